"""Benchmark files as their authors published them, read into one plain form.

ARC's choices may be labelled A to E or 1 to 4, and there may be three, four or five of them: the label only says which
choice is the right one. HellaSwag's files come with their WikiHow markers or already without; see `clean`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimoe.errors import InputError

LETTERS = ("A", "B", "C", "D", "E")


@dataclass(frozen=True, slots=True)
class Question:
    """One item of a benchmark, before any prompt is made of it.

    Attributes:
        id: the benchmark's own, or the item's number in its file, from 0.
        stem: the question, goal, passage, or sentence with a blank (_).
        choices: at least two.
        gold: index of the right one.
        labels: what the file calls the choices; A, B, … where it does not name them.
        passage: the text that the choices continue, where it is another than the stem (HellaSwag).
        subject: of MMLU's 57, or empty.
    """

    id: str
    stem: str
    choices: tuple[str, ...]
    gold: int
    labels: tuple[str, ...]
    passage: str = ""
    subject: str = ""


Reader = Callable[[Path], list[Question]]


def read_arc(path: Path) -> list[Question]:
    """ARC's JSON lines: id, question with stem and choices, answerKey.

    Raises:
        InputError: the file cannot be read, or a line (named) is no item or its key no label of its choices.
    """
    return [_checked(_arc, fields, place) for _, fields, place in _json_lines(path)]


def _arc(fields: Any) -> Question:
    question, key = fields["question"], fields["answerKey"]
    labels = tuple(str(choice["label"]) for choice in question["choices"])
    choices = tuple(choice["text"] for choice in question["choices"])
    if len(set(labels)) < len(labels):
        raise InputError(f"two of its choices have the same label, of {', '.join(labels)}")
    if key not in labels:
        raise InputError(f"its answerKey is {key!r}, but its choices are labelled {', '.join(labels)}")
    return Question(fields["id"], question["stem"], choices, labels.index(key), labels)


def read_hellaswag(path: Path) -> list[Question]:
    """HellaSwag's JSON lines: activity_label, ctx_a, ctx_b, ctx, endings, label.

    Raises:
        InputError: as read_arc does.
    """
    return [_checked(_hellaswag, fields, place, number) for number, fields, place in _json_lines(path)]


def _hellaswag(fields: Any, number: int) -> Question:
    label, endings = fields["label"], fields["endings"]
    if not isinstance(endings, list):
        raise InputError("its endings must be a list")
    label = int(label) if isinstance(label, str) and label else label  # the hub's copy quotes it
    _check_gold(label, len(endings))
    # The published evaluations capitalise where the second sentence begins, lower-case in the files.
    passage = f"{fields['activity_label']}: {fields['ctx_a']} {fields['ctx_b'].capitalize()}"
    return Question(
        id=str(number),
        stem=fields["ctx"],
        choices=tuple(clean(ending) for ending in endings),
        gold=label,
        labels=LETTERS[: len(endings)],
        passage=clean(passage),
    )


def clean(text: str) -> str:
    """HellaSwag without WikiHow's markers: a title begins a new sentence, other markers go, and so do double spaces.

    OLMES (Gu et al. 2024) does the same, but keeps the space that a marker at the start of an ending leaves behind:
    its continuations of those endings begin with two spaces, these with one.
    """
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return re.sub(" {2,}", " ", re.sub(r"\.\. +", ". ", text)).strip()


def read_piqa(path: Path) -> list[Question]:
    """PIQA's JSON lines (goal, sol1, sol2), and beside them NAME-labels.lst with 0 or 1 a line.

    Raises:
        InputError: as read_arc does; or labels that are not there, or not as many.
    """
    labels_path = path.with_name(f"{path.stem}-labels.lst")
    if not labels_path.is_file():
        raise InputError(f"{path} has no labels: there is no file {labels_path.name} beside it.")
    rows, labels = list(_json_lines(path)), _read(labels_path).split()
    if len(rows) != len(labels):
        raise InputError(f"{path} has {len(rows)} items, but {labels_path.name} has {len(labels)} labels.")
    questions = []
    for (number, fields, place), label in zip(rows, labels, strict=True):
        if label not in ("0", "1"):
            raise InputError(f"label {number + 1} in {labels_path} is {label!r}; it must be 0 or 1.")
        questions.append(_checked(_piqa, fields, place, number, int(label)))
    return questions


def _piqa(fields: Any, number: int, gold: int) -> Question:
    return Question(str(number), fields["goal"], (fields["sol1"], fields["sol2"]), gold, LETTERS[:2])


def read_winogrande(path: Path) -> list[Question]:
    """WinoGrande's JSON lines: qID, sentence with one blank (_), option1, option2, answer ("1" or "2").

    Raises:
        InputError: as read_arc does.
    """
    return [_checked(_winogrande, fields, place) for _, fields, place in _json_lines(path)]


def _winogrande(fields: Any) -> Question:
    if fields["sentence"].count("_") != 1:
        raise InputError("its sentence must have exactly one blank, written _")
    if not fields["sentence"].partition("_")[2].strip():
        raise InputError("nothing follows the blank of its sentence, so that there is nothing to score")
    if fields["answer"] not in ("1", "2"):
        raise InputError(f"its answer is {fields['answer']!r}; it must be '1' or '2'")
    gold = int(fields["answer"]) - 1
    return Question(fields["qID"], fields["sentence"], (fields["option1"], fields["option2"]), gold, LETTERS[:2])


def read_mmlu(path: Path) -> list[Question]:
    """One subject of MMLU: CSV without a header, question, four choices and the right one's letter; cells may be long.

    Raises:
        InputError: as read_arc does.
    """
    subject = path.stem.rpartition("_")[0]
    try:
        rows = list(csv.reader(io.StringIO(_read(path), newline=""), strict=True))
    except csv.Error as error:
        raise InputError(f"{path} is no CSV file: {error}.") from None
    questions = []
    for number, row in enumerate(rows):
        if len(row) != 6 or row[5] not in LETTERS[:4]:
            raise InputError(f"row {number + 1} of {path} must be a question, four choices and a letter from A to D.")
        made = Question(
            f"{subject}/{number}", row[0], tuple(row[1:5]), LETTERS.index(row[5]), LETTERS[:4], subject=subject
        )
        questions.append(_checked(lambda question: question, made, f"row {number + 1} of {path}"))
    return _some(questions, path)


def _json_lines(path: Path) -> Iterator[tuple[int, Any, str]]:
    """Number of the item from 0, its fields, and its place for a person."""
    numbered = [(n, line) for n, line in enumerate(_read(path).split("\n"), 1) if line.strip()]
    for index, (number, line) in enumerate(_some(numbered, path)):
        place = f"line {number} of {path}"
        try:
            yield index, json.loads(line), place
        except (ValueError, RecursionError):
            raise InputError(f"{place} is not JSON; the file may be cut off.") from None


def _checked(make: Callable[..., Question], fields: Any, place: str, *more: int) -> Question:
    """Make a question of a line's fields, and refuse what no prompt can be made of."""
    try:
        question = make(fields, *more)
    except InputError as error:
        raise InputError(f"{place} cannot be used: {error}.") from None
    except KeyError as error:
        raise InputError(f"{place} has no {error.args[0]!r}.") from None
    except (TypeError, AttributeError, ValueError):
        raise InputError(f"{place} is no item of this benchmark; its fields have other types.") from None
    texts = (question.id, question.stem, *question.choices)
    if not all(isinstance(text, str) for text in texts) or not all(text.strip() for text in question.choices):
        raise InputError(f"{place} cannot be used: id, question and choices must be texts, and no choice empty.")
    try:
        "".join((question.passage, *texts)).encode()
    except UnicodeEncodeError:
        raise InputError(f"{place} cannot be used: it has half of a surrogate pair, which is no character.") from None
    if not 2 <= len(question.choices) <= len(LETTERS):
        raise InputError(f"{place} has {len(question.choices)} choices; from 2 to {len(LETTERS)} can be scored.")
    return question


def _check_gold(label: Any, choices: int) -> None:
    if type(label) is not int or not 0 <= label < choices:
        raise InputError(f"its label is {label!r}; it must be a whole number from 0 to {choices - 1}")


def _some(items: list[Any], path: Path) -> list[Any]:
    if not items:
        raise InputError(f"{path} has no items.")
    return items


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text.") from None
    if text.startswith("version https://git-lfs"):
        raise InputError(f"{path} is only a pointer of Git LFS; fetch the file itself with 'git lfs pull'.")
    return text
