"""threshold: keep the experts whose probability is high enough."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minimoe.prefix_rule import Count
from minimoe.routers.base import PrefixRouter, RouterContext, check_fraction


@dataclass(frozen=True, kw_only=True)
class Threshold(PrefixRouter):
    """Every token keeps the experts whose probability is at least p.

    Formula: k = #{i : p_i >= p}. Source: the simplest rule that looks at a probability.

    Attributes:
        p: the threshold, 0 to 1; by default 1/E, what every expert would get from a router without opinion.
    """

    p: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p is not None:
            check_fraction("p", self.p)

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float]:
        return "threshold", self._bound(num_experts)

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        return (sorted_probs_TE >= self._bound(sorted_probs_TE.shape[-1])).sum(dim=-1)

    def _bound(self, num_experts: int) -> float:
        return 1 / num_experts if self.p is None else self.p
