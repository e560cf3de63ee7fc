"""How fast this engine is beside others on the same checkpoint, in bfloat16, with the same threads and tokens.

    python -m bench.peers                          # on the synthetic checkpoint, written first if need be
    python -m bench.peers --model DIR --rounds 9 --save

Before anything is timed the engines' logits are compared: a wrong engine is not fast. Then every engine takes its turn
in every round, so that whatever else the machine does meets all of them. All engines get the same random tokens, new
ones in each round: experts that were just used would otherwise be read from the processor's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from bench.report import Spread, at_least_one, machine, publish, table
from bench.synthetic import DEFAULT_GATE_SCALE, DEFAULT_LAYERS, Recipe, default_folder, write
from bench.worker import EngineFailed, Task, Worker, open_worker, read_through
from minimoe.errors import InputError

OURS = "minimoe"
ENGINES = (OURS, "transformers")
# Measured on small synthetic models of 4 and 16 layers: bfloat16 keeps correct engines 0.01 and 0.02 apart; 7 experts
# for 8, or another RoPE base, cost 0.05 and more, renormalised router weights 0.5. (The median, as a router's near tie
# that falls the other way costs more on single tokens.)
MAX_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class Work:
    """What every engine does in a round: prefill a prompt, then decode after a short one. Counts of tokens."""

    prefill: int = 512
    prompt: int = 8
    new: int = 32


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of one contender, an engine and a way to run its experts.

    Attributes:
        error: relative L2 distance of its logits from this engine's first variant, median over the positions.
        decode, prefill: None for prefill if the contender is for decoding only.
    """

    error: float
    decode: Spread
    prefill: Spread | None


class Seats:
    """Opens engines' workers, ready and warm: all at once if memory holds that many models, else one at a time."""

    def __init__(self, folder: Path, threads: int, work: Work, vocab_size: int, stack: ExitStack | None) -> None:
        self._folder, self._threads, self._work, self._vocab_size = folder, threads, work, vocab_size
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
        """The files into memory, and every expert's pages into the process: by a prompt that uses them all."""
        read_through(self._folder)
        tokens = Tokens(self._vocab_size, seed=-1)
        for variant in worker.variants:
            length = self._work.prompt if variant in worker.decode_only else self._work.prefill
            worker.run(Task(variant, tokens.take(length), tokens.take(2)))


class Tokens:
    """Random token ids."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, count: int) -> list[int]:
        return torch.randint(self._vocab_size, (count,), generator=self._generator).tolist()


def compare(
    folder: Path, threads: int, rounds: int, work: Work = Work(), engines: Sequence[str] = ENGINES
) -> tuple[dict[str, Speeds], dict[str, str]]:
    """Speeds by contender ("transformers eager"), and why engines were skipped, by engine.

    Raises:
        EngineFailed: this engine cannot run the model, or a contender's logits are not those of the others.
        InputError: not a model folder.
    """
    vocab_size = _vocab_size(folder)
    with ExitStack() as stack:
        seats = Seats(folder, threads, work, vocab_size, stack if _fits_together(folder, len(engines)) else None)
        errors, skipped = _check(seats, engines, Tokens(vocab_size, seed=0), work)
        present = [engine for engine in engines if engine not in skipped]
        decode, prefill = defaultdict(list), defaultdict(list)
        for turn in track(range(rounds), "Measuring", console=Console(stderr=True), disable=not sys.stderr.isatty()):
            tokens = Tokens(vocab_size, seed=1 + turn)
            long, short, new = tokens.take(work.prefill), tokens.take(work.prompt), tokens.take(work.new)
            first = turn % len(present)
            for engine in present[first:] + present[:first]:
                with seats.worker(engine) as worker:
                    for variant in worker.variants:
                        name = f"{engine} {variant}"
                        decode[name].append(work.new / worker.run(Task(variant, short, new)).decode)
                        if variant not in worker.decode_only:
                            prefill[name].append(work.prefill / worker.run(Task(variant, long, [])).prefill)
    speeds = {
        name: Speeds(error, Spread.of(decode[name]), Spread.of(prefill[name]) if name in prefill else None)
        for name, error in errors.items()
    }
    return speeds, skipped


def _check(seats: Seats, engines: Sequence[str], tokens: Tokens, work: Work) -> tuple[dict[str, float], dict[str, str]]:
    """The distance of every contender's logits from this engine's, and the engines that are not to be had."""
    prompt, ids = tokens.take(work.prompt), tokens.take(work.new)
    logits_PV: dict[str, torch.Tensor] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place:
        for engine in engines:
            try:
                with seats.worker(engine) as worker:
                    for variant in worker.variants:
                        file = Path(place) / f"{engine}-{variant}.pt"
                        worker.run(Task(variant, prompt, ids, str(file)))
                        logits_PV[f"{engine} {variant}"] = torch.load(file)
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


def ratios(speeds: Mapping[str, Spread]) -> dict[str, float]:
    """Speed of each of this engine's variants over that of the fastest peer, by medians; above 1 is faster.

    Empty without a peer.
    """
    peers = [spread.median for name, spread in speeds.items() if name.split()[0] != OURS]
    return {name: spread.median / max(peers) for name, spread in speeds.items() if peers and name.split()[0] == OURS}


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


def _report(speeds: Mapping[str, Speeds], skipped: Mapping[str, str]) -> tuple[str, dict[str, dict[str, float]]]:
    by_phase = {
        "decode": {name: speed.decode for name, speed in speeds.items()},
        "prefill": {name: speed.prefill for name, speed in speeds.items() if speed.prefill},
    }
    faster = {phase: ratios(spreads) for phase, spreads in by_phase.items()}
    rows = [
        [name, f"{speed.error:.4f}", speed.decode.text(), speed.prefill.text() if speed.prefill else "not run"]
        for name, speed in speeds.items()
    ]
    lines = [table(["engine", "logits off by", "decode tokens/s", "prefill tokens/s"], rows), ""]
    for phase, name in itertools.chain.from_iterable(((phase, name) for name in faster[phase]) for phase in faster):
        lines.append(f"{phase}: {name} runs at {faster[phase][name]:.2f} times the speed of the best peer.")
    lines += [f"Skipped {reason}" for reason in skipped.values()]
    return "\n".join(lines), faster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="a folder; by default the synthetic checkpoint of bench.synthetic")
    parser.add_argument("--rounds", type=at_least_one, default=7, help="turns of each engine")
    parser.add_argument("--threads", type=at_least_one, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    arguments = parser.parse_args()
    about = machine(arguments.threads)
    folder = arguments.model or default_folder(DEFAULT_LAYERS, DEFAULT_GATE_SCALE)
    work = Work()
    try:
        if arguments.model is None:
            write(folder, Recipe())
        speeds, skipped = compare(folder, arguments.threads, arguments.rounds, work)
    except InputError as error:
        parser.error(str(error))
    except EngineFailed as error:
        sys.exit(str(error))
    text, faster = _report(speeds, skipped)
    checkpoint = json.loads((folder / "config.json").read_text("utf-8"))
    result = {
        "machine": about,
        "model": {"name": folder.name, "layers": checkpoint["num_hidden_layers"], "dtype": "bfloat16"},
        "work": work,
        "speeds": speeds,
        "faster": faster,
        "skipped": skipped,
    }
    publish("peers", text, result, arguments.save)


if __name__ == "__main__":
    main()
