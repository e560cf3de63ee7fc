"""analyze's statistics against scipy, brute force and hand counts."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from scipy.spatial.distance import jensenshannon

from minimoe.analysis.balance import balance, shift
from minimoe.analysis.estimates import correlation, mean, variance
from minimoe.analysis.null import NullModel
from minimoe.analysis.specialisation import (
    LEAST_SEEN,
    coactivation,
    domain_information,
    domain_shares,
    favourites,
    saturation,
    vocabulary,
)
from minimoe.analysis.tally import SPREAD_BINS, bin_spreads

counts = st.integers(0, 50)


# Load


@given(arrays(np.int64, st.integers(1, 12), elements=counts))
def test_balance_is_scipys(load: np.ndarray) -> None:
    found = balance(load)
    assert found.dead == list(load).count(0)
    if not load.sum():
        assert all(math.isnan(value) for value in (found.cv, found.entropy, found.largest, found.least))
        return
    assert found.cv == pytest.approx(stats.variation(load), abs=1e-12)
    if len(load) > 1:
        assert found.entropy == pytest.approx(stats.entropy(load, base=len(load)), abs=1e-12)
    assert found.largest == pytest.approx(max(load) / np.mean(load))
    assert found.least == pytest.approx(min(load) / np.mean(load))


def test_balance_by_hand() -> None:
    even, lone = balance(np.array([5, 5, 5, 5])), balance(np.array([8, 0, 0, 0]))
    assert (even.cv, even.entropy, even.largest, even.least, even.dead) == pytest.approx((0, 1, 1, 1, 0))
    assert (lone.cv, lone.entropy, lone.largest, lone.least, lone.dead) == pytest.approx((math.sqrt(3), 0, 4, 0, 3))


@st.composite
def pruned_loads(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Loads of a top-k routing, and of one that keeps a prefix of each token's experts."""
    experts = draw(st.integers(2, 10))
    k = draw(st.integers(1, experts))
    load, top = np.zeros(experts, dtype=np.int64), np.zeros(experts, dtype=np.int64)
    tokens = draw(st.lists(st.tuples(st.permutations(range(experts)), st.integers(0, k)), min_size=1, max_size=20))
    for order, kept in tokens:
        top[list(order[:k])] += 1
        load[list(order[:kept])] += 1
    return load, top, k * len(tokens)


@given(pruned_loads())
def test_pruning_stays_within_the_theorem_and_both_corollaries(loads: tuple[np.ndarray, np.ndarray, int]) -> None:
    load, top, pairs = loads
    found = shift(load, top)
    if not load.sum():
        assert found is None
        return
    assert found is not None
    q, q_top = [n / sum(load) for n in load], [n / sum(top) for n in top]
    delta = 1 - sum(load) / pairs
    assert found.delta == pytest.approx(delta, abs=1e-12)
    assert found.l1 == pytest.approx(sum(abs(a - b) for a, b in zip(q, q_top, strict=True)), abs=1e-12)
    assert found.largest_change == pytest.approx(abs(max(q) - max(q_top)), abs=1e-12)
    assert found.cv2_change == pytest.approx(abs(stats.variation(load) ** 2 - stats.variation(top) ** 2), abs=1e-9)
    assert found.l1_bound == pytest.approx(2 * delta / (1 - delta), abs=1e-12)
    assert found.cv2_bound == pytest.approx(2 * len(q) * delta / (1 - delta) ** 2, abs=1e-9)
    assert found.within


def test_a_load_outside_the_bounds_is_called_so() -> None:
    # Not what pruning can do: as many pairs, all on another expert.
    found = shift(np.array([0, 10]), np.array([10, 0]))
    assert found is not None
    assert (found.l1, found.l1_bound) == (2, 0)
    assert not found.within


# Estimates


def sums(windows: list[list[float]]) -> np.ndarray:
    n, x = (np.array([f(w) for w in windows], dtype=float) for f in (len, sum))
    return np.array([(n > 0).sum(), n.sum(), x.sum(), (x * x).sum(), (n * x).sum(), (n * n).sum()])


