"""What random_tail and random_head share: top-k with some slots given to random experts.

Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from minimoe.curve import deviation
from minimoe.routers.base import Router, RouterContext, check_count, check_width, draw, rank
from minimoe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class RandomSlots(Router):
    """Top-k with some of its slots given to random experts; the slots keep their weights.

    Attributes:
        keep: the cut, a fixed number of ranks instead of the elbow.
        duplicates: let each replaced slot draw on its own, so that an expert may come twice; it then runs once, at
            the sum of its weights, and k is the number of different experts. False by default.
    """

    keep: int | None = None
    duplicates: bool = False

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_count("keep", self.keep, 0)

    @abstractmethod
    def pool(self, cut_T1: Tensor, ranks_E: Tensor, context: RouterContext) -> Tensor:
        """The ranks (from 0) that may be drawn, bool [T, E]; at least as many as slots are replaced."""

    @abstractmethod
    def replaced(self, cut_T1: Tensor, slots_K: Tensor) -> Tensor:
        """The slots (from 0) that are given away, bool [T, K]."""

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        """Rank, cut, draw.

        Raises:
            InputError: the model has fewer experts than its own top-k asks for.
        """
        tokens, num_experts = logits_TE.shape
        width, device = context.top_k, logits_TE.device
        check_width(width, num_experts)
        probs_TE, experts_TE = rank(logits_TE)
        cut_T = (
            deviation(probs_TE).argmax(dim=-1) + 1
            if self.keep is None
            else torch.full((tokens,), min(self.keep, width))
        )
        cut_T1 = cut_T.to(device).clamp(max=width)[:, None]
        pool_TE = self.pool(cut_T1, torch.arange(num_experts, device=device), context)
        replaced_TK = self.replaced(cut_T1, torch.arange(width, device=device))
        noise_TE = draw(tokens * num_experts, context).view(tokens, num_experts).to(device)
        # Ranks of the pool in random order, all others behind them.
        order_TE = noise_TE.masked_fill(~pool_TE, 2.0).argsort(dim=1)
        turn_TK = replaced_TK.cumsum(dim=1) - 1
        if self.duplicates:
            turn_TK = (draw(tokens * width, context).view(tokens, width).to(device) * pool_TE.sum(1)[:, None]).long()
        drawn_TK = order_TE.gather(1, turn_TK.clamp(min=0))
        ranks_TK = torch.where(replaced_TK, drawn_TK, torch.arange(width, device=device).expand(tokens, width))
        weights_TE = torch.zeros_like(probs_TE).scatter_add_(1, ranks_TK, probs_TE[:, :width])
        used_TE = torch.zeros_like(pool_TE).scatter_(1, ranks_TK, True)
        k_T = used_TE.sum(dim=1)
        if not self.duplicates:
            return Routing.from_ranking(experts_TE.gather(1, ranks_TK), probs_TE[:, :width], k_T, num_experts)
        front_TK = (~used_TE).to(torch.int8).sort(dim=1, stable=True).indices[:, :width]
        return Routing.from_ranking(experts_TE.gather(1, front_TK), weights_TE.gather(1, front_TK), k_T, num_experts)
