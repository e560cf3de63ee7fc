"""The benchmarks' own items: what eval makes of them equals a plain loop, whatever the chunks, order and interruptions.

The benchmarks' files are beside the checkout or nowhere. `pytest -m slow` takes a hundred items of each task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import WITHOUT_KERNELS

import minimoe
from minimoe.engine import Engine
from minimoe.evaluate.log import Log
from minimoe.evaluate.results import choose
from minimoe.evaluate.run import Benchmark, evaluate, prepare, settings
from minimoe.evaluate.tasks import TASKS, RequestSet
from minimoe.routers.top_k import TopK

BENCH = Path(__file__).parents[2] / "shared/data/bench"
COUNTS = [pytest.param(4, id="few"), pytest.param(100, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
pytestmark = pytest.mark.skipif(not BENCH.is_dir(), reason="the benchmarks' own files are not beside the checkout")


@pytest.fixture(scope="module")
def benchmarks() -> dict[str, Benchmark]:
    return {name: prepare(task, BENCH) for name, task in TASKS.items()}


@pytest.fixture(scope="module")
def exact() -> Engine:
    return minimoe.load("tiny", dtype="float32")


@pytest.fixture(scope="module")
def shipped() -> Engine:
    return minimoe.load("tiny")


Records = dict[str, Any]


def records(engine: Engine, benchmark: Benchmark, path: Path | None = None, **options: Any) -> Records:
    """What the log has of each item at the end."""
    with Log(path, settings(engine, 0)) as log:
        evaluate(engine, [benchmark], {"top_k": TopK()}, log, **options)
        keys = [(benchmark.task.name, "top_k", item.id, item.digest()) for item in benchmark.items]
        return {key[2]: dict(log.find(*key) or {}) for key in keys}


def stopped_after(pieces: int) -> Callable[..., None]:
    def ran(*_: Any) -> None:
        nonlocal pieces
        pieces -= 1
        if not pieces:
            raise KeyboardInterrupt

    return ran


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", TASKS)
def test_scores_are_those_of_a_plain_loop(
    exact: Engine, benchmarks: dict[str, Benchmark], name: str, count: int
) -> None:
    """Item by item and choice by choice, each in a pass of its own without a cache.

    In float32 every choice is the same and every log-probability to rounding. In bfloat16 two correct ways to compute
    one number are further apart than that; there `test_..._change_no_bit` says what holds exactly.
    """
    benchmark = replace(benchmarks[name], items=benchmarks[name].items[:count])
    found = records(exact, benchmark)
    for item in benchmark.items:
        assert isinstance(item, RequestSet)
        pairs = zip(item.contexts(), item.continuations, strict=True)
        plain = [exact.score(*pair).logprob for pair in pairs]
        assert found[item.id]["logprobs"] == pytest.approx(plain, abs=1e-4)
        assert benchmark.normaliser is not None
        assert choose(item, found[item.id], benchmark.normaliser) == choose(
            item, {"logprobs": plain}, benchmark.normaliser
        )


@WITHOUT_KERNELS
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", TASKS)
def test_one_at_a_time_in_any_order_and_interrupted_change_no_bit(
    shipped: Engine, benchmarks: dict[str, Benchmark], name: str, count: int, tmp_path: Path
) -> None:
    benchmark = replace(benchmarks[name], items=benchmarks[name].items[:count])
    whole = records(shipped, benchmark)
    turned = replace(benchmark, items=list(reversed(benchmark.items)))
    assert records(shipped, turned, chunk=1) == whole
    path = tmp_path / "items.jsonl"
    with pytest.raises(KeyboardInterrupt):
        records(shipped, turned, path, chunk=1, ran=stopped_after(2))
    assert records(shipped, benchmark, path, chunk=500) == whole
