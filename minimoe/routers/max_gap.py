"""max_gap: cut the sorted probabilities at their widest gap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minimoe.prefix_rule import Count
from minimoe.routers.base import PrefixRouter, RouterContext


@dataclass(frozen=True, kw_only=True)
class MaxGap(PrefixRouter):
    """Every token keeps its experts up to the largest drop from one probability to the next.

    Formula: k = the first i where p_i - p_(i+1) is largest, ranks i from 1, then clamped to 1..K; 1 for a
    model of one expert. Source: the largest-gap cut of a sorted list, common in clustering (the eigengap).
    """

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float]:
        return "max_gap", 0.0

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        if sorted_probs_TE.shape[1] == 1:
            return torch.ones(len(sorted_probs_TE), dtype=torch.int64, device=sorted_probs_TE.device)
        # float64 holds the difference of two float32 exactly enough that equal gaps stay equal.
        p_TE = sorted_probs_TE.to(torch.float64)
        return (p_TE[:, :-1] - p_TE[:, 1:]).argmax(dim=-1) + 1
