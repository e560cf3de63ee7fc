"""The native kernels called on tensors: what a call needs is checked here, and pointers are taken.

Shape letters: T tokens, A inputs, B outputs, D hidden, E experts, I expert intermediate, K slots; N new tokens of one
sequence, S all its positions, H heads, G kv heads, d head size.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from minimoe.errors import InputError, router_error
from minimoe.native.places import (
    DTYPES,
    AttentionPlaces,
    Decision,
    ExpertPlaces,
    GatePlaces,
    KernelRule,
    KernelRules,
    ModelPlaces,
    StepPlaces,
    StepResults,
    addresses,
    check_ranking,
    dtype_of,
)
from minimoe.prefix_rule import PrefixRule
from minimoe.routing import Routing

BROKEN_ROUTING = "the rule's Routing is broken: it holds k between 0 and its slots, and live ids between 0 and E - 1."
Ask = Callable[[int, Tensor], Routing]


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
        rows = [weight.shape[0] for weight in weights]
        results = [x_TA.new_empty(T, B) for B in rows]
        self.interface.minimoe_linear(
            self.index,
            DTYPES[x_TA.dtype],
            torch.get_num_threads(),
            T,
            A,
            n,
            (ctypes.c_int64 * n)(*rows),
            x_TA.data_ptr(),
            addresses(weights),
            addresses(results),
        )
        return results

    def rank(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax of float32 or bfloat16 logits [T, E] on the CPU, and the experts in descending order of probability.

        Ties go to the lowest expert. A row with a NaN or +inf has no probabilities: all are NaN, the ids in order.

        Returns:
            (sorted_probs_TE float32, experts_TE int64).
        """
        _check(logits_TE)
        logits_TE = logits_TE.contiguous()
        T, E = logits_TE.shape
        sorted_TE, experts_TE = torch.empty(T, E), torch.empty(T, E, dtype=torch.int64)
        self.interface.minimoe_rank(
            self.index,
            DTYPES[logits_TE.dtype],
            torch.get_num_threads(),
            T,
            E,
            logits_TE.data_ptr(),
            sorted_TE.data_ptr(),
            experts_TE.data_ptr(),
        )
        return sorted_TE, experts_TE

    def keep(self, sorted_probs_TE: Tensor, experts_TE: Tensor, k_T: Tensor, K: int) -> tuple[Tensor, Tensor]:
        """The first k_T of each token's ranked experts in K slots: weight 0 and the id E in the slots after them.

        Args:
            sorted_probs_TE, experts_TE: float32 and int64, as from `rank`.
            k_T: int64, from 0 to K; K is at most E.

        Returns:
            (experts_TK int64, weights_TK float32).
        """
        check_ranking(sorted_probs_TE, experts_TE, k_T)
        T, E = experts_TE.shape
        if sorted_probs_TE.shape != (T, E) or k_T.shape != (T,) or not 0 <= K <= E:
            raise ValueError(f"{K} slots, k and a ranking of {list(experts_TE.shape)} do not fit together")
        sorted_probs_TE, experts_TE, k_T = sorted_probs_TE.contiguous(), experts_TE.contiguous(), k_T.contiguous()
        kept_TK, weights_TK = torch.empty(T, K, dtype=torch.int64), torch.empty(T, K)
        self.interface.minimoe_keep(
            T,
            E,
            K,
            sorted_probs_TE.data_ptr(),
            experts_TE.data_ptr(),
            k_T.data_ptr(),
            kept_TK.data_ptr(),
            weights_TK.data_ptr(),
        )
        return kept_TK, weights_TK

    def decode(self, ids_T: Tensor, places: ModelPlaces, steps: StepPlaces, rules: KernelRules | Ask) -> StepResults:
        """A whole decode step of T sequences, one new token of each, from ids to logits.

        The same bits as `attention`, `gate`, `prefix` and `experts` layer by layer, in one call of the library, or one
        a layer where a rule is asked in between.

        Args:
            ids_T: int64.
            rules: those of the layers, or what is asked: given a layer and its router logits [T, E], in the model's
                dtype, it gives their routing.

        Raises:
            ValueError: tokens, model, caches and rule that do not fit together, an id that the model does not have.
            InputError: a routing with an expert or a k that is out of range.
            IndexError: a cache without room.
            NumericalError: router logits that are not finite; names the layer. Caches may then hold something after
                their ends, as with whatever else the rule raises.
        """
        T = len(ids_T)
        if ids_T.dtype is not torch.int64 or not ids_T.is_cpu or ids_T.shape != (steps.T,):
            raise ValueError("a decode step takes one token of each sequence, int64 on the CPU")
        alike = (places.dtype, places.layers, places.G, places.d) == (steps.dtype, steps.layers, steps.G, steps.d)
        told = rules if isinstance(rules, KernelRules) else None
        if not alike or (told and (len(told.table), told.num_experts) != (places.layers, places.E)):
            raise ValueError("model, caches and rules do not fit together")
        ids_T, results = ids_T.contiguous(), StepResults(places, T, told.limit if told else 0)

        def run(layer: int, decided: Decision | None) -> None:
            refused = self.interface.minimoe_decode(
                self.index,
                torch.get_num_threads(),
                byref(places),
                byref(steps),
                told.table if told else None,
                ids_T.data_ptr(),
                byref(results),
                layer,
                byref(decided) if decided else None,
            )
            if refused == -1:
                raise IndexError("a cache has no room for one more position")
            if refused == -2:
                raise ValueError(f"a token id is not one of the {places.V} of this model")
            if refused == -3:
                raise InputError(BROKEN_ROUTING)
            if refused:
                raise router_error(refused - 1)

        run(0, None)
        if not isinstance(rules, KernelRules):
            for layer in range(places.layers):
                start = time.perf_counter()
                results.asked.append(rules(layer, results.router_LTE[layer]))
                decided = Decision(results.asked[-1], T)
                results.seconds[4 * layer + 2] = time.perf_counter() - start
                run(layer, decided)
        return results

    def prefix(self, logits_TE: Tensor, rule: PrefixRule) -> tuple[Tensor, Tensor, Tensor]:
        """What `rank`, a rule's count, `keep` and its weights make of router logits, in one call.

        Args:
            logits_TE: float32 or bfloat16.

        Returns:
            (experts_TK int64, weights_TK float32, k_T int64), K the rule's limit.
        """
        _check(logits_TE)
        logits_TE = logits_TE.contiguous()
        T, E = logits_TE.shape
        followed = KernelRule(rule, E)
        experts_TK = torch.empty(T, rule.limit, dtype=torch.int64)
        weights_TK, k_T = torch.empty(T, rule.limit), torch.empty(T, dtype=torch.int64)
        self.interface.minimoe_prefix(
            self.index,
            DTYPES[logits_TE.dtype],
            torch.get_num_threads(),
            T,
            E,
            byref(followed),
            logits_TE.data_ptr(),
            experts_TK.data_ptr(),
            weights_TK.data_ptr(),
            k_T.data_ptr(),
        )
        return experts_TK, weights_TK, k_T

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

    def turn(
        self, x_TD: Tensor, norm_D: Tensor, rotation: tuple[Tensor, Tensor], eps: float, clip: float | None
    ) -> Tensor:
        """Queries or keys on their way to attention: the norm of x_TD over all heads, clamped to +-clip, and each head
        turned by its token's angles.

        Args:
            rotation: cosines and sines [T, 1, d]; d is even.

        Returns:
            [T, H, d], H of them in D.

        Raises:
            ValueError: what does not fit together.
        """
        cos_T1d, sin_T1d = (angles.contiguous() for angles in rotation)
        T, D = x_TD.shape
        d = cos_T1d.shape[-1]
        if d % 2 or D % d or norm_D.shape != (D,) or any(angles.shape != (T, 1, d) for angles in (cos_T1d, sin_T1d)):
            raise ValueError(f"{list(x_TD.shape)}, a norm and angles {list(cos_T1d.shape)} do not fit together")
        _check(x_TD, norm_D, cos_T1d, sin_T1d)
        x_TD = x_TD.contiguous()
        y_THd = x_TD.new_empty(T, D // d, d)
        self.interface.minimoe_turn(
            self.index,
            DTYPES[x_TD.dtype],
            torch.get_num_threads(),
            T,
            D // d,
            d,
            eps,
            float("inf") if clip is None else clip,
            x_TD.data_ptr(),
            norm_D.data_ptr(),
            cos_T1d.data_ptr(),
            sin_T1d.data_ptr(),
            y_THd.data_ptr(),
        )
        return y_THd

    def finite(self, x_TA: Tensor) -> bool:
        """Whether all numbers are finite."""
        _check(x_TA)
        x_TA = x_TA.contiguous()
        return bool(self.interface.minimoe_finite(DTYPES[x_TA.dtype], x_TA.numel(), x_TA.data_ptr()))

    def gate(self, x_TD: Tensor, places: GatePlaces) -> tuple[Tensor, Tensor]:
        """The norm of x_TD, and its product with the gate's matrix: (normed_TD, logits_TE)."""
        x_TD = _fitting(x_TD, places)
        T = x_TD.shape[0]
        normed_TD, logits_TE = torch.empty_like(x_TD), x_TD.new_empty(T, places.E)
        self.interface.minimoe_gate(
            self.index,
            torch.get_num_threads(),
            byref(places),
            T,
            x_TD.data_ptr(),
            normed_TD.data_ptr(),
            logits_TE.data_ptr(),
        )
        return normed_TD, logits_TE

    def attention(self, x_TD: Tensor, places: AttentionPlaces, steps: StepPlaces) -> Tensor:
        """One new token of each of T sequences: x_TD plus what attention adds to it.

        Norm, projections, their norms, clipping, rotary positions, one more key and value written at the end of the
        sequence's cache, attention to all of them, the output projection and the sum, all in one call: a call costs
        more time than most of these.

        Raises:
            ValueError: tokens, weights and caches that do not fit together.
            IndexError: a cache without room.
        """
        x_TD = _fitting(x_TD, places)
        fitting = steps.dtype is places.dtype and (steps.T, steps.G, steps.d) == (len(x_TD), places.G, places.d)
        if not fitting or places.layer >= steps.layers:
            raise ValueError("tokens, weights and caches do not fit together")
        y_TD = torch.empty_like(x_TD)
        failed = self.interface.minimoe_attention(
            self.index, torch.get_num_threads(), byref(places), byref(steps), x_TD.data_ptr(), y_TD.data_ptr()
        )
        if failed:
            raise IndexError("a cache has no room for one more position")
        return y_TD

    def attend(self, q_NHd: Tensor, k_GSd: Tensor, v_GSd: Tensor) -> Tensor:
        """Causal attention of the last N positions of one sequence over all its S; returns [N, H, d].

        float32 or bfloat16, all alike; H is a multiple of G. Keys and values may be parts of larger tensors, such as
        caches. The softmax is computed in float32; the sets `amx` and `avx512bf16` round its weights to bfloat16 before
        values are weighed, and take numbers below 2^-126 for zero. Gradients do not pass.

        Raises:
            ValueError: what does not fit together.
        """
        N, H, d = q_NHd.shape
        G, S = k_GSd.shape[:2]
        if k_GSd.stride() != v_GSd.stride() or k_GSd.stride(2) != 1:
            k_GSd, v_GSd = k_GSd.contiguous(), v_GSd.contiguous()
        alike = {(tensor.dtype, tensor.device.type) for tensor in (q_NHd, k_GSd, v_GSd)}
        if alike not in [{(dtype, "cpu")} for dtype in DTYPES] or not k_GSd.shape == v_GSd.shape == (G, S, d):
            raise ValueError("queries, keys and values do not fit together")
        if N > S or not G or H % G:
            raise ValueError(f"{N} queries of {H} heads and {S} positions of {G} do not fit together")
        q_NHd = q_NHd.contiguous()
        y_NHd = torch.empty_like(q_NHd)
        self.interface.minimoe_attend(
            self.index,
            DTYPES[q_NHd.dtype],
            torch.get_num_threads(),
            N,
            S,
            H,
            G,
            d,
            k_GSd.stride(1),
            k_GSd.stride(0),
            q_NHd.data_ptr(),
            k_GSd.data_ptr(),
            v_GSd.data_ptr(),
            y_NHd.data_ptr(),
        )
        return y_NHd

    def experts(self, x_TD: Tensor, places: ExpertPlaces, routing: Routing) -> tuple[Tensor, int]:
        """The weighted sum of each token's live experts, and the multiply-adds done with expert weights.

        Raises:
            ValueError: tokens and experts that do not fit together.
            InputError: a routing with an expert or a k that is out of range.
        """
        x_TD = _fitting(x_TD, places)
        T, decided, y_TD = len(x_TD), Decision(routing, len(x_TD)), torch.empty_like(x_TD)
        done = self.interface.minimoe_experts(
            self.index,
            torch.get_num_threads(),
            byref(places),
            T,
            decided.K,
            x_TD.data_ptr(),
            decided.experts_at,
            decided.weights_at,
            decided.k_at,
            y_TD.data_ptr(),
        )
        if done < 0:
            raise InputError(BROKEN_ROUTING)
        return y_TD, done


def _fitting(x_TD: Tensor, places: ExpertPlaces | AttentionPlaces | GatePlaces) -> Tensor:
    """Tokens that weights can be run on, row after row."""
    if x_TD.dtype is not places.dtype or not x_TD.is_cpu or x_TD.dim() != 2 or x_TD.shape[1] != places.D:
        raise ValueError(
            f"weights of {places.D} inputs in {places.dtype} do not fit together with {x_TD.dtype} "
            f"{list(x_TD.shape)} on {x_TD.device}"
        )
    return x_TD.contiguous()


def _check(x_TA: Tensor, *weights: Tensor) -> None:
    """An activation and weights that are read as they lie."""
    dtype = dtype_of(*weights) if weights else x_TA.dtype
    if x_TA.dtype is not dtype or dtype not in DTYPES or not x_TA.is_cpu or x_TA.dim() != 2:
        raise ValueError(f"the native kernels do not run {x_TA.dtype} {list(x_TA.shape)} on {x_TA.device} here")
