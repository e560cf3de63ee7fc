"""Engines that take turns on one checkpoint, with the same random tokens and threads.

Before anything is timed the engines' logits are compared: a wrong engine is not fast. Then every engine takes its turn
in every round, so that whatever else the machine does meets all of them. Tokens are new in each round: experts that
were just used would otherwise be read from the processor's cache.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from bench.engines import ENGINES
from bench.limits import READ_BYTES, Reading
from bench.report import Spread
from bench.worker import EngineFailed, Task, Worker, open_worker
from minimoe.errors import InputError

OURS = "minimoe"
READINGS = 3  # of the read bandwidth before and after everything that is timed
WARM_TOKENS = 512  # of a prompt that uses every expert
# Measured on small synthetic models of 4 and 16 layers: bfloat16 keeps correct engines 0.01 and 0.02 apart; 7 experts
# for 8, or another RoPE base, cost 0.05 and more, renormalised router weights 0.5. (The median, as a router's near tie
# that falls the other way costs more on single tokens.)
MAX_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class Work:
    """What every engine does in a round, in tokens: prompts of so many sequences, then passes of one token of each.

    Without new tokens the prompts are timed, else what comes after them.

    Attributes:
        times: how often in a turn, spread over it: what is over within seconds may meet memory at its fastest or not.
    """

    sequences: int
    prompt: int
    new: int = 0
    times: int = 1

    @property
    def timed_tokens(self) -> int:
        return self.sequences * (self.new or self.prompt)


Speeds = Mapping[str, Mapping[str, Spread]]  # tokens per second, by work and by contender ("transformers eager")


class Comparison(NamedTuple):
    """What was measured.

    Attributes:
        speeds: tokens per second.
        paces: the same over the read bandwidth right before and after, in tokens per byte: what other guests leave of a
            machine's memory changes from one minute to the next.
        errors: the distance of every contender's logits from this engine's first variant.
        skipped: why engines were skipped.
    """

    speeds: Speeds
    paces: Speeds
    errors: dict[str, float]
    skipped: dict[str, str]


class Seats:
    """Opens engines' workers, ready and warm: all at once if memory holds that many models, else one at a time."""

    def __init__(self, folder: Path, threads: int, vocab_size: int, stack: ExitStack | None) -> None:
        self._folder, self._threads, self._vocab_size = folder, threads, vocab_size
        self._stack = stack  # keeps workers open; None to close each after its turn
        self._open: dict[str, Worker] = {}

    @contextmanager
    def worker(self, engine: str) -> Iterator[Worker]:
        with ExitStack() as turn:
            if engine not in self._open:
                opened = (self._stack or turn).enter_context(open_worker(engine, self._folder, self._threads))
                self._warm(opened)
                if self._stack is None:
                    yield opened
                    return
                self._open[engine] = opened
            yield self._open[engine]

    def _warm(self, worker: Worker) -> None:
        """Every expert's pages into the process, by a prompt that uses them all."""
        tokens = Tokens(self._vocab_size, seed=-1)
        for variant in worker.variants:
            length = min(WARM_TOKENS, worker.most_tokens.get(variant, WARM_TOKENS))
            worker.run(Task(variant, tokens.take(1, length), tokens.take(2, 1)))


