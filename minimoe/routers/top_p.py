"""top_p: the smallest set of experts whose probabilities reach p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minimoe.prefix_rule import Count
from minimoe.routers.base import PrefixRouter, RouterContext, check_fraction


@dataclass(frozen=True, kw_only=True)
class TopP(PrefixRouter):
    """Every token keeps its best experts until their probabilities sum to p.

    Formula: k = the smallest n with p_1 + ... + p_n >= p, at least 1; all of them where rounding keeps
    the sum under p. Source: "Harder Tasks Need More Experts" (Huang et al. 2024).

    Attributes:
        p: the mass to reach, 0 to 1; 0.5 by default.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("p", self.p)

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float]:
        return "top_p", self.p

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        # float64: a float32 running sum can end at 0.9999998.
        reached_TE = sorted_probs_TE.to(torch.float64).cumsum(dim=-1) >= self.p
        return 1 + (~reached_TE[:, :-1]).sum(dim=-1)
