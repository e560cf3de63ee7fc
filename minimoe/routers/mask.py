"""mask: forbid or force given experts, and route as usual among the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from minimoe.errors import InputError
from minimoe.routers.base import Router, RouterContext, check_count, check_width, numbers, rank
from minimoe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Mask(Router):
    """Every token uses its k best experts after some were forbidden and others forced.

    Formula: k = the key k; the forced experts, and the most probable of those not forbidden, all at their raw
    softmax probability. Source: expert ablation, as in the
    studies of specialisation in OLMoE (Muennighoff et al. 2024).

    Attributes:
        forbid: experts that no token may use, as in 3/17.
        force: experts that every token uses, as in 5.
        layer: the layers where that holds, as in 0/1; by default all. Elsewhere it is top-k.
        k: experts per token, the forced ones included; by default the model's own number.
    """

    example: ClassVar[str] = "forbid=19/28"

    forbid: str | None = None
    force: str | None = None
    layer: str | None = None
    k: int | None = None
    _forbid: tuple[int, ...] = field(init=False, default=(), repr=False)
    _force: tuple[int, ...] = field(init=False, default=(), repr=False)
    _layers: tuple[int, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        for key, value in (("forbid", self.forbid), ("force", self.force), ("layer", self.layer)):
            object.__setattr__(self, "_layers" if key == "layer" else f"_{key}", tuple(numbers(key, value)))
        both = sorted({*self._forbid} & {*self._force})
        if both:
            raise InputError(f"expert {both[0]} is both forbidden and forced.")
        if self._layers and not self._forbid and not self._force:
            raise InputError("say with forbid= or force= which experts to mask in those layers, as in forbid=3/17.")
        if self.k is not None:
            check_count("k", self.k, 1)

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        """Rank, strike out, cut.

        Raises:
            InputError: an expert or a layer that the model does not have, more forced experts than k, or fewer
                allowed ones.
        """
        num_experts = logits_TE.shape[1]
        width = context.top_k if self.k is None else self.k
        check_width(width, num_experts)
        self._check(num_experts, width, context)
        probs_TE, experts_TE = rank(logits_TE)
        if context.layer in self._layers or not self._layers:
            # What comes first: forced (0), free (1), forbidden (2); a stable sort keeps the ranking within each.
            order_E = torch.ones(num_experts, dtype=torch.int64, device=probs_TE.device)
            order_E[list(self._forbid)] = 2
            order_E[list(self._force)] = 0
            front_TE = order_E[experts_TE].sort(dim=1, stable=True).indices
            chosen_TK = front_TE[:, :width].sort(dim=1).values  # descending rank again
        else:
            chosen_TK = torch.arange(width, device=probs_TE.device).expand(len(probs_TE), width)
        k_T = torch.full((len(probs_TE),), width, dtype=torch.int64, device=probs_TE.device)
        return Routing.from_ranking(experts_TE.gather(1, chosen_TK), probs_TE.gather(1, chosen_TK), k_T, num_experts)

    def _check(self, num_experts: int, width: int, context: RouterContext) -> None:
        for expert in (*self._forbid, *self._force):
            if expert >= num_experts:
                raise InputError(f"there is no expert {expert} to mask; the model's run from 0 to {num_experts - 1}.")
        layers = context.num_layers
        for layer in self._layers:
            if layers is not None and layer >= layers:
                raise InputError(f"there is no layer {layer} to mask; the model's run from 0 to {layers - 1}.")
        if len({*self._force}) > width:
            raise InputError(f"{len({*self._force})} experts are forced, but a token uses only {width}.")
        allowed = num_experts - len({*self._forbid})
        if allowed < width:
            raise InputError(
                f"only {allowed} of {num_experts} experts are allowed, but a token uses {width}; forbid fewer."
                if allowed
                else f"all {num_experts} experts are forbidden; allow at least one."
            )
