"""Means, correlations and shares of variance from sums, with 95 % intervals.

The tokens of a text are not independent, so that an interval over tokens is far too narrow: means have intervals over
windows, which are. (The correlation's takes tokens as independent, as the paper does; it is a lower limit.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minimoe.analysis.tally import SUMS, Array
from minimoe.intervals import Z


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; NaN where there are too few data."""

    value: float
    low: float
    high: float


def mean(sums_M: Array) -> Estimate:
    """The mean over tokens, with an interval over windows.

    r = sum x / sum n; its variance is W / (W - 1) sum (x - r n)^2 / (sum n)^2 over the W windows. Source: the ratio
    estimator for clusters of unlike size, Cochran 1977, chapter 6.

    Args:
        sums_M: see SUMS: over windows, their number and the sums of n, x, x^2, n x, n^2.
    """
    windows, n, x, xx, nx, nn = (float(sums_M[SUMS.index(name)]) for name in ("windows", "n", "x", "xx", "nx", "nn"))
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan)
    r = x / n
    if windows < 2:
        return Estimate(r, math.nan, math.nan)
    squares = max(xx - 2 * r * nx + r * r * nn, 0.0)
    error = math.sqrt(windows / (windows - 1) * squares) / n
    return Estimate(r, r - Z * error, r + Z * error)


def correlation(n: float, x: float, y: float, xx: float, yy: float, xy: float) -> Estimate:
    """Pearson's r of n pairs from their sums, with Fisher's interval; NaN without variance."""
    vx, vy, cov = xx - x * x / n if n else 0.0, yy - y * y / n if n else 0.0, xy - x * y / n if n else 0.0
    if n < 2 or vx <= 1e-12 * abs(xx) or vy <= 1e-12 * abs(yy):
        return Estimate(math.nan, math.nan, math.nan)
    r = min(max(cov / math.sqrt(vx * vy), -1.0), 1.0)
    if n < 4 or abs(r) == 1:
        return Estimate(r, math.nan, math.nan)
    half = Z / math.sqrt(n - 3)
    return Estimate(r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))


@dataclass(frozen=True, slots=True)
class Variance:
    """One-way analysis of variance.

    Attributes:
        eta2: share of all variance that lies between the groups.
        f: the F statistic.
    """

    eta2: float
    f: float


def variance(n_C: Array, x_C: Array, xx_C: Array) -> Variance:
    """How much of a quantity's variance lies between C groups, from each group's count, sum and sum of squares."""
    full = n_C > 0
    n_C, x_C, xx_C = n_C[full], x_C[full], xx_C[full]
    if len(n_C) < 2:
        return Variance(math.nan, math.nan)
    n, x = n_C.sum(), x_C.sum()
    between = float((x_C**2 / n_C).sum() - x**2 / n)
    within = float((xx_C - x_C**2 / n_C).sum())
    total = between + within
    if total <= 1e-12 * xx_C.sum():
        return Variance(math.nan, math.nan)
    free = n - len(n_C)
    f = between / (len(n_C) - 1) / (within / free) if within > 0 and free > 0 else math.nan
    return Variance(between / total, float(np.float64(f)))
