"""The native kernels, every instruction set that this processor has, against numpy in double precision.

That the backend equals `reference` and transformers is tested in test_experts.py and test_parity.py.
Shape letters: T tokens, A inputs, B outputs, D hidden, E experts, I expert intermediate, K slots.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import minimoe
from minimoe.cache import KVCache
from minimoe.curve import deviation
from minimoe.errors import InputError
from minimoe.experts import ExpertWeights, default_backend, find_backend
from minimoe.experts.native import Native
from minimoe.native import Kernels, find_kernels, instruction_sets
from minimoe.native.places import ExpertPlaces, StepPlaces
from minimoe.operations import Attention, Gate, NativeOperations, Operations, rms_norm
from minimoe.routing import Routing
from tests.test_experts import CASES, in_double_precision, random_inputs, random_weights

SETS = instruction_sets()
FLUSHING = ("amx", "avx512bf16")  # their products of bfloat16 take what is below 2^-126 for zero
EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-7}

pytestmark = pytest.mark.skipif(not SETS, reason="the native kernels were not built")
each_set = pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
each_dtype = pytest.mark.parametrize("dtype", EPS, ids=lambda dtype: str(dtype)[6:])


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


def between_guards(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor, and the room around it that no kernel may change; the tensor is not aligned to anything."""
    size = int(np.prod(shape))
    room = torch.full((size + 130,), 7, dtype=dtype)
    return room[65 : 65 + size].view(shape), room


# Sizes around vectors (8 and 16), blocks (16 and 32), the span of a sum (1,024) and the tiles of rows and tokens.
SIZES = [(1, 1), (7, 3), (16, 4), (31, 5), (33, 12), (64, 64), (100, 13), (1024, 3), (1025, 2), (2080, 7)]


@each_set
@each_dtype
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 5, 11])
@pytest.mark.parametrize(("A", "B"), SIZES)
def test_the_product_is_right(kernels: Kernels, dtype: torch.dtype, A: int, B: int, T: int) -> None:
    x_TA, weight_BA = operands(T, A, B, dtype)
    y_TB = product(kernels, x_TA, weight_BA)
    exact = x_TA.double().numpy() @ weight_BA.double().numpy().T
    assert y_TB.dtype == dtype
    # One rounding of the result, and float32's own over a sum of A products.
    np.testing.assert_allclose(y_TB.double().numpy(), exact, rtol=EPS[dtype], atol=2e-6 * A**0.5 * 4)


@each_set
@each_dtype
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_the_product_is_right_for_any_size(kernels: Kernels, dtype: torch.dtype, data: st.DataObject) -> None:
    T, A, B = (data.draw(st.integers(1, most)) for most in (40, 70, 40))
    x_TA, weight_BA = operands(T, A, B, dtype)
    exact = x_TA.double().numpy() @ weight_BA.double().numpy().T
    np.testing.assert_allclose(
        product(kernels, x_TA, weight_BA).double().numpy(), exact, rtol=EPS[dtype], atol=2e-6 * A**0.5 * 4
    )


@each_set
@pytest.mark.parametrize("count", [1, 2, 3])
def test_neither_neighbours_nor_threads_change_a_bit(kernels: Kernels, count: int) -> None:
    x_TA, weight_BA = operands(37, 2080, 300, torch.bfloat16)
    with threads(1):
        alone = torch.cat([product(kernels, x_1A, weight_BA) for x_1A in x_TA.split(1)])
    with threads(count):
        assert torch.equal(product(kernels, x_TA, weight_BA), alone)
        halves = [product(kernels, x_TA, part) for part in weight_BA.split(77)]
    assert torch.equal(torch.cat(halves, dim=1), alone)


@each_set
@each_dtype
@pytest.mark.parametrize("case", CASES)
def test_experts_are_right_and_prune(kernels: Kernels, dtype: torch.dtype, case: str) -> None:
    k, E, D, I = CASES[case]
    weights = random_weights(E, D, I, dtype)
    x_TD, routing = random_inputs(k, E, D, dtype)
    places = ExpertPlaces(weights.gate_EID, weights.up_EID, weights.down_EDI)
    y_TD, done = kernels.experts(x_TD, places, routing)
    assert done == 3 * D * I * sum(k)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    np.testing.assert_allclose(
        y_TD.double(), in_double_precision(x_TD, routing, weights), rtol=tolerance, atol=tolerance
    )


