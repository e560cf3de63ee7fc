"""The protocols that compare log-probabilities: from a RequestSet to token ids that fit the model, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minimoe.engine import Engine
from minimoe.evaluate.tasks import RequestSet
from minimoe.packing import Branch, Group, room, score_alone, score_together
from minimoe.routers import Router
from minimoe.scoring import cut

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fitted:
    """An item as token ids.

    Attributes:
        branches: context and continuation of each choice.
        unconditional: the same without the question, or empty if that is not scored.
        dropped: worked examples that were left out, from the front, because the item was too long for the model.
        cut: tokens of the context that were cut off at its beginning because that was not enough.
    """

    branches: list[Branch]
    unconditional: list[Branch]
    dropped: int
    cut: int

    @property
    def room(self) -> int:
        """Positions that it takes up in caches while it is scored."""
        return room(self.branches) + (room(self.unconditional) if self.unconditional else 0)


class Likelihood:
    """Scores RequestSets on an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def fit(self, item: RequestSet) -> Fitted | None:
        """Token ids that fit the model's context, or None if a choice alone is too long for it."""
        limit = self.engine.config.max_positions
        for dropped in range(len(item.shots) + 1):
            branches = self._encode(item.contexts(dropped), item.continuations)
            excess = max(len(context) + len(ids) for context, ids in branches) - limit
            if excess <= 0:
                break
        else:
            # The same number of tokens is cut from all choices, so that they are compared after the same text.
            if min(len(context) for context, _ in branches) <= excess:
                return None
            branches = [(context[excess:], ids) for context, ids in branches]
        alone: list[Branch] = []
        if item.unconditional is not None:
            alone = self._encode([item.unconditional] * len(item.continuations), item.continuations)
            if max(len(context) + len(ids) for context, ids in alone) > limit:
                return None
        return Fitted(branches, alone, dropped, max(0, excess))

    def together(self, router: Router, items: Sequence[Fitted]) -> list[Fields]:
        """The fields of a record for each item, by a rule that decides about each token by itself."""
        groups = [group for item in items for group in (item.branches, item.unconditional) if group]
        found = iter(score_together(self.engine.model, router, groups))
        return [_fields(item, next(found), next(found) if item.unconditional else None) for item in items]

    def alone(self, router: Router, item: Fitted, seed: int) -> Fields:
        """The same for one item, by any rule."""
        scored = score_alone(self.engine.model, router, item.branches, None, seed)
        prior = score_alone(self.engine.model, router, item.unconditional, None, seed) if item.unconditional else None
        return _fields(item, scored, prior)

    def _encode(self, contexts: Sequence[str], continuations: Sequence[str]) -> list[Branch]:
        pairs = [cut(self.engine.tokenizer, *pair) for pair in zip(contexts, continuations, strict=True)]
        return [(context or self.engine.encode_prompt([]), ids) for context, ids in pairs]


def _fields(item: Fitted, scored: Group, prior: Group | None) -> Fields:
    fields: Fields = {"logprobs": [score.logprob for score in scored.scores]}
    if prior is not None:
        fields["unconditional"] = [score.logprob for score in prior.scores]
    groups = [scored] if prior is None else [scored, prior]
    return {
        **fields,
        "tokens": sum(group.tokens for group in groups),
        "pairs": sum(group.pairs for group in groups),
        "shots_dropped": item.dropped,
        "tokens_cut": item.cut,
    }
