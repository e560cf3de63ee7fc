"""The native kernels of a rule: ranking, counting, and what is kept at what weights, against plain sorting and torch.

Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minimoe.native import Kernels, find_kernels
from minimoe.prefix_rule import PrefixRule
from minimoe.routers import Elbow, LayerK, PrefixRouter, RouterContext, Threshold, TopK
from minimoe.routers.spec import parse_router
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


SPECS = (
    "top_k",
    "top_k:k=2",
    "elbow",
    "elbow:reading=printed",
    "max_gap",
    "gap_ratio",
    "top_p:p=0.4",
    "top_p:p=1",
    "top_p:p=0",
    "min_p",
    "min_p:p=0",
    "threshold",
    "threshold:p=0.9",
    "entropy",
    "entropy:scale=0.35",
    "skip:beta=0.6",
    "layer_k:k=3",
)


def awkward(E: int) -> Tensor:
    """Logits [T, E] of curves with ties, cliffs and straight lines, each falling."""
    rising = torch.arange(E, dtype=torch.float32)
    rows = [torch.zeros(E), -rising, -rising / E, -90 * (rising > E // 2), -(rising % 2), -(rising // 3), 0 - rising**2]
    return torch.stack([*rows, torch.log(E - rising), 3e38 * (rising == 0)])


@each_dtype
@pytest.mark.parametrize("E", [1, 2, 5, 64])
@pytest.mark.parametrize("spec", SPECS)
def test_kernels_count_as_rules_do(spec: str, E: int, dtype: torch.dtype) -> None:
    """Above all limits, so that every count shows; 90 tokens are enough for several threads."""
    generator, rule = torch.Generator().manual_seed(E), parse_router(spec)
    spreads_T1 = torch.rand(90, 1, generator=generator) * 9
    logits_TE = torch.cat([torch.randn(90, E, generator=generator) * spreads_T1, awkward(E)]).to(dtype)
    assert isinstance(rule, PrefixRouter)
    rule = replace(rule, floor=0)
    where = context(len(logits_TE), top_k=min(8, E))
    followed = rule.prefix_rule(where, E)
    assert followed is not None
    followed = replace(followed, limit=E) if followed.count != "gap_ratio" else followed  # looks up to its limit
    experts_TK, weights_TK, k_T = find_kernels().prefix(logits_TE, followed)
    sorted_TE, ranked_TE = find_kernels().rank(logits_TE)
    expected_T = rule.count(sorted_TE, where).clamp(0, followed.limit)
    if followed.count == "entropy":  # logarithms may differ in their last bit: not where a half decides
        entropy_T = -torch.special.xlogy(sorted_TE.double(), sorted_TE.double()).sum(dim=1)
        wanted_T = followed.number * entropy_T.exp()
        close_T = (wanted_T + 0.5 - (wanted_T + 0.5).round()).abs() < 1e-9
        assert close_T.sum() <= 2
        expected_T = torch.where(close_T, k_T, expected_T)
    assert torch.equal(k_T, expected_T)
    expected = Routing.from_ranking(ranked_TE[:, : followed.limit], sorted_TE[:, : followed.limit], k_T, E)
    assert torch.equal(experts_TK, expected.experts_TK)
    assert torch.equal(weights_TK, expected.weights_TK)


@each_set
@each_dtype
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_floor_limit_and_mass_are_those_of_plain_sums(
    kernels: Kernels, dtype: torch.dtype, data: st.DataObject
) -> None:
    T, E = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 70))
    K = data.draw(st.integers(0, E))
    floor, count = data.draw(st.integers(0, K)), data.draw(st.sampled_from(["number", "program", "threshold"]))
    mass, top_k = data.draw(st.sampled_from(["none", "kept", "topk"])), data.draw(st.integers(1, 80))
    rule = PrefixRule(count, {"number": 5.0, "threshold": 0.1}.get(count, 0.0), floor, K, mass, top_k)
    logits_TE = (torch.randn(T, E) * data.draw(st.sampled_from([0.1, 1, 6]))).to(dtype)
    experts_TK, weights_TK, k_T = kernels.prefix(logits_TE, rule)
    sorted_TE, ranked_TE = kernels.rank(logits_TE)
    for t, (p, ids) in enumerate(zip(sorted_TE.tolist(), ranked_TE.tolist(), strict=True)):
        above = [p[0] - p_i - i * (p[0] - p[-1] + 1e-12) / max(E - 1, 1) for i, p_i in enumerate(p)]
        least = float(np.float32(0.1))
        counted = {"number": 5, "program": 1 + above.index(max(above)), "threshold": sum(p_i >= least for p_i in p)}
        k = min(max(counted[count], floor), K)
        if count != "program" or sum(value > max(above) - 1e-12 for value in above) == 1:
            assert k_T[t] == k
        k = int(k_T[t])
        wanted = {"none": sum(p[:k]), "kept": 1.0, "topk": sum(p[:top_k])}[mass]
        scale = wanted / sum(p[:k]) if k and sum(p[:k]) else 1.0
        assert experts_TK[t].tolist() == ids[:k] + [E] * (K - k)
        assert weights_TK[t].tolist() == pytest.approx([p_i * scale for p_i in p[:k]] + [0] * (K - k), rel=1e-6)


@pytest.mark.parametrize(
    ("renorm", "norm_topk_prob"), [("kept", False), ("topk", False), ("model", True), ("model", False)]
)
def test_weights_of_kernels_and_of_torch_are_the_same_bits(
    renorm: str, norm_topk_prob: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_TE = torch.randn(300, 64) * 3
    where = replace(context(300), norm_topk_prob=norm_topk_prob)
    rule = parse_router(f"elbow:renorm={renorm}")
    by_kernels = rule.route(logits_TE, where)
    monkeypatch.setattr(PrefixRouter, "prefix_rule", lambda *given: None)
    by_torch = rule.route(logits_TE, where)
    assert torch.equal(by_kernels.k_T, by_torch.k_T)
    assert torch.equal(by_kernels.weights_TK, by_torch.weights_TK)


@pytest.mark.parametrize(
    "wrong",
    [
        {"floor": -1},
        {"floor": 3},
        {"limit": 5},
        {"count": "some"},
        {"mass": "some"},
    ],
)
def test_a_prefix_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    rule = PrefixRule("number", 2.0, 0, 2, "none", 2)
    find_kernels().prefix(torch.zeros(1, 4), rule)
    with pytest.raises(ValueError, match="4 experts cannot be routed by"):
        find_kernels().prefix(torch.zeros(1, 4), replace(rule, **wrong))
    with pytest.raises(ValueError, match="0 experts cannot be routed by"):
        find_kernels().prefix(torch.zeros(1, 0), replace(rule, limit=0))


@pytest.mark.parametrize("rule", [TopK, Elbow, Threshold, LayerK])
def test_a_rule_that_counts_for_itself_is_asked(rule: type[PrefixRouter]) -> None:
    """The kernels count as minimoe's rules do; what is derived from these may not."""

    class One(rule):  # type: ignore[misc, valid-type]
        def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
            return super().count(sorted_probs_TE, context) * 0 + 1

    keys = {"k": "4"} if rule is LayerK else {}
    logits_TE = torch.randn(50, 16)
    asked = One(**keys).route(logits_TE, context(50))
    assert asked.k_T.tolist() == [1] * 50
    assert rule(**keys).route(logits_TE, context(50)).k_T.max() > 1


