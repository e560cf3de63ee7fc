"""One engine in a process of its own, which takes turns with the others by a line of JSON each way.

The parent writes a task, the child runs it and answers; a child that has no task sleeps. So two models never share
a process's memory, threads or settings, and their runs can still alternate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Task:
    """Fresh sequences: their prompts in one pass, then token after token of each.

    Attributes:
        variant: how the engine runs its experts.
        prompts: token ids of B prompts of one length.
        steps: the B tokens of each pass after it. They are given, not chosen by the model, so that all engines do the
            same work.
        logits_file: where to save the logits of every pass, float32 [1 + steps, B, V]; None to drop them.
    """

    variant: str
    prompts: Sequence[Sequence[int]]
    steps: Sequence[Sequence[int]]
    logits_file: str | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that the prompt's pass took, and all passes after it together."""

    prefill: float
    decode: float


class EngineFailed(RuntimeError):
    """The child could not start or stopped answering; the message is its last words."""


class Worker:
    """The parent's end.

    Attributes:
        variants, most_tokens, most_sequences: see BenchEngine.

    Raises:
        EngineFailed: the engine is not installed or could not load the model.
    """

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        self.engine = engine
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", engine, str(folder.resolve()), str(threads)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self._receive()
        self.variants: list[str] = hello["variants"]
        self.most_tokens: dict[str, int] = hello["most_tokens"]
        self.most_sequences: int = hello["most_sequences"]

    def run(self, task: Task) -> Times:
        """Give the child its turn and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(task)) + "\n")
        self._process.stdin.flush()
        return Times(**self._receive())

    def close(self) -> None:
        """End the child; its memory is free when this returns."""
        self._process.communicate()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        reply = json.loads(line) if line else {"failed": f"it ended with code {self._process.wait()}"}
        if "failed" in reply:
            self.close()
            raise EngineFailed(f"{self.engine}: {reply['failed']}")
        return reply


@contextmanager
def open_worker(engine: str, folder: Path, threads: int) -> Iterator[Worker]:
    """A Worker that is closed at the end."""
    worker = Worker(engine, folder, threads)
    try:
        yield worker
    finally:
        worker.close()


def read_through(files: Iterable[Path], *, anew: bool = False) -> None:
    """Read files from front to back, so that what follows finds them in the system's page cache.

    Args:
        anew: also what is there already, if nobody has mapped it. What was just written, or driven out and brought back
            where it was used, lies in small pages, from which any engine reads more slowly than from large ones.
    """
    for path in files:
        with path.open("rb", buffering=0) as file:
            if anew:
                os.fsync(file.fileno())  # only what is on the disk can be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(1 << 24):
                pass


def _serve(name: str, folder: Path, threads: int, replies: TextIO) -> None:
    """The child's end: read the files, load, say so, and run one task a line until there are no more."""
    import torch

    from bench.engines import ENGINES

    def reply(content: Mapping[str, Any]) -> None:
        print(json.dumps(content), file=replies, flush=True)

    try:
        read_through(ENGINES[name].files(folder), anew=True)
        engine = ENGINES[name](folder, threads)
    except Exception as error:  # whatever an engine raises, the parent names it and goes on without it
        reply({"failed": f"{type(error).__name__}: {error}"})
        return
    hello = {"variants": engine.variants, "most_tokens": engine.most_tokens, "most_sequences": engine.most_sequences}
    reply(hello)
    for line in sys.stdin:
        task = Task(**json.loads(line))
        with torch.inference_mode():
            engine.begin(task.variant, len(task.prompts), len(task.prompts[0]) + len(task.steps))
            start = time.perf_counter()
            logits = [engine.feed(task.prompts)]
            middle = time.perf_counter()
            logits += [engine.feed([[i] for i in step]) for step in task.steps]
            end = time.perf_counter()
        if task.logits_file:
            torch.save(torch.stack(logits).float(), task.logits_file)
        reply(asdict(Times(middle - start, end - middle)))


if __name__ == "__main__":
    # Libraries print; only replies may reach the parent, so what they print goes to stderr.
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        _serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), replies)
