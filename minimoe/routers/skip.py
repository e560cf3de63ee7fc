"""skip: drop the experts whose weight is small beside the first one's, with a bound for each layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from minimoe.calibration import Calibration, read_calibration
from minimoe.errors import InputError
from minimoe.prefix_rule import Count
from minimoe.routers.base import Needs, PrefixRouter, RouterContext, check_fraction


@dataclass(frozen=True, kw_only=True)
class Skip(PrefixRouter):
    """Every token keeps the experts with at least beta of the first one's weight; beta differs by layer.

    Formula: k = #{i : p_i >= beta_l * p_1}, l the layer. Source: NAEE (Lu et al. 2024, "Not All Experts are
    Equal"), which has it for two experts a token and takes the median ratio of a calibration text for beta.

    Attributes:
        file: what 'minimoe calibrate skip' wrote: a beta for each layer.
        beta: one beta for all layers instead, 0 to 1.
    """

    needs: ClassVar[Needs] = "calibration"
    example: ClassVar[str] = "beta=0.3"

    file: str | None = None
    beta: float | None = None
    _fitted: Calibration | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.file is None) == (self.beta is None):
            raise InputError("give either file=, as 'minimoe calibrate' writes it, or beta=.")
        if self.beta is not None:
            check_fraction("beta", self.beta)
        if self.file is not None:
            fitted = read_calibration(self.file, "skip")
            for value in fitted.values:
                check_fraction(f"beta in {self.file}", value)
            object.__setattr__(self, "_fitted", fitted)

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float]:
        return "min_p", self._bound(context)

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        return (sorted_probs_TE >= self._bound(context) * sorted_probs_TE[:, :1]).sum(dim=-1)

    def _bound(self, context: RouterContext) -> float:
        """beta of the context's layer."""
        if self._fitted is None:
            return self.beta or 0.0
        return float(self._fitted.value(context.layer, context.num_layers, context.checkpoint))
