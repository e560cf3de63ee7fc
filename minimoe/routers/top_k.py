"""top_k: every token uses its k most probable experts. OLMoE's own rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minimoe.prefix_rule import Count
from minimoe.routers.base import PrefixRouter, RouterContext, check_count


@dataclass(frozen=True, kw_only=True)
class TopK(PrefixRouter):
    """Every token uses the same number of experts.

    Formula: k = K. Source: Shazeer et al. 2017; OLMoE (Muennighoff et al. 2024) with K = 8.

    Attributes:
        k: experts per token; by default the model's own number.
    """

    k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None:
            check_count("k", self.k, 1)

    def limit(self, context: RouterContext) -> int:
        given = [limit for limit in (self.k, self.cap) if limit is not None]
        return min(given, default=context.top_k)

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float]:
        return "number", self.limit(context)

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        T = sorted_probs_TE.shape[0]
        return torch.full((T,), self.limit(context), dtype=torch.int64, device=sorted_probs_TE.device)
