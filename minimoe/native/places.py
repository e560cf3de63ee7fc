"""Where things lie in memory that stay there over many calls, as the kernels' C interface reads it.

Made and checked once: what a call has to look at costs time, most of all between kernels that stream weights through
the processor's caches. Whoever makes one keeps the tensors alive, in the memory where they were: they may be written
to, but not be given other storage.

Shape letters: T tokens, D hidden, E experts, I expert intermediate; H heads, G kv heads, d head size, L layers,
C room of a cache; V vocabulary, K slots of a routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, c_float, c_int64, c_void_p
from typing import Literal, get_args

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}

Count = Literal["all", "elbow"]


class ExpertPlaces(Structure):
    """The matrices of one layer's experts: E of each kind.

    Raises:
        ValueError: matrices of different shapes, or of a kind that the kernels do not read.
    """

    _fields_ = [
        *((name, c_int64) for name in ("type", "D", "I", "E")),
        *((name, c_void_p) for name in ("gate_at", "up_at", "down_at")),
    ]

    def __init__(self, gate_EID: Sequence[Tensor], up_EID: Sequence[Tensor], down_EDI: Sequence[Tensor]) -> None:
        I, D = gate_EID[0].shape
        for matrices, shape in ((gate_EID, (I, D)), (up_EID, (I, D)), (down_EDI, (D, I))):
            if len(matrices) != len(gate_EID) or any(matrix.shape != shape for matrix in matrices):
                raise ValueError("the experts of a layer all have the same shape")
        self.dtype = dtype_of(*gate_EID, *up_EID, *down_EDI)
        self.gate, self.up, self.down = (addresses(matrices) for matrices in (gate_EID, up_EID, down_EDI))
        super().__init__(DTYPES[self.dtype], D, I, len(gate_EID), *_at(self.gate, self.up, self.down))


class AttentionPlaces(Structure):
    """The weights of one layer's attention.

    Args:
        weights: norm [D], query [H*d, D], key and value [G*d, D], query norm [H*d], key norm [G*d], output [D, H*d].
        clip: what projections are clamped to after the norms, or None.

    Raises:
        ValueError: shapes that do not fit together, or tensors of a kind that the kernels do not read.
    """

    _fields_ = [
        *((name, c_int64) for name in ("type", "D", "H", "G", "d", "layer")),
        *((name, c_float) for name in ("eps", "clip")),
        ("weights_at", c_void_p),
    ]

    def __init__(
        self, weights: Sequence[Tensor], *, heads: int, kv_heads: int, layer: int, eps: float, clip: float | None
    ) -> None:
        out_width, D = weights[1].shape
        d = out_width // heads
        width, kv_width = heads * d, kv_heads * d
        shapes = [(D,), (width, D), (kv_width, D), (kv_width, D), (width,), (kv_width,), (D, width)]
        if [tuple(weight.shape) for weight in weights] != shapes or heads % kv_heads or d % 2:
            raise ValueError("the weights of attention do not fit together")
        self.dtype = dtype_of(*weights)
        self.weights = addresses(weights)
        clip = float("inf") if clip is None else clip
        super().__init__(DTYPES[self.dtype], D, heads, kv_heads, d, layer, eps, clip, *_at(self.weights))


class GatePlaces(Structure):
    """The norm [D] and the matrix [E, D] of one layer's gate.

    Raises:
        ValueError: shapes that do not fit together, or tensors of a kind that the kernels do not read.
    """

    _fields_ = [
        *((name, c_int64) for name in ("type", "D", "E")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("norm_at", "gate_at")),
    ]

    def __init__(self, norm_D: Tensor, gate_ED: Tensor, eps: float) -> None:
        E, D = gate_ED.shape
        if norm_D.shape != (D,):
            raise ValueError("the norm of a gate is as wide as its matrix")
        self.dtype = dtype_of(norm_D, gate_ED)
        super().__init__(DTYPES[self.dtype], D, E, eps, norm_D.data_ptr(), gate_ED.data_ptr())


class StepPlaces(Structure):
    """T sequences that each take one more token: their caches, and the rotation of the new positions.

    Args:
        keys, values: of each sequence [L, G, C, d].
        lengths: positions of each that are filled.
        cos_T1d, sin_T1d: of the positions' angles.

    Raises:
        ValueError: shapes that do not fit together, or tensors of a kind that the kernels do not read.
    """

    _fields_ = [
        ("T", c_int64),
        *((name, c_void_p) for name in ("cos_at", "sin_at", "keys_at", "values_at", "lengths_at", "rooms_at")),
    ]

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        lengths: Sequence[int],
        cos_T1d: Tensor,
        sin_T1d: Tensor,
    ) -> None:
        T = len(lengths)
        self.layers, self.G, _, self.d = keys[0].shape
        alike = all(
            k.shape == v.shape and (k.shape[0], *k.shape[1::2]) == (self.layers, self.G, self.d)
            for k, v in zip(keys, values, strict=True)
        )
        if not alike or len(keys) != T or cos_T1d.shape != (T, 1, self.d) or sin_T1d.shape != (T, 1, self.d):
            raise ValueError("the caches and the rotation of a pass do not fit together")
        self.dtype = dtype_of(*keys, *values, cos_T1d, sin_T1d)
        self.keys, self.values = addresses(keys), addresses(values)
        self.lengths, self.rooms = (c_int64 * T)(*lengths), (c_int64 * T)(*[k.shape[2] for k in keys])
        tables = _at(self.keys, self.values, self.lengths, self.rooms)
        super().__init__(T, cos_T1d.data_ptr(), sin_T1d.data_ptr(), *tables)


class ModelPlaces(Structure):
    """A whole model: what lies around its layers, and the places of each layer.

    Args:
        embed_VD, norm_D, head_VD: the embedding, the last norm and the head.
        eps: of the last norm.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or tensors of a kind that the kernels do not read.
    """

    _fields_ = [
        *((name, c_int64) for name in ("type", "layers", "D", "V", "E")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("embed_at", "norm_at", "head_at", "attention_at", "gates_at", "experts_at")),
    ]

    def __init__(
        self,
        embed_VD: Tensor,
        attention: Sequence[AttentionPlaces],
        gates: Sequence[GatePlaces],
        experts: Sequence[ExpertPlaces],
        norm_D: Tensor,
        head_VD: Tensor,
        eps: float,
    ) -> None:
        V, D = embed_VD.shape
        E = gates[0].E
        self.dtype, self.G, self.d = dtype_of(embed_VD, norm_D, head_VD), attention[0].G, attention[0].d
        alike = all(of.dtype is self.dtype and D == of.D for of in (*attention, *gates, *experts))
        counted = len(attention) == len(gates) == len(experts) and all(of.E == E for of in (*gates, *experts))
        heads = all((of.layer, of.G, of.d) == (layer, self.G, self.d) for layer, of in enumerate(attention))
        if not (alike and counted and heads) or head_VD.shape != (V, D) or norm_D.shape != (D,):
            raise ValueError("the layers of a model, its embedding and its head do not fit together")
        self.parts = [*attention, *gates, *experts]  # which their tables point to
        self.tables = [(c_void_p * len(of))(*_at(*of)) for of in (attention, gates, experts)]
        ends = (tensor.data_ptr() for tensor in (embed_VD, norm_D, head_VD))
        super().__init__(DTYPES[self.dtype], len(gates), D, V, E, eps, *ends, *_at(*self.tables))


class PrefixRule(Structure):
    """A rule that ranks a token's experts and counts: from `floor` to K of the best.

    Args:
        count: "elbow", the elbow of the sorted probabilities, or "all": K.

    Raises:
        ValueError: no count from `floor` to K.
    """

    _fields_ = [*((name, c_int64) for name in ("floor", "K", "elbow"))]

    def __init__(self, count: Count, floor: int, K: int) -> None:
        if count not in get_args(Count) or not 0 <= floor <= K:
            raise ValueError(f"counted as {count!r}, from {floor} to {K} experts cannot be kept")
        super().__init__(floor, K, count == "elbow")


class StepResults(Structure):
    """Where a decode step writes: the routing of L layers, its logits [L, T, E], and the logits [T, V]."""

    _fields_ = [*((name, c_void_p) for name in ("experts_at", "weights_at", "k_at", "router_at", "logits_at"))]

    def __init__(self, places: ModelPlaces, rule: PrefixRule, tokens: int) -> None:
        L, T, E, K = places.layers, tokens, places.E, rule.K
        self.experts_LTK = torch.empty(L, T, K, dtype=torch.int64)
        self.weights_LTK, self.k_LT = torch.empty(L, T, K), torch.empty(L, T, dtype=torch.int64)
        self.router_LTE = torch.empty(L, T, E, dtype=places.dtype)
        self.logits_TV = torch.empty(T, places.V, dtype=places.dtype)
        written = (self.experts_LTK, self.weights_LTK, self.k_LT, self.router_LTE, self.logits_TV)
        super().__init__(*[tensor.data_ptr() for tensor in written])


def addresses(tensors: Sequence[Tensor]) -> Array[c_void_p]:
    """Where each tensor begins."""
    return (c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def dtype_of(*tensors: Tensor) -> torch.dtype:
    """The dtype of tensors that are read as they lie.

    Raises:
        ValueError: they differ, lie on another device or in strides, or the kernels do not run their dtype.
    """
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        raise ValueError(f"the native kernels do not run {dtype}")
    for tensor in tensors:
        if tensor.dtype is not dtype or not tensor.is_cpu:
            raise ValueError(f"the native kernels do not run {tensor.dtype} on {tensor.device} with {dtype}")
        if not tensor.is_contiguous():
            raise ValueError("the native kernels read a weight as it lies, row after row")
    return dtype


def _at(*tables: Array[c_void_p] | Array[c_int64] | Structure) -> list[int]:
    return [addressof(table) for table in tables]
