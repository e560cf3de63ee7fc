"""Where things lie in memory that stay there over many calls, as the kernels' C interface reads it.

Made and checked once: what a call has to look at costs time, most of all between kernels that stream weights through
the processor's caches. Each keeps its tensors alive (`pointed_to`). They may be written to, but not be given other
storage.

Shape letters: T tokens, D hidden, E experts, I expert intermediate; H heads, G kv heads, d head size, L layers,
C room of a cache; V vocabulary, K slots of a routing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import Array, Structure, addressof, c_double, c_float, c_int64, c_void_p
from typing import get_args

import torch
from torch import Tensor

from minimoe.prefix_rule import Count, Mass, PrefixRule
from minimoe.routing import Routing

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
IN_LAYERS = ("attention", "gate", "rule", "experts")
COUNTS = {count: place for place, count in enumerate(get_args(Count))}
MASSES = {mass: place for place, mass in enumerate(get_args(Mass))}


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
        self.pointed_to = [*gate_EID, *up_EID, *down_EDI]
        self.dtype = dtype_of(*self.pointed_to)
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
        self.dtype, self.pointed_to = dtype_of(*weights), weights
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
        self.dtype, self.pointed_to = dtype_of(norm_D, gate_ED), (norm_D, gate_ED)
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
        self.pointed_to = [*keys, *values, cos_T1d, sin_T1d]
        self.dtype = dtype_of(*self.pointed_to)
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
        self.pointed_to = [*attention, *gates, *experts, embed_VD, norm_D, head_VD]
        self.dtype, self.G, self.d = dtype_of(embed_VD, norm_D, head_VD), attention[0].G, attention[0].d
        alike = all(of.dtype is self.dtype and D == of.D for of in (*attention, *gates, *experts))
        counted = len(attention) == len(gates) == len(experts) and all(of.E == E for of in (*gates, *experts))
        heads = all((of.layer, of.G, of.d) == (layer, self.G, self.d) for layer, of in enumerate(attention))
        if not (alike and counted and heads) or head_VD.shape != (V, D) or norm_D.shape != (D,):
            raise ValueError("the layers of a model, its embedding and its head do not fit together")
        self.tables = [(c_void_p * len(of))(*_at(*of)) for of in (attention, gates, experts)]
        ends = (tensor.data_ptr() for tensor in (embed_VD, norm_D, head_VD))
        super().__init__(DTYPES[self.dtype], len(gates), D, V, E, eps, *ends, *_at(*self.tables))


class KernelRule(Structure):
    """A PrefixRule as the kernels read it.

    Raises:
        ValueError: a model of so many experts cannot be routed by it.
    """

    _fields_ = [
        ("count", c_int64),
        ("number", c_double),
        *((name, c_int64) for name in ("floor", "limit", "mass", "top_k")),
    ]

    def __init__(self, rule: PrefixRule, num_experts: int) -> None:
        known = rule.count in COUNTS and rule.mass in MASSES and math.isfinite(rule.number)
        if not num_experts or not known or not rule.fits(num_experts):
            raise ValueError(f"{num_experts} experts cannot be routed by {rule}")
        count, mass = COUNTS[rule.count], MASSES[rule.mass]
        super().__init__(count, rule.number, rule.floor, rule.limit, mass, rule.top_k)


class KernelRules:
    """One rule for each layer, all of one limit.

    Attributes:
        limit, num_experts: of all of them.
        table: the KernelRules, one after the other.

    Raises:
        ValueError: different limits, or none that fit the model.
    """

    def __init__(self, rules: Sequence[PrefixRule], num_experts: int) -> None:
        if len({rule.limit for rule in rules}) != 1:
            raise ValueError("the rules of a step all have one limit")
        self.limit, self.num_experts = rules[0].limit, num_experts
        self.table = (KernelRule * len(rules))(*[KernelRule(rule, num_experts) for rule in rules])


class Decision(Structure):
    """What a rule decided about the T tokens of a layer.

    Raises:
        ValueError: a routing of other tokens, or one whose parts do not fit together or are nothing the kernels read.
    """

    _fields_ = [("K", c_int64), *((name, c_void_p) for name in ("experts_at", "weights_at", "k_at"))]

    def __init__(self, routing: Routing, tokens: int) -> None:
        T, K = routing.experts_TK.shape
        if tokens != T or routing.weights_TK.shape != (T, K) or routing.k_T.shape != (T,):
            raise ValueError("tokens, routing and experts do not fit together")
        check_ranking(routing.weights_TK, routing.experts_TK, routing.k_T)
        self.pointed_to = [part.contiguous() for part in (routing.experts_TK, routing.weights_TK, routing.k_T)]
        super().__init__(K, *[part.data_ptr() for part in self.pointed_to])


class StepResults(Structure):
    """Where a decode step writes: router logits of L layers, logits, what rules that are not asked decide, and times.

    Attributes:
        router_LTE, logits_TV: in the model's dtype.
        asked: what a rule that is asked has decided, layer by layer.
        seconds: float64, of attention, gate, rule and experts of each layer, then of embedding, last norm and head.
    """

    _fields_ = [
        *((f"{name}_at", c_void_p) for name in ("hidden", "experts", "weights", "k")),
        *((f"{name}_at", c_void_p) for name in ("router_logits", "logits", "seconds")),
    ]

    def __init__(self, places: ModelPlaces, tokens: int, K: int) -> None:
        L, T, E = places.layers, tokens, places.E
        self.asked: list[Routing] = []
        self._experts_LTK = torch.empty(L, T, K, dtype=torch.int64)
        self._weights_LTK, self._k_LT = torch.empty(L, T, K), torch.empty(L, T, dtype=torch.int64)
        self.router_LTE = torch.empty(L, T, E, dtype=places.dtype)
        self.logits_TV = torch.empty(T, places.V, dtype=places.dtype)
        self.seconds = torch.empty(4 * L + 3, dtype=torch.float64)
        self._hidden_3TD = torch.empty(3, T, places.D, dtype=places.dtype)
        routings = (self._experts_LTK, self._weights_LTK, self._k_LT)
        written = (self._hidden_3TD, *routings, self.router_LTE, self.logits_TV, self.seconds)
        super().__init__(*[tensor.data_ptr() for tensor in written])

    @property
    def routings(self) -> list[Routing]:
        """Of each layer."""
        layers = zip(self._experts_LTK, self._weights_LTK, self._k_LT, strict=True)
        return self.asked or [Routing(*layer, num_experts=self.router_LTE.shape[-1]) for layer in layers]

    @property
    def times(self) -> list[tuple[str, int | None, float]]:
        """What each operation was, in which layer if in one, and its seconds; named as for Probe.span."""
        *in_layers, embed, norm, head = self.seconds.tolist()
        operations = [(name, layer) for layer in range(len(in_layers) // 4) for name in IN_LAYERS]
        parts = [(name, layer, seconds) for (name, layer), seconds in zip(operations, in_layers, strict=True)]
        return [("embed", None, embed), *parts, ("norm", None, norm), ("head", None, head)]


def addresses(tensors: Sequence[Tensor]) -> Array[c_void_p]:
    """Where each tensor begins."""
    return (c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def check_ranking(values: Tensor, *whole: Tensor) -> None:
    """Numbers of a ranking or a routing: float32, and int64 ids and counts, all on the CPU."""
    if values.dtype is not torch.float32 or any(tensor.dtype is not torch.int64 for tensor in whole):
        raise ValueError("rankings and routings hold float32 numbers and int64 experts and k")
    if not all(tensor.is_cpu for tensor in (values, *whole)) or values.dim() != 2:
        raise ValueError("the native kernels take rankings and routings on the CPU")


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
