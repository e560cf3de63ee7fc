"""random_tail: put random experts in the place of those after the elbow. The paper's control."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minimoe.routers.base import RouterContext
from minimoe.routers.random_slots import RandomSlots


@dataclass(frozen=True, kw_only=True)
class RandomTail(RandomSlots):
    """Every token keeps its experts up to the elbow; those after it are replaced by random ones of lower rank.

    Formula: k = the model's own number K; with e the elbow's rank, slots e+1..K hold experts drawn from the ranks
    e+1..E (so an old one may come back), none twice, at the weights that the slots had. Source: "Elbow-based MoE
    Routing", whose program draws each slot on its own: duplicates=true.
    """

    def pool(self, cut_T1: Tensor, ranks_E: Tensor, context: RouterContext) -> Tensor:
        return ranks_E >= cut_T1

    def replaced(self, cut_T1: Tensor, slots_K: Tensor) -> Tensor:
        return slots_K >= cut_T1
