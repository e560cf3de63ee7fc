"""One matrix product with a weight that stays as it lies in the checkpoint: y = x W^T."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from minimoe.native import best_kernels

# Measured (bench/README.md): from this many rows on, widening the weight to float32 beats the loop that torch
# falls back to on a CPU without half-precision instructions; in blocks of this many elements it stays in the cache.
WIDEN_FROM_ROWS = 6
WIDEN_ELEMENTS = 2**19


def linear(x_TA: Tensor, weight_BA: Tensor) -> Tensor:
    """x_TA [T, A] times the transpose of weight_BA [B, A], accumulated in float32; the dtype of x.

    bfloat16 on a CPU goes through the native kernels, which read a weight about as fast as memory gives it. torch is
    good at many rows on a CPU that multiplies bfloat16 matrices itself, and at float32. Without the kernels a
    half-precision weight on a CPU without instructions for it is widened to float32, block by block, where that is
    faster. The results are the same up to the order of the sum.
    """
    if x_TA.dtype == torch.bfloat16 and x_TA.device.type == "cpu" and not _wants_gradient(x_TA, weight_BA):
        kernels = best_kernels()
        if kernels and (x_TA.shape[0] < WIDEN_FROM_ROWS or not has_native_half(torch.bfloat16)):
            return kernels.linears(x_TA, [weight_BA])[0]
    if (
        x_TA.shape[0] >= WIDEN_FROM_ROWS
        and x_TA.dtype in (torch.bfloat16, torch.float16)
        and x_TA.device.type == "cpu"
        and not has_native_half(x_TA.dtype)
    ):
        blocks = weight_BA.split(max(1, WIDEN_ELEMENTS // weight_BA.shape[1]))
        x32_TA = x_TA.float()
        return torch.cat([F.linear(x32_TA, block.float()).to(x_TA.dtype) for block in blocks], dim=1)
    return F.linear(x_TA, weight_BA)


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@functools.cache
def has_native_half(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies bfloat16 or float16 matrices with instructions of its own."""
    supported = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(getattr(torch.ops.mkldnn, supported)())
