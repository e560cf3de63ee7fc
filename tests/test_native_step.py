"""The native kernels around products and experts: norm, gate, and the attention of a decode step, against torch.

Shape letters: T tokens, D hidden, E experts, H heads, G kv heads, d head size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import minimoe
from minimoe.cache import KVCache
from minimoe.native import Kernels, find_kernels
from minimoe.native.places import StepPlaces
from minimoe.operations import Attention, Gate, NativeOperations, Operations, rms_norm
from tests.native_sets import EPS, each_dtype, each_set, needs_kernels, operands, product

pytestmark = needs_kernels


@each_set
@each_dtype
@pytest.mark.parametrize("D", [1, 7, 32, 100, 2048])
def test_the_norm_is_that_of_torch(kernels: Kernels, dtype: torch.dtype, D: int) -> None:
    x_TD, weight_1D = operands(5, D, 1, dtype)
    got = kernels.norm(x_TD * 3, weight_1D[0], 1e-5)
    expected = rms_norm(x_TD * 3, weight_1D[0], 1e-5)
    # Statistics are summed in another order, which in bfloat16 moves a result to its neighbour at most.
    torch.testing.assert_close(got, expected, rtol=8 * EPS[dtype] if dtype == torch.float32 else EPS[dtype], atol=1e-6)


def attention_case(
    H: int, G: int, d: int, lengths: list[int], clip: float | None, dtype: torch.dtype
) -> tuple[Attention, Tensor, tuple[Tensor, Tensor], list[KVCache]]:
    generator = torch.Generator().manual_seed(H + G + d + len(lengths))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    T, D = len(lengths), H * d
    angles_T1d = torch.rand(T, 1, d // 2, generator=generator).mul(9).repeat(1, 1, 2)
    norms = [random(width).abs() + 0.5 for width in (D, D, G * d)]
    query_DD, key_GdD, value_GdD, out_DD = (random(width, D) / D**0.5 for width in (D, G * d, G * d, D))
    of = Attention(1, H, G, norms[0], query_DD, key_GdD, value_GdD, norms[1], norms[2], out_DD, 1e-5, clip)
    config = replace(minimoe.load("tiny").config, num_layers=2, num_heads=H, num_kv_heads=G, hidden_size=D)
    caches = []
    for length in lengths:
        cache = KVCache(config, length + 1 + length % 3, dtype, torch.device("cpu"))
        cache.keys_LHCd.copy_(random(*cache.keys_LHCd.shape))
        cache.values_LHCd.copy_(random(*cache.values_LHCd.shape))
        cache.length = length
        caches.append(cache)
    return of, random(T, D), (angles_T1d.cos().to(dtype), angles_T1d.sin().to(dtype)), caches


@each_set
@each_dtype
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize(("T", "d"), [(0, 4), (1, 2), (3, 64), (40, 10)])
def test_heads_are_normed_clipped_and_turned_as_in_torch(
    kernels: Kernels, dtype: torch.dtype, T: int, d: int, clip: float | None
) -> None:
    of, x_TD, rotation, _ = attention_case(3, 1, d, [0] * T, clip, dtype)
    got = kernels.turn(x_TD, of.query_norm_D, rotation, of.eps, clip)
    expected = Operations().turned(of, x_TD, of.query_norm_D, rotation)
    assert got.shape == (T, 3, d)
    assert got.dtype == dtype
    # The norm's statistics are summed in another order, which moves some numbers to their neighbours before they turn.
    torch.testing.assert_close(got, expected, rtol=4 * EPS[dtype], atol=4 * EPS[dtype])


def test_heads_that_do_not_fit_their_angles_are_refused() -> None:
    of, x_TD, (cos_T1d, sin_T1d), _ = attention_case(2, 2, 6, [0, 0, 0], None, torch.float32)
    kernels, norm_D = find_kernels(), of.query_norm_D
    for x, norm, rotation in (
        (x_TD[:2], norm_D, (cos_T1d, sin_T1d)),
        (x_TD[:, :9], norm_D[:9], (cos_T1d, sin_T1d)),
        (x_TD, norm_D[:6], (cos_T1d, sin_T1d)),
        (x_TD, norm_D, (cos_T1d, sin_T1d[..., :4])),
        (x_TD, norm_D, (cos_T1d[..., :3], sin_T1d[..., :3])),
    ):
        with pytest.raises(ValueError, match="fit together"):
            kernels.turn(x, norm, rotation, 1e-5, None)
    with pytest.raises(ValueError, match=r"dtype|alike|do not"):
        kernels.turn(x_TD.bfloat16(), norm_D, (cos_T1d, sin_T1d), 1e-5, None)


@each_set
@each_dtype
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize(
    ("H", "G", "d", "lengths"),
    [(4, 4, 64, [0, 5, 130]), (4, 2, 16, [3]), (6, 2, 10, [0, 1, 2, 33]), (2, 1, 128, [700, 2]), (1, 1, 2, [0])],
)
def test_a_decode_step_of_attention_is_that_of_torch(
    kernels: Kernels, dtype: torch.dtype, clip: float | None, H: int, G: int, d: int, lengths: list[int]
) -> None:
    results = []
    for operations in (Operations(), NativeOperations(kernels)):
        of, x_TD, rotation, caches = attention_case(H, G, d, lengths, clip, dtype)
        y_TD = operations.attention(of, x_TD, operations.sequences([1] * len(lengths), caches, rotation))
        results.append((y_TD, caches))
    (expected_TD, expected_caches), (y_TD, caches) = results
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    torch.testing.assert_close(y_TD, expected_TD, **tolerance)
    for ours, theirs, length in zip(caches, expected_caches, lengths, strict=True):
        torch.testing.assert_close(ours.keys_LHCd, theirs.keys_LHCd, **tolerance)
        torch.testing.assert_close(ours.values_LHCd, theirs.values_LHCd, **tolerance)
        before = attention_case(H, G, d, lengths, clip, dtype)[3][lengths.index(length)]
        for now, then in ((ours.keys_LHCd, before.keys_LHCd), (ours.values_LHCd, before.values_LHCd)):
            assert (now != then).nonzero()[:, [0, 2]].unique(dim=0).tolist() == [[1, length]]  # one position, one layer


def test_a_full_cache_is_refused_and_nothing_is_written() -> None:
    operations = NativeOperations(find_kernels())
    of, x_TD, rotation, caches = attention_case(2, 1, 8, [3, 4], None, torch.float32)
    before = [cache.keys_LHCd.clone() for cache in caches]
    caches[1].length = caches[1].capacity
    with pytest.raises(IndexError, match="no room"):
        operations.attention(of, x_TD, operations.sequences([1, 1], caches, rotation))
    assert all(torch.equal(cache.keys_LHCd, old) for cache, old in zip(caches, before, strict=True))
    caches[1].length = 4
    sequences = operations.sequences([1, 1], caches, rotation)
    for wrong in (replace(of, layer=2), attention_case(2, 2, 8, [3], None, torch.float32)[0]):
        with pytest.raises(ValueError, match="fit together"):
            operations.attention(wrong, x_TD, sequences)
    with pytest.raises(ValueError, match="fit together"):
        operations.attention(of, x_TD[:1], sequences)
    with pytest.raises(ValueError, match="fit together"):
        operations.attention(replace(of, out_DD=of.key_GdD), x_TD, sequences)
    with pytest.raises(ValueError, match="fit together"):
        StepPlaces([cache.keys_LHCd for cache in caches], [caches[0].values_LHCd] * 2, [3, 4], *rotation)


@each_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, value: float) -> None:
    for operations in (Operations(), NativeOperations(find_kernels())):
        x_TE = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
        assert operations.finite(x_TE)
        x_TE[2, 3] = value
        assert not operations.finite(x_TE)


@each_set
@each_dtype
@pytest.mark.parametrize("T", [0, 1, 5])
def test_the_gate_is_a_norm_and_a_product(kernels: Kernels, dtype: torch.dtype, T: int) -> None:
    x_TD, weight_ED = operands(T, 100, 6, dtype)
    of = Gate(operands(1, 100, 1, dtype)[1][0], weight_ED, 1e-5)
    normed_TD, logits_TE = NativeOperations(kernels).gate(of, x_TD)
    assert torch.equal(normed_TD, kernels.norm(x_TD, of.norm_D, 1e-5))
    assert torch.equal(logits_TE, product(kernels, normed_TD, weight_ED))
    with pytest.raises(ValueError, match="fit together"):
        NativeOperations(kernels).gate(of, x_TD[:, :50])
    with pytest.raises(ValueError, match="as wide"):
        NativeOperations(kernels).gate(Gate(of.norm_D[:7], weight_ED, 1e-5), x_TD)
