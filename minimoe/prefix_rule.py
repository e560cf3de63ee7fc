"""Rules that keep a prefix of the ranking, as plain data: kernels follow them without asking anybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Count = Literal["number", "program", "printed", "max_gap", "gap_ratio", "top_p", "min_p", "threshold", "entropy"]
Mass = Literal["none", "kept", "topk"]


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """How many of its best experts a token keeps in a layer, and at what weights.

    Attributes:
        count: how k is found: "number" itself; "program" and "printed", the readings of the elbow; else what the rule
            of that name in minimoe.routers says.
        number: k, what top_p, min_p and threshold compare with, or the factor of entropy; without meaning for others.
        floor, limit: the least and the most of k, 0 <= floor <= limit; `limit` is the width of the Routing.
        mass: what the kept weights are made to sum to: "none" (they are left alone), "kept" (1), or "topk" (what the
            best top_k sum to).
        top_k: the model's own number of experts, for that mass.
    """

    count: Count
    number: float
    floor: int
    limit: int
    mass: Mass
    top_k: int

    def fits(self, num_experts: int) -> bool:
        """Whether a model of so many experts can be routed by it."""
        return 0 <= self.floor <= self.limit <= num_experts
