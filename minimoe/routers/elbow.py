"""elbow: cut the sorted probabilities where the curve bends. The rule of "Elbow-based MoE Routing"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from minimoe.curve import Reading, deviation
from minimoe.errors import InputError
from minimoe.prefix_rule import Count
from minimoe.routers.base import PrefixRouter, RouterContext, check_choice, check_positive

Method = Literal["argmax", "kneed"]


@dataclass(frozen=True, kw_only=True)
class Elbow(PrefixRouter):
    """Every token keeps its experts up to the elbow of its sorted probabilities.

    Formula: k = 1 + argmax_i of (p_1 - p_i) / (p_1 - p_N) - i / (N - 1), ranks i from 0, ties to the lowest,
    then clamped to 1..K.
    Source: "Elbow-based MoE Routing". The paper's printed algorithm and its published program differ:
    the program flips the curve first. Read literally, the printed one always gives k = 1.

    Attributes:
        reading: "program" (default) or "printed".
        method: "argmax" (default), the formula above; "kneed", the library of that name (Satopaa et al. 2011),
            which takes the first bend past a threshold and prunes nothing where it finds none.
        sensitivity: kneed's S, used by that method alone; 1 by default.
    """

    reading: Reading = "program"
    method: Method = "argmax"
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("reading", self.reading, Reading)
        check_choice("method", self.method, Method)
        check_positive("sensitivity", self.sensitivity)
        if self.method == "kneed":
            if self.reading == "printed":
                raise InputError("method kneed has its own reading of the curve; leave reading out.")
            _kneed()

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float] | None:
        return None if self.method == "kneed" else (self.reading, 0.0)

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        if self.method == "argmax":
            return deviation(sorted_probs_TE, self.reading).argmax(dim=-1) + 1
        curves = sorted_probs_TE.to(torch.float64).cpu().numpy()
        return torch.tensor([self.knee(curve) for curve in curves], dtype=torch.int64).to(sorted_probs_TE.device)

    def knee(self, curve: np.ndarray[Any, Any]) -> int:
        """What kneed finds on one curve, counted from 1; it cannot take two points or a level line."""
        if len(curve) < 3 or curve[0] == curve[-1]:
            return len(curve)
        ranks = np.arange(1, len(curve) + 1)
        knee = _kneed()(ranks, curve, S=self.sensitivity, curve="convex", direction="decreasing").knee
        return len(curve) if knee is None else int(knee)


def _kneed() -> Any:
    """The class that finds knees.

    Raises:
        InputError: the library is not there; says how to get it.
    """
    try:
        from kneed import KneeLocator
    except ImportError:
        raise InputError("method kneed needs the library kneed; pip install 'minimoe[kneed]'.") from None
    return KneeLocator
