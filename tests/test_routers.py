"""How many experts, and which: each rule against a plain loop in double precision and against counts made by hand.

Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from curves import context, curves
from free_rules import FREE_RULES

from minimoe.routers import ROUTERS, PrefixRouter, rank
from minimoe.routers.elbow import Elbow, deviation
from minimoe.routers.entropy import Entropy
from minimoe.routers.gap_ratio import GapRatio
from minimoe.routers.max_gap import MaxGap
from minimoe.routers.min_p import MinP
from minimoe.routers.skip import Skip
from minimoe.routers.threshold import Threshold
from minimoe.routers.top_k import TopK
from minimoe.routers.top_p import TopP

Curve = Sequence[float]


COUNTS = {1: 100, 2: 1000, 3: 2000, 64: 10_000}  # curves for each number of experts


@cache
def sorted_lists(E: int) -> list[list[float]]:
    return rank(curves(E, COUNTS[E]))[0].tolist()


# What each rule says it computes, written as plain loops over one sorted curve.


def elbow_loop(p: Curve) -> int:
    best, where = -math.inf, 0
    for i, value in enumerate(p):
        x = i / (len(p) - 1) if len(p) > 1 else 0.0
        d = (p[0] - value) / (p[0] - p[-1] + 1e-12) - x
        if d > best:
            best, where = d, i
    return where + 1


def top_p_loop(p: Curve, mass: float) -> int:
    total = 0.0
    for n, value in enumerate(p, 1):
        total += value
        if total >= mass:
            return n
    return len(p)


def at_least(p: Curve, threshold: float) -> int:
    return len([value for value in p if value >= threshold])


def gap_loop(p: Curve) -> int:
    gaps = [a - b for a, b in itertools.pairwise(p)]
    return gaps.index(max(gaps)) + 1 if gaps else 1


def ratio_loop(p: Curve, cap: int) -> int:
    ratios = [a / (b + 1e-12) for a, b in itertools.islice(itertools.pairwise(p), cap)]
    return ratios.index(max(ratios)) + 1 if ratios else 1


def entropy_loop(p: Curve, scale: float) -> int:
    return math.floor(scale * math.exp(-math.fsum(x * math.log(x) for x in p if x > 0)) + 0.5)


# Fractions that float32 holds exactly, so that no rounding decides what is compared.
RULES: dict[str, tuple[Callable[..., PrefixRouter], Callable[[Curve], int]]] = {
    "top_k": (TopK, lambda p: len(p)),
    "elbow": (Elbow, elbow_loop),
    "top_p": (TopP, lambda p: top_p_loop(p, 0.5)),
    "top_p:p=0.9": (lambda **o: TopP(p=0.9, **o), lambda p: top_p_loop(p, 0.9)),
    "top_p:p=1": (lambda **o: TopP(p=1.0, **o), lambda p: top_p_loop(p, 1.0)),
    "min_p": (MinP, lambda p: at_least(p, p[0] * 0.25)),
    "min_p:p=0.0625": (lambda **o: MinP(p=0.0625, **o), lambda p: at_least(p, p[0] * 0.0625)),
    "max_gap": (MaxGap, gap_loop),
    "entropy": (Entropy, lambda p: entropy_loop(p, 1.0)),
    "entropy:scale=0.5": (lambda **o: Entropy(scale=0.5, **o), lambda p: entropy_loop(p, 0.5)),
    "skip:beta=0.125": (lambda **o: Skip(beta=0.125, **o), lambda p: at_least(p, p[0] * 0.125)),
    "threshold": (Threshold, lambda p: at_least(p, 1 / len(p))),
    "threshold:p=0.03125": (lambda **o: Threshold(p=0.03125, **o), lambda p: at_least(p, 0.03125)),
}


def test_every_registered_rule_is_tested_here_or_among_the_free_ones() -> None:
    assert {name.partition(":")[0] for name in [*RULES, *FREE_RULES]} == set(ROUTERS)


@pytest.mark.parametrize("E", COUNTS)
def test_rank_is_a_softmax_sorted_with_ties_to_the_lowest_expert(E: int) -> None:
    logits_TE = curves(E, COUNTS[E])
    probs_TE, experts_TE = rank(logits_TE)
    exact = np.exp(logits_TE.double().numpy() - logits_TE.double().numpy().max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    assert probs_TE.dtype == torch.float32
    np.testing.assert_allclose(probs_TE, np.take_along_axis(exact, experts_TE.numpy(), 1), rtol=2e-6, atol=1e-12)
    for row, experts in zip(logits_TE.softmax(-1)[:2000].tolist(), experts_TE[:2000].tolist(), strict=True):
        assert experts == sorted(range(E), key=lambda e: (-row[e], e))


@pytest.mark.parametrize("E", COUNTS)
@pytest.mark.parametrize("name", RULES)
def test_k_is_that_of_a_plain_loop_on_thirteen_thousand_curves(name: str, E: int) -> None:
    make, loop = RULES[name]
    logits_TE, sorted_curves = curves(E, COUNTS[E]), sorted_lists(E)
    wanted = [max(1, loop(curve)) for curve in sorted_curves]
    assert make(cap=E).route(logits_TE, context(len(wanted))).k_T.tolist() == wanted
    half = (E + 1) // 2
    assert make().route(logits_TE, context(len(wanted), top_k=half)).k_T.tolist() == [min(k, half) for k in wanted]


@pytest.mark.parametrize("E", COUNTS)
@pytest.mark.parametrize("cap", [1, 2, 8, 64])
def test_gap_ratio_looks_as_far_as_its_cap(cap: int, E: int) -> None:
    cap = min(cap, E)
    logits_TE, sorted_curves = curves(E, COUNTS[E]), sorted_lists(E)
    wanted = [min(cap, ratio_loop(curve, cap)) for curve in sorted_curves]
    assert GapRatio(cap=cap).route(logits_TE, context(len(wanted))).k_T.tolist() == wanted


def test_elbow_by_kneed_is_kneed() -> None:
    """Against the library fed one double precision curve after another; the argmax often disagrees with it."""
    kneed = pytest.importorskip("kneed")
    logits_TE = curves(64, T=600)
    expected = []
    for curve in rank(logits_TE)[0].tolist():
        found = kneed.KneeLocator(range(64), curve, curve="convex", direction="decreasing").knee
        expected.append(8 if found is None else min(8, max(1, int(found) + 1)))
    by_kneed = Elbow(method="kneed").route(logits_TE, context(600)).k_T.tolist()
    assert by_kneed == expected
    agree = sum(a == b for a, b in zip(by_kneed, Elbow().route(logits_TE, context(600)).k_T.tolist(), strict=True))
    assert 0 < agree < 600
    flat = Elbow(method="kneed", cap=2).route(torch.zeros(1, 2), context(1))
    assert flat.k_T.tolist() == [2]


def test_elbow_is_the_papers_program_in_numpy() -> None:
    logits_TE = curves(64, seed=7)
    p = rank(logits_TE)[0].double().numpy()
    x = np.linspace(0, 1, 64)
    flipped = 1 - (p - p[:, -1:]) / (p[:, :1] - p[:, -1:] + 1e-12)
    k = np.clip(np.argmax(flipped - x, axis=1) + 1, 1, 8)
    routing = Elbow().route(logits_TE, context(10_000))
    # (p1 - p) / h and 1 - (p - pN) / h round differently, so a draw between two ranks may fall either way.
    differ = np.flatnonzero(routing.k_T.numpy() != k)
    d = np.sort((flipped - x)[differ], axis=1)
    assert len(differ) <= 2
    assert (d[:, -1] - d[:, -2] < 1e-12).all()


@pytest.mark.parametrize("E", [1, 2, 3, 8, 64])
def test_the_printed_elbow_always_gives_one_expert(E: int) -> None:
    logits_TE = torch.cat([curves(E), torch.zeros(1, E), torch.eye(E)[:1] * 200])
    assert Elbow(reading="printed", cap=E).route(logits_TE, context(len(logits_TE))).k_T.tolist() == [1] * len(
        logits_TE
    )


def test_deviation_at_both_ends_and_at_an_elbow_worked_out_by_hand() -> None:
    p_TE = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    assert deviation(p_TE)[0].tolist() == pytest.approx([0, 2 / 3 - 1 / 3, 1 - 2 / 3, 0], abs=1e-11)
    assert deviation(p_TE, "printed")[0].tolist() == pytest.approx([1, 0, -2 / 3, -1], abs=1e-11)
    assert deviation(p_TE).dtype == torch.float64


HAND_RULES = (
    TopK(k=3),
    Elbow(cap=8),
    Elbow(cap=8, reading="printed"),
    TopP(cap=8),
    MinP(cap=8),
    Threshold(cap=8),
    MaxGap(cap=8),
    GapRatio(cap=8),
)
# Eight experts, in 64ths; every k was counted by hand, in the order of HAND_RULES (top_p 0.5, min_p 0.25, threshold
# 1/8). The elbow keeps fewest experts where the router is least sure, and a straight line has no bend.
BY_HAND = {
    "flat": ([8, 8, 8, 8, 8, 8, 8, 8], (3, 1, 1, 4, 8, 8, 1, 1)),
    "linear": ([15, 13, 11, 9, 7, 5, 3, 1], (3, 1, 1, 3, 6, 4, 1, 7)),
    "concave": ([11, 11, 10, 10, 9, 7, 5, 1], (3, 1, 1, 3, 7, 5, 7, 7)),
    "convex": ([32, 16, 8, 4, 2, 1, 0.5, 0.5], (3, 3, 1, 1, 3, 3, 1, 1)),
    "one hot": ([64, 0, 0, 0, 0, 0, 0, 0], (3, 2, 1, 1, 1, 1, 1, 1)),
    "step": ([14, 14, 14, 14, 2, 2, 2, 2], (3, 5, 1, 3, 4, 4, 4, 4)),
    "plateau of two": ([20, 20, 4, 4, 4, 4, 4, 4], (3, 3, 1, 2, 2, 2, 2, 2)),
    "plateau of seven": ([9, 9, 9, 9, 9, 9, 9, 1], (3, 1, 1, 4, 7, 7, 7, 7)),
    "two plateaus": ([16, 16, 16, 8, 4, 2, 1, 1], (3, 5, 1, 2, 5, 4, 3, 3)),
}


@pytest.mark.parametrize("shape", BY_HAND)
def test_k_on_curves_counted_by_hand(shape: str) -> None:
    curve, expected = BY_HAND[shape]
    probs_1E = torch.tensor([curve]) / 64
    assert probs_1E.sum().item() == 1
    assert tuple(rule.count(probs_1E, context(1)).item() for rule in HAND_RULES) == expected


@pytest.mark.parametrize("E", [8, 64])
def test_m_equal_leaders_give_the_elbow_m_plus_one(E: int) -> None:
    leaders = range(1, E - 1)
    logits_TE = torch.tensor([[2.0] * m + [-1.0] * (E - m) for m in leaders])
    assert Elbow(cap=E).route(logits_TE, context(len(leaders))).k_T.tolist() == [m + 1 for m in leaders]


@pytest.mark.parametrize("E", [1, 2, 3, 5, 25, 49, 64, 100])
def test_a_flat_curve_reaches_the_default_threshold_whatever_the_number_of_experts(E: int) -> None:
    assert Threshold(cap=E).route(torch.zeros(1, E), context(1)).k_T.tolist() == [E]


def test_top_p_at_its_two_ends() -> None:
    logits_TE = curves(64, T=2000)
    assert TopP(p=0.0).route(logits_TE, context(2000)).k_T.tolist() == [1] * 2000
    sums = [math.fsum(row) for row in rank(logits_TE)[0].tolist()]
    short_T = torch.tensor([total < 1 - 1e-9 for total in sums])  # where rounding keeps the whole under p = 1
    assert short_T.any()
    assert (TopP(p=1.0, cap=64).route(logits_TE, context(2000)).k_T[short_T] == 64).all()


def test_top_p_is_not_fooled_by_a_float32_running_sum() -> None:
    """p is set to exactly the mass of the first n experts; a float32 sum often ends just beside it."""
    probs_TE = rank(curves(64, T=300, seed=3)[0::6] * 10)[0]
    float32_misses = 0
    for probs_E, n in zip(probs_TE, range(10, 60), strict=True):
        exact = [sum((Fraction(value) for value in probs_E[:m].tolist()), Fraction(0)) for m in range(65)]
        p = float(exact[n])
        expected = next(m for m in range(65) if exact[m] >= Fraction(p))
        assert TopP(p=p, cap=64).count(probs_E[None], context(1)).tolist() == [expected]
        float32_misses += int((np.cumsum(probs_E.numpy(), dtype=np.float32).astype(float) < p).sum()) + 1 != expected
    assert float32_misses > 5


@pytest.mark.parametrize("name", RULES)
def test_a_shift_of_the_logits_changes_nothing(name: str) -> None:
    rule = RULES[name][0](cap=16)
    logits_TE = (curves(64, T=600) * 1024).round() / 1024  # so that the shifts below are exact in float32
    before = rule.route(logits_TE, context(600))
    for shift in (3.0, -17.5):
        after = rule.route(logits_TE + shift, context(600))
        assert torch.equal(after.k_T, before.k_T)
        assert torch.equal(after.experts_TK, before.experts_TK)
        assert torch.equal(after.weights_TK, before.weights_TK)


@pytest.mark.parametrize("name", RULES)
def test_renaming_the_experts_renames_the_chosen_ones(name: str) -> None:
    rule = RULES[name][0](cap=16)
    logits_TE = curves(64, T=1200)
    untied_T = [len(set(row)) == 64 for row in logits_TE.softmax(-1).tolist()]  # a tie depends on names, rightly
    logits_TE = logits_TE[untied_T]
    T = len(logits_TE)
    assert T > 900
    old_TE = torch.rand(T, 64, generator=torch.Generator().manual_seed(1)).argsort(dim=1)
    before = rule.route(logits_TE, context(T))
    after = rule.route(logits_TE.gather(1, old_TE), context(T))
    after.check()
    differs_T = after.k_T != before.k_T
    # The softmax adds up in another order, so that once in a long while a curve on the very edge may tip over.
    assert differs_T.sum() <= 1
    padded_TE = torch.cat([old_TE, torch.full((T, 1), 64)], dim=1)
    named_TK = padded_TE.gather(1, after.experts_TK)
    assert torch.equal(named_TK[~differs_T], before.experts_TK[~differs_T])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_ties_go_to_the_lowest_expert_in_every_rule(name: str, dtype: torch.dtype) -> None:
    rows = list(itertools.product((-1, 0, 2), repeat=6))  # every way for six experts to tie
    routing = RULES[name][0](cap=6).route(torch.tensor(rows, dtype=dtype), context(len(rows)))
    for row, experts, k in zip(rows, routing.experts_TK.tolist(), routing.k_T.tolist(), strict=True):
        assert experts[:k] == sorted(range(6), key=lambda e: (-row[e], e))[:k]


def test_64_equal_logits_are_taken_from_expert_0_on() -> None:
    assert TopK().route(torch.full((1, 64), 0.3), context(1)).experts_TK.tolist() == [list(range(8))]


def test_bfloat16_logits_are_ranked_on_their_float32_softmax() -> None:
    logits_TE = curves(64, T=2000).bfloat16()
    routing = TopK().route(logits_TE, context(2000))
    assert torch.equal(routing.experts_TK, TopK().route(logits_TE.float(), context(2000)).experts_TK)
    torch.testing.assert_close(routing.weights_TK, logits_TE.float().softmax(-1).gather(1, routing.experts_TK))
    rounded_TE = logits_TE.float().softmax(-1).bfloat16().sort(dim=-1, descending=True, stable=True).indices[:, :8]
    changed_T = (rounded_TE.sort().values != routing.experts_TK.sort().values).any(dim=1)
    assert changed_T.any()  # or this test could not tell the two apart


@pytest.mark.parametrize(("sigma", "mean_k"), [(0.5, 7.61), (1.0, 7.46), (1.5, 7.09), (2.0, 6.62)])
def test_the_null_model_of_gaussian_logits(sigma: float, mean_k: float) -> None:
    """A mean k of 7.6 says little about a router: the elbow gives it on independent Gaussian noise too."""
    T = 20_000
    logits_TE = torch.randn(T, 64, generator=torch.Generator().manual_seed(0)) * sigma
    assert Elbow().route(logits_TE, context(T)).k_T.double().mean().item() == pytest.approx(mean_k, abs=0.02)
