"""layer_k: a number of experts for each layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from minimoe.calibration import Calibration, read_calibration
from minimoe.errors import InputError
from minimoe.prefix_rule import Count
from minimoe.routers.base import Needs, PrefixRouter, RouterContext, check_count, numbers


@dataclass(frozen=True, kw_only=True)
class LayerK(PrefixRouter):
    """Every token of a layer uses the same number of experts, and every layer has its own.

    Formula: k = k_l, l the layer. Source: LExI (2025), which finds the k_l for a budget by how much each
    layer's output changes.

    Attributes:
        file: what 'minimoe calibrate layer_k' wrote.
        k: the numbers themselves instead, a layer each: 8/8/6/4; one number alone stands for all layers.
        cap: the most experts a token may use; by default the largest of the numbers.
    """

    needs: ClassVar[Needs] = "calibration"
    example: ClassVar[str] = "k=6"

    file: str | None = None
    k: str | None = None
    _k: tuple[int, ...] = field(init=False, default=(), repr=False)
    _fitted: Calibration | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.file is None) == (self.k is None):
            raise InputError("give either file=, as 'minimoe calibrate' writes it, or k=, as in k=8/8/6/4.")
        fitted = None if self.file is None else read_calibration(self.file, "layer_k")
        k = numbers("k", self.k) if fitted is None else fitted.values
        for value in k:
            check_count("k", value, 1)
        if not k:
            raise InputError(f"{self.file} holds no numbers.")
        object.__setattr__(self, "_k", tuple(k))
        object.__setattr__(self, "_fitted", fitted)

    def limit(self, context: RouterContext) -> int:
        return max(self._k) if self.cap is None else self.cap

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float]:
        return "number", self._number(context)

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        T = len(sorted_probs_TE)
        return torch.full((T,), self._number(context), dtype=torch.int64, device=sorted_probs_TE.device)

    def _number(self, context: RouterContext) -> int:
        """k of the context's layer."""
        limit = self.limit(context)
        if self._fitted is not None:
            return min(int(self._fitted.value(context.layer, context.num_layers, context.checkpoint)), limit)
        layers = context.num_layers
        if context.layer >= len(self._k) > 1 or (layers is not None and len(self._k) not in (1, layers)):
            of = "more" if layers is None else str(layers)
            raise InputError(f"k has numbers for {len(self._k)} layers, but the model has {of}.")
        return min(self._k[min(context.layer, len(self._k) - 1)], limit)