def test_the_interval_of_windows_of_one_size_is_that_of_their_means() -> None:
    windows = np.random.default_rng(0).normal(3, 2, size=(40, 25))
    found = mean(sums([list(row) for row in windows]))
    means = windows.mean(1)
    assert found.value == pytest.approx(means.mean())
    assert (found.low, found.high) == pytest.approx(stats.norm.interval(0.95, means.mean(), stats.sem(means)))


def test_the_interval_of_windows_of_all_sizes_covers_the_truth_in_95_of_100() -> None:
    chance, hits = np.random.default_rng(1), 0
    for _ in range(400):
        levels = chance.normal(5, 1, size=60)  # tokens of a window are alike, so that tokens alone would mislead
        windows = [list(chance.normal(level, 0.5, size=chance.integers(5, 40))) for level in levels]
        found = mean(sums(windows))
        hits += found.low <= 5 <= found.high
    assert 0.91 <= hits / 400 <= 0.98


def test_no_data_and_one_window_have_no_interval() -> None:
    assert math.isnan(mean(np.zeros(6)).value)
    lone = mean(sums([[1.0, 2.0]]))
    assert lone.value == 1.5
    assert math.isnan(lone.low)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=4, max_size=40))
def test_correlation_is_scipys(pairs: list[tuple[int, int]]) -> None:
    x, y = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))
    found = correlation(len(x), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum())
    if x.std() == 0 or y.std() == 0:
        assert math.isnan(found.value)
        return
    expected = stats.pearsonr(x, y)
    assert found.value == pytest.approx(expected.statistic, abs=1e-9)
    if abs(found.value) < 0.9999:
        low, high = expected.confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=9), min_size=2, max_size=5))
def test_variance_is_scipys(groups: list[list[int]]) -> None:
    parts = [np.array(group, dtype=float) for group in groups]
    n, x, xx = (np.array([f(p) for p in parts]) for f in (len, np.sum, lambda p: (p * p).sum()))
    found = variance(n, x, xx)
    everything = np.concatenate(parts)
    total = ((everything - everything.mean()) ** 2).sum()
    if total == 0:
        assert math.isnan(found.eta2)
        return
    between = sum(len(p) * (p.mean() - everything.mean()) ** 2 for p in parts)
    assert found.eta2 == pytest.approx(between / total, abs=1e-9)
    if all(p.std() == 0 for p in parts):
        return
    assert found.f == pytest.approx(stats.f_oneway(*parts).statistic, rel=1e-6, abs=1e-9)


# Specialisation


routings = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=15)


@given(routings)
def test_coactivation_is_a_count_of_pairs(tokens: list[list[int]]) -> None:
    together = np.zeros((6, 6), dtype=np.int64)
    for used in tokens:
        for a in used:
            for b in used:
                together[a, b] += 1
    found = coactivation(together, np.diag(together))
    for a in range(6):
        having = [used for used in tokens if a in used]
        for b in range(6):
            share = sum(b in used for used in having) / len(having) if having and a != b else 0
            assert found[a, b] == pytest.approx(share)


def test_neighbours_by_hand() -> None:
    # Rankings 0 1 2 and 0 2 1: after 0 comes 1 once and 2 once; 0 and 1 work together always.
    adjacent = np.array([[0, 1, 1], [0, 0, 1], [0, 1, 0]])
    assert coactivation(adjacent, np.array([2, 2, 2])).tolist() == [[0, 0.5, 0.5], [0, 0, 0.5], [0, 0.5, 0]]


def test_shares_of_domains() -> None:
    load, tokens = np.array([[4, 0], [1, 3]]), np.array([4, 3])
    assert domain_shares(load, tokens).tolist() == [[1, 0], [1 / 3, 1]]


