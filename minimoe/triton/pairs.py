"""Experts of a lone token: each live (token, slot) pair reads its own expert's weights, and nothing else is read.

Two launches. Neither asks the host how many experts a token uses: programs of dead slots end before they read a weight,
and the sum runs over as many slots as the routing on the device says. That is what a CUDA graph can replay.

Shape letters: T tokens, D hidden, E experts, K slots, I expert intermediate, S = T * K slots of all tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimoe.routing import Routing

# A program's tile: rows of a weight, and how much of each it reads at a time. Not yet tuned on a GPU.
ROWS, COLUMNS = 8, 512


def run_pairs(x_TD: Tensor, routing: Routing, gate_EID: Tensor, up_EID: Tensor, down_EDI: Tensor) -> Tensor:
    """The weighted sum of each token's live experts; see minimoe.experts.Experts.run.

    Args:
        gate_EID, up_EID, down_EDI: each expert's matrix contiguous; experts any stride apart.
    """
    (T, D), I, K = x_TD.shape, gate_EID.shape[1], routing.width
    h_SI, y_TD = x_TD.new_empty(T * K, I), torch.empty_like(x_TD)
    _up_kernel[(T * K, triton.cdiv(I, ROWS))](
        x_TD,
        routing.experts_TK,
        gate_EID,
        up_EID,
        h_SI,
        gate_EID.stride(0),
        up_EID.stride(0),
        E=routing.num_experts,
        K=K,
        D=D,
        I=I,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    _down_kernel[(T, triton.cdiv(D, ROWS))](
        h_SI,
        routing.experts_TK,
        routing.weights_TK,
        routing.k_T,
        down_EDI,
        y_TD,
        down_EDI.stride(0),
        K=K,
        D=D,
        I=I,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return y_TD


@triton.jit
def _up_kernel(
    x_TD,
    experts_TK,
    gate_EID,
    up_EID,
    h_SI,
    gate_stride,
    up_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (slot, tile of I): h = silu(gate x) * (up x)."""
    slot = tl.program_id(0)
    expert = tl.load(experts_TK + slot)
    if expert >= E:
        return
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    tile = rows[:, None] * D + columns[None, :]
    gate = gate_EID + expert * gate_stride + tile
    up = up_EID + expert * up_stride + tile
    x = x_TD + (slot // K) * D + columns
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, COLUMNS):
        here = start + columns < D
        inside = (rows < I)[:, None] & here[None, :]
        values = tl.load(x + start, mask=here, other=0.0).to(tl.float32)[None, :]
        gates += tl.load(gate + start, mask=inside, other=0.0).to(tl.float32) * values
        ups += tl.load(up + start, mask=inside, other=0.0).to(tl.float32) * values
    g = tl.sum(gates, axis=1)
    h = g / (1.0 + tl.exp(-g)) * tl.sum(ups, axis=1)
    tl.store(h_SI + slot * I + rows, h.to(h_SI.dtype.element_ty), mask=rows < I)


@triton.jit
def _down_kernel(
    h_SI,
    experts_TK,
    weights_TK,
    k_T,
    down_EDI,
    y_TD,
    down_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (token, tile of D): the weighted sum over live slots, in float32, in the order of the slots."""
    token = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for slot in range(token * K, token * K + tl.load(k_T + token).to(tl.int32)):
        expert = tl.load(experts_TK + slot)
        weight = tl.load(weights_TK + slot)
        down = down_EDI + expert * down_stride + rows[:, None] * I + columns[None, :]
        for start in range(0, I, COLUMNS):
            here = start + columns < I
            inside = (rows < D)[:, None] & here[None, :]
            values = weight * tl.load(h_SI + slot * I + start + columns, mask=here, other=0.0).to(tl.float32)
            sums += tl.load(down + start, mask=inside, other=0.0).to(tl.float32) * values[None, :]
    tl.store(y_TD + token * D + rows, tl.sum(sums, axis=1).to(y_TD.dtype.element_ty), mask=rows < D)
