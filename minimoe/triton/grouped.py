"""Experts of many tokens: slots grouped by expert on the device, so that each weight is read once for all its tokens.

The slots of an expert are cut into blocks of a fixed number of rows; its last block is padded. How many blocks there
are stays on the device: the grid covers the most there can be, and programs past the end return at once. No sum is
made of atomic additions, so two runs agree to the bit.

Shape letters: T tokens, D hidden, E experts, K slots, I expert intermediate, S = T * K slots of all tokens, M rows of a
block, N columns of its result, B the most blocks there can be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimoe.routing import Routing

SCAN = 1024  # slots that are looked at together
SUM_COLUMNS = 1024  # of a token's result that are added up together


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the products are cut: M rows and N columns of a result, `depth` of the sum at a time, warps of a program."""

    M: int
    N: int
    depth: int
    warps: int
    stages: int

    @classmethod
    def for_rows(cls, rows: float) -> Tiles:
        """For so many rows an expert on average. Not yet tuned on a GPU."""
        if rows <= 16:
            return cls(16, 64, 128, warps=4, stages=3)  # 16 is the least that a matrix instruction takes
        if rows <= 96:
            return cls(64, 64, 64, warps=4, stages=3)
        return cls(128, 128, 64, warps=8, stages=3)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Slots grouped by expert, in blocks; all on the device.

    Attributes:
        slots_BM: int32, the slots of each block in ascending order, S in its padding.
        experts_B: int32, the expert of each block.
        count_1: int32, how many blocks there are; what lies behind them is undefined.
    """

    slots_BM: Tensor
    experts_B: Tensor
    count_1: Tensor


def group(routing: Routing, M: int) -> Blocks:
    """Two launches, none of which the host waits for."""
    S, E = routing.experts_TK.numel(), routing.num_experts
    most = S // M + min(E, S)
    counts_E, experts_B, count_1 = (
        torch.empty(size, dtype=torch.int32, device=routing.experts_TK.device) for size in (E, most, 1)
    )
    slots_BM = torch.empty(most, M, dtype=torch.int32, device=routing.experts_TK.device)
    _count_kernel[(E,)](routing.experts_TK, counts_E, S, SCAN=SCAN)
    _group_kernel[(E,)](
        routing.experts_TK,
        counts_E,
        slots_BM,
        experts_B,
        count_1,
        S,
        E=E,
        E_PADDED=triton.next_power_of_2(E),
        M=M,
        SCAN=SCAN,
    )
    return Blocks(slots_BM, experts_B, count_1)


def run_grouped(
    x_TD: Tensor,
    routing: Routing,
    gate_EID: Tensor,
    up_EID: Tensor,
    down_EDI: Tensor,
    tiles: Tiles | None = None,
) -> Tensor:
    """The weighted sum of each token's live experts; see minimoe.experts.Experts.run.

    Args:
        gate_EID, up_EID, down_EDI: each expert's matrix contiguous; experts any stride apart.
        tiles: by default those for this many slots.
    """
    (T, D), I, K, E = x_TD.shape, gate_EID.shape[1], routing.width, routing.num_experts
    tiles = tiles or Tiles.for_rows(T * K / E)
    blocks = group(routing, tiles.M)
    most = len(blocks.experts_B)
    h_SI, z_SD, y_TD = x_TD.new_empty(T * K, I), x_TD.new_empty(T * K, D), torch.empty_like(x_TD)
    shape = {"D": D, "I": I, "M": tiles.M, "N": tiles.N, "DEPTH": tiles.depth}
    launch = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    # Blocks are the fastest axis: programs that run together share a tile of weights.
    _up_kernel[(most, triton.cdiv(I, tiles.N))](
        x_TD,
        blocks.slots_BM,
        blocks.experts_B,
        blocks.count_1,
        gate_EID,
        up_EID,
        h_SI,
        gate_EID.stride(0),
        up_EID.stride(0),
        T * K,
        K=K,
        **shape,
        **launch,
    )
    _down_kernel[(most, triton.cdiv(D, tiles.N))](
        h_SI,
        blocks.slots_BM,
        blocks.experts_B,
        blocks.count_1,
        routing.weights_TK,
        down_EDI,
        z_SD,
        down_EDI.stride(0),
        T * K,
        **shape,
        **launch,
    )
    _sum_kernel[(T, triton.cdiv(D, SUM_COLUMNS))](z_SD, routing.k_T, y_TD, K=K, D=D, COLUMNS=SUM_COLUMNS)
    return y_TD


@triton.jit
def _count_kernel(experts_S, counts_E, S, SCAN: tl.constexpr):
    """Program (expert): how many slots it has."""
    expert = tl.program_id(0)
    found = tl.zeros((SCAN,), tl.int32)
    for start in range(0, S, SCAN):
        slots = start + tl.arange(0, SCAN)
        found += (tl.load(experts_S + slots, mask=slots < S, other=-1) == expert).to(tl.int32)
    tl.store(counts_E + expert, tl.sum(found, axis=0))


@triton.jit
def _group_kernel(
    experts_S,
    counts_E,
    slots_BM,
    experts_B,
    count_1,
    S,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    M: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Program (expert): lists its slots in blocks of its own, behind those of the experts before it."""
    expert = tl.program_id(0)
    all_experts = tl.arange(0, E_PADDED)
    blocks_E = (tl.load(counts_E + all_experts, mask=all_experts < E, other=0) + M - 1) // M
    first = tl.sum(tl.where(all_experts < expert, blocks_E, 0), axis=0)
    own = tl.sum(tl.where(all_experts == expert, blocks_E, 0), axis=0)
    if expert == 0:
        tl.store(count_1, tl.sum(blocks_E, axis=0))
    for block in range(first, first + own):
        tl.store(experts_B + block, expert)
    end = first * M
    if own > 0:
        for start in range(0, S, SCAN):
            slots = start + tl.arange(0, SCAN)
            mine = tl.load(experts_S + slots, mask=slots < S, other=-1) == expert
            places = end + tl.cumsum(mine.to(tl.int32), axis=0) - 1
            tl.store(slots_BM + places, slots, mask=mine)
            end += tl.sum(mine.to(tl.int32), axis=0)
        padding = end + tl.arange(0, M)
        tl.store(slots_BM + padding, tl.zeros((M,), tl.int32) + S, mask=padding < (first + own) * M)


