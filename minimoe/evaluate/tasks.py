"""The six benchmarks: where their files lie, and what prompts are made of a question.

Two protocols compare log-probabilities. `cloze` scores the text of each choice after the question (WinoGrande: the
common end of the sentence after each of its two beginnings); `choice` shows all choices and scores their letters. The
prompts follow OLMES (Gu et al. 2024), which OLMoE was evaluated with; they are equal to its recorded requests for all
tasks but MMLU in `cloze`, and for ARC in `choice`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from minimoe.errors import InputError
from minimoe.evaluate.questions import (
    LETTERS,
    Question,
    Reader,
    read_arc,
    read_hellaswag,
    read_mmlu,
    read_piqa,
    read_winogrande,
)

Protocol = Literal["cloze", "choice"]
Normaliser = Literal["none", "characters", "pmi"]
Split = Literal["validation", "test"]
UNCONDITIONAL = "Answer:"  # OLMES's context for how likely a choice is without its question


@dataclass(frozen=True, slots=True)
class RequestSet:
    """What is scored for one item: the continuations, each after its own context.

    Attributes:
        id, subject, gold: the question's.
        opening: text that every context begins with.
        shots: worked examples after it, which can be left out one by one from the front.
        queries: the rest of each choice's context.
        continuations: of each choice.
        sizes: characters of each choice, without the space in front.
        unconditional: a context without the question after which they are scored as well, or None.
    """

    id: str
    subject: str
    gold: int
    opening: str
    shots: tuple[str, ...]
    queries: tuple[str, ...]
    continuations: tuple[str, ...]
    sizes: tuple[int, ...]
    unconditional: str | None

    def contexts(self, dropped: int = 0) -> list[str]:
        """The context of each choice, without the first `dropped` shots."""
        before = self.opening + "".join(self.shots[dropped:])
        return [before + query for query in self.queries]

    @property
    def choices(self) -> int:
        return len(self.continuations)

    @property
    def characters(self) -> int:
        """About what it costs: the context once, and every continuation."""
        alone = "" if self.unconditional is None else self.unconditional
        return len(self.contexts()[0]) + len(alone) + sum(map(len, self.continuations))

    def digest(self) -> str:
        """What tells these prompts from others."""
        texts = [self.opening, self.shots, self.queries, self.continuations, self.unconditional]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Task:
    """A benchmark.

    Attributes:
        name, title: as typed, and as printed.
        read: the reader of its files.
        files: by split, names of files under the data folder; the first that is there is read. With * it is a set of
            files of which all are read.
        shots: where worked examples come from: the first of these that is there. {subject} is MMLU's.
        cloze: what a question becomes in the cloze protocol.
        choice: what stands above the lettered choices.
        letters: what the letter protocol calls the stem.
        normaliser: of log-probabilities in the cloze protocol, as OLMES chose it.
        published: how many items the published files of its own split have.
        split: the one that is evaluated: the test set where its labels are public.
        header: what MMLU's choice prompts begin with.
    """

    name: str
    title: str
    read: Reader
    files: Mapping[Split, tuple[str, ...]]
    shots: tuple[str, ...]
    cloze: str
    choice: str
    letters: str
    normaliser: Normaliser
    published: int
    split: Split = "validation"
    header: str = field(default="")


ASKED = {"cloze": "Question: {stem}\nAnswer:", "choice": "Question: {stem}", "letters": "Question"}


def _arc(name: str, title: str, normaliser: Normaliser, published: int) -> Task:
    files: dict[Split, tuple[str, ...]] = {
        "validation": (f"{name}/{title}-Dev.jsonl",),
        "test": (f"{name}/{title}-Test.jsonl",),
    }
    shots = (f"{name}/shots.jsonl", *files["validation"])
    return Task(name, title, read_arc, files, shots, **ASKED, normaliser=normaliser, published=published, split="test")


TASKS = {
    task.name: task
    for task in (
        Task(
            "mmlu",
            "MMLU",
            read_mmlu,
            {"validation": ("mmlu/val/*_val.csv",), "test": ("mmlu/test/*_test.csv",)},
            ("mmlu/dev/{subject}_dev.csv",),
            **ASKED,
            normaliser="characters",
            published=14042,
            split="test",
            header="The following are multiple choice questions (with answers) about {subject}.\n\n",
        ),
        _arc("arc_easy", "ARC-Easy", "none", 2376),
        _arc("arc_challenge", "ARC-Challenge", "characters", 1172),
        Task(
            "hellaswag",
            "HellaSwag",
            read_hellaswag,
            {"validation": ("hellaswag/hellaswag_val.jsonl", "hellaswag/hellaswag_val_rebuilt.jsonl")},
            ("hellaswag/shots.jsonl", "hellaswag/hellaswag_train.jsonl"),
            cloze="{passage}",
            choice="{passage}\nChoose the best continuation:",
            letters="Context",
            normaliser="characters",
            published=10042,
        ),
        Task(
            "piqa",
            "PIQA",
            read_piqa,
            {"validation": ("piqa/valid.jsonl",)},
            ("piqa/shots.jsonl", "piqa/train.jsonl"),
            cloze="Goal: {stem}\nAnswer:",
            choice="Goal: {stem}",
            letters="Goal",
            normaliser="characters",
            published=1838,
        ),
        Task(
            "winogrande",
            "WinoGrande",
            read_winogrande,
            {"validation": ("winogrande/dev.jsonl",)},
            ("winogrande/shots.jsonl", "winogrande/train_xs.jsonl"),
            cloze="{stem}",
            choice="Fill in the blank: {stem}",
            letters="Sentence",
            normaliser="none",
            published=1267,
        ),
    )
}


def find_tasks(names: Sequence[str]) -> list[Task]:
    """Tasks by name; `-` and `_` are alike, and each is taken once.

    Raises:
        InputError: an unknown name; lists the known ones.
    """
    keys = [name.strip().lower().replace("-", "_") for name in names]
    for name, key in zip(names, keys, strict=True):
        if key not in TASKS:
            raise InputError(f"unknown task {name.strip()!r}; choose from {', '.join(TASKS)}.")
    return [TASKS[key] for key in dict.fromkeys(keys)]


def read_questions(task: Task, data: Path, split: Split | None = None) -> list[Question]:
    """A task's questions, those of MMLU subject by subject.

    Args:
        data: the folder that holds a folder for each task.
        split: by default the task's own.

    Raises:
        InputError: there are no such files, or one cannot be used; names it.
    """
    if not data.is_dir():
        raise InputError(f"--data {data} is no folder; it must hold a folder for each task, such as {task.name}.")
    names = task.files.get(split or task.split, ())
    for name in names:
        paths = sorted(data.glob(name))
        if paths:
            return [question for path in paths for question in task.read(path)]
    raise InputError(f"{task.title} is not there: {data} has no {' or '.join(names) or f'{split} set of it'}.")


def read_shots(task: Task, data: Path, count: int, subjects: Sequence[str]) -> dict[str, list[Question]]:
    """The first `count` questions that worked examples are made of, by subject (one, "", except in MMLU).

    Raises:
        InputError: no file to take them from, or not enough in it.
    """
    found: dict[str, list[Question]] = {}
    for subject in dict.fromkeys(subjects) if count else ():
        names = [name.format(subject=subject) for name in task.shots]
        path = next((data / name for name in names if (data / name).is_file()), None)
        if path is None:
            raise InputError(f"{task.title} has no worked examples for --shots: {data} has no {' or '.join(names)}.")
        found[subject] = task.read(path)[:count]
        if len(found[subject]) < count:
            raise InputError(f"{path} has only {len(found[subject])} worked examples, not the {count} of --shots.")
    return found


def build(task: Task, protocol: Protocol, question: Question, shots: Sequence[Question] = ()) -> RequestSet:
    """What is scored for a question in one of the two log-probability protocols."""
    shown = tuple(f"{_solved(task, protocol, shot)}\n\n" for shot in shots)
    if protocol == "choice":
        queries = (_lettered(task, question),) * len(question.choices)
        texts = LETTERS[: len(question.choices)]
        opening = task.header.format(subject=question.subject.replace("_", " "))
    elif _has_blank(task):
        before, after = question.stem.split("_")
        queries = tuple(before + choice for choice in question.choices)
        texts, opening = (after.strip(),) * len(question.choices), ""
    else:
        queries = (_query(task, question),) * len(question.choices)
        texts, opening = question.choices, ""
    return RequestSet(
        id=question.id,
        subject=question.subject,
        gold=question.gold,
        opening=opening,
        shots=shown,
        queries=queries,
        continuations=tuple(f" {text}" for text in texts),
        sizes=tuple(len(text) for text in texts),
        unconditional=None if protocol == "choice" or _has_blank(task) else UNCONDITIONAL,
    )


def _has_blank(task: Task) -> bool:
    return task.name == "winogrande"


def _query(task: Task, question: Question) -> str:
    return task.cloze.format(stem=question.stem, passage=question.passage)


def _lettered(task: Task, question: Question) -> str:
    lines = [f" {letter}. {text}" for letter, text in zip(LETTERS, question.choices, strict=False)]
    head = task.choice.format(stem=question.stem, passage=question.passage)
    return "\n".join([head, *lines, UNCONDITIONAL])


def _solved(task: Task, protocol: Protocol, question: Question) -> str:
    """A question with its answer."""
    answer = question.choices[question.gold]
    if protocol == "choice":
        return f"{_lettered(task, question)} {LETTERS[question.gold]}"
    if _has_blank(task):
        return question.stem.replace("_", answer)
    return f"{_query(task, question)} {answer}"
