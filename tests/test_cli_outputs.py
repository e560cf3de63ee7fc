"""What a command writes never takes the place of what it reads, nor of what is somebody else's."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import Cli, assert_one_sentence

from minimoe.journal import Journal

TEXT = "The owl sat in the tree. " * 20
RULE = """from minimoe.routers import PrefixRouter


class R(PrefixRouter):
    def count(self, p, c):
        return (p[:, 0] * 0).long() + {k}
"""
COMPARE = ("compare", "--window", 8, "--limit", 2, "--no-controls")
ANALYZE = ("analyze", "--window", 8, "--limit", 2, "--no-figures")


@pytest.fixture
def here(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a text under many names, a rule, and a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "out").mkdir()
    for name in ("text.svg", "a.json.part", "a.json.minimoe-new", "out/summary.json", "out/analysis.npz.part"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "my_rule_of_outputs.py").write_text(RULE.format(k=1))
    shutil.copytree(folder, tmp_path / "model")
    return tmp_path


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    before = contents()
    yield
    assert contents() == before


@pytest.mark.parametrize(
    "words",
    [
        (*COMPARE, "--text", "text.svg", "--out", "text.svg"),
        (*COMPARE, "--text", "text.svg", "--plot", "text.svg"),
        (*COMPARE, "--text", "text.svg", "--plot", "a.svg", "--out", "a.svg"),
        (*COMPARE, "--text", "a.json.part", "--out", "a.json"),
        (*COMPARE, "--text", "a.json.minimoe-new", "--out", "a.json"),
        (*COMPARE, "--text", "text.svg", "-m", "model", "--out", "model/tokenizer.json"),
        (*COMPARE, "--text", "text.svg", "--router", "./my_rule_of_outputs.py:R", "--out", "my_rule_of_outputs.py"),
        (*COMPARE, "--text", "text.svg", "--router", "my_rule_of_outputs:R", "--out", "my_rule_of_outputs.py"),
        ("calibrate", "skip", "--text", "text.svg", "--out", "text.svg", "--window", 8),
        ("calibrate", "my_rule_of_outputs:R", "--mean-k", 2, "--text", "text.svg", "--out", "my_rule_of_outputs.py"),
        ("generate", "-n", 2, "--prompt-file", "text.svg", "--record", "text.svg"),
        ("generate", "x", "-n", 2, "-r", "my_rule_of_outputs:R", "--record", "./my_rule_of_outputs.py"),
        ("generate", "x", "-n", 2, "-r", "skip:file=text.svg", "--record", "text.svg"),
        ("generate", "x", "-n", 2, "-m", "model", "--record", "model/config.json"),
        (*ANALYZE, "out/summary.json", "-o", "out"),
        (*ANALYZE, "out/analysis.npz.part", "-o", "out"),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_nothing_that_is_read_is_written_over(cli: Cli, here: Path, words: tuple[object, ...]) -> None:
    with unchanged(here):
        run = cli(*words)
        assert_one_sentence(run)
        assert "would replace" in run.err


def test_a_package_that_prints_or_breaks_is_told_of_as_ever(cli: Cli, here: Path, folder: Path) -> None:
    for name, body in (("printing_rules", "print('hello')"), ("broken_rules", "1 / 0")):
        (here / name).mkdir()
        (here / name / "__init__.py").write_text(body)
        (here / name / "mine.py").write_text(RULE.format(k=1))
    words = ("generate", "x", "-n", 2, "-m", folder, "--record", "r.npz", "--json")
    assert cli(*words, "-r", "printing_rules.mine:R").document["mean_k"] == 1
    run = cli(*words, "-r", "broken_rules.mine:R")
    assert_one_sentence(run)
    assert "ZeroDivisionError" in run.err


def test_other_names_in_the_same_places_are_fine(cli: Cli, here: Path) -> None:
    assert cli(*COMPARE, "--text", "text.svg", "-m", "model", "--out", "model/found.json").code == 0
    assert json.loads((here / "model" / "found.json").read_text())["items"] == 2


@pytest.mark.parametrize(
    "words",
    [
        (*COMPARE, "--text", "text.svg", "--out", "a.json"),
        ("calibrate", "skip", "--text", "text.svg", "--out", "a.json", "--window", 8),
        ("calibrate", "min_p", "--mean-k", 2, "--text", "text.svg", "--out", "a.json", "--window", 8),
        (*ANALYZE, "text.svg", "-o", "out"),
    ],
    ids=lambda words: f"{words[0]} {words[1]}",
)
def test_somebody_elses_file_in_the_place_of_unfinished_work_is_kept(
    cli: Cli, here: Path, folder: Path, words: tuple[object, ...]
) -> None:
    (here / "out" / "summary.json").unlink()
    with unchanged(here):
        run = cli(*words, "-m", folder)
        assert_one_sentence(run)
        assert "move it away" in run.err


@pytest.mark.parametrize("verb", ["compare", "analyze", "eval"])
@pytest.mark.parametrize("place", ["v=2", "rules"])
def test_a_rule_that_was_changed_is_other_work_wherever_it_lies(
    cli: Cli, here: Path, folder: Path, verb: str, place: str
) -> None:
    (here / place).mkdir()
    rule, found = here / place / "r.py", []
    data = here / "data" / "arc_easy"
    data.mkdir(parents=True)
    choices = [{"label": label, "text": f"sat on {label}"} for label in "ABCD"]
    item = {"id": "1", "question": {"stem": "What did the owl do?", "choices": choices}, "answerKey": "A"}
    (data / "ARC-Easy-Test.jsonl").write_text(json.dumps(item) + "\n")
    for k in (1, 2):
        rule.write_text(RULE.format(k=k))
        spec = f"./{place}/r.py:R"
        words: dict[str, tuple[object, ...]] = {
            "compare": (*COMPARE, "--text", "text.svg", "--router", spec, "--out", "c.json"),
            "analyze": (*ANALYZE, "text.svg", "-r", spec, "-o", "fresh"),
            "eval": ("eval", "--data", "data", "--tasks", "arc_easy", "--shots", 0, "--router", spec, "--out", "e"),
        }
        found.append(cli(*words[verb], "-m", folder, "--json"))
    if verb == "analyze":
        assert_one_sentence(found[1])
        assert "another analysis" in found[1].err
    elif verb == "compare":
        assert [run.document["arms"][1]["mean_k"] for run in found] == [1, 2]
    else:
        assert [run.document["results"][0]["mean_k"] for run in found] == [1, 2]


@pytest.mark.parametrize("damage", ["5", "null", "[]", "[5, null]", f"[{zlib.crc32(b'null')}, nul", "\x00", "[1, 2]"])
def test_a_damaged_piece_of_unfinished_work_is_done_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.part"
    first = Journal(path, "mine")
    assert [first.once(lambda n=n: [n]) for n in range(3)] == [[0], [1], [2]]  # type: ignore[misc]
    first.close()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], f"{damage}\n", lines[3]]))
    again, done = Journal(path, "mine"), []

    def piece(number: int) -> list[int]:
        done.append(number)
        return [number]

    assert [again.once(lambda n=n: piece(n)) for n in range(3)] == [[0], [1], [2]]  # type: ignore[misc]
    assert done == [1, 2]


def test_a_name_that_no_spec_can_hold_is_refused_before_the_work(cli: Cli, here: Path, folder: Path) -> None:
    for words in (
        ("calibrate", "skip", "--text", "text.svg", "--window", 8, "--out", "a,b.json"),
        ("generate", "x", "-n", 2, "--record", "r,1.npz"),
    ):
        run = cli(*words, "-m", folder)
        assert_one_sentence(run)
        assert "of that name" in run.err


@pytest.mark.parametrize("length", [300, 254])
def test_names_that_are_too_long_are_bad_input(cli: Cli, here: Path, folder: Path, length: int) -> None:
    long = "a" * length
    for words in (
        (*COMPARE, "--text", "text.svg", "--out", long),
        ("generate", "x", "-n", 2, "--record", long),
        ("calibrate", "skip", "--text", "text.svg", "--out", long),
        *((((*ANALYZE, "text.svg", "-o", long)), ("generate", "x", "-r", f"./{long}.py:A")) if length > 255 else ()),
    ):
        run = cli(*words, "-m", folder)
        assert_one_sentence(run)
        assert "too long" in run.err
    assert not [name for name in os.listdir(here) if name.startswith("aaa")]
