"""The evaluation itself: benchmarks made ready, and every item that the log lacks scored by every rule."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.evaluate.letters import LetterPrompt, Letters, ask
from minimoe.evaluate.likelihood import Likelihood
from minimoe.evaluate.log import Log
from minimoe.evaluate.tasks import Normaliser, RequestSet, Split, Task, build, read_questions, read_shots
from minimoe.model import Batch
from minimoe.packing import chunks
from minimoe.routers import Router

Kind = Literal["cloze", "choice", "letters"]

CHUNK = 4000  # positions that are in caches at once: large enough to be fast, small enough for memory

Fields = dict[str, Any]
Item = RequestSet | LetterPrompt


class Method(Protocol):
    """How the items of a protocol are run: Likelihood or Letters. What `fit` returns has a `room`."""

    def fit(self, item: Any) -> Any: ...

    def together(self, router: Router, items: Sequence[Any]) -> list[Fields]: ...

    def alone(self, router: Router, item: Any, seed: int) -> Fields: ...


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A task made ready: read, checked, and turned into prompts.

    Attributes:
        items: RequestSets, or LetterPrompts in the letter protocol.
        shots: worked examples before each question.
        normaliser: of log-probabilities; None in the letter protocol.
        split: which of the task's sets it is.
    """

    task: Task
    protocol: Kind
    split: Split
    shots: int
    normaliser: Normaliser | None
    items: Sequence[RequestSet] | Sequence[LetterPrompt]


def prepare(
    task: Task,
    data: Path,
    *,
    protocol: Kind = "cloze",
    shots: int = 0,
    normaliser: Normaliser | None = None,
    limit: int | None = None,
    split: Split | None = None,
) -> Benchmark:
    """Read a task's files and build its prompts.

    Args:
        normaliser: by default the task's own in the cloze protocol, and none for letters, which are of one length.
        limit: only the first so many items; of MMLU, of each subject.

    Raises:
        InputError: files that are not there or cannot be used, or settings that do not go together.
    """
    split = split or task.split
    questions = read_questions(task, data, split)
    if limit is not None:
        by_subject: dict[str, list[Any]] = {}
        for question in questions:
            by_subject.setdefault(question.subject, []).append(question)
        questions = [question for part in by_subject.values() for question in islice(part, limit)]
    if protocol == "letters":
        if shots or normaliser:
            raise InputError("the letter protocol has no worked examples and no normaliser.")
        return Benchmark(task, protocol, split, 0, None, [ask(task, question) for question in questions])
    normaliser = normaliser or (task.normaliser if protocol == "cloze" else "none")
    examples = read_shots(task, data, shots, [question.subject for question in questions])
    items = [build(task, protocol, question, examples.get(question.subject, ())) for question in questions]
    if normaliser != "pmi":
        items = [replace(item, unconditional=None) for item in items]
    elif any(item.unconditional is None for item in items):
        raise InputError(f"the normaliser pmi needs choices of their own, which {task.title} does not have here.")
    return Benchmark(task, protocol, split, shots, normaliser, items)


def settings(engine: Engine, seed: int) -> dict[str, Any]:
    """What all records of a run depend on, besides their prompts and rules."""
    return {
        "checkpoint": engine.model.fingerprint(),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "backend": engine.backend,
        "device": str(engine.model.device),
        "seed": seed,
    }


def left(benchmarks: Sequence[Benchmark], rules: Mapping[str, Router], log: Log) -> int:
    """How many characters of prompts are still to be run: about proportional to the time it takes."""
    return sum(
        item.characters for b in benchmarks for name in rules for item in b.items if _find(log, b, name, item) is None
    )


def evaluate(
    engine: Engine,
    benchmarks: Sequence[Benchmark],
    rules: Mapping[str, Router],
    log: Log,
    *,
    seed: int = 0,
    chunk: int = CHUNK,
    ran: Callable[[Benchmark, str, int], None] = lambda benchmark, rule, characters: None,
) -> int:
    """Fill the log with what it lacks. All rules run a chunk of items before the next chunk, on the same token ids.

    Rules that look at other tokens of a pass, or draw, run every continuation in a pass of its own, with a seed that
    depends on the item alone: what they do then does not depend on the order either.

    Args:
        rules: by the name that the log knows them by.
        ran: told after each piece of work how many characters of prompts it was.

    Returns:
        How many tokens went through the model.

    Raises:
        NumericalError: logits that are not finite.
    """
    single = {name: decides_alone(engine, rule) for name, rule in rules.items()}
    tokens = 0
    for benchmark in benchmarks:
        method: Method = Letters(engine) if benchmark.protocol == "letters" else Likelihood(engine)
        todo = [item for item in benchmark.items if any(_find(log, benchmark, name, item) is None for name in rules)]
        ready = ((item, method.fit(item)) for item in todo)
        for part in chunks(ready, lambda pair: 0 if pair[1] is None else pair[1].room, chunk):
            for name, rule in rules.items():
                lacking = [(item, fitted) for item, fitted in part if _find(log, benchmark, name, item) is None]
                for some in filter(None, [lacking] if single[name] else [[one] for one in lacking]):
                    records = _score(method, benchmark, name, rule, some, single[name], seed)
                    log.add(records)
                    tokens += sum(record.get("tokens", 0) for record in records)
                    ran(benchmark, name, sum(item.characters for item, _ in some))
    return tokens


def _score(
    method: Method,
    benchmark: Benchmark,
    name: str,
    rule: Router,
    part: Sequence[tuple[Item, Any]],
    single: bool,
    seed: int,
) -> list[Fields]:
    """Records of some items by one rule; those that no cutting makes fit are invalid."""
    fitting = [(item, fitted) for item, fitted in part if fitted is not None]
    if single:
        found = method.together(rule, [fitted for _, fitted in fitting]) if fitting else []
    else:
        found = [method.alone(rule, fitted, _seed(seed, item)) for item, fitted in fitting]
    scored = {id(item): fields for (item, _), fields in zip(fitting, found, strict=True)}
    return [
        {**_key(benchmark, name, item), **scored.get(id(item), {"invalid": "too long for the model"})}
        for item, _ in part
    ]


def decides_alone(engine: Engine, rule: Router) -> bool:
    """Whether a rule decides about each token by itself, without draws: then it does not matter what runs together."""
    if getattr(rule, "sees", "itself") != "itself":
        return False
    draws = torch.Generator().manual_seed(0)
    before = draws.get_state()
    token = engine.encode_prompt([])[0]
    with torch.inference_mode():
        engine.model.forward(Batch(torch.tensor([token, token], device=engine.model.device), [2]), rule, None, draws)
    return torch.equal(before, draws.get_state())


def _key(benchmark: Benchmark, name: str, item: Item) -> dict[str, str]:
    return {"task": benchmark.task.name, "router": name, "id": item.id, "digest": item.digest()}


def _find(log: Log, benchmark: Benchmark, name: str, item: Item) -> Any:
    return log.find(*_key(benchmark, name, item).values())


def _seed(seed: int, item: Item) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {item.digest()}".encode()).digest()[:7], "big")
