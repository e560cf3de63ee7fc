"""How long a checkpoint takes to load when it lies in the page cache, and how much memory that needs.

    python -m bench.loading                        # on the synthetic checkpoint, written first if need be
    python -m bench.loading --model DIR --repeats 5 --save

Each repetition is a process of its own, which imports and reads the files through first; neither is timed.
An engine that maps its files puts off reading them, so the time up to the logits of a first token is given too. Peak
memory is the process's resident set (VmHWM), mapped file pages, interpreter and libraries included; what was resident
before loading is listed beside it, and the part that is no file's (RssAnon), which the system cannot drop.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from bench.engines import ENGINES
from bench.report import Spread, at_least_one, machine, publish, table
from bench.synthetic import DEFAULT_GATE_SCALE, DEFAULT_LAYERS, Recipe, default_folder, write
from bench.worker import ROOT, EngineFailed, read_through
from minimoe.errors import InputError

MAX_LOAD_SECONDS = 2.0
MAX_PEAK_OF_FILE = 1.15
MAX_ANONYMOUS_BYTES = 1.5e9
FIRST_TOKEN_BAR = 10.0  # times as fast as transformers


@dataclass(frozen=True, slots=True)
class Loading:
    """One process that loaded a model and ran one token.

    Attributes:
        load, first_token: seconds from the end of the imports.
        baseline, peak: resident bytes before loading, and the most there ever were.
        anonymous: the most of them that were no file's, as seen every few milliseconds.
    """

    load: float
    first_token: float
    baseline: int
    peak: int
    anonymous: int


def load_once(engine: str, folder: Path, threads: int) -> Loading:
    """Load in this process. For a fresh process only: a peak is never forgotten."""
    ENGINES[engine].prepare()
    read_through(ENGINES[engine].files(folder))
    baseline = resident_bytes("VmHWM")
    with AnonymousPeak() as anonymous:
        start = time.perf_counter()
        loaded = ENGINES[engine](folder, threads)
        middle = time.perf_counter()
        with torch.inference_mode():
            loaded.begin(loaded.variants[0], 1, 1)
            loaded.feed([[0]])
        end = time.perf_counter()
    return Loading(middle - start, end - start, baseline, resident_bytes("VmHWM"), anonymous.bytes)


class AnonymousPeak(threading.Thread):
    """The most resident bytes of this process that belong to no file, looked at every few milliseconds meanwhile."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._over = threading.Event()

    def run(self) -> None:
        while True:
            over = self._over.wait(0.005)
            self.bytes = max(self.bytes, resident_bytes("RssAnon"))
            if over:
                return

    def __enter__(self) -> AnonymousPeak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def resident_bytes(which: str) -> int:
    """A count of resident memory of this process as Linux keeps it: VmHWM, the most ever, or RssAnon, no file's now."""
    found = re.search(rf"^{which}:\s+(\d+) kB$", Path("/proc/self/status").read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {which}; this benchmark needs Linux.")
    return int(found[1]) * 1024


def load_in_child(engine: str, folder: Path, threads: int) -> Loading:
    """Load in a fresh process.

    Raises:
        EngineFailed: the engine is not installed or could not load the model; the message is its last words.
    """
    command = [sys.executable, "-W", "ignore", "-m", "bench.loading", "--child", engine]
    command += ["--model", str(folder.resolve()), "--threads", str(threads)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if child.returncode:
        raise EngineFailed(f"{engine}: {(child.stderr.strip() or 'no message').splitlines()[-1]}")
    return Loading(**json.loads(child.stdout.splitlines()[-1]))


def measure(
    folder: Path, threads: int, repeats: int, engines: Sequence[str]
) -> tuple[dict[str, list[Loading]], dict[str, str]]:
    """Loadings by engine, in turns, and why engines were skipped."""
    loadings: defaultdict[str, list[Loading]] = defaultdict(list)
    skipped: dict[str, str] = {}
    for _ in track(range(repeats), "Loading", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        for engine in engines:
            if engine not in skipped:
                try:
                    run = load_in_child(engine, folder, threads)
                except EngineFailed as error:
                    skipped[engine] = str(error)
                else:
                    loadings[engine].append(run)
    return dict(loadings), skipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="a folder; by default the synthetic checkpoint of bench.synthetic")
    parser.add_argument("--layers", type=at_least_one, default=DEFAULT_LAYERS, help="of it; 16 is the whole model")
    parser.add_argument("--repeats", type=at_least_one, default=5, help="loads of each engine")
    parser.add_argument("--threads", type=at_least_one, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.model or default_folder(arguments.layers, DEFAULT_GATE_SCALE)
    if arguments.child:
        print(json.dumps(asdict(load_once(arguments.child, folder, arguments.threads))))
        return
    about = machine(arguments.threads)
    try:
        if arguments.model is None:
            write(folder, Recipe(changes={"num_hidden_layers": arguments.layers}))
    except InputError as error:
        parser.error(str(error))
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder.")
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    loadings, skipped = measure(folder, arguments.threads, arguments.repeats, list(ENGINES))
    figures = {
        engine: {
            "load_seconds": Spread.of([loading.load for loading in runs]),
            "first_token_seconds": Spread.of([loading.first_token for loading in runs]),
            "baseline_bytes": Spread.of([loading.baseline for loading in runs]),
            "anonymous_bytes": Spread.of([loading.anonymous for loading in runs]),
            "peak_of_file": Spread.of([loading.peak / file_bytes for loading in runs]),
        }
        for engine, runs in loadings.items()
    }
    rows = [
        [
            engine,
            figure["load_seconds"].text(digits=2),
            figure["first_token_seconds"].text(digits=2),
            figure["baseline_bytes"].text(1e-9, 2),
            figure["anonymous_bytes"].text(1e-9, 2),
            figure["peak_of_file"].text(digits=2),
        ]
        for engine, figure in figures.items()
    ]
    headers = ["engine", "load s", "first token after s", "before loading GB", "no file's GB", "peak / file size"]
    text = table(headers, rows) + (
        f"\n\nThe files are {file_bytes / 1e9:.2f} GB. "
        f"The bars: load under {MAX_LOAD_SECONDS} s, peak under {MAX_PEAK_OF_FILE} of the file size, of it no file's "
        f"{MAX_ANONYMOUS_BYTES / 1e9} GB. Model: {folder.name}."
    )
    text += "".join(f"\nSkipped {reason}" for reason in skipped.values())
    bars = {"load_seconds": MAX_LOAD_SECONDS, "peak_of_file": MAX_PEAK_OF_FILE, "anonymous_bytes": MAX_ANONYMOUS_BYTES}
    result = {"machine": about, "model": folder.name, "file_bytes": file_bytes, "bars": bars}
    name = f"loading-{folder.name}" if arguments.model else f"loading-{arguments.layers}-layers"
    publish(name, text, {**result, "figures": figures, "skipped": skipped}, arguments.save)


if __name__ == "__main__":
    main()
