"""elbow: cut the sorted probabilities where the curve bends. The rule of "Elbow-based MoE Routing"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minimoe.routers.base import PrefixRouter, RouterContext, check_choice

Reading = Literal["program", "printed"]

EPSILON = 1e-12


def deviation(sorted_probs_TE: Tensor, reading: Reading = "program") -> Tensor:
    """D, how far the normalised curve stands above the diagonal at each rank; float64 [T, E].

    With p sorted in descending order, N = E and ranks i from 0 (Elbow-based MoE Routing, section 3):

        program:  y_i = (p_1 - p_i) / (p_1 - p_N + 1e-12)    the curve flipped, rising and concave
        printed:  y_i = (p_i - p_N) / (p_1 - p_N + 1e-12)    as the paper's algorithm has it
        x_i = i / (N - 1),  D_i = y_i - x_i

    float64, so that the rank where D is largest does not hang on the rounding of this arithmetic.
    """
    p_TE = sorted_probs_TE.to(torch.float64)
    first_T1, last_T1 = p_TE[:, :1], p_TE[:, -1:]
    height_TE = first_T1 - p_TE if reading == "program" else p_TE - last_T1
    num_experts = p_TE.shape[1]
    # One expert alone has no curve; its x is 0, like the first point of any other.
    x_E = torch.arange(num_experts, dtype=torch.float64, device=p_TE.device) / max(num_experts - 1, 1)
    return height_TE / (first_T1 - last_T1 + EPSILON) - x_E


@dataclass(frozen=True, kw_only=True)
class Elbow(PrefixRouter):
    """Every token keeps its experts up to the elbow of its sorted probabilities.

    Formula: k = 1 + argmax_i of (p_1 - p_i) / (p_1 - p_N) - i / (N - 1), ranks i from 0, ties to the lowest,
    then clamped to 1..K.
    Source: "Elbow-based MoE Routing". The paper's printed algorithm and its published program differ:
    the program flips the curve first. Read literally, the printed one always gives k = 1.

    Attributes:
        reading: "program" (default) or "printed".
    """

    reading: Reading = "program"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("reading", self.reading, Reading)

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        return deviation(sorted_probs_TE, self.reading).argmax(dim=-1) + 1
