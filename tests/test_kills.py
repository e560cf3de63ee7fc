"""eval and paper killed by SIGKILL again and again: they go on, and end with the same report, byte for byte.

What cannot be the same in two runs is how long things took. eval tells that on stderr only; paper keeps its times in
one part, which is measured once, so that with the same times the whole report must be the same.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from benchmark_files import write_benchmarks

# Little of everything that takes time and shows nothing here.
PROGRAM = """
import sys
import torch
from minimoe.cli import main
from minimoe.paper import estimate, study
torch.set_num_threads(1)
study.QUICK_ROUNDS, estimate.seconds = 1, lambda study: 1.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("top8_of_64", max_position_embeddings=512)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("data"))


def start(words: Sequence[str | Path]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(words: Sequence[str | Path]) -> None:
    process = start(words)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err.decode()


def size(folder: Path) -> int:
    """Bytes of all that is kept; files may come and go."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def killed(words: Sequence[str | Path], folder: Path, changes: int, wait: float) -> bool:
    """Run until what is kept has changed so many times, then a moment longer, and kill; False if it was done first."""
    process = start(words)
    before = size(folder)
    while changes and process.poll() is None:
        now = size(folder)
        changes -= now != before
        before = now
        time.sleep(0.001)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_eval(model: Path, data: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ("eval", "-m", model, "--data", data, "--tasks", "arc_easy,piqa,hellaswag", "--router", "random:k=3,elbow")
    finish([*words, "--out", whole])
    draws = random.Random(0)
    cut.mkdir()
    kills = [killed([*words, "--out", cut], cut, draws.randint(1, 3), draws.random() / 50) for _ in range(3)]
    assert any(kills)
    begun = (cut / "items.jsonl").read_bytes()
    finish([*words, "--out", cut])
    assert {name: content for name, content in files(cut).items() if name != "items.jsonl"} == {
        name: content for name, content in files(whole).items() if name != "items.jsonl"
    }
    lines = (cut / "items.jsonl").read_bytes().splitlines()
    assert sorted(lines) == sorted((whole / "items.jsonl").read_bytes().splitlines())  # nothing twice, nothing missing
    assert (cut / "items.jsonl").read_bytes().startswith(begun[: begun.rfind(b"\n") + 1])  # and nothing done again


def test_paper(model: Path, data: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ("paper", "-m", model, "--data", data, "--quick")
    finish([*words, "--out", whole])
    draws = random.Random(1)
    parts = cut / "parts"
    parts.mkdir(parents=True)
    kills, times = 0, None
    for changes in (2, 6, 4):
        kills += killed([*words, "--out", cut], parts, changes, draws.random() / 5)
        if times is None and (parts / "latency.json").exists():
            times = (parts / "latency.json").read_bytes()
    assert kills
    if times is None:  # once more, and not before the times are kept
        process = start([*words, "--out", cut])
        while not (parts / "latency.json").exists():
            time.sleep(0.001)
        process.kill()
        process.communicate()
        times = (parts / "latency.json").read_bytes()
    finish([*words, "--out", cut])
    assert (parts / "latency.json").read_bytes() == times
    shutil.copy(whole / "parts" / "latency.json", parts / "latency.json")
    finish([*words, "--out", cut])
    done, expected = files(cut), files(whole)
    assert set(done) == set(expected)
    for name in expected:
        if not name.endswith((".npz", ".jsonl")):  # archives note the hour; the log's lines may stand in another order
            assert done[name] == expected[name], name
