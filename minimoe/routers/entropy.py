"""entropy: as many experts as the router seems to hesitate between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minimoe.prefix_rule import Count
from minimoe.routers.base import PrefixRouter, RouterContext, check_positive


@dataclass(frozen=True, kw_only=True)
class Entropy(PrefixRouter):
    """Every token keeps as many experts as its probabilities amount to: the exponential of their entropy.

    Formula: k = scale * exp(-sum of p_i ln p_i), rounded to the nearest whole number (a half goes up), then
    clamped to 1..K. Source: the perplexity of a distribution, or Hill number of order 1 (Hill 1973).

    Attributes:
        scale: a factor on the exponential; 1 by default.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("scale", self.scale)

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float]:
        return "entropy", self.scale

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        entropy_T = torch.special.entr(sorted_probs_TE.to(torch.float64)).sum(dim=-1)
        wanted_T = (self.scale * entropy_T.exp() + 0.5).floor()
        return wanted_T.clamp(0, sorted_probs_TE.shape[1]).to(torch.int64)