@given(arrays(np.int64, (2, 5), elements=st.integers(0, 20)))
def test_information_on_the_domain_is_scipys_divergence(load: np.ndarray) -> None:
    found = domain_information(load)
    if not load.sum(axis=1).all():
        assert math.isnan(found) if not load.any() else found == pytest.approx(0)
        return
    assert found == pytest.approx(jensenshannon(load[0], load[1], base=2) ** 2, abs=1e-9)


def test_information_by_hand() -> None:
    assert domain_information(np.array([[5, 0, 0], [0, 7, 0], [0, 0, 1]])) == pytest.approx(math.log2(3))
    assert domain_information(np.array([[2, 4], [1, 2]])) == pytest.approx(0)


def test_vocabulary_is_a_count_of_tokens() -> None:
    chance = np.random.default_rng(0)
    tokens = [(int(chance.integers(4)), set(chance.choice(6, size=2, replace=False).tolist())) for _ in range(60)]
    tokens += [(4, {0, 1})] * (LEAST_SEEN - 1) + [(5, {2, 3})] * LEAST_SEEN
    words, seen = np.zeros((6, 7), dtype=np.int32), np.zeros(7, dtype=np.int64)
    for word, used in tokens:
        seen[word] += 1
        words[list(used), word] += 1
    found = vocabulary(words, seen)
    times = Counter(word for word, _ in tokens)
    often = [word for word in range(7) if times[word] >= LEAST_SEEN]
    largest = []
    for word in range(7):
        shares = [sum(w == word and e in used for w, used in tokens) / max(times[word], 1) for e in range(6)]
        assert found.share_EV[:, word].tolist() == pytest.approx(shares if word in often else [0] * 6)
        largest += [max(shares)] if word in often else []
    assert found.largest == pytest.approx(np.mean(largest))
    assert 4 not in often


def test_favourites_come_by_share_then_by_frequency() -> None:
    share = np.array([[0.5, 0.0, 0.9, 0.5], [0.0, 0.0, 0.0, 0.0]])
    assert favourites(share, np.array([10, 10, 10, 30]), 3) == [[2, 3, 0], []]


@given(routings, routings)
def test_saturation_is_a_count_of_shared_choices(own: list[list[int]], other: list[list[int]]) -> None:
    pairs = list(zip(own, other, strict=False))
    mine, theirs = ({(t, e) for t, used in enumerate(side) for e in used} for side in zip(*pairs, strict=True))
    found = saturation(len(mine), len(theirs), len(mine & theirs))
    assert found is not None
    assert found.share == pytest.approx(len(mine & theirs) / len(theirs))
    assert found.jaccard == pytest.approx(len(mine & theirs) / len(mine | theirs))
    assert saturation(3, 0, 0) is None


# The null model


@pytest.mark.parametrize(("sigma", "mean_k"), [(0.5, 7.61), (1.0, 7.46), (1.5, 7.09), (2.0, 6.62)])
def test_null_curves_have_the_mean_k_that_gaussian_logits_are_known_to_have(sigma: float, mean_k: float) -> None:
    """Of 100,000 curves each, 64 experts, K of 8; bins are 2.3 % wide, and the five around sigma are taken."""
    spread = np.zeros(SPREAD_BINS)
    nearest = int(np.abs(bin_spreads() - sigma).argmin())
    spread[nearest - 2 : nearest + 3] = 1
    found = NullModel(64, 8, spread).of(spread)
    assert found.k == pytest.approx(mean_k, abs=0.05)
    assert found.curve_E.sum() == pytest.approx(1)
    assert (np.diff(found.curve_E) <= 0).all()


def test_null_curves_do_not_depend_on_what_else_is_asked() -> None:
    one, both = np.zeros(SPREAD_BINS), np.zeros(SPREAD_BINS)
    one[300] = both[300] = both[310] = 2
    assert NullModel(8, 2, one).of(one).k == NullModel(8, 2, both).of(one).k
    assert math.isnan(NullModel(8, 2, one).of(np.zeros(SPREAD_BINS)).k)
    lone = NullModel(1, 1, one).of(one)
    assert (lone.k, lone.elbow) == (1, 0)
    assert math.isnan(lone.angle)