@each_set
@each_dtype
@pytest.mark.parametrize("T", [1, 2, 9, 70])
def test_experts_equal_the_reference_at_larger_sizes(kernels: Kernels, dtype: torch.dtype, T: int) -> None:
    """Rows and columns of several chunks, blocks and spans, with a rest at the end of each."""
    weights = random_weights(6, 1100, 290, dtype)
    x_TD, routing = random_inputs([1 + t % 6 for t in range(T)], 6, 1100, dtype)
    ours = Native(kernels.name)(weights).run(x_TD, routing)
    expected = find_backend("reference")(weights).run(x_TD, routing)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@each_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_token_do_not_depend_on_its_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    weights = random_weights(6, 1100, 290, dtype)
    x_TD, routing = random_inputs([3, 0, 6, 1, 5, 2, 4, 4, 1] * 5, 6, 1100, dtype)
    experts = Native(kernels.name)(weights)
    with threads(2):
        together = experts.run(x_TD, routing)
    with threads(1):
        alone = [experts.run(x_TD[t : t + 1], routing.rows(slice(t, t + 1))) for t in range(len(x_TD))]
    assert torch.equal(together, torch.cat(alone))


@each_set
def test_matrices_of_pruned_experts_are_not_even_read(kernels: Kernels) -> None:
    """They lie in pages without any right of access: reading one byte would end the process."""
    pages = mmap.mmap(-1, 3 * 64 * 64 * 4, prot=0)  # PROT_NONE
    address = _address(pages)
    weights = random_weights(4, 64, 64)
    places = ExpertPlaces(weights.gate_EID, weights.up_EID, weights.down_EDI)
    for e in (1, 3):
        places.gate[e], places.up[e], places.down[e] = (address + i * 64 * 64 * 4 for i in range(3))
    x_TD, _ = random_inputs([2] * 5, 4, 64)
    routing = Routing(torch.tensor([[0, 2]] * 5), torch.ones(5, 2), torch.tensor([1, 2, 2, 0, 1]), 4)
    dead_TK = torch.arange(2) >= routing.k_T[:, None]
    dead = replace(routing, experts_TK=routing.experts_TK.masked_fill(dead_TK, 4))
    y_TD, _ = kernels.experts(x_TD, places, dead)
    np.testing.assert_allclose(y_TD, in_double_precision(x_TD, routing, weights), rtol=1e-5, atol=1e-5)


def _address(pages: mmap.mmap) -> int:
    """Where a mapping without rights lies; Python itself refuses to make a buffer of it."""
    with open("/proc/self/maps") as maps:
        sizes = {line.split()[0]: line.split()[1] for line in maps}
    for span, rights in sizes.items():
        start, end = (int(part, 16) for part in span.split("-"))
        if rights.startswith("---") and end - start == len(pages):
            return start
    pytest.skip("the mapping was not found")


def _places(*tensors: Tensor) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


@each_set
@each_dtype
def test_nothing_outside_the_result_is_written(kernels: Kernels, dtype: torch.dtype) -> None:
    for T, A, B in [(1, 33, 13), (3, 100, 7), (9, 16, 5)]:
        x_TA, weight_BA = operands(T, A, B, dtype)
        y_TB, room = between_guards((T, B), dtype)
        rows, weights, results = (ctypes.c_int64 * 1)(B), _places(weight_BA), _places(y_TB)
        arguments = (kernels.index, int(dtype == torch.bfloat16), 1, T, A, 1)
        kernels.interface.minimoe_linear(*arguments, rows, x_TA.data_ptr(), weights, results)
        assert torch.equal(y_TB, product(kernels, x_TA, weight_BA))
        assert (room[:65] == 7).all()
        assert (room[-65:] == 7).all()


