"""top_any: each expert decides for itself whether it is wanted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from minimoe.calibration import Calibration, read_calibration
from minimoe.errors import InputError
from minimoe.routers.base import Needs, Router, RouterContext, check_count, check_fraction, rank
from minimoe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class TopAny(Router):
    """Every expert takes the tokens that find it probable enough, each expert by its own threshold.

    Formula: k = #{e : p_e >= threshold of e in layer l}, at least the best one, at most the cap; weights are the
    raw probabilities. Source: DynMoE (Guo et al. 2024). There thresholds are trained on a sigmoid score; here they
    are calibrated, and on the softmax probability, which a shift of all logits leaves alone.

    Attributes:
        file: what 'minimoe calibrate top_any' wrote: a threshold for each expert of each layer.
        p: one threshold for all experts instead, 0 to 1.
        cap: the most experts a token may use; by default all.
    """

    needs: ClassVar[Needs] = "calibration"
    example: ClassVar[str] = "p=0.03"

    file: str | None = None
    p: float | None = None
    cap: int | None = None
    _fitted: Calibration | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.file is None) == (self.p is None):
            raise InputError("give either file=, as 'minimoe calibrate' writes it, or p=.")
        if self.p is not None:
            check_fraction("p", self.p)
        if self.cap is not None:
            check_count("cap", self.cap, 1)
        if self.file is not None:
            fitted = read_calibration(self.file, "top_any")
            for thresholds in fitted.values:
                for value in thresholds if isinstance(thresholds, list) else [thresholds]:
                    check_fraction(f"a threshold in {self.file}", value)
            object.__setattr__(self, "_fitted", fitted)

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        """Ask every expert.

        Raises:
            InputError: the thresholds are for another checkpoint.
        """
        num_experts = logits_TE.shape[1]
        probs_TE, experts_TE = rank(logits_TE)
        wanted_TE = probs_TE >= self._thresholds(num_experts, context).to(probs_TE.device)[experts_TE]
        wanted_TE[:, 0] = True
        cap = min(num_experts, self.cap or num_experts)
        wanted_TE &= wanted_TE.cumsum(dim=1) <= cap
        # A stable sort brings the wanted ranks to the front and leaves them in order.
        front_TE = (~wanted_TE).to(torch.int8).sort(dim=1, stable=True).indices[:, :cap]
        return Routing.from_ranking(
            experts_TE.gather(1, front_TE), probs_TE.gather(1, front_TE), wanted_TE.sum(dim=1), num_experts
        )

    def _thresholds(self, num_experts: int, context: RouterContext) -> Tensor:
        if self._fitted is None:
            return torch.full((num_experts,), float(self.p or 0))
        values = self._fitted.value(context.layer, context.num_layers, context.checkpoint)
        if not isinstance(values, list) or len(values) != num_experts:
            raise InputError(f"{self.file} does not hold {num_experts} thresholds for each layer.")
        return torch.tensor(values, dtype=torch.float32)
