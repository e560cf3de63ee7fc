"""The one matrix product, with and without widening, against numpy in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minimoe.linear import WIDEN_FROM_ROWS, has_native_half, linear
from minimoe.native import best_kernels

EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ROWS = (0, 1, 3, WIDEN_FROM_ROWS - 1, WIDEN_FROM_ROWS, 40)


def operands(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 33, generator=generator).to(dtype), torch.randn(17, 33, generator=generator).to(dtype)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_product_is_right_in_every_dtype(
    rows: int, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minimoe.linear.best_kernels", lambda: None)
    monkeypatch.setattr("minimoe.linear.has_native_half", lambda dtype: native)
    monkeypatch.setattr("minimoe.linear.WIDEN_ELEMENTS", 3 * 33)  # blocks of three rows of the weight, and a rest
    x_TA, weight_BA = operands(rows, dtype)
    before = weight_BA.clone()
    y_TB = linear(x_TA, weight_BA)
    exact = x_TA.double().numpy() @ weight_BA.double().numpy().T
    assert y_TB.dtype == dtype
    assert y_TB.shape == (rows, 17)
    assert torch.equal(weight_BA, before)
    # One rounding of the result, and float32's own in a sum of 33 products.
    np.testing.assert_allclose(y_TB.double().numpy(), exact, rtol=EPS[dtype], atol=1e-5)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("rows", ROWS)
def test_only_many_rows_that_the_processor_would_emulate_are_widened(
    rows: int, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minimoe.linear.best_kernels", lambda: None)
    monkeypatch.setattr("minimoe.linear.has_native_half", lambda dtype: native)
    monkeypatch.setattr("minimoe.linear.WIDEN_ELEMENTS", 6 * 33)
    seen: list[tuple[torch.dtype, int]] = []
    product = F.linear

    def watched(x_TA: torch.Tensor, weight_BA: torch.Tensor) -> torch.Tensor:
        seen.append((weight_BA.dtype, len(weight_BA)))
        return product(x_TA, weight_BA)

    monkeypatch.setattr(F, "linear", watched)
    linear(*operands(rows, dtype))
    if dtype == torch.float32 or native or rows < WIDEN_FROM_ROWS:
        assert seen == [(dtype, 17)]
    else:
        assert seen == [(torch.float32, 6), (torch.float32, 6), (torch.float32, 5)]


def test_widening_lets_gradients_through(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = []
    for native in (False, True):
        monkeypatch.setattr("minimoe.linear.has_native_half", lambda dtype, native=native: native)
        x_TA, weight_BA = (tensor.requires_grad_() for tensor in operands(40, torch.bfloat16))
        linear(x_TA, weight_BA).float().pow(2).sum().backward()
        assert x_TA.grad is not None
        assert weight_BA.grad is not None
        grads.append((x_TA.grad, weight_BA.grad))
    for widened, plain in zip(*grads, strict=True):
        assert widened.dtype == torch.bfloat16
        torch.testing.assert_close(widened, plain, rtol=0.05, atol=0.5)


def test_what_the_processor_can_do_is_a_plain_yes_or_no() -> None:
    assert {type(has_native_half(dtype)) for dtype in (torch.bfloat16, torch.float16)} == {bool}


@pytest.mark.skipif(best_kernels() is None, reason="no native kernels")
@pytest.mark.parametrize(("rows", "half", "expected"), [(1, True, True), (40, True, False), (40, False, True)])
def test_torch_takes_many_rows_where_the_processor_multiplies_bfloat16_itself(
    rows: int, half: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minimoe.linear.has_native_half", lambda dtype: half)
    products: list[int] = []
    product = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: products.append(len(x)) or product(x, w))
    linear(*operands(rows, torch.bfloat16))
    assert (products == []) is expected
