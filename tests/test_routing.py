"""Routing: the plain data between a rule and the experts, against lists of (expert, weight) rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minimoe.probe import Probe, Probes, RoutingRecorder
from minimoe.routing import Routing

Row = list[tuple[int, float]]  # one token's live slots: expert, weight


def build(rows: Sequence[Row], width: int, num_experts: int) -> Routing:
    """A Routing written out slot by slot, without the code under test."""
    experts = [[e for e, _ in row] + [num_experts] * (width - len(row)) for row in rows]
    weights = [[w for _, w in row] + [0.0] * (width - len(row)) for row in rows]
    return Routing(
        experts_TK=torch.tensor(experts, dtype=torch.int64).reshape(len(rows), width),
        weights_TK=torch.tensor(weights, dtype=torch.float32).reshape(len(rows), width),
        k_T=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        num_experts=num_experts,
    )


@st.composite
def ragged(draw: st.DrawFn, num_experts: int | None = None) -> tuple[list[Row], int, int]:
    """Rows, width and number of experts: any k from 0 to the width, any number of tokens from 0."""
    E = num_experts or draw(st.integers(1, 9))
    width = draw(st.integers(0, E))
    live = draw(st.lists(st.integers(0, width), max_size=7))
    random = Random(draw(st.integers(0, 2**16)))
    rows = [[(e, random.randrange(1, 65) / 64) for e in random.sample(range(E), k)] for k in live]
    return rows, width, E


def same(a: Routing, b: Routing) -> bool:
    return (
        torch.equal(a.experts_TK, b.experts_TK)
        and torch.equal(a.weights_TK, b.weights_TK)
        and torch.equal(a.k_T, b.k_T)
        and a.num_experts == b.num_experts
    )


@given(ragged())
@settings(deadline=None, max_examples=150)
def test_pairs_are_those_of_a_plain_list(given_rows: tuple[list[Row], int, int]) -> None:
    rows, width, E = given_rows
    routing = build(rows, width, E)
    routing.check()
    expected = sorted((e, t, t * width + j, w) for t, row in enumerate(rows) for j, (e, w) in enumerate(row))
    pairs = routing.pairs()
    assert pairs.tokens_P.tolist() == [t for _, t, _, _ in expected]
    assert pairs.slots_P.tolist() == [slot for _, _, slot, _ in expected]
    assert pairs.weights_P.tolist() == [w for _, _, _, w in expected]
    assert pairs.counts_E.tolist() == [sum(e == wanted for e, *_ in expected) for wanted in range(E)]
    assert pairs.offsets_E.tolist() == [sum(e < wanted for e, *_ in expected) for wanted in range(E + 1)]
    for tensor in (pairs.tokens_P, pairs.slots_P, pairs.counts_E, pairs.offsets_E):
        assert tensor.dtype == torch.int64
    assert pairs.weights_P.dtype == torch.float32


def test_filler_slots_are_neither_expert_0_nor_out_of_range() -> None:
    """k = (1, 4, 2) in four slots: the three sorts of fault this once caused are all visible in the counts."""
    rows: list[Row] = [[(3, 1.0)], [(1, 0.4), (0, 0.3), (2, 0.2), (3, 0.1)], [(2, 0.6), (1, 0.4)]]
    pairs = build(rows, 4, 4).pairs()
    assert pairs.counts_E.tolist() == [1, 2, 2, 2]
    assert pairs.offsets_E.tolist() == [0, 1, 3, 5, 7]
    assert pairs.tokens_P.tolist() == [1, 1, 2, 1, 2, 0, 1]


@pytest.mark.parametrize(("tokens", "width"), [(0, 3), (0, 0), (4, 0), (4, 3)])
def test_nothing_live_means_no_pairs(tokens: int, width: int) -> None:
    routing = build([[]] * tokens, width, 5)
    routing.check()
    pairs = routing.pairs()
    assert pairs.tokens_P.shape == pairs.slots_P.shape == pairs.weights_P.shape == (0,)
    assert pairs.counts_E.tolist() == [0] * 5
    assert pairs.offsets_E.tolist() == [0] * 6
    assert (routing.num_tokens, routing.width) == (tokens, width)


@given(ragged())
@settings(deadline=None, max_examples=60)
def test_from_ranking_keeps_the_first_k_and_makes_the_rest_dead(given_rows: tuple[list[Row], int, int]) -> None:
    rows, width, E = given_rows
    ranked: list[Row] = []
    for row in rows:  # fill the dead slots with experts and weights that the cut must remove
        left = [e for e in range(E) if e not in {e for e, _ in row}]
        ranked.append(row + [(e, 0.5) for e in left[: width - len(row)]])
    full = build(ranked, width, E)
    k_T = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    assert same(Routing.from_ranking(full.experts_TK, full.weights_TK, k_T, E), build(rows, width, E))


@given(st.integers(1, 6).flatmap(lambda E: st.lists(ragged(num_experts=E), min_size=1, max_size=4)))
@settings(deadline=None, max_examples=60)
def test_cat_lays_tokens_end_to_end(parts: list[tuple[list[Row], int, int]]) -> None:
    whole = Routing.cat([build(*part) for part in parts])
    whole.check()
    width = max(width for _, width, _ in parts)
    assert same(whole, build([row for rows, _, _ in parts for row in rows], width, parts[0][2]))


def test_cat_refuses_nothing_and_mixed_models() -> None:
    with pytest.raises(ValueError, match="at least one part"):
        Routing.cat([])
    with pytest.raises(ValueError, match="same number of experts"):
        Routing.cat([build([[(0, 1.0)]], 1, 2), build([[(0, 1.0)]], 1, 3)])


def test_rows_takes_slices_and_index_tensors() -> None:
    rows: list[Row] = [[(0, 0.5)], [], [(2, 0.25), (1, 0.125)], [(1, 1.0)]]
    routing = build(rows, 2, 3)
    assert same(routing.rows(slice(1, 3)), build(rows[1:3], 2, 3))
    assert same(routing.rows(slice(4, None)), build([], 2, 3))
    assert same(routing.rows(torch.tensor([3, 0, 0])), build([rows[3], rows[0], rows[0]], 2, 3))
    assert same(routing.rows(torch.tensor([True, False, True, False])), build([rows[0], rows[2]], 2, 3))


def test_detach_drops_gradients_and_nothing_else() -> None:
    routing = build([[(0, 0.5), (1, 0.25)], [(1, 1.0)]], 2, 2)
    tracked = replace(routing, weights_TK=routing.weights_TK.clone().requires_grad_() * 1)
    assert tracked.weights_TK.requires_grad
    assert not tracked.detach().weights_TK.requires_grad
    assert same(tracked.detach(), routing)


def put(name: str, place: tuple[int, ...], value: float) -> Callable[[Routing], Routing]:
    """A change of one entry of one tensor."""

    def change(routing: Routing) -> Routing:
        tensor: Tensor = getattr(routing, name).clone()
        tensor[place] = value
        changed: dict[str, Any] = {name: tensor}
        return replace(routing, **changed)

    return change


E = 4
BROKEN: dict[str, tuple[Callable[[Routing], Routing], str]] = {
    "weights of another width": (lambda r: replace(r, weights_TK=r.weights_TK[:, :2]), "weights"),
    "k of another length": (lambda r: replace(r, k_T=r.k_T[:1]), "and k"),
    "int32 experts": (lambda r: replace(r, experts_TK=r.experts_TK.int()), "int64 experts"),
    "float64 weights": (lambda r: replace(r, weights_TK=r.weights_TK.double()), "float32 weights"),
    "bfloat16 weights": (lambda r: replace(r, weights_TK=r.weights_TK.bfloat16()), "float32 weights"),
    "int32 k": (lambda r: replace(r, k_T=r.k_T.int()), "int64 k"),
    "k below 0": (put("k_T", (0,), -1), "between 0 and the 3 slots"),
    "k above the width": (put("k_T", (0,), 4), "between 0 and the 3 slots"),
    "k too small for the row": (put("k_T", (0,), 1), "live slots come first"),
    "k too large for the row": (put("k_T", (0,), 3), "live slots come first"),
    "sentinel in a live slot": (put("experts_TK", (0, 0), E), "live slots come first"),
    "negative id in a live slot": (put("experts_TK", (0, 1), -1), "live slots come first"),
    "expert id in a dead slot": (put("experts_TK", (0, 2), 0), "live slots come first"),
    "negative id in a dead slot": (put("experts_TK", (0, 2), -1), "sentinel"),
    "id past the sentinel in a dead slot": (put("experts_TK", (0, 2), E + 1), "sentinel"),
    "weight in a dead slot": (put("weights_TK", (0, 2), 0.1), "0 in a dead slot"),
    "NaN weight": (put("weights_TK", (0, 0), math.nan), "finite"),
    "NaN in a dead slot": (put("weights_TK", (0, 2), math.nan), "finite"),
    "infinite weight": (put("weights_TK", (1, 0), math.inf), "finite"),
    "an expert twice": (put("experts_TK", (0, 1), 3), "at most once"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_finds_every_broken_promise(name: str) -> None:
    whole = build([[(3, 0.5), (1, 0.25)], [(0, 1.0)]], 3, E)
    whole.check()
    change, sentence = BROKEN[name]
    with pytest.raises(ValueError, match=sentence):
        change(whole).check()


@given(ragged(), ragged())
@settings(deadline=None, max_examples=30)
def test_a_recorder_keeps_every_pass_of_every_layer(
    first: tuple[list[Row], int, int], second: tuple[list[Row], int, int]
) -> None:
    recorder, other = RoutingRecorder(2), RoutingRecorder(2)
    probes = Probes(recorder, other, Probe())
    for rows, width, _ in (first, second, first):
        for layer in (0, 1):
            probes.routed(layer, build(rows[layer:], width, 9), torch.zeros(len(rows[layer:]), 9))
    widest = max(first[1], second[1])
    for seen in (recorder, other):
        for layer, routing in enumerate(seen.routings()):
            rows = first[0][layer:] + second[0][layer:] + first[0][layer:]
            assert same(routing, build(rows, widest, 9))
