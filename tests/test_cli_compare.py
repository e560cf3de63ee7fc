"""`minimoe compare` at the command line; what it measures is tested in test_comparison.py."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from command_line import Cli, assert_one_sentence


@pytest.mark.parametrize(
    "line",
    [
        '{"ctx": "x", "endings": ["a"], "label": 1e400}',
        '{"ctx": "x", "endings": ["a", "b"], "label": 0.7}',
        '{"ctx": "x", "endings": ["a", "b"], "label": true}',
        '{"ctx": "x", "endings": "ab", "label": 0}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:48],
)
def test_a_line_that_is_no_cloze_item_is_named(cli: Cli, folder: Path, tmp_path: Path, line: str) -> None:
    file = tmp_path / "items.jsonl"
    good = json.dumps({"ctx": "The owl", "endings": ["sat", "ran\u2028on"], "label": "1"}, ensure_ascii=False)
    file.write_text(f"\ufeff{good}\n{line}\n{good}\n", "utf-8")
    run = cli("compare", "--cloze", file, "-m", folder, "--no-controls")
    assert (run.code, run.out) == (2, "")
    assert f"line 2 of {file} is no cloze item" in run.err


def test_every_whole_number_is_a_seed_of_compare(cli: Cli, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The owl sat in the tree. " * 20)
    words = ("compare", "--text", tmp_path / "text", "-m", folder, "--window", 8, "--limit", 2, "--no-controls")
    assert cli(*words, "--seed", -1).code == 0


def test_a_packed_text_is_read(cli: Cli, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.xz"
    text.write_bytes(lzma.compress(b"The owl sat in the tree. " * 20))
    words = ("compare", "-m", folder, "--window", 8, "--limit", 2, "--no-controls")
    assert cli(*words, "--text", text).code == 0
    text.write_bytes(text.read_bytes()[:40])
    run = cli(*words, "--text", text)
    assert_one_sentence(run)
    assert "no whole xz file" in run.err
