"""Experts on a GPU, by Triton kernels: what a rule prunes is not read, and the host never waits for k.

See minimoe/triton/pairs.py for a lone token, minimoe/triton/grouped.py for more, and minimoe/triton/operations.py for
what runs around them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from minimoe.errors import InputError
from minimoe.experts.base import Experts, ExpertWeights
from minimoe.routing import Routing
from minimoe.triton.grouped import run_grouped
from minimoe.triton.operations import TritonOperations
from minimoe.triton.pairs import run_pairs


class Triton:
    """The backend `triton`."""

    operations = TritonOperations()

    def __call__(self, weights: ExpertWeights) -> TritonExperts:
        return TritonExperts(weights)


class TritonExperts(Experts):
    """float32, bfloat16 and float16 on a GPU; on the CPU only in Triton's interpreter.

    Raises:
        InputError: the weights are not on a GPU.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__(weights)
        if not weights.gate_EID[0].is_cuda and not triton.knobs.runtime.interpret:
            raise InputError("the triton backend runs on a GPU; give --device cuda, or choose --backend bucketed.")
        self._gate_EID = stacked(weights.gate_EID)
        self._up_EID = stacked(weights.up_EID)
        self._down_EDI = stacked(weights.down_EDI)

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        if not routing.experts_TK.numel():
            return torch.zeros_like(x_TD)
        x_TD = x_TD.contiguous()
        routing = Routing(
            routing.experts_TK.contiguous(), routing.weights_TK.contiguous(), routing.k_T, routing.num_experts
        )
        run = run_pairs if x_TD.shape[0] == 1 else run_grouped
        with torch.cuda.device_of(x_TD):
            return run(x_TD, routing, self._gate_EID, self._up_EID, self._down_EDI)


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """All matrices of one kind as one tensor: a view where they lie evenly in one piece of memory, else a copy."""
    first = matrices[0]
    step = matrices[1].data_ptr() - first.data_ptr() if len(matrices) > 1 else first.nbytes
    size = first.element_size()
    storage = first.untyped_storage()
    even = (
        step > 0
        and step % size == 0
        and all(
            matrix.is_contiguous()
            and matrix.untyped_storage().data_ptr() == storage.data_ptr()
            and matrix.data_ptr() == first.data_ptr() + e * step
            for e, matrix in enumerate(matrices)
        )
    )
    if not even:
        return torch.stack(list(matrices))
    return first.as_strided((len(matrices), *first.shape), (step // size, *first.stride()))
