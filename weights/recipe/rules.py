"""The controls that the elbow rule is compared with: its random replacements, and top-k at the same mean k.

Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minimoe.routers import Elbow, PrefixRouter, RouterContext
from minimoe.routers.base import rank
from minimoe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class MixedTopK(PrefixRouter):
    """Top-k at any mean k: each token draws the whole number below or above its layer's mean.

    Attributes:
        means: the wanted mean k of each layer.
    """

    means: Sequence[float]

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        draws_T = torch.rand(sorted_probs_TE.shape[0], generator=context.generator)
        return (self.means[context.layer] + draws_T).floor().to(torch.int64)


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """Top-k whose experts before or after the elbow are random ones; every slot keeps its weight.

    The tail (ranks k and later, counted from 0, of an elbow that keeps k) is drawn from all experts of rank k and
    later, as in "Elbow-based MoE Routing"; the head from all experts outside the model's top K. No expert comes twice.

    Attributes:
        part: which part is replaced.
    """

    part: Literal["tail", "head"]

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        sorted_probs_TE, experts_TE = rank(logits_TE)
        K, E = context.top_k, logits_TE.shape[1]
        kept_T1 = Elbow().count(sorted_probs_TE, context).clamp(1, K)[:, None]
        first_T1 = kept_T1 if self.part == "tail" else torch.full_like(kept_T1, K)
        draws_TE = torch.rand(logits_TE.shape, generator=context.generator)
        # Ranks from `first` on in random order, then the others.
        drawn_TE = draws_TE.masked_fill(torch.arange(E) < first_T1, -1.0).argsort(dim=1, descending=True)
        slots_K = torch.arange(K)
        place_TK = (slots_K - kept_T1).clamp(min=0) if self.part == "tail" else slots_K.expand(len(kept_T1), K)
        replaced_TK = slots_K >= kept_T1 if self.part == "tail" else slots_K < kept_T1
        ranks_TK = torch.where(replaced_TK, drawn_TE.gather(1, place_TK), slots_K)
        return Routing.from_ranking(
            experts_TE.gather(1, ranks_TK), sorted_probs_TE[:, :K], torch.full((len(kept_T1),), K), E
        )
