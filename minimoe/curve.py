"""The geometry of a sorted probability curve: where it bends, and how sharply.

Shape letters: T tokens, E experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reading = Literal["program", "printed"]

EPSILON = 1e-12
SHARP_DEGREES = 135.0  # what the paper calls a sharp elbow: this angle or less


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


def elbow(sorted_probs_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Where each curve bends most, and the angle there.

    The elbow (x_e, y_e) is the point of the flipped curve, which rises from (0, 0) to (1, 1), that stands highest above
    the diagonal; its angle is the one between the ways from there to (0, 0) and to (1, 1). Source: "Elbow-based MoE
    Routing".

    Returns:
        (rank_T int64 from 0, ties to the lowest, not clamped to a model's K; degrees_T float64, NaN for a curve that
        nowhere leaves the diagonal, such as a level line, as it has no elbow).
    """
    height_T, rank_T = deviation(sorted_probs_TE).max(dim=1)
    x_T = rank_T.to(torch.float64) / max(sorted_probs_TE.shape[1] - 1, 1)
    y_T = height_T + x_T
    dot_T = -x_T * (1 - x_T) - y_T * (1 - y_T)
    lengths_T = torch.hypot(x_T, y_T) * torch.hypot(1 - x_T, 1 - y_T)
    return rank_T, (dot_T / lengths_T).clamp(-1, 1).acos().rad2deg()
