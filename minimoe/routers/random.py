"""random: experts drawn with closed eyes. The control that says what choosing is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minimoe.routers.base import (
    Router,
    RouterContext,
    check_choice,
    check_positive,
    check_width,
    draw,
    rank,
    split_mean,
)
from minimoe.routing import Routing

Weights = Literal["slots", "own"]


@dataclass(frozen=True, kw_only=True)
class Random(Router):
    """Every token uses k experts drawn uniformly, none twice.

    Formula: k = the key k, where it is no whole number mixed by token as in mixed_k; slot i holds a random expert
    at the weight p_i that the i-th best would have had. Source: random routing, as THOR
    trains with (Zuo et al. 2022); here a control.

    Attributes:
        k: experts per token (the mean, if it is no whole number); by default the model's own number.
        weights: "slots" (default), those of the best k experts; "own", each drawn expert's own probability.
    """

    k: float | None = None
    weights: Weights = "slots"

    def __post_init__(self) -> None:
        if self.k is not None:
            check_positive("k", self.k)
        check_choice("weights", self.weights, Weights)

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        """Draw.

        Raises:
            InputError: k is above the model's number of experts.
        """
        mean_k = float(context.top_k if self.k is None else self.k)
        tokens, num_experts = logits_TE.shape
        width = max(1, -int(-mean_k // 1))
        check_width(width, num_experts)
        probs_TE, ranked_TE = rank(logits_TE)
        order_TE = draw(tokens * num_experts, context).view(tokens, num_experts).argsort(dim=1).to(logits_TE.device)
        k_T = split_mean(mean_k, tokens, draw(tokens + 1, context)).to(logits_TE.device)
        drawn_TK = order_TE[:, :width]
        if self.weights == "own":
            # Ranks in order, so that live slots come in descending rank.
            drawn_TK = drawn_TK.masked_fill(torch.arange(width, device=k_T.device) >= k_T[:, None], num_experts)
            drawn_TK = drawn_TK.sort(dim=1).values.clamp(max=num_experts - 1)
            weights_TK = probs_TE.gather(1, drawn_TK)
        else:
            weights_TK = probs_TE[:, :width]
        return Routing.from_ranking(ranked_TE.gather(1, drawn_TK), weights_TK, k_T, num_experts)
