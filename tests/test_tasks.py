"""Benchmark files to prompts: the published request sets, hand-made items, and files that are not as they should be."""

from __future__ import annotations

import gzip
import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import ARC_EASY, arc, hellaswag, write_benchmarks, write_lines, write_rows

from minimoe.errors import InputError
from minimoe.evaluate.questions import Question, clean
from minimoe.evaluate.tasks import TASKS, Protocol, RequestSet, build, find_tasks, read_questions, read_shots

BENCH = Path(__file__).parents[2] / "shared/data/bench"
PUBLISHED = pytest.mark.skipif(not BENCH.is_dir(), reason="the benchmarks' own files are not beside the checkout")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("bench"))


def recorded(name: str) -> list[list[dict[str, Any]]]:
    """The requests of an OLMES set, those of one document together."""
    with gzip.open(BENCH / "olmes_requests" / name / "requests.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [list(rows) for _, rows in groupby(rows, lambda row: row["doc_id"])]


def request(context: str, continuation: str) -> dict[str, str]:
    return {"context": context, "continuation": continuation}


def requests(built: RequestSet) -> list[dict[str, str]]:
    return [request(*pair) for pair in zip(built.contexts(), built.continuations, strict=True)]


def folded(row: dict[str, Any]) -> dict[str, str]:
    """HellaSwag's rule: where a marker began an ending, OLMES keeps the space that it leaves behind."""
    text = {key: re.sub(" {2,}", " ", value) for key, value in row["request"].items()}
    assert row["request"]["continuation"] in (text["continuation"], " " + text["continuation"])
    return text


def recorded_shots(name: str, folder: Path) -> None:
    """Write the worked examples of a recorded set in their benchmark's own format: the text before the last query."""
    first = recorded(name)[0][0]
    blocks = first["request"]["context"].removesuffix(first["doc"]["query"]).removesuffix("\n\n").split("\n\n")
    assert len(blocks) == 5
    rows: list[Any] = []
    for block in blocks:
        if name.startswith("hellaswag"):
            activity, _, text = block.partition(": ")
            rows.append(hellaswag((activity, *_last_word(text), 0)))
        else:
            stem, *choices, key = block.split("\n")
            texts = [choice[4:] for choice in choices]
            rows.append(arc(("", stem.removeprefix("Question: "), texts, "ABCDE"[: len(texts)], key[-1])))
    write_lines(folder / "shots.jsonl", rows)


def _last_word(text: str) -> tuple[str, str, list[str]]:
    """A passage cut before its last word; where it is cut does not show in a worked example."""
    before, _, last = text.rpartition(" ")
    return before, "", [last, "never"]


@PUBLISHED
@pytest.mark.parametrize("name", ["arc_easy__rc_0shot", "arc_challenge__rc_0shot", "piqa__rc_0shot"])
def test_cloze_prompts_are_those_that_were_recorded(name: str) -> None:
    task = TASKS[name.partition("__")[0]]
    built = [build(task, "cloze", question) for question in read_questions(task, BENCH, "validation")]
    documents = recorded(name)
    plain = [rows for rows in documents if rows[0]["doc_id"] < 10**6]
    alone = [rows for rows in documents if rows[0]["doc_id"] >= 10**6]
    assert len(built) == len(plain) == len(alone)
    for ours, theirs, unconditional in zip(built, plain, alone, strict=True):
        assert requests(ours) == [row["request"] for row in theirs]
        assert [request(ours.unconditional, c) for c in ours.continuations] == [r["request"] for r in unconditional]
        assert {ours.gold} == {row["label"] for row in theirs}
        assert ours.id == str(theirs[0]["native_id"])


@PUBLISHED
def test_winogrande_varies_the_context_as_recorded() -> None:
    task = TASKS["winogrande"]
    built = [build(task, "cloze", question) for question in read_questions(task, BENCH)]
    documents = recorded("winogrande__rc_0shot")
    assert len(built) == len(documents) == 1267
    for ours, theirs in zip(built, documents, strict=True):
        assert requests(ours) == [row["request"] for row in theirs]
        assert {ours.gold} == {row["label"] for row in theirs}
        assert ours.unconditional is None


@PUBLISHED
def test_letter_prompts_with_five_shots_are_those_that_were_recorded(tmp_path: Path) -> None:
    task = TASKS["arc_easy"]
    (tmp_path / "arc_easy").mkdir()
    recorded_shots("arc_easy__val_mc_5shot", tmp_path / "arc_easy")
    shots = read_shots(task, tmp_path, 5, [""])[""]
    built = [build(task, "choice", question, shots) for question in read_questions(task, BENCH, "validation")]
    documents = recorded("arc_easy__val_mc_5shot")
    assert len(built) == len(documents) == 570
    for ours, theirs in zip(built, documents, strict=True):
        assert requests(ours) == [row["request"] for row in theirs]
        assert {ours.gold} == {row["label"] for row in theirs}


@PUBLISHED
def test_hellaswag_with_five_shots_is_as_recorded_but_for_the_space_of_a_marker(tmp_path: Path) -> None:
    task = TASKS["hellaswag"]
    (tmp_path / "hellaswag").mkdir()
    recorded_shots("hellaswag__rc_5shot", tmp_path / "hellaswag")
    shots = read_shots(task, tmp_path, 5, [""])[""]
    raw = [json.loads(line) for line in (BENCH / "hellaswag/hellaswag_val_rebuilt.jsonl").open(encoding="utf-8")]
    rows = {
        row["ind"]: question for row, question in zip(raw, read_questions(task, BENCH), strict=True) if "ind" in row
    }
    documents = recorded("hellaswag__rc_5shot")
    plain = [rows for rows in documents if rows[0]["doc_id"] < 10**6]
    assert len(rows) == len(plain) == 1000
    for theirs in plain:
        ours = build(task, "cloze", rows[theirs[0]["doc"]["ind"]], shots)
        assert requests(ours) == [folded(row) for row in theirs]
        assert {ours.gold} == {row["label"] for row in theirs}
    alone = {rows[0]["doc_id"] - 10**6: rows for rows in documents if rows[0]["doc_id"] >= 10**6}
    for theirs in plain:
        ours = build(task, "cloze", rows[theirs[0]["doc"]["ind"]], shots)
        unconditional = [request(ours.unconditional, c) for c in ours.continuations]
        assert unconditional == [folded(row) for row in alone[theirs[0]["doc_id"]]]


@PUBLISHED
def test_published_sizes_are_those_of_the_files() -> None:
    assert {name: len(read_questions(task, BENCH)) for name, task in TASKS.items()} == {
        name: task.published for name, task in TASKS.items()
    }


def made(data: Path, name: str, protocol: Protocol, shots: int = 0) -> list[RequestSet]:
    task = TASKS[name]
    questions = read_questions(task, data)
    examples = read_shots(task, data, shots, [question.subject for question in questions])
    return [build(task, protocol, question, examples.get(question.subject, ())) for question in questions]


def test_whatever_arc_calls_its_choices_they_become_letters(data: Path) -> None:
    built = made(data, "arc_easy", "choice")
    assert [item.gold for item in built] == [0, 0, 1, 4]
    assert [len(item.continuations) for item in built] == [4, 4, 3, 5]
    assert built[1].contexts()[0] == (
        "Question: What colour is the sky?\n A. blue\n B. small\n C. three\n D. upon\nAnswer:"
    )
    assert built[3].continuations == (" A", " B", " C", " D", " E")
    assert [question.labels for question in read_questions(TASKS["arc_easy"], data)] == [
        tuple(labels) for *_, labels, _ in ARC_EASY
    ]


def test_worked_examples_stand_before_the_question_and_can_be_left_out(data: Path) -> None:
    item = made(data, "arc_easy", "cloze", shots=2)[0]
    last = "Question: Where did the fox live?\nAnswer:"
    second = "Question: What did they walk to?\nAnswer: the river\n\n"
    assert item.contexts()[0] == "Question: What is blue?\nAnswer: the sky\n\n" + second + last
    assert (item.contexts(1)[0], item.contexts(2)[0]) == (second + last, last)
    assert (
        made(data, "arc_easy", "choice", shots=1)[0]
        .contexts()[0]
        .startswith("Question: What is blue?\n A. the fox\n B. the sky\n C. the owl\nAnswer: B\n\nQuestion: Where")
    )


def test_mmlu_is_read_by_subject_with_line_breaks_and_quotes(data: Path) -> None:
    items = made(data, "mmlu", "choice", shots=5)
    assert [item.id for item in items] == ["animal_stories/0", "animal_stories/1", "astronomy/0"]
    context = items[0].contexts()[0]
    assert context.startswith("The following are multiple choice questions (with answers) about animal stories.\n\n")
    assert context.count("Question: Which?\n A. this\n B. that\n C. these\n D. those\nAnswer: C\n\n") == 5
    assert context.endswith('Question: He said: "What is\nthe answer?"\n A. the one, that\n B. the other\n C. two\n'
                            " D. three\nAnswer:")  # fmt: skip
    assert items[0].contexts(5)[0].startswith("The following are")
    assert made(data, "mmlu", "cloze")[2].contexts() == ["Question: The sky is\nAnswer:"] * 4


def test_hellaswag_begins_sentences_with_capitals_and_loses_its_markers(data: Path) -> None:
    first, second = made(data, "hellaswag", "cloze")
    assert first.contexts() == ["Walking: The fox and the owl were friends. They"] * 4
    assert (first.continuations[0], first.sizes[0]) == (" walked to the river.", 20)
    assert second.contexts()[0] == "Boats: How to row. Get in a boat."
    assert second.continuations[0] == " Sit down. Row."
    assert clean("  a [title] b.. c  d ") == "a. b. c d"


def test_winogrande_fills_the_blank_in_the_context(data: Path) -> None:
    first, second = made(data, "winogrande", "cloze")
    assert first.contexts() == ["The fox met the owl because the fox", "The fox met the owl because the owl"]
    assert (first.continuations, first.gold) == ((" was near the river.",) * 2, 1)
    assert second.continuations[0] == " 's sky."
    assert made(data, "winogrande", "choice")[0].contexts()[0] == (
        "Fill in the blank: The fox met the owl because _ was near the river.\n A. the fox\n B. the owl\nAnswer:"
    )


def test_tasks_are_found_by_name_once() -> None:
    assert [task.name for task in find_tasks(["PIQA", " arc-easy", "piqa"])] == ["piqa", "arc_easy"]
    with pytest.raises(InputError, match=r"unknown task 'boolq'.*mmlu, arc_easy"):
        find_tasks(["piqa", "boolq"])


GOOD = arc(ARC_EASY[0])


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([GOOD, {**GOOD, "answerKey": "F"}], "line 2 .*answerKey is 'F'.*A, B, C, D"),
        ([GOOD, {**GOOD, "answerKey": None}], "line 2 .*answerKey is None"),
        ([{key: GOOD[key] for key in ("id", "question")}], "line 1 .* no 'answerKey'"),
        ([arc(("x", "Which?", list("abcdef"), "ABCDEF", "A"))], "6 choices"),
        ([arc(("x", "Which?", ["a"], "A", "A"))], "1 choices"),
        ([arc(("x", "Which?", ["a", " "], "AB", "A"))], "no choice empty"),
        ([arc(("x", "Which?", ["a", 3], "AB", "A"))], "must be texts"),
        ([GOOD, arc(("x", "Which?", ["a", "b"], "AA", "A"))], "line 2 .*same label"),
        ([arc(("x", "Which?", ["a", "b\ud800"], "AB", "A"))], "line 1 .*surrogate"),
        (["text"], "line 1 .* other types"),
        ([], "no items"),
    ],
)
def test_an_arc_file_that_cannot_be_used_is_named_by_line(tmp_path: Path, lines: list[Any], says: str) -> None:
    path = write_lines(tmp_path / "arc_easy/ARC-Easy-Test.jsonl", lines)
    with pytest.raises(InputError, match=says) as caught:
        read_questions(TASKS["arc_easy"], tmp_path)
    assert str(path) in str(caught.value)


