"""What the routers of a model do on a text: load of the experts, k of the tokens, angle of the elbows.

Shape letters: L layers, T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minimoe.probe import Probe
from minimoe.routers.base import rank
from minimoe.routers.elbow import deviation
from minimoe.routing import Routing

SHARP_DEGREES = 135.0


def elbow_angles(sorted_probs_TE: Tensor) -> Tensor:
    """The angle at each curve's elbow between the ways to (0, 0) and to (1, 1), in degrees; NaN where there is none.

    Source: "Elbow-based MoE Routing", on the flipped curve, which rises from (0, 0) to (1, 1).
    """
    deviation_TE = deviation(sorted_probs_TE)
    height_T, elbow_T = deviation_TE.max(dim=1)
    x_T = elbow_T.double() / (sorted_probs_TE.shape[1] - 1)
    y_T = height_T + x_T
    to_start_T2, to_end_T2 = torch.stack([-x_T, -y_T], dim=1), torch.stack([1 - x_T, 1 - y_T], dim=1)
    cosine_T = (to_start_T2 * to_end_T2).sum(dim=1) / (to_start_T2.norm(dim=1) * to_end_T2.norm(dim=1))
    return cosine_T.clamp(-1, 1).acos().rad2deg()


class RouterHealth(Probe):
    """Counts over all tokens of all passes, by layer.

    Attributes:
        load_LE: (token, expert) pairs of each expert.
        k_LE1: how many tokens used 0, 1, …, E experts.
        sharp_L: router curves whose elbow has an angle of 135 degrees or less.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.load_LE = torch.zeros(layers, experts, dtype=torch.int64)
        self.k_LE1 = torch.zeros(layers, experts + 1, dtype=torch.int64)
        self.sharp_L = torch.zeros(layers, dtype=torch.int64)

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        E = routing.num_experts
        self.load_LE[layer] += torch.bincount(routing.experts_TK.reshape(-1), minlength=E + 1)[:E]
        self.k_LE1[layer] += torch.bincount(routing.k_T, minlength=E + 1)
        self.sharp_L[layer] += (elbow_angles(rank(logits_TE)[0]) <= SHARP_DEGREES).sum()

    def shares(self) -> Tensor:
        """load_LE as parts of the fair share: 1 everywhere is an even load."""
        return self.load_LE / self.load_LE.double().mean(dim=1, keepdim=True)

    def variation(self) -> list[float]:
        """Of each layer, the coefficient of variation of the load: standard deviation over mean."""
        return self.shares().std(dim=1, correction=0).tolist()

    def mean_k(self) -> list[float]:
        """Of each layer."""
        k_LE1 = self.k_LE1.double()
        return ((k_LE1 * torch.arange(k_LE1.shape[1])).sum(dim=1) / k_LE1.sum(dim=1)).tolist()

    def sharp(self) -> list[float]:
        """Of each layer, the part of the curves whose elbow is sharp."""
        return (self.sharp_L / self.k_LE1.sum(dim=1)).tolist()
