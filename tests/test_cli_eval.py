"""`minimoe eval` at the command line; what it computes is tested in test_evaluate.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import write_benchmarks, write_lines
from command_line import Cli, assert_one_sentence

from minimoe.cli.evaluate import log_name
from minimoe.evaluate.log import Log


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("top8_of_64", max_position_embeddings=512)


def test_all_tasks_by_two_rules_in_a_table_and_a_folder(cli: Cli, model: Path, data: Path, tmp_path: Path) -> None:
    words = ("eval", "--data", data, "-m", model, "--router", "top_k,elbow", "--out", tmp_path / "new/out")
    run = cli(*words)
    assert run.code == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in run.out.splitlines() if line.startswith("|")]
    assert len({len(line) for line in run.out.splitlines() if line.startswith("|")}) == 1
    assert [row[0] for row in rows[2::2]] == ["mmlu", "arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande"]
    assert {row[1] for row in rows[2:]} == {"top_k", "elbow"}
    assert "arc_easy: test set, 4 of 2,376 items; cloze, 0 shots, normaliser none" in run.out
    assert "mean over 2 subjects" in run.out
    assert (tmp_path / "new/out/table.md").read_text() == run.out
    document = json.loads((tmp_path / "new/out/result.json").read_text())
    again = cli(*words, "--json")
    assert again.document == document
    assert "tokens/s" in run.err
    assert "tokens/s" not in again.err  # nothing was left to run
    accuracies = [f"{result['accuracy']:.1%}" for result in document["results"]]
    assert accuracies == [row[3] for row in rows[2:]]


def test_letters_beside_the_published_parser(cli: Cli, model: Path, data: Path) -> None:
    words = ("eval", "--data", data, "-m", model, "--tasks", "arc-easy", "--limit", 2, "--protocol", "letters")
    run = cli(*words, "--published-parser")
    assert run.code == 0
    assert [line.split("|")[2].strip() for line in run.out.splitlines()[2:4]] == ["top_k", "· paper's parser"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", "boolq"], "unknown task 'boolq'"),
        (["--tasks", " , "], "at least one task"),
        (["--tasks", "piqa", "--shots", "1"], "no worked examples"),
        (["--data", "nowhere"], "is no folder"),
        (["--published-parser"], "--protocol letters"),
        (["--protocol", "letters", "--shots", "1"], "no worked examples"),
        (["--protocol", "essay"], "essay"),
        (["--router", "elbw"], "unknown router 'elbw'"),
        (["--router", " "], "at least one rule"),
        (["--limit", "0"], "at least 1"),
        (["--out", __file__], "needs the name of a folder"),
    ],
)
def test_what_cannot_work_is_said_before_the_model_is_loaded(cli: Cli, data: Path, words: list[str], says: str) -> None:
    run = cli("eval", "--data", data, "-m", "not/there", *words)
    assert_one_sentence(run)
    assert says in run.err


def test_data_has_to_be_named(cli: Cli) -> None:
    assert_one_sentence(cli("eval"))


def test_finished_work_is_kept_when_a_later_run_cannot_use_its_data(cli: Cli, model: Path, tmp_path: Path) -> None:
    data, out = write_benchmarks(tmp_path / "bench"), tmp_path / "out"
    words = ("eval", "--data", data, "-m", model, "--tasks", "arc_easy,piqa", "--out", out)
    assert cli(*words).code == 0
    kept = (out / "items.jsonl").read_bytes()
    file = data / "arc_easy/ARC-Easy-Test.jsonl"
    rows: list[Any] = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    write_lines(file, [*rows[:1], {**rows[1], "answerKey": ""}])
    run = cli(*words)
    assert_one_sentence(run)
    assert "line 2" in run.err
    assert (out / "items.jsonl").read_bytes() == kept
    run = cli(*words[:-4], "--tasks", "piqa", "--out", out, "--seed", "1")
    assert_one_sentence(run)
    assert "seed 0" in run.err


def test_a_rule_that_was_changed_has_another_name_in_the_log(tmp_path: Path) -> None:
    file = tmp_path / "my_rule.py"
    spec = f"{file}:Mine"
    names = []
    for k in (2, 3, 2):
        code = "from minimoe.routers.top_k import TopK\n\n\nclass Mine(TopK):\n    route = TopK.route\n"
        file.write_text(f"{code}    more = {k}\n")
        names.append(log_name(spec))
    assert names[0] == names[2] != names[1]
    assert names[0].startswith(f"{spec}#")
    assert log_name("top_k:k=2") == "top_k:k=2"


def test_interrupted_it_says_where_it_goes_on(
    cli: Cli, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("eval", "--data", data, "-m", model, "--tasks", "arc_easy", "--router", "random:k=3", "--out", tmp_path)
    add, calls = Log.add, []

    def interrupted(log: Log, records: Any) -> None:
        add(log, records)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Log, "add", interrupted)
    run = cli(*words)
    assert (run.code, run.out) == (130, "")
    assert f"What is done is in {tmp_path}, and the same command goes on from there." in run.err
    before = (tmp_path / "items.jsonl").read_bytes()
    assert before.count(b"\n") == 1 + 2
    assert cli(*words).code == 0
    after = (tmp_path / "items.jsonl").read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == 1 + 4
