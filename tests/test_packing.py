"""Continuations scored together equal those scored one by one, whatever else is in the pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from fixtures import RUNNABLE, WITHOUT_KERNELS
from hypothesis import given, settings
from hypothesis import strategies as st

import minimoe
from minimoe.engine import Engine
from minimoe.errors import NumericalError
from minimoe.packing import Branch, Group, chunks, room, score_alone, score_together, trunk
from minimoe.probe import Probe, RoutingRecorder
from minimoe.routers.spec import parse_router
from minimoe.scoring import score

TOKEN = st.integers(0, 300)


@st.composite
def groups(draw: st.DrawFn) -> list[list[Branch]]:
    """Groups whose contexts are alike, or alike at the beginning only, or not at all."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        common = draw(st.lists(TOKEN, max_size=12))
        branches: list[Branch] = []
        for _ in range(draw(st.integers(1, 5))):
            own = draw(st.lists(TOKEN, min_size=0 if common else 1, max_size=draw(st.sampled_from([0, 0, 3])) or 1))
            context = [*common, *own[: 3 if common else None]]
            branches.append((context or [7], draw(st.lists(TOKEN, min_size=1, max_size=5))))
        made.append(branches)
    return made


@pytest.fixture(scope="module", params=RUNNABLE)
def engine(checkpoint: Callable[..., Path], request: pytest.FixtureRequest) -> Engine:
    return minimoe.load(checkpoint("top8_of_64"), router="elbow", backend=request.param)


@pytest.fixture(scope="module")
def narrow(checkpoint: Callable[..., Path]) -> Engine:
    return minimoe.load(checkpoint("top8_of_64", dtype=torch.bfloat16), router="elbow", backend="native")


@settings(max_examples=25)
@given(made=groups())
def test_together_is_as_alone(engine: Engine, made: list[list[Branch]]) -> None:
    together = score_together(engine.model, engine.router, made)
    for branches, group in zip(made, together, strict=True):
        for (context, ids), found in zip(branches, group.scores, strict=True):
            alone = score(engine.model, engine.router, context, ids, None, 0)
            assert found.logprobs == pytest.approx(alone.logprobs, abs=2e-5)
            assert (found.tokens, found.greedy) == (alone.tokens, alone.greedy)
            assert found.logprob == sum(found.logprobs)


@WITHOUT_KERNELS
@settings(max_examples=25)
@given(made=groups(), data=st.data())
def test_what_else_is_in_the_pass_changes_no_bit(narrow: Engine, made: list[list[Branch]], data: st.DataObject) -> None:
    together = score_together(narrow.model, narrow.router, made)
    order = data.draw(st.permutations(range(len(made))))
    cut = data.draw(st.integers(0, len(made)))
    for part in (order[:cut], order[cut:]):
        assert score_together(narrow.model, narrow.router, [made[i] for i in part]) == [together[i] for i in part]


def fed(branches: Sequence[Branch]) -> list[list[int]]:
    return [[*context, *ids][:-1] for context, ids in branches]


@settings(max_examples=50)
@given(made=groups())
def test_nothing_in_common_runs_twice(made: list[list[Branch]]) -> None:
    for branches in made:
        shared, sequences = trunk(branches), fed(branches)
        assert len({tuple(ids[:shared]) for ids in sequences}) == 1
        longer = {tuple(ids[: shared + 1]) for ids in sequences}
        assert len(longer) > 1 or min(map(len, sequences)) == shared
        assert room(branches) == max(map(len, sequences))


def test_tokens_and_their_experts_are_counted_for_each_group(engine: Engine) -> None:
    made: list[list[Branch]] = [
        [([1, 2, 3], [4, 5, 6]), ([1, 2, 3], [4, 7])],  # 1 2 3 4 in common, and then 5
        [([9, 8, 7, 6], [5]), ([9, 8, 7, 6], [4])],  # nothing to run after the context
        [([5], [6, 7]), ([4], [6])],  # nothing in common
    ]
    recorder = RoutingRecorder(engine.config.num_layers)
    found = score_together(engine.model, engine.router, made, recorder)
    assert [group.tokens for group in found] == [5, 4, 3]
    assert sum(group.tokens for group in found) == recorder.routings()[0].num_tokens
    assert sum(group.pairs for group in found) == sum(int(routing.k_T.sum()) for routing in recorder.routings())
    for branches, group in zip(made, found, strict=True):
        assert score_together(engine.model, engine.router, [branches])[0].pairs == group.pairs
    assert score_together(engine.model, engine.router, []) == []


class Heads(Probe):
    """Counts the rows whose logits are computed."""

    rows = 0

    def headed(self, rows: int) -> None:
        self.rows += rows


def test_logits_are_computed_once_a_position(engine: Engine) -> None:
    heads = Heads()
    score_together(engine.model, engine.router, [[([1, 2, 3], [letter]) for letter in (4, 5, 6, 7)]], heads)
    assert heads.rows == 1


@pytest.mark.parametrize("spec", ["union:k0=2", "random:k=3", "mixed_k:k=2.5"])
def test_alone_is_the_plain_loop_for_rules_that_look_around_or_draw(engine: Engine, spec: str) -> None:
    router = parse_router(spec)
    branches: list[Branch] = [([1, 2, 3], [4, 5]), ([1, 2, 3], [6])]
    recorder = RoutingRecorder(engine.config.num_layers)
    group = score_alone(engine.model, router, branches, recorder, seed=3)
    assert group.scores == [score(engine.model, router, *branch, None, 3) for branch in branches]
    assert isinstance(group, Group)
    assert group.tokens == 4 + 3
    assert group.pairs == sum(int(routing.k_T.sum()) for routing in recorder.routings())


def test_logits_that_are_not_finite_are_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.model, "head", lambda hidden, probe=None: torch.full((len(hidden), 9), torch.nan))
    with pytest.raises(NumericalError, match="not finite"):
        score_together(engine.model, engine.router, [[([1], [2])]])


@given(st.lists(st.integers(0, 9)), st.integers(1, 20))
def test_chunks_keep_the_order_and_the_limit_and_are_as_few_as_that_allows(sizes: list[int], limit: int) -> None:
    found = list(chunks(sizes, lambda size: size, limit))
    assert [size for part in found for size in part] == sizes
    assert all(part and (sum(part) <= limit or len(part) == 1) for part in found)
    assert all(sum(part) + after[0] > limit for part, after in itertools.pairwise(found))
