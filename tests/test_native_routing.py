"""The native kernels of a rule: softmax and ranking, the elbow, and what is kept, against plain sorting and torch.

Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minimoe.curve import deviation
from minimoe.native import Kernels, find_kernels
from minimoe.routers import Elbow, RouterContext, TopK
from minimoe.routing import Routing
from tests.curves import context
from tests.native_sets import EPS, each_dtype, each_set, needs_kernels

pytestmark = needs_kernels


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


@each_set
@each_dtype
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_rank_count_and_keep_in_one_call_are_those_three(
    kernels: Kernels, dtype: torch.dtype, data: st.DataObject
) -> None:
    T, E = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 70))
    K = data.draw(st.integers(0, E))
    floor, count = data.draw(st.integers(0, K)), data.draw(st.sampled_from(["all", "elbow"]))
    logits_TE = (torch.randn(T, E) * data.draw(st.sampled_from([0.1, 1, 6]))).to(dtype)
    experts_TK, weights_TK, k_T = kernels.prefix(logits_TE, count, floor, K)
    sorted_TE, ranked_TE = kernels.rank(logits_TE)
    expected_T = torch.full((T,), K) if count == "all" else deviation(sorted_TE).argmax(dim=1) + 1
    assert torch.equal(k_T, expected_T.clamp(floor, K))
    expected = Routing.from_ranking(ranked_TE[:, :K], sorted_TE[:, :K], k_T, E)
    assert torch.equal(experts_TK, expected.experts_TK)
    assert torch.equal(weights_TK, expected.weights_TK)


@pytest.mark.parametrize(("floor", "K"), [(-1, 2), (3, 2), (0, 5)])
def test_a_prefix_that_cannot_be_is_refused(floor: int, K: int) -> None:
    with pytest.raises(ValueError, match="of 4 experts cannot be kept"):
        find_kernels().prefix(torch.zeros(1, 4), "all", floor, K)
    with pytest.raises(ValueError, match="counted as 'some'"):
        find_kernels().prefix(torch.zeros(1, 4), "some", 1, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of 0 experts cannot be kept"):
        find_kernels().prefix(torch.zeros(1, 0), "elbow", 0, 0)


@pytest.mark.parametrize("rule", [TopK, Elbow])
def test_a_rule_that_counts_for_itself_is_asked(rule: type[TopK] | type[Elbow]) -> None:
    """The kernels count as TopK and Elbow do; what is derived from these may not."""

    class One(rule):  # type: ignore[misc, valid-type]
        def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
            return torch.ones(len(sorted_probs_TE), dtype=torch.int64)

    logits_TE = torch.randn(50, 16)
    asked = One().route(logits_TE, context(50))
    assert asked.k_T.tolist() == [1] * 50
    assert rule().route(logits_TE, context(50)).k_T.max() > 1
