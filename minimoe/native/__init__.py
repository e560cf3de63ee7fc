"""The native kernels: loading the library, choosing an instruction set, and calling it on tensors.

The library is C++ with a plain C interface, built with the package where there is a compiler and absent elsewhere.
It is compiled with OpenMP but not linked to a runtime of its own, so that it shares torch's threads; that is why
torch has to be imported first.

Shape letters: T tokens, A inputs, B outputs, D hidden, E experts, I expert intermediate, K slots.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minimoe.errors import InputError

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
NOT_BUILT = "the native kernels were not built on this machine; reinstall minimoe where a C++ compiler is found"

_INT, _INT64, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one instruction set.

    Attributes:
        name: of the instruction set.
        index: its number in the library.
        library: the loaded library.
    """

    name: str
    index: int
    library: ctypes.CDLL

    def linear(self, x_TA: Tensor, weight_BA: Tensor) -> Tensor:
        """x_TA [T, A] times the transpose of weight_BA [B, A]: float32 or bfloat16, both alike, on the CPU.

        Accumulated in float32 in an order that depends on A alone. Gradients do not pass.
        """
        _check(x_TA, weight_BA)
        if x_TA.dim() != 2 or weight_BA.dim() != 2 or x_TA.shape[1] != weight_BA.shape[1]:
            raise ValueError(f"cannot multiply {list(x_TA.shape)} by the transpose of {list(weight_BA.shape)}")
        x_TA = x_TA.contiguous()
        (T, A), B = x_TA.shape, weight_BA.shape[0]
        y_TB = torch.empty(T, B, dtype=x_TA.dtype)
        self.library.minimoe_linear(
            self.index,
            DTYPES[x_TA.dtype],
            torch.get_num_threads(),
            T,
            A,
            B,
            x_TA.data_ptr(),
            weight_BA.data_ptr(),
            y_TB.data_ptr(),
        )
        return y_TB

    def experts(
        self, x_TD: Tensor, places: Places, experts_TK: Tensor, weights_TK: Tensor, k_T: Tensor
    ) -> tuple[Tensor, int]:
        """The weighted sum of each token's live experts, and the multiply-adds done with expert weights.

        Args:
            x_TD: in the dtype of the experts' matrices.
            places: of the matrices; whoever made them keeps the matrices alive.
            experts_TK, weights_TK, k_T: int64, float32 and int64, as in a Routing.

        Raises:
            ValueError: an expert or a k that is out of range.
        """
        _check(x_TD)
        (T, D), K = x_TD.shape, experts_TK.shape[1]
        if D != places.D or weights_TK.shape != (T, K) or experts_TK.shape != (T, K) or k_T.shape != (T,):
            raise ValueError("tokens, routing and experts do not fit together")
        x_TD, experts_TK, weights_TK, k_T = (
            tensor.contiguous() for tensor in (x_TD, experts_TK, weights_TK.float(), k_T)
        )
        y_TD = torch.empty_like(x_TD)
        done = self.library.minimoe_experts(
            self.index,
            DTYPES[x_TD.dtype],
            torch.get_num_threads(),
            T,
            D,
            places.I,
            len(places.gate),
            K,
            x_TD.data_ptr(),
            places.gate,
            places.up,
            places.down,
            experts_TK.data_ptr(),
            weights_TK.data_ptr(),
            k_T.data_ptr(),
            y_TD.data_ptr(),
        )
        if done < 0:
            raise ValueError("a routing holds k between 0 and its slots, and live ids between 0 and E - 1")
        return y_TD, done


class Places:
    """Where the matrices of one layer's experts lie in memory: E addresses of each kind.

    Raises:
        ValueError: matrices of different shapes, or of a kind that the kernels do not read.
    """

    def __init__(self, gate_EID: Sequence[Tensor], up_EID: Sequence[Tensor], down_EDI: Sequence[Tensor]) -> None:
        self.I, self.D = gate_EID[0].shape
        for matrices, shape in ((gate_EID, (self.I, self.D)), (up_EID, (self.I, self.D)), (down_EDI, (self.D, self.I))):
            if len(matrices) != len(gate_EID) or any(matrix.shape != shape for matrix in matrices):
                raise ValueError("the experts of a layer all have the same shape")
            _check(*matrices)
        self.gate, self.up, self.down = (
            (ctypes.c_void_p * len(matrices))(*(matrix.data_ptr() for matrix in matrices))
            for matrices in (gate_EID, up_EID, down_EDI)
        )


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in DTYPES or tensor.device.type != "cpu" or tensor.dtype != tensors[0].dtype:
            raise ValueError(f"the native kernels do not run {tensor.dtype} on {tensor.device}")
    if not all(tensor.is_contiguous() for tensor in tensors[1:]):
        raise ValueError("the native kernels read a weight as it lies, row after row")


@functools.cache
def instruction_sets() -> tuple[Kernels, ...]:
    """The kernels that this processor can run, the fastest first and plain loops, `scalar`, last; () if not built."""
    files = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not files:
        return ()
    try:
        library = ctypes.CDLL(str(files[0]))
    except OSError:  # built for another machine, or torch brings another OpenMP than the library was compiled for
        return ()
    library.minimoe_set_name.restype = ctypes.c_char_p
    library.minimoe_linear.argtypes = [*[_INT] * 3, *[_INT64] * 3, *[_POINTER] * 3]
    library.minimoe_linear.restype = None
    library.minimoe_experts.argtypes = [*[_INT] * 3, *[_INT64] * 5, *[_POINTER] * 8]
    library.minimoe_experts.restype = _INT64
    return tuple(
        Kernels(library.minimoe_set_name(index).decode(), index, library)
        for index in range(library.minimoe_sets())
        if library.minimoe_set_supported(index)
    )


@functools.cache
def best_kernels() -> Kernels | None:
    """The fastest kernels there are, or None where only plain loops would be left: torch is faster than these."""
    return next((kernels for kernels in instruction_sets() if kernels.name != "scalar"), None)


def find_kernels(isa: str | None = None) -> Kernels:
    """The kernels of an instruction set, or the fastest ones.

    Raises:
        InputError: not built, or not of this processor; lists the names there are.
    """
    known = {kernels.name: kernels for kernels in instruction_sets()}
    if not known:
        raise InputError(f"{NOT_BUILT}, or choose --backend bucketed.")
    if isa is None:
        return next(iter(known.values()))
    if isa not in known:
        raise InputError(f"this processor cannot run isa {isa!r}; choose one of {', '.join(known)}.")
    return known[isa]
