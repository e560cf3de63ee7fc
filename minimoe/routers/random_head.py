"""random_head: put random experts in the place of those before the elbow. The paper's counter-control."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minimoe.routers.base import RouterContext
from minimoe.routers.random_slots import RandomSlots


@dataclass(frozen=True, kw_only=True)
class RandomHead(RandomSlots):
    """Every token keeps its experts after the elbow; those up to it are replaced by random ones.

    Formula: k = the model's own number K; with e the elbow's rank, slots 1..e hold experts drawn from all that the
    slots e+1..K do not hold (so an old one may come back), none twice, at the weights that the slots had. Source:
    "Elbow-based MoE Routing", whose program draws each slot on its own: duplicates=true.
    """

    def pool(self, cut_T1: Tensor, ranks_E: Tensor, context: RouterContext) -> Tensor:
        return (ranks_E < cut_T1) | (ranks_E >= context.top_k)

    def replaced(self, cut_T1: Tensor, slots_K: Tensor) -> Tensor:
        return slots_K < cut_T1
