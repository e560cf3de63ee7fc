"""What runs around the experts on a GPU, in few launches: in a decode step most of torch's would be over at once.

Shape letters: T tokens, D hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimoe.operations import Attention, Operations, Sequences
from minimoe.triton.attention import attend_one_each, cache_table


class TritonOperations(Operations):
    """Norms, and the attention of decode steps. Prompts attend by torch's fused kernels, products are torch's."""

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_TD = x_TD.contiguous()
        y_TD = torch.empty_like(x_TD)
        if len(x_TD):
            T, D = x_TD.shape
            with torch.cuda.device_of(x_TD):
                _norm_kernel[(T,)](x_TD, weight_D, y_TD, D=D, D_PADDED=triton.next_power_of_2(D), EPS=eps)
        return y_TD

    def mix(self, of: Attention, q_TD: Tensor, k_TGd: Tensor, v_TGd: Tensor, sequences: Sequences) -> Tensor:
        if sequences.caches is None or len(sequences.new) != q_TD.shape[0]:
            return super().mix(of, q_TD, k_TGd, v_TGd, sequences)
        if len(sequences.caches) != q_TD.shape[0]:
            raise ValueError(f"{q_TD.shape[0]} sequences need as many caches, not {len(sequences.caches)}")
        # One token of each sequence: all its steps at once.
        table_4B = cache_table(sequences.caches).to(q_TD.device, non_blocking=True)
        with torch.cuda.device_of(q_TD):
            return attend_one_each(of, q_TD, k_TGd, v_TGd, sequences.rotation, table_4B)


@triton.jit
def _norm_kernel(x_TD, weight_D, y_TD, D: tl.constexpr, D_PADDED: tl.constexpr, EPS: tl.constexpr):
    """Program (token): statistics in float32, back to x's dtype, then the weight."""
    dtype: tl.constexpr = x_TD.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, D_PADDED)
    x = tl.load(x_TD + token * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS)).to(dtype).to(tl.float32)
    weight = tl.load(weight_D + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(y_TD + token * D + columns, (normed * weight).to(dtype), mask=columns < D)
