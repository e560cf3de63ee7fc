"""How long a study will take, from short runs of the very work that is left."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minimoe.evaluate.log import Log
from minimoe.evaluate.run import Benchmark, decides_alone, evaluate
from minimoe.journal import Journal
from minimoe.paper.figures import scatter
from minimoe.paper.measures import block_latency
from minimoe.paper.report import svg
from minimoe.paper.study import NEW, Progress, Study, mean_k, read_part
from minimoe.routers import Router
from minimoe.routers.top_k import TopK

TOGETHER = 8000  # characters of prompts in a probe of passes over many items
ALONE = 0.4  # seconds, about, of a benchmark's probe by rules that have every pass to themselves
FIGURES = 10  # of the report
TYPICAL_K = 7.5  # before the elbow's own is known


def seconds(study: Study) -> float:
    """About how long what is not yet done will take; 0 if nothing is left."""
    left = study.left()
    if not left:
        return 0.0
    rates = _Rates(study)
    parts = {
        "samples": lambda: 0.0,
        "prompts": lambda: 0.0,
        "routers": lambda: _analysis(study, rates, study.benchmarks.groups, NEW),
        "subjects": lambda: _subjects(study, rates),
        "latency": lambda: _latency(study),
        "scores": lambda: _scores(study, rates),
    }
    return sum(parts[name]() for name in left) + FIGURES * _drawing()


def _drawing() -> float:
    """Seconds of a figure, but for the library's first one."""

    def one() -> str:
        return svg(scatter([(0.0, 0.0)] * 500, "", ""))

    one()
    return _timed(one)


class _Rates:
    """What items cost, measured once for each protocol."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._together: dict[str, float] = {}

    def together(self, protocol: str) -> float:
        """Seconds a character of prompts, by rules that many items are run together for."""
        if protocol not in self._together:
            of = [benchmark for benchmark in self.study.scored if benchmark.protocol == protocol]
            some = [_some(benchmark, TOGETHER // len(of)) for benchmark in of]
            self._run(some, TopK())
            self._together[protocol] = _timed(lambda: self._run(some, TopK())) / sum(map(_characters, some))
        return self._together[protocol]

    def alone(self, benchmark: Benchmark, rule: Router) -> float:
        """Seconds an item, by a rule that has every pass to itself."""
        first = replace(benchmark, items=benchmark.items[:1])
        self._run([first], rule)
        one = _timed(lambda: self._run([first], rule))
        some = replace(benchmark, items=_spread(benchmark.items, min(max(1, int(ALONE / one)), 16)))
        return _timed(lambda: self._run([some], rule)) / len(some.items)

    def _run(self, benchmarks: Sequence[Benchmark], rule: Router) -> None:
        with Log(None, {}) as log:
            evaluate(self.study.engine, benchmarks, {"": rule}, log)


def _analysis(study: Study, rates: _Rates, groups: Any, new_tokens: int) -> float:
    """One pass over all prompts, and what an analysis costs whatever it reads."""
    first = next(iter(groups))
    one = {name: part[:1] if name == first else [] for name, part in groups.items()}
    with tempfile.TemporaryDirectory() as folder:
        fixed = _timed(lambda: study.analyse(Path(folder) / "probe.npz", one, new_tokens, Progress()))
    return fixed + rates.together("letters") * sum(item.characters for part in groups.values() for item in part)


def _subjects(study: Study, rates: _Rates) -> float:
    groups = study.subject_groups()
    return 0.0 if groups is None else _analysis(study, rates, groups, 0)


def _latency(study: Study) -> float:
    """From a round of a single arm."""
    groups, arms = study.benchmarks.groups, study.arms(TYPICAL_K)
    prompts = study.prompts({name: _spread(part, study.batch) for name, part in groups.items()})

    def one() -> Any:
        return block_latency(study.engine, {"": TopK()}, prompts, 1, study.batch, study.seed, Journal(None, ""))

    return _timed(one) * study.rounds * len(arms)


def _scores(study: Study, rates: _Rates) -> float:
    """What the log lacks, by how each rule runs it."""
    routers = read_part(study.parts / "routers.json", study.identity)
    found = {"routers": routers}
    log = Log(None, {}) if routers is None else study.log(found)
    total = 0.0
    with log:
        for benchmarks, rules in study.rules(TYPICAL_K if routers is None else mean_k(found)):
            for name, rule in rules.items():
                single = decides_alone(study.engine, rule)
                for benchmark in benchmarks:
                    task = benchmark.task.name
                    lacking = [i for i in benchmark.items if log.find(task, name, i.id, i.digest()) is None]
                    if single:
                        rate = rates.together(benchmark.protocol) if lacking else 0.0
                        total += rate * sum(item.characters for item in lacking)
                    elif lacking:
                        total += rates.alone(benchmark, rule) * len(lacking)
    return total


def _some(benchmark: Benchmark, characters: int) -> Benchmark:
    """Items from all over a benchmark, about so many characters together."""
    mean = _characters(benchmark) / len(benchmark.items)
    return replace(benchmark, items=_spread(benchmark.items, max(1, round(characters / mean))))


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """So many items at even distances, or all."""
    return [items[place * len(items) // count] for place in range(count)] if count < len(items) else list(items)


def _characters(benchmark: Benchmark) -> int:
    return sum(item.characters for item in benchmark.items)


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
