"""The protocol of the paper "Elbow-based MoE Routing": the model writes the letter of its answer, a parser reads it.

Prompt, two new tokens and no worked examples are those of the paper's program (rpan188/elbow-routing,
scripts/evals.py). Its parser takes the first "Answer:" of prompt and output together that has a letter from A to D
after it, so that choices labelled 1 to 4 or E are always wrong, a question that quotes an answer is read itself, and
"a" counts as A. `read` looks at the output alone and knows the item's own labels; `read_as_published` has the faults.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minimoe.engine import Engine
from minimoe.evaluate.questions import Question
from minimoe.evaluate.tasks import Task
from minimoe.generation import Batcher, Generation
from minimoe.routers import Router

Fields = dict[str, Any]

NEW_TOKENS = 2
PUBLISHED = re.compile(r"Answer:[^A-Za-z]*([A-Da-d])\b")


@dataclass(frozen=True, slots=True)
class LetterPrompt:
    """One item of this protocol: what the model is asked, and what the choices are called in it."""

    id: str
    subject: str
    gold: int
    labels: tuple[str, ...]
    prompt: str

    @property
    def choices(self) -> int:
        return len(self.labels)

    @property
    def characters(self) -> int:
        """About what it costs."""
        return len(self.prompt)

    def digest(self) -> str:
        """What tells this prompt from others."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


def ask(task: Task, question: Question) -> LetterPrompt:
    """The prompt of the paper's program for a question; choices keep the labels that their file gives them."""
    named = zip(question.labels, question.choices, strict=True)
    lines = [
        f"{task.letters}: {question.stem}",
        "Choices:",
        *(f"{label}. {text}" for label, text in named),
        "Answer:",
    ]
    return LetterPrompt(question.id, question.subject, question.gold, question.labels, "\n".join(lines))


def read(item: LetterPrompt, output: str) -> int | None:
    """Which choice an output names: it must begin, after spaces and signs, with one of the item's labels alone."""
    found = re.match(r"[\W_]*([A-Z0-9])(?![A-Za-z0-9])", output)
    return item.labels.index(found[1]) if found and found[1] in item.labels else None


def read_as_published(item: LetterPrompt, output: str) -> str | None:
    """The letter that the paper's parser finds in prompt and output; it is right if it equals the gold label."""
    found = PUBLISHED.search(item.prompt + output)
    return found[1].upper() if found else None


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt as token ids, and how many were cut off at its beginning to fit the model."""

    ids: list[int]
    cut: int

    @property
    def room(self) -> int:
        """Positions that it takes up in caches."""
        return len(self.ids) + NEW_TOKENS


class Letters:
    """Asks an engine for letters, greedily."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def fit(self, item: LetterPrompt) -> Fitted | None:
        """Token ids with room for the answer; every prompt can be cut to fit, but in a context of two tokens."""
        ids = self.engine.tokenizer.encode(item.prompt)
        keep = self.engine.config.max_positions - NEW_TOKENS
        return Fitted(ids[-keep:], max(0, len(ids) - keep)) if keep > 0 else None

    def together(self, router: Router, items: Sequence[Fitted]) -> list[Fields]:
        """The fields of a record for each item, by a rule that decides about each token by itself."""
        return self._write(router, items, seed=0)

    def alone(self, router: Router, item: Fitted, seed: int) -> Fields:
        """The same for one item, by any rule."""
        return self._write(router, [item], seed)[0]

    def _write(self, router: Router, items: Sequence[Fitted], seed: int) -> list[Fields]:
        engine = self.engine
        # No prompt is split over two passes, so that its numbers do not depend on its neighbours.
        batcher = Batcher(
            engine.model,
            engine.tokenizer,
            router,
            engine.eos_token_ids,
            max_batch=len(items),
            prefill_tokens=sum(len(item.ids) for item in items),
        )
        requests = [
            engine.request(item.ids, max_new_tokens=NEW_TOKENS, routing=True, temperature=0, seed=seed)
            for item in items
        ]
        with torch.inference_mode():
            done = {index: result for index, _, result in batcher.run(requests) if result}
        return [_fields(item, done[index]) for index, item in enumerate(items)]


def _fields(item: Fitted, written: Generation) -> Fields:
    routing = written.routing or []
    return {
        "output": written.text,
        "tokens": routing[0].num_tokens,
        "pairs": sum(int(layer.k_T.sum()) for layer in routing),
        "shots_dropped": 0,
        "tokens_cut": item.cut,
    }