@each_set
@each_dtype
def test_weights_may_lie_anywhere(kernels: Kernels, dtype: torch.dtype) -> None:
    """A safetensors file aligns its tensors to no more than their elements."""
    x_TA, weight_BA = operands(3, 65, 9, dtype)
    unaligned, _ = between_guards((9, 65), dtype)
    unaligned.copy_(weight_BA)
    assert torch.equal(product(kernels, x_TA, unaligned), product(kernels, x_TA, weight_BA))
    strided = torch.stack([x_TA, x_TA], dim=2)[:, :, 0]
    assert torch.equal(product(kernels, strided, weight_BA), product(kernels, x_TA, weight_BA))


@each_set
@each_dtype
@pytest.mark.parametrize("T", [0, 1, 3, 6])
def test_several_weights_at_once_are_each_alone(kernels: Kernels, dtype: torch.dtype, T: int) -> None:
    x_TA, _ = operands(T, 200, 1, dtype)
    weights = [operands(1, 200, B, dtype)[1] for B in (900, 1, 33)]
    together = kernels.linears(x_TA, weights)
    assert all(torch.equal(a, product(kernels, x_TA, w)) for a, w in zip(together, weights, strict=True))
    assert kernels.linears(x_TA, []) == []


@each_set
@each_dtype
@pytest.mark.parametrize("D", [1, 7, 32, 100, 2048])
def test_the_norm_is_that_of_torch(kernels: Kernels, dtype: torch.dtype, D: int) -> None:
    x_TD, weight_1D = operands(5, D, 1, dtype)
    got = kernels.norm(x_TD * 3, weight_1D[0], 1e-5)
    expected = rms_norm(x_TD * 3, weight_1D[0], 1e-5)
    # Statistics are summed in another order, which in bfloat16 moves a result to its neighbour at most.
    torch.testing.assert_close(got, expected, rtol=8 * EPS[dtype] if dtype == torch.float32 else EPS[dtype], atol=1e-6)


@each_set
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_ranking_is_a_stable_sort(kernels: Kernels, data: st.DataObject) -> None:
    T, E, values = (
        data.draw(st.integers(0, 70)),
        data.draw(st.integers(1, 70)),
        data.draw(st.sampled_from([1, 3, 10**6])),
    )
    dtype = data.draw(st.sampled_from(list(EPS)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits_TE = (torch.randint(values, (T, E), generator=generator) * (9 / values)).to(dtype)
    sorted_TE, experts_TE = kernels.rank(logits_TE)
    for row, ranked, experts in zip(logits_TE.tolist(), sorted_TE.tolist(), experts_TE.tolist(), strict=True):
        order = sorted(range(E), key=lambda e: (-row[e], e))
        exact = np.exp(np.array(row) - max(row))
        np.testing.assert_allclose(ranked, (exact / exact.sum())[order], rtol=1e-5)
        # Logits that differ in their last bit may have one probability; then the lowest id comes first.
        assert experts == sorted(range(E), key=lambda e: (-ranked[experts.index(e)], e))
        np.testing.assert_allclose(np.array(row)[experts], np.array(row)[order], rtol=1e-6)


@each_set
@each_dtype
def test_ranking_survives_what_is_not_finite(kernels: Kernels, dtype: torch.dtype) -> None:
    """As torch: a row with a NaN or +inf, or of -inf alone, has no probabilities; a few -inf have probability 0."""
    logits_TE = torch.randn(5, 64).to(dtype)
    logits_TE[0, 3] = math.nan
    logits_TE[1, 3] = math.inf
    logits_TE[2] = -math.inf
    logits_TE[3, 3:60] = -math.inf
    sorted_TE, experts_TE = kernels.rank(logits_TE)
    assert torch.equal(experts_TE.sort(dim=1).values, torch.arange(64).expand(5, 64))
    assert sorted_TE[:3].isnan().all()
    expected_TE = torch.softmax(logits_TE, dim=1, dtype=torch.float32).sort(dim=1, descending=True).values
    torch.testing.assert_close(sorted_TE[3:], expected_TE[3:])


@pytest.mark.parametrize("E", [1, 2, 3, 8, 64])
def test_the_elbow_is_that_of_the_formula(E: int) -> None:
    generator = torch.Generator().manual_seed(E)
    spread_T1 = torch.rand(3000, 1, generator=generator) * 9
    sorted_TE, _ = find_kernels().rank(torch.randn(3000, E, generator=generator) * spread_T1)
    sorted_TE[0] = 1 / E  # a level line, which has no elbow
    sorted_TE[1] = math.nan
    sorted_TE[2, 1:] = sorted_TE[2, -1]  # an edge
    assert torch.equal(find_kernels().elbow(sorted_TE), deviation(sorted_TE).argmax(dim=1) + 1)


@each_set
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_what_is_kept_is_what_torch_keeps(kernels: Kernels, data: st.DataObject) -> None:
    T, E = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 12))
    K = data.draw(st.integers(0, E))
    k_T = torch.tensor(data.draw(st.lists(st.integers(0, K), min_size=T, max_size=T)), dtype=torch.int64)
    sorted_TE, experts_TE = kernels.rank(torch.randn(T, E))
    expected = Routing.from_ranking(experts_TE[:, :K], sorted_TE[:, :K], k_T, E)
    kept_TK, weights_TK = kernels.keep(sorted_TE, experts_TE, k_T, K)
    assert torch.equal(kept_TK, expected.experts_TK)
    assert torch.equal(weights_TK, expected.weights_TK)


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