class Tokens:
    """Random token ids."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, rows: int, columns: int) -> list[list[int]]:
        return torch.randint(self._vocab_size, (rows, columns), generator=self._generator).tolist()


def compare(
    folder: Path,
    threads: int,
    rounds: int,
    works: Mapping[str, Work],
    engines: Sequence[str] = ENGINES,
) -> Comparison:
    """Every engine's turn in every round.

    Raises:
        EngineFailed: this engine cannot run the model, or a contender's logits are not those of the others.
        InputError: not a model folder.
    """
    vocab_size = _vocab_size(folder)
    speeds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in works}
    paces: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in works}
    reading = Reading(threads, READ_BYTES // 4)
    with ExitStack() as stack:
        seats = Seats(folder, threads, vocab_size, stack if _fits_together(folder, len(engines)) else None)
        errors, skipped = _check(seats, engines, Tokens(vocab_size, seed=0))
        present = [engine for engine in engines if engine not in skipped]
        for turn in range(rounds):
            tokens = Tokens(vocab_size, seed=1 + turn)
            tasks = {
                name: (work, tokens.take(work.sequences, work.prompt), tokens.take(work.new, work.sequences))
                for name, work in works.items()
            }
            first = turn % len(present)
            for engine in present[first:] + present[:first]:
                if engine in skipped:
                    continue
                print(f"Round {turn + 1} of {rounds}: {engine}.", file=sys.stderr)
                try:
                    for name, who, speed, bandwidth in _turn(seats, engine, tasks, reading):
                        print(f"    {name}, {who}: {speed:.1f} tokens/s", file=sys.stderr)
                        speeds[name][who].append(speed)
                        paces[name][who].append(speed / bandwidth)
                except EngineFailed as error:  # a peer that dies takes no figures with it
                    if engine == OURS:
                        raise
                    skipped[engine] = f"{error}, from round {turn + 1} on"
    spreads, paced = (
        {name: {who: Spread.of(values) for who, values in by.items()} for name, by in figures.items()}
        for figures in (speeds, paces)
    )
    return Comparison(spreads, paced, errors, skipped)


def _turn(
    seats: Seats,
    engine: str,
    tasks: Mapping[str, tuple[Work, list[list[int]], list[list[int]]]],
    reading: Callable[[], float],
) -> Iterator[tuple[str, str, float, float]]:
    """Everything one engine can do, as (work, contender, tokens per second, bytes that were readable per second)."""
    with seats.worker(engine) as worker:
        repeated = range(max(work.times for work, _, _ in tasks.values()))
        again = [(name, task) for time in repeated for name, task in tasks.items() if time < task[0].times]
        for name, (work, prompts, steps) in again:
            for variant in _able(worker, work):
                before = [reading() for _ in range(READINGS)]
                times = worker.run(Task(variant, prompts, steps))
                bandwidth = Spread.of(before + [reading() for _ in range(READINGS)]).median
                seconds = times.decode if work.new else times.prefill
                yield name, f"{engine} {variant}", work.timed_tokens / seconds, bandwidth


def _able(worker: Worker, work: Work) -> list[str]:
    """The variants that can do a work at all."""
    if work.sequences > worker.most_sequences:
        return []
    tokens = work.sequences * work.prompt
    return [variant for variant in worker.variants if tokens <= worker.most_tokens.get(variant, tokens)]


def _check(seats: Seats, engines: Sequence[str], tokens: Tokens) -> tuple[dict[str, float], dict[str, str]]:
    """The distance of every contender's logits from this engine's, and the engines that are not to be had."""
    prompts, steps = tokens.take(1, 8), tokens.take(32, 1)
    logits_PV: dict[str, torch.Tensor] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place:
        for engine in engines:
            print(f"Checking the logits of {engine}.", file=sys.stderr)
            try:
                with seats.worker(engine) as worker:
                    for variant in worker.variants:
                        file = Path(place) / f"{engine}-{variant}.pt"
                        worker.run(Task(variant, prompts, steps, str(file)))
                        logits_PV[f"{engine} {variant}"] = torch.load(file)[:, 0]
            except EngineFailed as error:
                if engine == OURS:
                    raise
                skipped[engine] = str(error)
    reference_PV = next(iter(logits_PV.values()))
    errors = {name: distance(values_PV, reference_PV) for name, values_PV in logits_PV.items()}
    wrong = [f"{name} by {error:.3f}" for name, error in errors.items() if not error <= MAX_ERROR]
    if wrong:
        raise EngineFailed(
            f"the logits differ from those of {next(iter(logits_PV))} by more than {MAX_ERROR}, so nothing was timed: "
            f"{', '.join(wrong)}."
        )
    return errors, skipped


def distance(a_PV: torch.Tensor, b_PV: torch.Tensor) -> float:
    """|a - b| / |b| at each of P positions, L2 over the vocabulary; the median over the positions."""
    return float(((a_PV - b_PV).norm(dim=1) / b_PV.norm(dim=1)).median())


def _vocab_size(folder: Path) -> int:
    try:
        return int(json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder} is not a model folder with a config.json ({error}).") from error


def _fits_together(folder: Path, models: int) -> bool:
    """Whether memory holds that many copies of the weights, and half as much again for loading the last one."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("utf-8"))
    return available is not None and (models + 0.5) * size < int(available[1]) * 1024
