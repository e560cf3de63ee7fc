"""The benchmark: what is run, in which order, and the arithmetic of its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import minimoe
from minimoe import benchmark
from minimoe.benchmark import TG_PROMPT, Arm, Meter, Result, Work, measure
from minimoe.engine import Engine
from minimoe.errors import InputError, NumericalError
from minimoe.routers import RouterContext, TopK
from minimoe.routing import Routing

LAYERS = 3


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    return minimoe.load(checkpoint("base"))


class Watcher(TopK):
    """A rule that remembers what it was asked, in the first layer: phase, tokens, positions and sequences."""

    seen: list[tuple[str, list[int], list[int], list[int]]]

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        if context.layer == 0:
            self.seen.append(
                (context.phase, context.ids_T.tolist(), context.positions_T.tolist(), context.sequence_T.tolist())
            )
        return super().route(logits_TE, context)


def watch(engine: Engine, name: str = "watched", k: int = 1) -> tuple[Arm, Watcher]:
    rule = Watcher(k=k)
    object.__setattr__(rule, "seen", [])  # the rule is frozen
    return Arm(name, "bucketed", rule, engine.model), rule


@settings(deadline=None)
@given(
    seconds=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9),
    tokens=st.integers(1, 4096),
    batch=st.integers(1, 64),
)
def test_speeds_and_quartiles_are_those_of_numpy(seconds: list[float], tokens: int, batch: int) -> None:
    result = Result(None, Work("pp", tokens, batch), seconds, 1.0)  # type: ignore[arg-type]
    speeds = tokens * batch / np.array(seconds)
    assert result.tokens_per_second == pytest.approx(speeds)
    assert result.quartiles == pytest.approx(np.percentile(speeds, [25, 50, 75]))


def test_arms_take_turns_and_the_first_turn_is_not_counted(engine: Engine) -> None:
    arms = [watch(engine, name)[0] for name in ("a", "b")]
    works = [Work("pp", 4, 1), Work("tg", 2, 2)]
    order: list[tuple[str, str]] = []
    results = measure(arms, works, vocabulary=300, repetitions=3, ran=lambda a, w: order.append((a.router, w.name)))
    assert order == [("a", "pp4"), ("b", "pp4"), ("a", "tg2"), ("b", "tg2")] * 4
    assert [(r.work.name, r.arm.router) for r in results] == [("pp4", "a"), ("pp4", "b"), ("tg2", "a"), ("tg2", "b")]
    assert all(len(r.seconds) == 3 and min(r.seconds) > 0 for r in results)


def test_seconds_are_those_of_the_work(engine: Engine) -> None:
    class Slow(TopK):
        def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
            if context.layer == 0 and context.phase == "decode":
                time.sleep(0.05)
            return super().route(logits_TE, context)

    arm = Arm("slow", "bucketed", Slow(), engine.model)
    prompt, written = measure([arm], [Work("pp", 4, 1), Work("tg", 4, 1)], vocabulary=300, repetitions=2)
    assert min(written.seconds) >= 4 * 0.05
    assert min(prompt.seconds) < min(written.seconds)


def test_a_turn_has_the_same_tokens_for_all_arms_and_new_ones_each_time(engine: Engine) -> None:
    (one, first), (two, second) = watch(engine, k=1), watch(engine, k=2)
    measure([one, two], [Work("pp", 16, 1)], vocabulary=300, repetitions=3)
    assert [ids for _, ids, _, _ in first.seen] == [ids for _, ids, _, _ in second.seen]
    assert len({tuple(ids) for _, ids, _, _ in first.seen}) == 4
    assert all(0 <= i < 300 for _, ids, _, _ in first.seen for i in ids)


@pytest.mark.parametrize("work", [Work("pp", 4, 1), Work("tg", 2, 2)])
def test_broken_weights_have_no_speed(checkpoint: Callable[..., Path], work: Work) -> None:
    engine = minimoe.load(checkpoint("base"))
    engine.model.head_VD[5] = math.inf  # a private mapping: the file stays as it is
    for decoder in (None, engine.decoder):
        arm = Arm("top_k", engine.backend, TopK(), engine.model, decoder)
        with pytest.raises(NumericalError, match=f"{work.name}: the logits are not finite"):
            measure([arm], [work], vocabulary=300, repetitions=1)


def test_seed_decides_the_tokens(engine: Engine) -> None:
    def tokens(seed: int) -> list[list[int]]:
        arm, rule = watch(engine)
        measure([arm], [Work("pp", 8, 2)], vocabulary=300, repetitions=1, seed=seed)
        return [ids for _, ids, _, _ in rule.seen]

    assert tokens(1) == tokens(1) != tokens(2)


def test_tg_takes_single_steps_after_its_prompt(engine: Engine) -> None:
    arm, rule = watch(engine)
    measure([arm], [Work("tg", 3, 2)], vocabulary=300, repetitions=1)
    run = rule.seen[len(rule.seen) // 2 :]
    assert [phase for phase, *_ in run] == ["prefill", "decode", "decode", "decode"]
    assert run[0][2] == [*range(TG_PROMPT)] * 2
    assert [(positions, sequences) for _, _, positions, sequences in run[1:]] == [
        ([TG_PROMPT + i] * 2, [0, 1]) for i in range(3)
    ]


@pytest.mark.parametrize(
    ("limit", "passes"),
    [
        (100, [[(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]]),
        (5, [[(0, i) for i in range(5)], [(0, i) for i in range(5)]]),
        (3, [[(0, 0), (0, 1), (0, 2)], [(0, 0), (0, 1), (0, 2)], [(0, 3), (0, 4)], [(0, 3), (0, 4)]]),
    ],
)
def test_long_prompts_run_in_passes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, limit: int, passes: list[list[tuple[int, int]]]
) -> None:
    monkeypatch.setattr(benchmark, "PREFILL_TOKENS", limit)
    arm, rule = watch(engine)
    measure([arm], [Work("pp", 5, 2)], vocabulary=300, repetitions=1)
    seen = [list(zip(sequences, positions, strict=True)) for _, _, positions, sequences in rule.seen]
    assert seen == passes * 2


def test_mean_k_counts_every_token_and_layer(engine: Engine) -> None:
    class ByLayer(TopK):
        def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
            return TopK(k=context.layer + 1).route(logits_TE, context)

    arm = Arm("by layer", "bucketed", ByLayer(), engine.model)
    for result in measure([arm], [Work("pp", 7, 2), Work("tg", 2, 1)], vocabulary=300, repetitions=2):
        assert result.mean_k == pytest.approx((1 + 2 + 3) / LAYERS)


def test_meter_against_the_recorded_routing(engine: Engine) -> None:
    elbow = minimoe.load(engine.name, router="elbow:cap=8")
    meter = Meter()
    assert meter.mean_k is None
    result = elbow.generate("The fox and the owl", max_new_tokens=6, temperature=0, probe=meter)
    every_k = torch.cat([layer.k_T for layer in result.routing]).double()  # type: ignore[union-attr]
    assert meter.mean_k == pytest.approx(every_k.mean().item())
    assert list(meter.began) == ["prefill", "decode"]
    assert meter.began["prefill"] < meter.began["decode"]


@pytest.mark.parametrize(("work", "length"), [(Work("pp", 129, 1), 129), (Work("tg", 113, 1), 129)])
def test_what_does_not_fit_is_refused_with_both_sizes(engine: Engine, work: Work, length: int) -> None:
    with pytest.raises(InputError, match=rf"{work.name} needs {length} tokens.* 128"):
        measure([watch(engine)[0]], [work], vocabulary=300)


@pytest.mark.parametrize("work", [Work("pp", 128, 1), Work("tg", 112, 1)])
def test_the_whole_context_can_be_measured(engine: Engine, work: Work) -> None:
    (result,) = measure([watch(engine)[0]], [work], vocabulary=300, repetitions=1)
    assert len(result.seconds) == 1