@each_set
def test_infinities_and_nans_stay_what_they_are(kernels: Kernels) -> None:
    values = torch.tensor([[float("inf")], [float("-inf")], [float("nan")], [-0.0], [3.4e38]]).bfloat16()
    one = torch.ones(1, 1).bfloat16()
    got = product(kernels, values, one)
    assert got[:2].tolist() == [[float("inf")], [float("-inf")]]
    assert got[2].isnan()
    assert torch.equal(got[4:], values[4:])


@each_set
@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_results_are_rounded_as_torch_rounds(kernels: Kernels, values: list[float]) -> None:
    """x is exact in bfloat16, the weight is 1 and small parts are added by a second column: halves round to even."""
    high = torch.tensor(values).bfloat16()
    low = high.abs().float().mul(2.0**-9).bfloat16()
    x_T2 = torch.stack([high, low], dim=1)
    if kernels.name in FLUSHING:
        high, low = (part.masked_fill(part.abs() < 2.0**-126, 0) for part in (high, low))
    expected = (high.float() + low.float()).bfloat16()
    assert torch.equal(product(kernels, x_T2, torch.ones(1, 2).bfloat16())[:, 0], expected)


@each_set
@each_dtype
def test_the_smallest_numbers_count_except_where_it_says_not(kernels: Kernels, dtype: torch.dtype) -> None:
    tiny = torch.tensor([[2.0**-126], [2.0**-127], [2.0**-130]], dtype=dtype)
    expected = tiny.clone()
    if dtype == torch.bfloat16 and kernels.name in FLUSHING:
        expected[1:] = 0
    assert torch.equal(product(kernels, tiny, torch.ones(1, 1, dtype=dtype)), expected)


@pytest.mark.parametrize(
    ("experts", "k"), [([[0, 4]], [2]), ([[0, -1]], [2]), ([[0, 1]], [3]), ([[0, 1]], [-1])], ids=str
)
def test_a_broken_routing_is_refused_before_anything_is_read(experts: list[list[int]], k: list[int]) -> None:
    weights = random_weights(4, 8, 8)
    routing = Routing(torch.tensor(experts), torch.ones(1, 2), torch.tensor(k), 4)
    with pytest.raises(ValueError, match="live ids between 0 and E - 1"):
        Native()(weights).run(torch.ones(1, 8), routing)


