"""The native products and experts, every instruction set that this processor has, against numpy in double precision.

That the backend equals `reference` and transformers is tested in test_experts.py and test_parity.py.
Shape letters: T tokens, A inputs, B outputs, D hidden, E experts, I expert intermediate, K slots.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import minimoe
from minimoe.errors import InputError
from minimoe.experts import ExpertWeights, find_backend
from minimoe.experts.native import Native
from minimoe.native import Kernels, find_kernels
from minimoe.native.places import ExpertPlaces
from minimoe.routing import Routing
from tests.native_sets import EPS, FLUSHING, SETS, each_dtype, each_set, needs_kernels, operands, product, threads
from tests.test_experts import CASES, in_double_precision, random_inputs, random_weights

pytestmark = needs_kernels


def between_guards(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor, and the room around it that no kernel may change; the tensor is not aligned to anything."""
    size = int(np.prod(shape))
    room = torch.full((size + 130,), 7, dtype=dtype)
    return room[65 : 65 + size].view(shape), room


# Sizes around vectors (8 and 16), blocks (16 and 32), the span of a sum (2,048) and the tiles of rows and tokens.
SIZES = [(1, 1), (7, 3), (16, 4), (31, 5), (33, 12), (64, 64), (100, 13), (2048, 3), (2049, 2), (2080, 7), (4130, 7)]


@each_set
@each_dtype
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 5, 11, 16, 29, 97, 300])
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
@each_dtype
@pytest.mark.parametrize("size", [1, 3, 8, 21, 130])
@pytest.mark.parametrize("T", [1, 4, 7])
def test_silu_is_right_for_every_size_of_number(kernels: Kernels, dtype: torch.dtype, T: int, size: int) -> None:
    """By an expert that is silu(gates) * 1 for its first input, and passes all of that on."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    gates = torch.linspace(-120, 121, size)[order].to(dtype)
    first = torch.zeros(size, size, dtype=dtype)
    first[:, 0] = 1
    weights = [first * gates[:, None]], [first], [torch.eye(size, dtype=dtype)]
    places = ExpertPlaces(*weights)
    everywhere = Routing(torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1), torch.ones(T, dtype=torch.int64), 1)
    y_TD, _ = kernels.experts(first[:1].repeat(T, 1), places, everywhere)
    exact = gates.double() / (1 + (-gates.double()).exp())
    # Two roundings; from e^89 on the divisor is infinite in float32.
    tolerance = 5e-7 if dtype == torch.float32 else EPS[dtype]
    torch.testing.assert_close(y_TD.double(), exact.expand(T, -1), rtol=tolerance, atol=1e-36)


@each_set
def test_silu_of_what_is_not_finite(kernels: Kernels) -> None:
    gates_E = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e38, -3e38])
    ones_E11 = torch.ones(len(gates_E), 1, 1)
    places = ExpertPlaces(gates_E[:, None, None].unbind(), ones_E11.unbind(), ones_E11.unbind())
    own = torch.arange(len(gates_E))[:, None]
    each = Routing(own, torch.ones_like(own, dtype=torch.float32), torch.ones_like(own[:, 0]), len(gates_E))
    y_E1, _ = kernels.experts(torch.ones(len(gates_E), 1), places, each)
    torch.testing.assert_close(y_E1[:, 0], gates_E / (1 + (-gates_E).exp()), equal_nan=True)


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
    weights = random_weights(6, 2100, 290, dtype)
    x_TD, routing = random_inputs([1 + t % 6 for t in range(T)], 6, 2100, dtype)
    ours = Native(kernels.name)(weights).run(x_TD, routing)
    expected = find_backend("reference")(weights).run(x_TD, routing)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@each_set
@each_dtype
@pytest.mark.parametrize("B", [2048, 2001])
def test_results_that_leave_the_caches_are_right(kernels: Kernels, dtype: torch.dtype, B: int) -> None:
    """More than 4 MB of them; whole cache lines may then be written in another way than parts of some."""
    x_TA, weight_BA = operands(1100, 33, B, dtype)
    y_TB = product(kernels, x_TA, weight_BA)
    exact = x_TA.double().numpy() @ weight_BA.double().numpy().T
    np.testing.assert_allclose(y_TB.double().numpy(), exact, rtol=EPS[dtype], atol=5e-5)


@each_set
@each_dtype
def test_experts_of_a_long_prompt(kernels: Kernels, dtype: torch.dtype) -> None:
    """Hundreds of tokens of every expert, and results that leave the caches: right, and each as if it came alone."""
    weights = random_weights(6, 2048, 40, dtype)
    x_TD, routing = random_inputs([1 + t % 6 for t in range(600)], 6, 2048, dtype)
    experts = Native(kernels.name)(weights)
    with threads(2):
        ours = experts.run(x_TD, routing)
    tolerance = 5e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        ours, find_backend("reference")(weights).run(x_TD, routing), rtol=tolerance, atol=tolerance
    )
    for t in (0, 299, 599):
        assert torch.equal(experts.run(x_TD[t : t + 1], routing.rows(slice(t, t + 1))), ours[t : t + 1])


@each_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_token_do_not_depend_on_its_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    weights = random_weights(6, 2100, 290, dtype)
    x_TD, routing = random_inputs([3, 0, 6, 1, 5, 2, 4, 4, 1] * 5, 6, 2100, dtype)
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
    for T, A, B in [(1, 33, 13), (3, 100, 7), (9, 16, 5), (23, 70, 14)]:
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


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer takes all addresses there are")
@each_set
def test_a_call_without_memory_is_an_error_and_the_next_one_works(kernels: Kernels) -> None:
    code = f"""
import resource, torch
from minimoe.native.sets import find_kernels
kernels = find_kernels({kernels.name!r})
x, w = torch.ones(60000, 1024, dtype=torch.bfloat16), torch.ones(2, 1024, dtype=torch.bfloat16)
kernels.linears(x[:3], [w])
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (50 << 20), limits[1]))
try:
    kernels.linears(x, [w])
except MemoryError:
    resource.setrlimit(resource.RLIMIT_AS, limits)
    print(*{{y.float().sum().item() for y in kernels.linears(x[:300], [w])}})
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(300 * 2 * 1024.0)]


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
        lambda: kernels.keep(sorted_TE.double(), experts_TE, k_T, 2),
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_the_library_agrees_with_plain_loops_without_python(tmp_path: Path) -> None:
    """tests/kernels.cpp on the library as it was built: guard pages around every tensor, and random shapes."""
    (library,) = Path(minimoe.native.__file__).parent.glob("_kernels*.so")
    program, source = tmp_path / "kernels", Path(__file__).with_name("kernels.cpp")
    subprocess.run(["g++", "-std=gnu++17", "-O1", source, library, "-fopenmp", "-o", program], check=True)
    done = subprocess.run([program, "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "all passed" in done.stdout
    assert all(f"{kernels.name} " in done.stdout for kernels in SETS if kernels.name != "scalar")
