"""What the routers of a model do on a text: load of the experts, k of the tokens, angle of the elbows.

Shape letters: L layers, T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minimoe.curve import SHARP_DEGREES, elbow
from minimoe.probe import Probe
from minimoe.routers.base import rank
from minimoe.routing import Routing


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
        self.sharp_L[layer] += (elbow(rank(logits_TE)[0])[1] <= SHARP_DEGREES).sum()

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