class OneExpert:
    """Counts, and is no rule."""

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        return torch.ones(len(sorted_probs_TE), dtype=torch.int64)


class Mixed(OneExpert, TopK):
    """Counts as what it is mixed with."""


class Given(TopK):
    """Is given its count after it was made."""


Given.count = OneExpert.count  # type: ignore[method-assign]


@pytest.mark.parametrize("rule", [Mixed, Given])
def test_the_nearest_count_decides_wherever_it_comes_from(rule: type[PrefixRouter]) -> None:
    assert rule().route(torch.randn(50, 16), context(50)).k_T.tolist() == [1] * 50


def test_numbers_of_any_size_are_cut_at_the_cap() -> None:
    logits_TE = torch.randn(3, 16)
    for k in (9, 3_000_000_000, 2**63 - 1, 2**63, 10**18):
        rule = parse_router(f"layer_k:k={k},cap=8")
        assert isinstance(rule, PrefixRouter)
        assert rule.route(logits_TE, context(3)).k_T.tolist() == [8] * 3
        assert rule.count(logits_TE.softmax(dim=1), context(3)).tolist() == [8] * 3
    rule = PrefixRule("number", 1e30, 0, 5, "none", 8)
    assert find_kernels().prefix(logits_TE, rule)[2].tolist() == [5] * 3
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="cannot be routed"):
            find_kernels().prefix(logits_TE, replace(rule, number=wrong))
