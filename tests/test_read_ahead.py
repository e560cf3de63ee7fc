"""Cold files are read from front to back, warm ones not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import minimoe
from minimoe import read_ahead as module
from minimoe.read_ahead import CHUNK, is_cold, read_ahead


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a", "b")]
    for path, size in zip(paths, (CHUNK + 5000, 70_000), strict=True):
        path.write_bytes(os.urandom(size))
    return paths


def make_cold(path: Path) -> None:
    """Drop a file from the page cache; skips the test where the system does not do that or cannot show it.

    Linux reads on, in the background, from every place that is looked at: it has to be through with that before the
    file is dropped for good.
    """
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not is_cold(path):
            pytest.skip("this file system does not tell what is in the page cache")
        file.read()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_only_cold_files_are_read_and_then_they_are_warm(files: list[Path]) -> None:
    assert read_ahead(files) == 0
    make_cold(files[0])
    seen: list[tuple[int, int]] = []
    size = files[0].stat().st_size
    assert read_ahead(files, lambda done, total: seen.append((done, total))) == size
    assert [total for _, total in seen] == [size] * len(seen)
    assert [done for done, _ in seen] == [CHUNK, size]
    assert not is_cold(files[0])
    assert read_ahead(files) == 0


def test_files_larger_than_memory_are_left_alone(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_cold", lambda path: True)
    monkeypatch.setattr(module.os, "sysconf", lambda name: 10)
    assert read_ahead(files) == 0


def test_a_system_that_cannot_tell_counts_as_warm(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module.os, "RWF_NOWAIT", raising=False)
    assert read_ahead(files) == 0


def test_an_empty_file_is_warm(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read_ahead([tmp_path / "empty"]) == 0


def test_loading_a_cold_checkpoint_tells_how_far_it_is(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("base", shards=3)
    paths = sorted(folder.glob("*.safetensors"))
    monkeypatch.setattr(module, "is_cold", lambda path: True)
    seen: list[tuple[int, int]] = []
    minimoe.load(folder, progress=lambda done, total: seen.append((done, total)))
    size = sum(path.stat().st_size for path in paths)
    assert seen[-1] == (size, size)
    assert len(seen) == len(paths) > 1
