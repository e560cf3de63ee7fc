"""The operations of a model other than its experts: products, norms and attention, in torch or by the native kernels.

Shape letters: T tokens of all sequences laid end to end, D hidden, H heads, G kv heads, d head size, L layers,
C room of a cache; N new tokens of one sequence, S all its positions so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.linear import linear
from minimoe.native import Kernels
from minimoe.native.places import AttentionPlaces, GatePlaces, StepPlaces


@dataclass(frozen=True)
class Attention:
    """The weights of one layer's attention.

    Attributes:
        layer: index of the layer, where the caches keep its keys and values.
        heads, kv_heads: H and G; H is a multiple of G.
        norm_D: of the norm before the projections.
        query_DD, key_GdD, value_GdD, out_DD: the projections.
        query_norm_D, key_norm_Gd: of the norms over the whole projections.
        eps: of all norms.
        clip: what projections are clamped to after the norms, or None.
    """

    layer: int
    heads: int
    kv_heads: int
    norm_D: Tensor
    query_DD: Tensor
    key_GdD: Tensor
    value_GdD: Tensor
    query_norm_D: Tensor
    key_norm_Gd: Tensor
    out_DD: Tensor
    eps: float
    clip: float | None

    @cached_property
    def places(self) -> AttentionPlaces:
        """For the native kernels, from the first use on: weights may be written to, but not be given other storage."""
        norms = self.query_norm_D, self.key_norm_Gd
        return AttentionPlaces(
            [self.norm_D, self.query_DD, self.key_GdD, self.value_GdD, *norms, self.out_DD],
            heads=self.heads,
            kv_heads=self.kv_heads,
            layer=self.layer,
            eps=self.eps,
            clip=self.clip,
        )


@dataclass(frozen=True)
class Gate:
    """The weights of what scores one layer's experts: the norm before it, and its matrix.

    Attributes:
        norm_D, weight_ED: the weights.
        eps: of the norm.
    """

    norm_D: Tensor
    weight_ED: Tensor
    eps: float

    @cached_property
    def places(self) -> GatePlaces:
        """For the native kernels."""
        return GatePlaces(self.norm_D, self.weight_ED, self.eps)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Whose tokens a pass runs, and where they stand: the same in all layers.

    Attributes:
        new: how many of the tokens belong to each sequence.
        caches: extended by the new keys and values, or None to attend to the new tokens alone.
        rotation: cosines and sines [T, 1, d] of the positions' angles, in the dtype of the model.
        steps: for the native kernels, in a pass of one token of each sequence.
    """

    new: Sequence[int]
    caches: Sequence[KVCache] | None
    rotation: tuple[Tensor, Tensor]
    steps: StepPlaces | None = None


