"""How soon the command line answers: `--help`, and a whole generation with the embedded model.

    python -m bench.startup --repeats 9 --save

Wall-clock time from the start of a process to its end. One run of each that is not counted comes first: it compiles
bytecode and brings the files into the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from bench.report import Spread, at_least_one, machine, publish, table
from bench.worker import ROOT


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, the most seconds that it may take, and how many tokens it must write (None: it writes none)."""

    arguments: Sequence[str]
    bar: float
    new_tokens: int | None = None

    @property
    def text(self) -> str:
        return " ".join(["minimoe", *self.arguments])


COMMANDS = (
    Command(("--help",), bar=1.0),
    Command(("generate", "--max-new-tokens", "32", "--json"), bar=6.0, new_tokens=32),
)


class CommandFailed(RuntimeError):
    """A command did not do what is to be timed; the message says which and why."""


def wall_seconds(command: Command) -> float:
    """Run a command in a process of its own.

    Raises:
        CommandFailed: it failed, or wrote fewer tokens than it should.
    """
    start = time.perf_counter()
    line = [sys.executable, "-m", "minimoe", *command.arguments]
    process = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if process.returncode:
        last = (process.stderr.strip() or "no message").splitlines()[-1]
        raise CommandFailed(f"{command.text} failed with code {process.returncode}: {last}")
    if command.new_tokens is not None:
        written = len(json.loads(process.stdout)["tokens"])
        if written != command.new_tokens:
            raise CommandFailed(f"{command.text} wrote {written} tokens, so its time says nothing.")
    return seconds


def measure(commands: Sequence[Command], repeats: int) -> dict[str, Spread]:
    """Seconds by command line; the commands take turns."""
    seconds: dict[str, list[float]] = {command.text: [] for command in commands}
    rounds = track(range(repeats + 1), "Starting", console=Console(stderr=True), disable=not sys.stderr.isatty())
    for turn in rounds:
        for command in commands:
            taken = wall_seconds(command)
            if turn > 0:
                seconds[command.text].append(taken)
    return {text: Spread.of(values) for text, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=at_least_one, default=9, help="runs of each command")
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    arguments = parser.parse_args()
    about = machine(len(os.sched_getaffinity(0)))
    try:
        seconds = measure(COMMANDS, arguments.repeats)
    except CommandFailed as error:
        sys.exit(str(error))
    bars = {command.text: command.bar for command in COMMANDS}
    rows = [[text, spread.text(digits=2), f"{bars[text]:.0f}"] for text, spread in seconds.items()]
    result = {"machine": about, "bars": bars, "seconds": seconds}
    publish("startup", table(["command", "wall s", "bar s"], rows), result, arguments.save)


if __name__ == "__main__":
    main()
