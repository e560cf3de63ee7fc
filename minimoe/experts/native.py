"""Experts in C++, in place on the mapped weights: what a rule prunes costs neither arithmetic nor memory traffic.

One or a few tokens run at the speed of the memory, many at that of the processor. See minimoe/native/vector.inl.
"""

from __future__ import annotations

from torch import Tensor

from minimoe.errors import InputError
from minimoe.experts.base import Experts, ExpertWeights
from minimoe.native import Kernels, find_kernels
from minimoe.native.places import DTYPES, ExpertPlaces
from minimoe.operations import NativeOperations
from minimoe.routing import Routing


class Native:
    """The backend `native`, or `native:isa=NAME` for a certain instruction set.

    Raises:
        InputError: the kernels were not built, or this processor cannot run that set.
    """

    def __init__(self, isa: str | None = None) -> None:
        self.kernels = find_kernels(isa)
        self.operations = NativeOperations(self.kernels)

    def __call__(self, weights: ExpertWeights) -> NativeExperts:
        return NativeExperts(weights, self.kernels)


class NativeExperts(Experts):
    """One call for all live experts of all tokens.

    Attributes:
        places: of the weights.

    Raises:
        InputError: weights in a dtype or on a device that the kernels do not run.
    """

    def __init__(self, weights: ExpertWeights, kernels: Kernels) -> None:
        super().__init__(weights)
        sample = weights.gate_EID[0]
        if sample.dtype not in DTYPES or sample.device.type != "cpu":
            raise InputError(
                f"the native backend runs float32 and bfloat16 on the CPU, not {str(sample.dtype)[6:]} on "
                f"{sample.device.type}; choose --backend bucketed."
            )
        self._kernels = kernels
        self.places = ExpertPlaces(weights.gate_EID, weights.up_EID, weights.down_EDI)

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        return self._kernels.experts(x_TD, self.places, routing)[0]