class Operations:
    """In torch: any device and dtype, with gradients."""

    def linear(self, x_TA: Tensor, weight_BA: Tensor) -> Tensor:
        """x_TA times the transpose of weight_BA; see minimoe.linear."""
        return linear(x_TA, weight_BA)

    def linears(self, x_TA: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """x_TA times the transpose of each weight."""
        return [linear(x_TA, weight) for weight in weights]

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight: statistics in float32, back to x's dtype, then the weight."""
        return rms_norm(x_TD, weight_D, eps)

    def gate(self, of: Gate, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x_TD, which the experts get as well, and the router logits: (normed_TD, logits_TE)."""
        normed_TD = self.norm(x_TD, of.norm_D, of.eps)
        return normed_TD, self.linear(normed_TD, of.weight_ED)

    def finite(self, x_TE: Tensor) -> bool:
        """Whether all numbers are finite."""
        return math.isfinite(x_TE.detach().abs().max())  # a NaN is the largest of all

    def sequences(
        self, new: Sequence[int], caches: Sequence[KVCache] | None, rotation: tuple[Tensor, Tensor]
    ) -> Sequences:
        """What a pass hands to attention in every layer; prepared once."""
        return Sequences(new, caches, rotation)

    def attention(self, of: Attention, x_TD: Tensor, sequences: Sequences) -> Tensor:
        """x_TD plus what attention adds to it; extends the caches, whose length the caller moves on.

        Raises:
            IndexError: a cache without room.
        """
        q_TD, k_TGd, v_TGd = self.projections(of, x_TD)
        return x_TD + self.linear(self.mix(of, q_TD, k_TGd, v_TGd, sequences), of.out_DD)

    def projections(self, of: Attention, x_TD: Tensor) -> list[Tensor]:
        """Queries [T, D], keys and values [T, G*d] of the normed x_TD, heads side by side."""
        return self.linears(self.norm(x_TD, of.norm_D, of.eps), (of.query_DD, of.key_GdD, of.value_GdD))

    def mix(self, of: Attention, q_TD: Tensor, k_TGd: Tensor, v_TGd: Tensor, sequences: Sequences) -> Tensor:
        """From projections to each token's mix of values, before the output projection; extends the caches."""
        queries = self.turned(of, q_TD, of.query_norm_D, sequences.rotation)
        keys = self.turned(of, k_TGd, of.key_norm_Gd, sequences.rotation)
        if of.clip is not None:
            v_TGd = v_TGd.clamp(-of.clip, of.clip)
        values = v_TGd.unflatten(-1, (of.kv_heads, -1))
        return self.attended(of.layer, queries, keys, values, sequences).flatten(-2)

    def turned(self, of: Attention, x_TD: Tensor, norm_D: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Queries or keys [T, H, d]: norm over the whole projection, then clip, then RoPE: OLMoE's order."""
        x_TD = self.norm(x_TD, norm_D, of.eps)
        if of.clip is not None:
            x_TD = x_TD.clamp(-of.clip, of.clip)
        return rotate(x_TD.unflatten(-1, (-1, rotation[0].shape[-1])), *rotation)

    def attended(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sequences: Sequences) -> Tensor:
        """Causal attention within each sequence, [T, H, d]; extends the caches."""
        if sequences.caches is None and len(set(sequences.new)) == 1:
            return _attend_alike(q_THd, k_TGd, v_TGd, sequences.new[0])
        return _attend_each(attend, layer, q_THd, k_TGd, v_TGd, sequences)


class NativeOperations(Operations):
    """By the kernels of one instruction set: float32 and bfloat16 on the CPU, without gradients.

    Attributes:
        kernels: those.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def linear(self, x_TA: Tensor, weight_BA: Tensor) -> Tensor:
        return self.kernels.linears(x_TA, [weight_BA])[0]

    def linears(self, x_TA: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        return self.kernels.linears(x_TA, weights)

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return self.kernels.norm(x_TD, weight_D, eps)

    def sequences(
        self, new: Sequence[int], caches: Sequence[KVCache] | None, rotation: tuple[Tensor, Tensor]
    ) -> Sequences:
        steps = None
        if caches and len(new) == rotation[0].shape[0]:
            keys, values = [cache.keys_LHCd for cache in caches], [cache.values_LHCd for cache in caches]
            steps = StepPlaces(keys, values, [cache.length for cache in caches], *rotation)
        return Sequences(new, caches, rotation, steps)

    def attention(self, of: Attention, x_TD: Tensor, sequences: Sequences) -> Tensor:
        if sequences.steps is None:
            return super().attention(of, x_TD, sequences)
        return self.kernels.attention(x_TD, of.places, sequences.steps)

    def turned(self, of: Attention, x_TD: Tensor, norm_D: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        return self.kernels.turn(x_TD, norm_D, rotation, of.eps, of.clip)

    def attended(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sequences: Sequences) -> Tensor:
        return _attend_each(self.kernels.attend, layer, q_THd, k_TGd, v_TGd, sequences)

    def finite(self, x_TE: Tensor) -> bool:
        return self.kernels.finite(x_TE)

    def gate(self, of: Gate, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.gate(x_TD, of.places)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See Operations.norm."""
    if x_TD.dtype == torch.float32:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    x32_TD = x_TD.float()
    return weight_D * (x32_TD * torch.rsqrt(x32_TD.pow(2).mean(-1, keepdim=True) + eps)).to(x_TD.dtype)


def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Rotary position embedding on half-split pairs: dimension i turns with dimension i + d/2."""
    low, high = x_THd.chunk(2, dim=-1)
    return x_THd * cos_T1d + torch.cat([-high, low], dim=-1) * sin_T1d


def attend(q_NHd: Tensor, k_GSd: Tensor, v_GSd: Tensor) -> Tensor:
    """Causal attention of the last N positions of one sequence over all its S; returns [N, H, d].

    H may be a multiple of G (grouped queries). The mask is aligned to the end: query n sees S - N + n + 1 keys.
    """
    N, H, d = q_NHd.shape
    G, S = k_GSd.shape[:2]
    if N == 1:
        # A lone query sees everything; a group's queries are then rows of one product over its kv head.
        mixed = F.scaled_dot_product_attention(q_NHd.view(1, G, H // G, d), k_GSd[None], v_GSd[None])
        return mixed.reshape(1, H, d)
    mask = None if N == S else torch.ones(N, S, dtype=torch.bool, device=q_NHd.device).tril(S - N)
    mixed = F.scaled_dot_product_attention(
        q_NHd.transpose(0, 1)[None],
        k_GSd[None],
        v_GSd[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=H != G,
    )
    return mixed[0].transpose(0, 1)


def _attend_each(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    layer: int,
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    sequences: Sequences,
) -> Tensor:
    """One sequence at a time: each has its own length, and none sees another."""
    parts = zip(*(t.split(list(sequences.new)) for t in (q_THd, k_TGd, v_TGd)), strict=True)
    mixed = []
    for sequence, (q_NHd, k_NGd, v_NGd) in enumerate(parts):
        if sequences.caches is not None:
            k_GSd, v_GSd = sequences.caches[sequence].extend(layer, k_NGd, v_NGd)
        else:
            k_GSd, v_GSd = k_NGd.transpose(0, 1), v_NGd.transpose(0, 1)
        mixed.append(attend(q_NHd, k_GSd, v_GSd))
    return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


def _attend_alike(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, length: int) -> Tensor:
    """Fresh sequences of one length go through one call; what a training step is made of."""
    q, k, v = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q_THd, k_TGd, v_TGd))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return mixed.transpose(1, 2).flatten(0, 1)
