"""95 % intervals of shares and means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

Z = NormalDist().inv_cdf(0.975)


def wilson(correct: int, count: int) -> list[float]:
    """The 95 % score interval of a share. Source: Wilson 1927."""
    share, z2 = correct / count, Z * Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return [max(0.0, middle - half), min(1.0, middle + half)]


def mean_interval(values: Sequence[float]) -> list[float]:
    """The 95 % interval of a mean, from the normal distribution and the sample's standard deviation."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return [mean, mean]
    half = Z * math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
    return [mean - half, mean + half]