@triton.jit
def _up_kernel(
    x_TD,
    slots_BM,
    experts_B,
    count_1,
    gate_EID,
    up_EID,
    h_SI,
    gate_stride,
    up_stride,
    S,
    K: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program (block, tile of I): gathers the block's tokens; h = silu(gate x) * (up x)."""
    block = tl.program_id(0)
    if block >= tl.load(count_1):
        return
    expert = tl.load(experts_B + block).to(tl.int64)
    slots = tl.load(slots_BM + block * M + tl.arange(0, M))
    live = slots < S
    columns = tl.program_id(1) * N + tl.arange(0, N)
    depth = tl.arange(0, DEPTH)
    x = x_TD + (slots // K).to(tl.int64)[:, None] * D + depth[None, :]
    tile = columns[None, :] * D + depth[:, None]
    gate = gate_EID + expert * gate_stride + tile
    up = up_EID + expert * up_stride + tile
    gates = tl.zeros((M, N), tl.float32)
    ups = tl.zeros((M, N), tl.float32)
    for start in range(0, D, DEPTH):
        here = start + depth < D
        inside = here[:, None] & (columns < I)[None, :]
        values = tl.load(x + start, mask=live[:, None] & here[None, :], other=0.0)
        # "ieee" keeps float32 products whole; half-precision ones are exact anyway.
        gates = tl.dot(values, tl.load(gate + start, mask=inside, other=0.0), gates, input_precision="ieee")
        ups = tl.dot(values, tl.load(up + start, mask=inside, other=0.0), ups, input_precision="ieee")
    h = gates / (1.0 + tl.exp(-gates)) * ups
    place = h_SI + slots.to(tl.int64)[:, None] * I + columns[None, :]
    tl.store(place, h.to(h_SI.dtype.element_ty), mask=live[:, None] & (columns < I)[None, :])


@triton.jit
def _down_kernel(
    h_SI,
    slots_BM,
    experts_B,
    count_1,
    weights_S,
    down_EDI,
    z_SD,
    down_stride,
    S,
    D: tl.constexpr,
    I: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program (block, tile of D): z = weight * down h, for each slot on its own."""
    block = tl.program_id(0)
    if block >= tl.load(count_1):
        return
    expert = tl.load(experts_B + block).to(tl.int64)
    slots = tl.load(slots_BM + block * M + tl.arange(0, M))
    live = slots < S
    columns = tl.program_id(1) * N + tl.arange(0, N)
    depth = tl.arange(0, DEPTH)
    h = h_SI + slots.to(tl.int64)[:, None] * I + depth[None, :]
    down = down_EDI + expert * down_stride + columns[None, :] * I + depth[:, None]
    sums = tl.zeros((M, N), tl.float32)
    for start in range(0, I, DEPTH):
        here = start + depth < I
        values = tl.load(h + start, mask=live[:, None] & here[None, :], other=0.0)
        inside = here[:, None] & (columns < D)[None, :]
        sums = tl.dot(values, tl.load(down + start, mask=inside, other=0.0), sums, input_precision="ieee")
    z = sums * tl.load(weights_S + slots, mask=live, other=0.0)[:, None]
    place = z_SD + slots.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(place, z.to(z_SD.dtype.element_ty), mask=live[:, None] & (columns < D)[None, :])


@triton.jit
def _sum_kernel(z_SD, k_T, y_TD, K: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (token, tile of D): the sum over live slots, in float32, in the order of the slots."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for slot in range(tl.load(k_T + token).to(tl.int32)):
        sums += tl.load(z_SD + (token * K + slot) * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(y_TD + token * D + columns, sums.to(y_TD.dtype.element_ty), mask=columns < D)
