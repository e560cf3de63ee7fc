"""Attention of one new token of each sequence, over caches that lie where they lie and are as long as they are.

Three launches: queries, keys and values are brought into shape and the latter appended to the caches; a sequence's
positions are shared out among programs, none of which reads past the sequence's end; and their parts are put together.
Where the caches lie and how long they are stands in a table on the device, so that a CUDA graph serves any caches.
torch has no attention that does so: its masked one reads all the room there is, its flex_attention has to be compiled
while the model runs, and its varlen_attn takes one tensor for all caches and runs on a GPU only.

Shape letters: B sequences, D hidden, H heads, G kv heads, d head size, L layers, C room of a cache, N splits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.operations import Attention

# Positions that are looked at together, and programs that share a head's positions. Not yet tuned on a GPU.
TILE, SPLITS = 64, 16


def cache_table(caches: Sequence[KVCache]) -> Tensor:
    """What the kernels have to know of B caches: addresses of keys and values, room, and length; int64 [4, B].

    Raises:
        IndexError: one has no room for another position, which the kernels would write all the same.
    """
    for cache in caches:
        if cache.length >= cache.capacity:
            raise IndexError(f"a cache of {cache.capacity} positions cannot hold {cache.length + 1}")
    rows = [(c.keys_LHCd.data_ptr(), c.values_LHCd.data_ptr(), c.capacity, c.length) for c in caches]
    return torch.tensor(rows, dtype=torch.int64).T.contiguous()


def attend_one_each(
    of: Attention, q_BD: Tensor, k_BGd: Tensor, v_BGd: Tensor, rotation: tuple[Tensor, Tensor], table_4B: Tensor
) -> Tensor:
    """From projections to each token's mix of values; see minimoe.operations.Operations.mix.

    Args:
        rotation: cosines and sines [B, 1, d].
        table_4B: see `cache_table`, on the device. The new keys and values are written behind each cache's length.

    Returns:
        mixed_BD; sums are float32.
    """
    (B, D), H, G = q_BD.shape, of.heads, of.kv_heads
    d = D // H
    q_BD, k_BGd, v_BGd = q_BD.contiguous(), k_BGd.contiguous(), v_BGd.contiguous()
    queries_BD, mixed_BD = torch.empty_like(q_BD), torch.empty_like(q_BD)
    sums_BHNd = torch.empty(B, H, SPLITS, d, dtype=torch.float32, device=q_BD.device)
    peaks_BHN, masses_BHN = (torch.empty(B, H, SPLITS, dtype=torch.float32, device=q_BD.device) for _ in range(2))
    _place_kernel[(B, 3)](
        q_BD,
        k_BGd,
        v_BGd,
        of.query_norm_D,
        of.key_norm_Gd,
        *rotation,
        table_4B,
        queries_BD,
        B,
        of.layer,
        H=H,
        H_PADDED=triton.next_power_of_2(H),
        G=G,
        G_PADDED=triton.next_power_of_2(G),
        HALF=d // 2,
        HALF_PADDED=triton.next_power_of_2(d // 2),
        EPS=of.eps,
        CLIP=of.clip,
    )
    shape = {"H": H, "d": d, "d_PADDED": triton.next_power_of_2(d), "TILE": TILE, "SPLITS": SPLITS}
    _attend_kernel[(B, H, SPLITS)](
        queries_BD, table_4B, sums_BHNd, peaks_BHN, masses_BHN, B, of.layer, d**-0.5, G=G, **shape
    )
    _merge_kernel[(B, H)](sums_BHNd, peaks_BHN, masses_BHN, table_4B, mixed_BD, B, **shape)
    return mixed_BD


@triton.jit
def _turned(
    x,
    norm,
    cosines,
    sines,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    EPS: tl.constexpr,
    CLIP: tl.constexpr,
):
    """Norm over all heads, clip and RoPE; halves [heads, d / 2], rounded to x's dtype wherever torch rounds too."""
    dtype: tl.constexpr = x.dtype.element_ty
    heads, dims = tl.arange(0, HEADS_PADDED)[:, None], tl.arange(0, HALF_PADDED)[None, :]
    inside = (heads < HEADS) & (dims < HALF)
    places = heads * 2 * HALF + dims
    low = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + places + HALF, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(tl.sum(low * low + high * high, axis=1), axis=0) / (HEADS * 2 * HALF) + EPS)
    low = (low * factor).to(dtype).to(tl.float32) * tl.load(norm + places, mask=inside, other=0.0).to(tl.float32)
    high = (high * factor).to(dtype).to(tl.float32) * tl.load(norm + places + HALF, mask=inside, other=0.0).to(
        tl.float32
    )
    low, high = _clipped(low, CLIP).to(dtype).to(tl.float32), _clipped(high, CLIP).to(dtype).to(tl.float32)
    # Both halves of a head turn by the same angles.
    cosine = tl.load(cosines + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sines + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    turned_low = (low * cosine).to(dtype).to(tl.float32) + (-high * sine).to(dtype).to(tl.float32)
    turned_high = (high * cosine).to(dtype).to(tl.float32) + (low * sine).to(dtype).to(tl.float32)
    return turned_low.to(dtype), turned_high.to(dtype)


@triton.jit
def _clipped(x, CLIP: tl.constexpr):
    if CLIP is not None:
        # Comparisons, because a NaN has to stay one.
        x = tl.where(x > CLIP, CLIP, tl.where(x < -CLIP, -CLIP, x))
    return x


@triton.jit(do_not_specialize=["layer"])
def _place_kernel(
    q_BD,
    k_BGd,
    v_BGd,
    query_norm_D,
    key_norm_Gd,
    cosines_Bd,
    sines_Bd,
    table_4B,
    queries_BD,
    B,
    layer,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    G: tl.constexpr,
    G_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    EPS: tl.constexpr,
    CLIP: tl.constexpr,
):
    """Program (sequence; query, key or value)."""
    sequence, kind = tl.program_id(0), tl.program_id(1)
    cosines, sines = cosines_Bd + sequence * 2 * HALF, sines_Bd + sequence * 2 * HALF
    dims = tl.arange(0, HALF_PADDED)[None, :]
    if kind == 0:
        heads = tl.arange(0, H_PADDED)[:, None]
        low, high = _turned(
            q_BD + sequence * H * 2 * HALF,
            query_norm_D,
            cosines,
            sines,
            H,
            H_PADDED,
            HALF,
            HALF_PADDED,
            EPS,
            CLIP,
        )
        place = queries_BD + (sequence * H + heads) * 2 * HALF + dims
        tl.store(place, low, mask=(heads < H) & (dims < HALF))
        tl.store(place + HALF, high, mask=(heads < H) & (dims < HALF))
        return
    heads = tl.arange(0, G_PADDED)[:, None]
    inside = (heads < G) & (dims < HALF)
    room = tl.load(table_4B + 2 * B + sequence)
    length = tl.load(table_4B + 3 * B + sequence)
    places = ((layer * G + heads) * room + length) * 2 * HALF + dims
    if kind == 1:
        low, high = _turned(
            k_BGd + sequence * G * 2 * HALF,
            key_norm_Gd,
            cosines,
            sines,
            G,
            G_PADDED,
            HALF,
            HALF_PADDED,
            EPS,
            CLIP,
        )
        keys = tl.load(table_4B + sequence).to(tl.pointer_type(k_BGd.dtype.element_ty))
        tl.store(keys + places, low, mask=inside)
        tl.store(keys + places + HALF, high, mask=inside)
    else:
        given = v_BGd + (sequence * G + heads) * 2 * HALF + dims
        first = _clipped(tl.load(given, mask=inside, other=0.0).to(tl.float32), CLIP)
        second = _clipped(tl.load(given + HALF, mask=inside, other=0.0).to(tl.float32), CLIP)
        values = tl.load(table_4B + B + sequence).to(tl.pointer_type(v_BGd.dtype.element_ty))
        tl.store(values + places, first.to(v_BGd.dtype.element_ty), mask=inside)
        tl.store(values + places + HALF, second.to(v_BGd.dtype.element_ty), mask=inside)


@triton.jit
def _share(table_4B, sequence, B, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """How many positions the sequence has now, and how many of them each split takes: whole tiles."""
    seen = tl.load(table_4B + 3 * B + sequence) + 1
    return seen, tl.cdiv(tl.cdiv(seen, SPLITS), TILE) * TILE


@triton.jit(do_not_specialize=["layer"])
def _attend_kernel(
    queries_BD,
    table_4B,
    sums_BHNd,
    peaks_BHN,
    masses_BHN,
    B,
    layer,
    scale,
    G: tl.constexpr,
    H: tl.constexpr,
    d: tl.constexpr,
    d_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (sequence, head, split): the softmax's largest score, its mass, and the values summed, of a share."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seen, share = _share(table_4B, sequence, B, TILE, SPLITS)
    start = split * share
    if start >= seen:
        return
    end = tl.minimum(start + share, seen)
    dims = tl.arange(0, d_PADDED)
    row = (layer * G + head // (H // G)) * tl.load(table_4B + 2 * B + sequence) * d
    keys = tl.load(table_4B + sequence).to(tl.pointer_type(queries_BD.dtype.element_ty))
    values = tl.load(table_4B + B + sequence).to(tl.pointer_type(queries_BD.dtype.element_ty))
    # Caches begin where torch gives out memory, so they are aligned for wide loads, which a table does not show.
    keys, values = tl.multiple_of(keys, 16) + row, tl.multiple_of(values, 16) + row
    query = tl.load(queries_BD + (sequence * H + head) * d + dims, mask=dims < d, other=0.0).to(tl.float32) * scale
    peak = tl.full((), float("-inf"), tl.float32)
    mass = tl.zeros((), tl.float32)
    sums = tl.zeros((d_PADDED,), tl.float32)
    for first in range(start, end, TILE):
        places = first + tl.arange(0, TILE)
        inside = (places < end)[:, None] & (dims < d)[None, :]
        tile = places[:, None] * d + dims[None, :]
        products = tl.load(keys + tile, mask=inside, other=0.0).to(tl.float32) * query[None, :]
        scores = tl.where(places < end, tl.sum(products, axis=1), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=0))
        powers, fading = tl.exp(scores - higher), tl.exp(peak - higher)
        mass = mass * fading + tl.sum(powers, axis=0)
        here = tl.load(values + tile, mask=inside, other=0.0).to(tl.float32)
        sums = sums * fading + tl.sum(powers[:, None] * here, axis=0)
        peak = higher
    part = (sequence * H + head) * SPLITS + split
    tl.store(peaks_BHN + part, peak)
    tl.store(masses_BHN + part, mass)
    tl.store(sums_BHNd + part * d + dims, sums, mask=dims < d)


@triton.jit
def _merge_kernel(
    sums_BHNd,
    peaks_BHN,
    masses_BHN,
    table_4B,
    mixed_BD,
    B,
    H: tl.constexpr,
    d: tl.constexpr,
    d_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (sequence, head): the splits that had positions, put together in their order."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    seen, share = _share(table_4B, sequence, B, TILE, SPLITS)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, d_PADDED)
    used = splits < tl.cdiv(seen, share)
    parts = (sequence * H + head) * SPLITS + splits
    peaks = tl.load(peaks_BHN + parts, mask=used, other=float("-inf"))
    factors = tl.exp(peaks - tl.max(peaks, axis=0))
    mass = tl.sum(factors * tl.load(masses_BHN + parts, mask=used, other=0.0), axis=0)
    inside = used[:, None] & (dims < d)[None, :]
    sums = tl.load(sums_BHNd + parts[:, None] * d + dims[None, :], mask=inside, other=0.0)
    mixed = tl.sum(factors[:, None] * sums, axis=0) / mass
    tl.store(mixed_BD + (sequence * H + head) * d + dims, mixed.to(mixed_BD.dtype.element_ty), mask=dims < d)
