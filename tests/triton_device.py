"""What Triton's interpreter lacks as of triton 3.9, for the tests that need it.

It keeps bfloat16 as bits, multiplies those bits in a dot product, and cuts numbers off where a GPU rounds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.accelerator import DEVICE


@contextmanager
def bfloat16_as_on_a_gpu() -> Iterator[None]:
    """Mends both; on a GPU nothing has to be."""
    if DEVICE.type == "cuda":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_rounding(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return convert(values, source, target, mode)

    def dot_widening(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(_widened(side.data), tl.float32) for side in (a, b))
        return dot(builder, a, b, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_rounding)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_widening)
        yield


def _widened(bits: Any) -> Any:
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)
