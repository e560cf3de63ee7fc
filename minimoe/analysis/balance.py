"""How evenly a load is spread over experts, and how far a rule that prunes can move it.

Shape letters: E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minimoe.analysis.tally import Array


@dataclass(frozen=True, slots=True)
class Balance:
    """The balance of one load.

    Attributes:
        cv: coefficient of variation, standard deviation over mean; 0 is even.
        entropy: of the shares, as a part of the greatest possible, log E; 1 is even.
        largest, least: shares of the most and the least used expert, as multiples of the fair share 1 / E.
        dead: experts that no token used.
    """

    cv: float
    entropy: float
    largest: float
    least: float
    dead: int


def balance(load_E: Array) -> Balance:
    """The balance of a load; NaN where there is none."""
    experts, total = len(load_E), load_E.sum()
    dead = int((load_E == 0).sum())
    if total == 0:
        return Balance(math.nan, math.nan, math.nan, math.nan, dead)
    share_E = load_E / total
    used_E = share_E[share_E > 0]
    entropy = float(-(used_E * np.log(used_E)).sum() / math.log(experts)) if experts > 1 else 1.0
    return Balance(
        cv=float(share_E.std() * experts),
        entropy=entropy,
        largest=float(share_E.max() * experts),
        least=float(share_E.min() * experts),
        dead=dead,
    )


@dataclass(frozen=True, slots=True)
class Shift:
    """How far pruning moved the load, beside the most it could. Source: "Elbow-based MoE Routing".

    With q = load / its sum, K the model's top-k, delta = 1 - E[k] / K, N experts and CV^2 = N |q|^2 - 1:

        theorem      l1 = |q - q_top|_1                     at most 2 delta / (1 - delta)
        corollary 1  largest_change = |max q - max q_top|   at most the same
        corollary 2  cv2_change = |CV^2 - CV^2_top|         at most 2 N delta / (1 - delta)^2

    They hold for a rule that only drops experts of the model's own top-k, on the same router logits.
    """

    delta: float
    l1: float
    l1_bound: float
    largest_change: float
    cv2_change: float
    cv2_bound: float

    @property
    def within(self) -> bool:
        """Whether the theorem and both corollaries hold, to the rounding of float64."""
        slack = 1e-12
        return (
            self.l1 <= self.l1_bound + slack
            and self.largest_change <= self.l1_bound + slack
            and self.cv2_change <= self.cv2_bound + slack
        )


def shift(load_E: Array, top_load_E: Array) -> Shift | None:
    """The shift from the load of top-k to that of a rule which prunes it; None where one of them is nothing."""
    total, top_total, experts = load_E.sum(), top_load_E.sum(), len(load_E)
    if total == 0 or top_total == 0:
        return None
    q_E, top_q_E = load_E / total, top_load_E / top_total
    delta = 1 - float(total / top_total)
    return Shift(
        delta=delta,
        l1=float(np.abs(q_E - top_q_E).sum()),
        l1_bound=2 * delta / (1 - delta),
        largest_change=float(abs(q_E.max() - top_q_E.max())),
        cv2_change=float(experts * abs((q_E**2).sum() - (top_q_E**2).sum())),
        cv2_bound=2 * experts * delta / (1 - delta) ** 2,
    )
