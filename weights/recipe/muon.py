"""Muon: momentum whose update is made orthogonal, for matrices that are stacked along leading dimensions.

Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
Shape letters: S stacked matrices, M rows, N columns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# The quintic a x + b x^3 + c x^5 that drives every singular value to about 1 in five steps (Jordan et al.).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(x_SMN: Tensor, steps: int = 5) -> Tensor:
    """U V^T of each matrix's singular value decomposition U S V^T, approximately: singular values of 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    tall = x_SMN.shape[-2] > x_SMN.shape[-1]
    x = x_SMN.mT if tall else x_SMN
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        x = polynomial @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, then scaled by sqrt(max(1, M / N)) times the learning rate.

    Args:
        parameters: tensors [S, M, N].
        lr: the spectral norm of a square matrix's update.
        momentum: of the running sum of gradients.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter)
                velocity = state["velocity"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(velocity, group["momentum"]))
                scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)
