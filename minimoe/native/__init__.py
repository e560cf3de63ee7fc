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

_INT, _INT64, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one instruction set.

    Attributes:
        name: of the instruction set.
        index: its number in the library.
        interface: the functions of the loaded library.
    """

    name: str
    index: int
    interface: ctypes.CDLL

    def linears(self, x_TA: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """x_TA [T, A] times the transpose of each weight [B, A]: float32 or bfloat16, all alike, on the CPU.

        Accumulated in float32 in an order that depends on A alone. Gradients do not pass. The sets `amx` and
        `avx512bf16` take numbers below 2^-126 for zero in bfloat16, as their instructions do.
        """
        _check(x_TA, *weights)
        T, A = x_TA.shape
        for weight in weights:
            if weight.dim() != 2 or weight.shape[1] != A:
                raise ValueError(f"cannot multiply {list(x_TA.shape)} by the transpose of {list(weight.shape)}")
        x_TA, n = x_TA.contiguous(), len(weights)
        rows = [len(weight) for weight in weights]
        results = [x_TA.new_empty(T, B) for B in rows]
        self.interface.minimoe_linear(
            self.index,
            DTYPES[x_TA.dtype],
            torch.get_num_threads(),
            T,
            A,
            n,
            (_INT64 * n)(*rows),
            x_TA.data_ptr(),
            (_POINTER * n)(*[weight.data_ptr() for weight in weights]),
            (_POINTER * n)(*[result.data_ptr() for result in results]),
        )
        return results

    def rank(self, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's probabilities, float32, in descending order, NaN last; ties go to the lowest expert.

        Returns:
            (sorted_probs_TE float32, experts_TE int64).
        """
        if probs_TE.dtype is not torch.float32 or not probs_TE.is_cpu or probs_TE.dim() != 2:
            raise ValueError("the native kernels rank float32 probabilities [T, E] on the CPU")
        probs_TE = probs_TE.contiguous()
        T, E = probs_TE.shape
        sorted_TE, experts_TE = torch.empty_like(probs_TE), torch.empty_like(probs_TE, dtype=torch.int64)
        self.interface.minimoe_rank(
            self.index,
            torch.get_num_threads(),
            T,
            E,
            probs_TE.data_ptr(),
            sorted_TE.data_ptr(),
            experts_TE.data_ptr(),
        )
        return sorted_TE, experts_TE

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight: statistics in float32, back to x's dtype, then the weight."""
        _check(x_TD, weight_D)
        x_TD = x_TD.contiguous()
        T, D = x_TD.shape
        if weight_D.shape != (D,):
            raise ValueError(f"a norm of {D} numbers needs as many weights, not {list(weight_D.shape)}")
        y_TD = torch.empty_like(x_TD)
        self.interface.minimoe_norm(
            self.index,
            DTYPES[x_TD.dtype],
            torch.get_num_threads(),
            T,
            D,
            eps,
            x_TD.data_ptr(),
            weight_D.data_ptr(),
            y_TD.data_ptr(),
        )
        return y_TD

    def attention(
        self,
        q_TD: Tensor,
        k_TGd: Tensor,
        v_TGd: Tensor,
        q_norm_D: Tensor,
        k_norm_Gd: Tensor,
        cos_T1d: Tensor,
        sin_T1d: Tensor,
        *,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        lengths: Sequence[int],
        layer: int,
        eps: float,
        clip: float | None,
    ) -> Tensor:
        """One new token of each of T sequences, from its projections to its mix of values.

        Norms over the whole projections, clipping, rotary positions, one more key and value written at the end of
        the sequence's cache, and attention to all of them.

        Args:
            keys, values: of each sequence [layers, G, room, d].
            lengths: positions of each that are filled.

        Raises:
            ValueError: shapes that do not fit together.
            IndexError: a cache without room.
        """
        _check(q_TD, q_norm_D, k_norm_Gd, cos_T1d, sin_T1d, *keys, *values)
        T, _, d = cos_T1d.shape
        G = keys[0].shape[1] if keys else 0
        width, kv_width = q_norm_D.numel(), k_norm_Gd.numel()
        fitting = (
            len(keys) == len(values) == len(lengths) == T > 0
            and q_TD.shape == (T, width)
            and k_TGd.shape == v_TGd.shape == (T, kv_width)
            and kv_width == G * d
            and width % kv_width == 0
            and sin_T1d.shape == cos_T1d.shape
            and all(
                k.shape == v.shape and k.shape[1::2] == (G, d) and layer < len(k)
                for k, v in zip(keys, values, strict=True)
            )
        )
        if not fitting or d % 2:
            raise ValueError("projections, norms, rotation and caches do not fit together")
        q_TD, k_TGd, v_TGd = q_TD.contiguous(), k_TGd.contiguous(), v_TGd.contiguous()
        y_TD = torch.empty_like(q_TD)
        failed = self.interface.minimoe_attention(
            self.index,
            DTYPES[q_TD.dtype],
            torch.get_num_threads(),
            T,
            width // d,
            G,
            d,
            layer,
            eps,
            float("inf") if clip is None else clip,
            *(tensor.data_ptr() for tensor in (q_TD, k_TGd, v_TGd, q_norm_D, k_norm_Gd, cos_T1d, sin_T1d)),
            (_POINTER * T)(*[tensor.data_ptr() for tensor in keys]),
            (_POINTER * T)(*[tensor.data_ptr() for tensor in values]),
            (_INT64 * T)(*lengths),
            (_INT64 * T)(*[tensor.shape[2] for tensor in keys]),
            y_TD.data_ptr(),
        )
        if failed:
            raise IndexError("a cache has no room for one more position")
        return y_TD

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
        done = self.interface.minimoe_experts(
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
    """The first is an activation; the others are read as they lie."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        raise ValueError(f"the native kernels do not run {dtype}")
    for tensor in tensors:
        if tensor.dtype is not dtype or not tensor.is_cpu:
            raise ValueError(f"the native kernels do not run {tensor.dtype} on {tensor.device} with {dtype}")
        if tensor is not tensors[0] and not tensor.is_contiguous():
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
    library.minimoe_linear.argtypes = [*[_INT] * 3, *[_INT64] * 3, *[_POINTER] * 4]
    library.minimoe_linear.restype = None
    library.minimoe_rank.argtypes = [*[_INT] * 2, *[_INT64] * 2, *[_POINTER] * 3]
    library.minimoe_rank.restype = None
    library.minimoe_norm.argtypes = [*[_INT] * 3, *[_INT64] * 2, _FLOAT, *[_POINTER] * 3]
    library.minimoe_norm.restype = None
    library.minimoe_attention.argtypes = [*[_INT] * 3, *[_INT64] * 5, *[_FLOAT] * 2, *[_POINTER] * 12]
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
        raise InputError(f"there are no kernels {isa!r} for this processor; choose one of {', '.join(known)}.")
    return known[isa]
