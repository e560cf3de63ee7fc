"""gap_ratio: cut the sorted probabilities where the next one is relatively smallest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minimoe.prefix_rule import Count
from minimoe.routers.base import PrefixRouter, RouterContext

EPSILON = 1e-12


@dataclass(frozen=True, kw_only=True)
class GapRatio(PrefixRouter):
    """Every token keeps its experts up to the largest ratio of one probability to the next.

    Formula: k = the first i where p_i / (p_(i+1) + 1e-12) is largest, over the ranks i from 1 to the cap
    that have a next one; 1 for a model of one expert. Ranks past the cap are not looked at: in the far tail
    any two probabilities may stand in any ratio. Source: the eigenvalue-ratio criterion (Ahn and Horenstein
    2013), on experts.
    """

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float]:
        return "gap_ratio", 0.0

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        ranks = min(self.limit(context), sorted_probs_TE.shape[1] - 1)
        if ranks == 0:
            return torch.ones(len(sorted_probs_TE), dtype=torch.int64, device=sorted_probs_TE.device)
        p_TE = sorted_probs_TE.to(torch.float64)
        return (p_TE[:, :ranks] / (p_TE[:, 1 : ranks + 1] + EPSILON)).argmax(dim=-1) + 1
