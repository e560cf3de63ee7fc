"""The geometry of a sorted probability curve: where it bends, and how sharply.

Shape letters: T tokens, E experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
