"""Hand-made items of the six benchmarks, in the files that their authors publish."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ARC_EASY = [
    ("fox_1", "Where did the fox live?", ["near the river", "in a boat", "on the shore", "in the sea"], "ABCD", "A"),
    ("fox_2", "What colour is the sky?", ["blue", "small", "three", "upon"], "1234", "1"),
    ("fox_3", "Who were friends?", ["the sea", "the fox and the owl", "the boat"], "ABC", "B"),
    ("fox_4", "How many stayed?", ["one", "two", "three", "four", "five"], "ABCDE", "E"),
]
ARC_DEV = [
    ("dev_1", "What is blue?", ["the fox", "the sky", "the owl"], "ABC", "B"),
    ("dev_2", "What did they walk to?", ["the river", "the answer"], "12", "1"),
]
HELLASWAG = [
    ("Walking", "The fox and the owl were friends.", "they", ["walked to the river.", "is blue.", "two", "said"], 0),
    ("Boats", "[header] How to row [title] Get in a boat.", "", ["[step] Sit down [title] Row.", "x", "y", "z"], 0),
]
PIQA = [
    ("cross the river", "take the boat", "take the sky", 0),
    ("find the owl", "walk into the sea  ", "look into the tree", 1),
]
WINOGRANDE = [
    ("q-1", "The fox met the owl because _ was near the river.", "the fox", "the owl", "2"),
    ("q-2", "The owl saw the fox's boat and _'s sky.", "the owl", "the fox", "1"),
]
MMLU = {
    "animal_stories": [
        ['He said: "What is\nthe answer?"', "the one, that", "the other", "two", "three", "D"],
        ["Who is small?", "the fox", "the sky", "the sea", "the shore", "A"],
    ],
    "astronomy": [["The sky is", "blue", "near", "upon", "a boat", "A"]],
}


def write_benchmarks(data: Path) -> Path:
    """Write every file of the six benchmarks, and return the folder."""
    write_lines(data / "arc_easy/ARC-Easy-Test.jsonl", map(arc, ARC_EASY))
    write_lines(data / "arc_easy/ARC-Easy-Dev.jsonl", map(arc, ARC_DEV))
    write_lines(data / "arc_challenge/ARC-Challenge-Test.jsonl", map(arc, ARC_EASY[:2]))
    write_lines(data / "hellaswag/hellaswag_val.jsonl", map(hellaswag, HELLASWAG))
    write_lines(data / "piqa/valid.jsonl", ({"goal": g, "sol1": a, "sol2": b} for g, a, b, _ in PIQA))
    (data / "piqa/valid-labels.lst").write_text("".join(f"{label}\n" for *_, label in PIQA))
    keys = ("qID", "sentence", "option1", "option2", "answer")
    write_lines(data / "winogrande/dev.jsonl", (dict(zip(keys, row, strict=True)) for row in WINOGRANDE))
    for subject, rows in MMLU.items():
        write_rows(data / f"mmlu/test/{subject}_test.csv", rows)
        write_rows(data / f"mmlu/dev/{subject}_dev.csv", [["Which?", "this", "that", "these", "those", "C"]] * 5)
    return data


def arc(row: Sequence[Any]) -> dict[str, Any]:
    name, stem, texts, labels, key = row
    choices = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    return {"id": name, "question": {"stem": stem, "choices": choices}, "answerKey": key}


def hellaswag(row: Sequence[Any]) -> dict[str, Any]:
    activity, ctx_a, ctx_b, endings, label = row
    fields = {"activity_label": activity, "ctx_a": ctx_a, "ctx_b": ctx_b, "ctx": f"{ctx_a} {ctx_b}".strip()}
    return {**fields, "endings": endings, "label": label}


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_rows(path: Path, rows: Iterable[Sequence[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path
