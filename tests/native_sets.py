"""What the tests of the native kernels share: every instruction set that this processor has, and operands for it.

Shape letters: T tokens, A inputs, B outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from minimoe.native import Kernels, instruction_sets

SETS = instruction_sets()
FLUSHING = ("amx", "avx512bf16")  # their products of bfloat16 take what is below 2^-126 for zero
EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-7}

each_set = pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
each_dtype = pytest.mark.parametrize("dtype", EPS, ids=lambda dtype: str(dtype)[6:])
needs_kernels = pytest.mark.skipif(not SETS, reason="the native kernels were not built")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def operands(T: int, A: int, B: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T + A + B)
    x_TA, weight_BA = torch.randn(T, A, generator=generator), torch.randn(B, A, generator=generator)
    return x_TA.to(dtype), weight_BA.to(dtype)


def product(kernels: Kernels, x_TA: Tensor, weight_BA: Tensor) -> Tensor:
    return kernels.linears(x_TA, [weight_BA])[0]
