"""From the log to scores: accuracy with its interval beside chance, and everything one must know to compare it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minimoe.evaluate.letters import LetterPrompt, read, read_as_published
from minimoe.evaluate.log import Log, Record
from minimoe.evaluate.run import Benchmark
from minimoe.evaluate.tasks import Normaliser, RequestSet
from minimoe.intervals import Z, mean_interval, wilson


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one item.

    Attributes:
        correct: whether the right choice was chosen; of several that are equally good, the first is.
        invalid: no choice was made: the item is too long for the model, or no letter could be read. Not correct.
        tied: several choices were equally good.
    """

    correct: bool
    invalid: bool = False
    tied: bool = False


def choose(item: RequestSet, record: Record, normaliser: Normaliser) -> Answer:
    """The choice with the highest log-probability: as it is, a character, or without that of the choice alone."""
    if "invalid" in record:
        return Answer(correct=False, invalid=True)
    values = list(record["logprobs"])
    if normaliser == "characters":
        values = [value / size for value, size in zip(values, item.sizes, strict=True)]
    elif normaliser == "pmi":
        values = [value - prior for value, prior in zip(values, record["unconditional"], strict=True)]
    best = max(values)
    return Answer(correct=values.index(best) == item.gold, tied=values.count(best) > 1)


def chosen_letter(item: LetterPrompt, record: Record) -> Answer:
    """The choice whose letter the model wrote."""
    found = None if "invalid" in record else read(item, record["output"])
    return Answer(correct=found == item.gold, invalid=found is None)


def published_letter(item: LetterPrompt, record: Record) -> Answer:
    """The same by the paper's parser, with its faults."""
    found = None if "invalid" in record else read_as_published(item, record["output"])
    return Answer(correct=found == item.labels[item.gold], invalid=found is None)


def results(
    benchmarks: Sequence[Benchmark],
    rules: Sequence[str],
    log: Log,
    layers: int,
    *,
    published_parser: bool = False,
) -> list[dict[str, Any]]:
    """One result for each benchmark and rule, in order; see `summarise`. Every item must be in the log.

    Args:
        layers: of the model; for the mean k.
        published_parser: in the letter protocol, a second result for each, read by the paper's parser.
    """
    found = []
    for benchmark in benchmarks:
        base: list[Answer] | None = None
        for rule in rules:
            records = [log.find(benchmark.task.name, rule, item.id, item.digest()) or {} for item in benchmark.items]
            for parser in ("own", "published") if published_parser else ("own",):
                answers = _answers(benchmark, records, parser)
                base = answers if base is None else base
                found.append(
                    {
                        **_described(benchmark, rule, parser),
                        **summarise(benchmark, answers, base, records, layers),
                    }
                )
    return found


def _described(benchmark: Benchmark, rule: str, parser: str) -> dict[str, Any]:
    task = benchmark.task
    letters = benchmark.protocol == "letters"
    prompts = {"cloze": task.cloze, "choice": task.choice, "letters": f"{task.letters}: {{stem}}\nChoices:"}
    return {
        "task": task.name,
        "split": benchmark.split,
        "router": rule,
        "protocol": benchmark.protocol,
        "prompt": prompts[benchmark.protocol],
        "shots": benchmark.shots,
        "normaliser": benchmark.normaliser,
        "parser": parser if letters else None,
        "mean": "over items",
        "published_items": task.published if benchmark.split == task.split else None,
    }


def _answers(benchmark: Benchmark, records: Sequence[Record], parser: str) -> list[Answer]:
    pairs: Any = zip(benchmark.items, records, strict=True)
    if benchmark.normaliser is not None:
        return [choose(item, record, benchmark.normaliser) for item, record in pairs]
    by = chosen_letter if parser == "own" else published_letter
    return [by(item, record) for item, record in pairs]


def summarise(
    benchmark: Benchmark, answers: Sequence[Answer], base: Sequence[Answer], records: Sequence[Record], layers: int
) -> dict[str, Any]:
    """One benchmark by one rule in numbers.

    items, correct, accuracy (of all items, also invalid ones) with its Wilson interval; chance: the accuracy of
    guessing; change against the first rule with its paired interval; invalid, tied (the first of the best counts), cut
    and shots_dropped: how many items; mean_k: experts a token and layer; tokens: that went through the model;
    by_normaliser: the accuracy under each that the log can give; subjects, subject_mean: MMLU's, the mean over its
    subjects with an interval that takes the items as drawn by subject.
    """
    items, count = benchmark.items, len(answers)
    correct = sum(answer.correct for answer in answers)
    changes = [float(answer.correct - other.correct) for answer, other in zip(answers, base, strict=True)]
    tokens = sum(record.get("tokens", 0) for record in records)
    return {
        "items": count,
        "correct": correct,
        "accuracy": correct / count,
        "interval": wilson(correct, count),
        "chance": sum(1 / item.choices for item in items) / count,
        "change": sum(changes) / count,
        "change_interval": mean_interval(changes),
        "invalid": sum(answer.invalid for answer in answers),
        "tied": sum(answer.tied for answer in answers),
        "cut": sum(record.get("tokens_cut", 0) > 0 for record in records),
        "shots_dropped": sum(record.get("shots_dropped", 0) > 0 for record in records),
        "mean_k": sum(record.get("pairs", 0) for record in records) / (tokens * layers) if tokens else None,
        "tokens": tokens,
        "by_normaliser": _by_normaliser(benchmark, records),
        **_by_subject(benchmark, answers),
    }


def _by_normaliser(benchmark: Benchmark, records: Sequence[Record]) -> dict[str, float]:
    if benchmark.normaliser is None:
        return {}
    names: list[Normaliser] = ["none", "characters"]
    if benchmark.normaliser == "pmi":
        names.append("pmi")
    pairs: Any = list(zip(benchmark.items, records, strict=True))
    return {name: sum(choose(item, record, name).correct for item, record in pairs) / len(pairs) for name in names}


def _by_subject(benchmark: Benchmark, answers: Sequence[Answer]) -> dict[str, Any]:
    parts: dict[str, list[bool]] = {}
    pairs: Any = zip(benchmark.items, answers, strict=True)
    for item, answer in pairs:
        parts.setdefault(item.subject, []).append(answer.correct)
    if list(parts) == [""]:
        return {}
    shares = {subject: sum(part) / len(part) for subject, part in parts.items()}
    mean = sum(shares.values()) / len(shares)
    variance = sum(share * (1 - share) / len(parts[subject]) for subject, share in shares.items()) / len(shares) ** 2
    half = Z * math.sqrt(variance)
    return {
        "subject_mean": mean,
        "subject_mean_interval": [mean - half, mean + half],
        "subjects": {s: {"items": len(parts[s]), "accuracy": share} for s, share in shares.items()},
    }
