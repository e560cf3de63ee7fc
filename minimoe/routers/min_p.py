"""min_p: drop the experts that are far less probable than the best one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minimoe.prefix_rule import Count
from minimoe.routers.base import PrefixRouter, RouterContext, check_fraction


@dataclass(frozen=True, kw_only=True)
class MinP(PrefixRouter):
    """Every token keeps the experts with at least a fraction of the best one's probability.

    Formula: k = #{i : p_i >= p * p_1}. Source: min-p sampling (Nguyen et al. 2024), on experts.

    Attributes:
        p: the fraction, 0 to 1; 0.25 by default.
    """

    p: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("p", self.p)

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float]:
        return "min_p", self.p

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        return (sorted_probs_TE >= self.p * sorted_probs_TE[:, :1]).sum(dim=-1)