def test_what_does_not_fit_is_refused() -> None:
    kernels = find_kernels()
    sorted_TE, experts_TE = kernels.rank(torch.randn(3, 4))
    k_T = torch.tensor([1, 2, 3])
    for call in (
        lambda: kernels.elbow(sorted_TE.double()),
        lambda: kernels.elbow(torch.empty(3, 0)),
        lambda: kernels.keep(sorted_TE, experts_TE, k_T.int(), 2),
        lambda: kernels.keep(sorted_TE, experts_TE.int(), k_T, 2),
        lambda: kernels.keep(sorted_TE, experts_TE, k_T, 5),
        lambda: kernels.keep(sorted_TE, experts_TE, k_T[:2], 2),
        lambda: kernels.keep(sorted_TE[:, :3], experts_TE, k_T, 2),
    ):
        with pytest.raises(ValueError, match=r"fit together|rankings and routings"):
            call()
    with pytest.raises(ValueError, match="cannot multiply"):
        product(kernels, torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="row after row"):
        product(kernels, torch.ones(2, 3), torch.ones(3, 2).T)
    with pytest.raises(ValueError, match="do not run"):
        product(kernels, torch.ones(2, 3), torch.ones(4, 3).half())
    weights = random_weights(2, 4, 3)
    with pytest.raises(ValueError, match="same shape"):
        Native()(replace(weights, up_EID=weights.down_EDI))
    with pytest.raises(ValueError, match="fit together"):
        Native()(weights).run(torch.ones(1, 5), random_inputs([1], 2, 5)[1])
    halves = ExpertWeights(*([m.half() for m in ms] for ms in (weights.gate_EID, weights.up_EID, weights.down_EDI)))
    with pytest.raises(InputError, match="not float16 on cpu; choose --backend bucketed"):
        Native()(halves)


def test_the_instruction_set_can_be_chosen() -> None:
    assert SETS[-1].name == "scalar"
    for kernels in SETS:
        backend = find_backend(f"native:isa={kernels.name}")
        assert isinstance(backend, Native)
        assert backend.kernels is kernels
        assert isinstance(backend.operations, NativeOperations)
    with pytest.raises(InputError, match=r"no kernels 'mmx' for this processor; choose one of .*scalar"):
        find_backend("native:isa=mmx")
    for spec in ("native:avx2", "native:threads=2", "bucketed:isa=avx2", "native:", "bucketed:", "native:isa="):
        with pytest.raises(InputError, match="native:isa=avx2"):
            find_backend(spec)


def test_every_set_writes_the_same_text() -> None:
    texts = {
        kernels.name: minimoe.load("tiny", backend=f"native:isa={kernels.name}", dtype="float32")
        .generate("Once upon a time", max_new_tokens=12, temperature=0)
        .text
        for kernels in SETS
    }
    reference = minimoe.load("tiny", backend="reference", dtype="float32")
    texts["reference"] = reference.generate("Once upon a time", max_new_tokens=12, temperature=0).text
    assert len(set(texts.values())) == 1, texts


@pytest.mark.parametrize("half", [False, True])
def test_native_is_the_default_where_it_is_the_fastest(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minimoe.experts.has_native_half", lambda dtype: half)
    cpu = torch.device("cpu")
    fastest = "native" if len(SETS) > 1 else "bucketed"
    assert default_backend(torch.float32, cpu) == fastest
    assert default_backend(torch.bfloat16, cpu) == ("bucketed" if half and SETS[0].name != "amx" else fastest)
    if len(SETS) > 1:  # tiles are for bfloat16, and keep it
        for name, chosen in (("amx", "native"), ("avx512bf16", "bucketed" if half else "native")):
            with monkeypatch.context() as patch:
                patch.setattr("minimoe.experts.best_kernels", lambda name=name: replace(SETS[0], name=name))
                assert default_backend(torch.bfloat16, cpu) == chosen
    assert default_backend(torch.float16, cpu) == "bucketed"
    assert default_backend(torch.bfloat16, torch.device("cuda")) == "bucketed"
    assert minimoe.load("tiny").backend == default_backend(torch.bfloat16, cpu)
    assert minimoe.load("tiny", dtype="float16").backend == "bucketed"


def test_without_the_library_the_package_runs_on_torch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("minimoe.native", "minimoe.engine"):
        monkeypatch.setattr(f"{place}.instruction_sets", lambda: ())
    for place in ("experts", "linear", "routers.base", "routers.elbow"):
        monkeypatch.setattr(f"minimoe.{place}.best_kernels", lambda: None)
    engine = minimoe.load("tiny", router="elbow")
    assert engine.backend == "bucketed"
    assert "not built" in engine.notes[0]
    assert engine.generate("Once", max_new_tokens=3, temperature=0).tokens
    with pytest.raises(InputError, match=r"not built.*--backend bucketed"):
        minimoe.load("tiny", backend="native")