def refused(task: str, data: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_questions(TASKS[task], data)
    return str(caught.value)


def test_missing_and_half_files_are_told_apart(tmp_path: Path) -> None:
    data = write_benchmarks(tmp_path)
    labels = data / "piqa/valid-labels.lst"
    labels.write_text("0\n")
    assert "2 items, but valid-labels.lst has 1 labels" in refused("piqa", data)
    labels.write_text("0\n2\n")
    assert "label 2" in refused("piqa", data)
    labels.unlink()
    assert "no labels" in refused("piqa", data)
    file = data / "winogrande/dev.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert "line 2" in refused("winogrande", data)
    assert "not JSON" in refused("winogrande", data)
    file.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refused("winogrande", data)
    write_lines(file, [{"qID": "x", "sentence": "no blank", "option1": "a", "option2": "b", "answer": "1"}])
    assert "one blank" in refused("winogrande", data)
    write_lines(file, [{"qID": "x", "sentence": "a _ b", "option1": "a", "option2": "b", "answer": ""}])
    assert "answer is ''" in refused("winogrande", data)
    write_lines(file, [{"qID": "x", "sentence": "a _ ", "option1": "a", "option2": "b", "answer": "1"}])
    assert "nothing follows the blank" in refused("winogrande", data)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in refused("winogrande", data)
    file.unlink()
    assert "WinoGrande is not there" in refused("winogrande", data)
    assert "is no folder" in refused("winogrande", data / "nowhere")
    write_rows(data / "mmlu/test/astronomy_test.csv", [["The sky is", "blue", "near", "upon", "A"]])
    assert "row 1 of" in refused("mmlu", data)
    write_lines(data / "hellaswag/hellaswag_val.jsonl", [hellaswag(("A", "b", "c", ["d", "e"], 2))])
    assert "label is 2" in refused("hellaswag", data)
    write_lines(data / "hellaswag/hellaswag_val.jsonl", [hellaswag(("A", "b", "c", ["d", "e"], ""))])
    assert "label is ''" in refused("hellaswag", data)


def test_worked_examples_have_to_be_there(data: Path) -> None:
    with pytest.raises(InputError, match=r"PIQA has no worked examples.*piqa/shots.jsonl"):
        read_shots(TASKS["piqa"], data, 1, [""])
    with pytest.raises(InputError, match="only 2 worked examples, not the 3"):
        read_shots(TASKS["arc_easy"], data, 3, [""])
    assert read_shots(TASKS["piqa"], data, 0, [""]) == {}


def test_a_byte_order_mark_and_blank_lines_are_no_items(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "arc_easy/ARC-Easy-Test.jsonl", [GOOD])
    path.write_text("\ufeff\n" + path.read_text("utf-8").replace("\n", "\r\n") + "\n", "utf-8")
    (question,) = read_questions(TASKS["arc_easy"], tmp_path)
    assert question == Question("fox_1", GOOD["question"]["stem"], tuple(ARC_EASY[0][2]), 0, ("A", "B", "C", "D"))
