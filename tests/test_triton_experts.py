"""The expert kernels against `reference` in float32: on a GPU, or in Triton's interpreter where there is none.

Shape letters: T tokens, D hidden, E experts, K slots, I expert intermediate, S slots of all tokens.
"""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from minimoe.errors import InputError
from minimoe.experts import ExpertWeights, find_backend
from minimoe.experts.reference import ReferenceExperts
from minimoe.routing import Routing
from tests.accelerator import DEVICE
from tests.test_experts import CASES, random_inputs, random_weights
from tests.triton_device import bfloat16_as_on_a_gpu

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
stacked = importlib.import_module("minimoe.experts.triton").stacked
grouped, pairs = (importlib.import_module(f"minimoe.triton.{name}") for name in ("grouped", "pairs"))

MORE_CASES = {
    **CASES,
    "several tiles and blocks": ([2, 3, 0, 1, 3, 3, 3] * 6, 3, 70, 37),
    "several tiles and one token": ([2], 3, 70, 37),
}
SMALL_TILES = grouped.Tiles(M=16, N=16, depth=16, warps=4, stages=2)


def on_device(weights: ExpertWeights, x_TD: Tensor, routing: Routing) -> tuple[ExpertWeights, Tensor, Routing]:
    moved = ([matrix.to(DEVICE) for matrix in kind] for kind in (weights.gate_EID, weights.up_EID, weights.down_EDI))
    there = Routing(
        routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE), routing.k_T.to(DEVICE), routing.num_experts
    )
    return ExpertWeights(*moved), x_TD.to(DEVICE), there


def run(weights: ExpertWeights, x_TD: Tensor, routing: Routing) -> Tensor:
    weights, x_TD, routing = on_device(weights, x_TD, routing)
    return find_backend("triton")(weights).run(x_TD, routing).cpu()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, or the largest integer, so that what nobody has written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("case", MORE_CASES)
def test_the_kernels_equal_the_reference_in_float32(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    k, E, D, I = MORE_CASES[case]
    monkeypatch.setattr(pairs, "COLUMNS", 32)  # so that small shapes have several tiles too
    monkeypatch.setattr(grouped.Tiles, "for_rows", lambda rows: SMALL_TILES)
    weights = random_weights(E, D, I)
    x_TD, routing = random_inputs(k, E, D)
    used = {e for row, live in zip(routing.experts_TK.tolist(), k, strict=True) for e in row[:live]}
    expected = ReferenceExperts(weights).run(x_TD, routing)
    for kind in (weights.gate_EID, weights.up_EID, weights.down_EDI):
        for e in set(range(E)) - used:
            kind[e].fill_(math.nan)  # whoever reads a pruned expert gets NaN
    x_TD[routing.k_T == 0] = math.nan
    with poisoned_memory():
        y_TD = run(weights, x_TD, routing)
    torch.testing.assert_close(y_TD, expected, rtol=1e-5, atol=1e-5)
    assert (y_TD[routing.k_T == 0] == 0).all()


@pytest.mark.parametrize("case", ["one token", "some tokens without experts", "several tiles and blocks"])
def test_bfloat16(case: str) -> None:
    k, E, D, I = MORE_CASES[case]
    weights = random_weights(E, D, I, torch.bfloat16)
    x_TD, routing = random_inputs(k, E, D, torch.bfloat16)
    with bfloat16_as_on_a_gpu():
        y_TD = run(weights, x_TD, routing)
    assert y_TD.dtype == torch.bfloat16
    torch.testing.assert_close(y_TD, ReferenceExperts(weights).run(x_TD, routing), rtol=3e-2, atol=3e-2)


def test_the_pair_kernels_take_several_tokens_too() -> None:
    k, E, D, I = CASES["ragged"]
    weights, x_TD, routing = on_device(random_weights(E, D, I), *random_inputs(k, E, D))
    y_TD = pairs.run_pairs(
        x_TD, routing, *(torch.stack(list(kind)) for kind in (weights.gate_EID, weights.up_EID, weights.down_EDI))
    )
    torch.testing.assert_close(y_TD, ReferenceExperts(weights).run(x_TD, routing), rtol=1e-5, atol=1e-5)


def test_two_runs_agree_to_the_bit() -> None:
    weights = random_weights(4, 16, 12)
    x_TD, routing = random_inputs([2, 4, 0, 1, 3], 4, 16)
    assert torch.equal(run(weights, x_TD, routing), run(weights, x_TD, routing))


@pytest.mark.parametrize("M", [1, 2, 16])
@pytest.mark.parametrize("k", [[3, 0, 1, 5, 2, 2], [0, 0], [1], [5] * 9])
def test_slots_are_grouped_by_expert(k: list[int], M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every live slot once, in blocks of one expert, in order; padding holds S; and the count is right."""
    monkeypatch.setattr(grouped, "SCAN", 8)
    E = 5
    _, routing = random_inputs(k, E, 1)
    _, _, there = on_device(random_weights(1, 1, 1), torch.empty(0), routing)
    if not routing.experts_TK.numel():
        return
    blocks = grouped.group(there, M)
    found: list[list[int]] = [[] for _ in range(E)]
    count = int(blocks.count_1)
    for slots, expert in zip(blocks.slots_BM[:count].tolist(), blocks.experts_B[:count].tolist(), strict=True):
        found[expert] += slots
    S, flat = routing.experts_TK.numel(), routing.experts_TK.flatten()
    for e, slots in enumerate(found):
        own = (flat == e).nonzero().flatten().tolist()
        assert slots == own + [S] * (-len(own) % M)


def test_matrices_that_lie_evenly_are_not_copied() -> None:
    packed = torch.randn(5, 2, 4, 3)
    for part in range(2):
        view = stacked([matrix[part] for matrix in packed])
        assert view.data_ptr() == packed[0, part].data_ptr()
        assert torch.equal(view, packed[:, part])
    for loose in ([packed[0, 0], packed[1, 0], packed[3, 0]], [packed[1, 0], packed[0, 0]], [torch.ones(2, 2)] * 2):
        assert torch.equal(stacked(loose), torch.stack(loose))
    assert torch.equal(stacked([packed[2, 1]]), packed[2:3, 1])


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # an import of it fails
import minimoe
minimoe.load(backend="bucketed")
try:
    minimoe.load(backend="triton")
except minimoe.errors.InputError as error:
    print(error)
"""


def test_without_triton_all_but_its_backend_works() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    assert done.stdout == "the triton backend needs the package triton; pip install 'minimoe[triton]'.\n"


def test_without_a_gpu_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("triton").knobs.runtime, "interpret", False)
    with pytest.raises(InputError, match="the triton backend runs on a GPU; give --device cuda, or choose --backend"):
        find_backend("triton")(random_weights(2, 4, 4))


def test_the_backend_takes_no_option() -> None:
    with pytest.raises(InputError, match="backend triton takes no option 'isa=avx2'"):
        find_backend("triton:isa=avx2")
