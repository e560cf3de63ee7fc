"""What the study runs on: the six benchmarks, or without them the cloze items that come with the embedded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minimoe.evaluate.questions import LETTERS, Question
from minimoe.evaluate.run import Benchmark, prepare
from minimoe.evaluate.tasks import TASKS, RequestSet, Task
from minimoe.hub import EMBEDDED, resolve
from minimoe.items import read_cloze

QUICK_ITEMS, QUICK_PER_SUBJECT, QUICK_OWN = 12, 1, 6


@dataclass(frozen=True, slots=True)
class Benchmarks:
    """Benchmarks made ready in the paper's protocol and in the cloze protocol, one of each for each task.

    Attributes:
        letters, cloze: in the order of the tasks.
        groups: prompts in the paper's protocol by what routers are told apart on: the tasks, or the sets of own items.
        titles: of the groups.
        subjects: name of the task whose subjects are compared.
    """

    letters: Sequence[Benchmark]
    cloze: Sequence[Benchmark]
    groups: Mapping[str, Sequence[Any]]
    titles: Mapping[str, str]
    subjects: str


def six_benchmarks(data: Path, *, quick: bool) -> Benchmarks:
    """The paper's benchmarks from a folder as `minimoe eval` reads it.

    Raises:
        InputError: files that are not there or cannot be used.
    """

    def made(protocol: Any) -> list[Benchmark]:
        limits = {name: QUICK_PER_SUBJECT if name == "mmlu" else QUICK_ITEMS for name in TASKS if quick}
        return [prepare(task, data, protocol=protocol, limit=limits.get(name)) for name, task in TASKS.items()]

    letters = made("letters")
    groups = {b.task.name: b.items for b in letters}
    return Benchmarks(letters, made("cloze"), groups, {b.task.name: b.task.title for b in letters}, "mmlu")


def own_items(*, quick: bool) -> Benchmarks:
    """The cloze items of the embedded model as one benchmark, with its sets as subjects.

    Raises:
        InputError: they are not there.
    """
    folder, limit = resolve(EMBEDDED), QUICK_OWN if quick else None
    letters = prepare(OWN, folder, protocol="letters", limit=limit)
    cloze = prepare(OWN, folder, protocol="cloze", limit=limit)
    cloze = replace(cloze, items=[_joined(item) for item in cloze.items if isinstance(item, RequestSet)])
    groups = by_subject(letters.items)
    return Benchmarks([letters], [cloze], groups, {name: name for name in groups}, OWN.name)


def by_subject(items: Sequence[Any]) -> dict[str, list[Any]]:
    """Items of each subject, in the order in which subjects come."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(item.subject, []).append(item)
    return groups


def _read(path: Path) -> list[Question]:
    return [
        Question(
            id=f"{path.stem}/{number}",
            stem=item.passage,
            choices=tuple(item.endings),
            gold=item.label,
            labels=LETTERS[: len(item.endings)],
            subject=path.stem,
        )
        for number, item in enumerate(read_cloze(path))
    ]


def _joined(item: RequestSet) -> RequestSet:
    """Endings follow their passage after a space, or at once where it ends in one or in a line break."""
    if not item.queries[0][-1:].isspace():
        return item
    return replace(item, continuations=tuple(text.removeprefix(" ") for text in item.continuations))


OWN = Task(
    name="own",
    title="own items",
    read=_read,
    files={"test": ("cloze/*.jsonl",)},
    shots=(),
    cloze="{stem}",
    choice="{stem}",
    letters="Passage",
    normaliser="characters",
    published=0,
    split="test",
)
