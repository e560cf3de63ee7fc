"""The expert seam: weights as they lie in the checkpoint, and one method that every backend has.

Shape letters: T tokens, D hidden, E experts, I expert intermediate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from minimoe.operations import Operations
from minimoe.routing import Routing


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer: E matrices of each kind, views of the mapped file.

    Attributes:
        gate_EID, up_EID: E tensors [I, D].
        down_EDI: E tensors [D, I].
    """

    gate_EID: Sequence[Tensor]
    up_EID: Sequence[Tensor]
    down_EDI: Sequence[Tensor]


class Experts(ABC):
    """Runs the experts of one layer: y_t = sum over the live slots j of w_tj * expert_tj(x_t),
    with expert(x) = down(silu(gate x) * (up x))."""

    operations: ClassVar[Operations] = Operations()  # what runs around the experts

    def __init__(self, weights: ExpertWeights) -> None:
        self.weights = weights

    @abstractmethod
    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of each token's live experts.

        Computes exactly routing.k_T.sum() rows; dead slots cost nothing and a token with k = 0 gets zeros.

        Args:
            x_TD: in the weights' dtype.

        Returns:
            y_TD in the dtype of x; the weighted sum is accumulated in float32.
        """


class Backend(Protocol):
    """What a model is given: it makes the experts of each layer, and has the operations that run around them."""

    @property
    def operations(self) -> Operations: ...

    def __call__(self, weights: ExpertWeights, /) -> Experts: ...


def weigh(y_PD: Tensor, weights_P1: Tensor) -> Tensor:
    """Expert outputs times their weights, float32, ready to be summed.

    The weight and the product are rounded to the model's dtype, as transformers does; the sum then is not.
    """
    return (y_PD * weights_P1.to(y_PD.dtype)).float()
