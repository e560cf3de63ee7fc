"""Many continuations scored together: large passes without padding, and what several have in common computed once.

A group is what belongs to one item, such as the choices of a question. All its sequences begin alike (the trunk, at
least the question); the trunks of many groups run in one pass. Then every group's first branch continues on its trunk's
cache in one pass, is forgotten, then every second branch, and so on: nothing is copied.

Shape letters: T tokens, D hidden, V vocabulary, R rows whose logits are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.errors import NumericalError
from minimoe.model import Batch, Olmoe
from minimoe.probe import Phase, Probe, Probes
from minimoe.routers import Router
from minimoe.routing import Routing
from minimoe.scoring import Score, score

T = TypeVar("T")

HEAD_ROWS = 256  # rows of logits in memory at once; they are as wide as the vocabulary

Branch = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of its continuation, at least one each and together within the model's context."""


@dataclass(frozen=True, slots=True)
class Group:
    """The scores of a group.

    Attributes:
        scores: of its continuations, in order.
        tokens: how many went through the model for it.
        pairs: experts they used, over all tokens and layers.
    """

    scores: list[Score]
    tokens: int
    pairs: int


def chunks(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Items in their order, as many at a time as together have at most `limit`; one that is larger goes alone."""
    part: list[T] = []
    used = 0
    for item in items:
        if part and used + size(item) > limit:
            yield part
            part, used = [], 0
        part.append(item)
        used += size(item)
    if part:
        yield part


def trunk(branches: Sequence[Branch]) -> int:
    """How many of the tokens that are fed to the model all branches of a group have in common at their beginning."""
    fed = [[*context, *ids][:-1] for context, ids in branches]
    shortest = min(map(len, fed))
    alike = (len({ids[position] for ids in fed}) == 1 for position in range(shortest))
    return next((position for position, same in enumerate(alike) if not same), shortest)


def room(branches: Sequence[Branch]) -> int:
    """Positions that a group takes up in its cache: its longest sequence."""
    return max(len(context) + len(ids) - 1 for context, ids in branches)


def score_together(
    model: Olmoe, router: Router, groups: Sequence[Sequence[Branch]], probe: Probe | None = None
) -> list[Group]:
    """The scores of many groups, by a rule that decides about each token by itself and does not draw.

    With the native backend, the scores are the same to the last bit however the groups are put together.

    Raises:
        NumericalError: logits that are not finite.
    """
    with torch.inference_mode():
        return _Work(model, router, groups, probe).run()


def score_alone(model: Olmoe, router: Router, branches: Sequence[Branch], probe: Probe | None, seed: int) -> Group:
    """The scores of a group, each branch in a pass of its own: for rules that look at other tokens, or draw.

    Raises:
        NumericalError: logits that are not finite.
    """
    uses = _Uses()
    probe = uses if probe is None else Probes(probe, uses)
    scores, tokens, pairs = [], 0, 0
    for context, ids in branches:
        scores.append(score(model, router, context, ids, probe, seed))
        tokens += len(uses.k_T)
        pairs += int(uses.k_T.sum())
    return Group(scores, tokens, pairs)


class _Uses(Probe):
    """Experts that each token of the latest pass used, over all layers."""

    def __init__(self) -> None:
        self.k_T = torch.zeros(0, dtype=torch.int64)

    def step(self, phase: Phase, new: Sequence[int], past: Sequence[int]) -> None:
        self.k_T = torch.zeros(sum(new), dtype=torch.int64)

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        self.k_T += routing.k_T.cpu()


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of one group in one pass, from a position on; `wanted` are (position, target token, branch)."""

    group: int
    ids: list[int]
    start: int
    wanted: list[tuple[int, int, int]]


class _Work:
    """One call of score_together."""

    def __init__(self, model: Olmoe, router: Router, groups: Sequence[Sequence[Branch]], probe: Probe | None) -> None:
        self.model, self.router, self.groups = model, router, groups
        self.uses = _Uses()
        self.probe = self.uses if probe is None else Probes(probe, self.uses)
        self.trunks = [trunk(branches) for branches in groups]
        self.caches = [KVCache(model.config, room(branches), model.dtype, model.device) for branches in groups]
        # Of every token of every continuation: its log-probability, and whether it was the likeliest.
        self.found: list[list[list[tuple[float, bool]]]] = [[[] for _ in branches] for branches in groups]
        self.tokens, self.pairs = [0] * len(groups), [0] * len(groups)

    def run(self) -> list[Group]:
        self._pass([self._trunk(group) for group in range(len(self.groups))])
        for turn in range(max(map(len, self.groups), default=0)):
            having = [group for group, branches in enumerate(self.groups) if turn < len(branches)]
            self._pass([self._branch(group, turn) for group in having])
        return [self._result(group) for group in range(len(self.groups))]

    def _trunk(self, group: int) -> _Part:
        branches, end = self.groups[group], self.trunks[group]
        ids = [*branches[0][0], *branches[0][1]][:end]
        wanted = [want for index in range(len(branches)) for want in self._wanted(group, index, 0, end)]
        return _Part(group, ids, 0, wanted)

    def _branch(self, group: int, index: int) -> _Part:
        context, ids = self.groups[group][index]
        start, end = self.trunks[group], len(context) + len(ids) - 1
        return _Part(group, [*context, *ids][start:end], start, self._wanted(group, index, start, end))

    def _wanted(self, group: int, index: int, start: int, end: int) -> list[tuple[int, int, int]]:
        context, ids = self.groups[group][index]
        first = len(context) - 1  # predicts the continuation's first token
        return [(position, ids[position - first], index) for position in range(max(start, first), end)]

    def _pass(self, parts: Sequence[_Part]) -> None:
        # A lone token goes through another attention kernel than several do. In passes of its own kind, the numbers
        # of a sequence do not depend on its neighbours.
        several = [part for part in parts if len(part.ids) > 1]
        lone = [part for part in parts if len(part.ids) == 1]
        for alike in filter(None, (several, lone)):
            self._forward(alike)

    def _forward(self, parts: Sequence[_Part]) -> None:
        ids_T = torch.tensor([token for part in parts for token in part.ids], device=self.model.device)
        lengths = [len(part.ids) for part in parts]
        caches = [self.caches[part.group] for part in parts]
        hidden_TD = self.model.forward(Batch(ids_T, lengths, caches), self.router, self.probe)
        asked, offset = [], 0
        for part, k_T in zip(parts, self.uses.k_T.split(lengths), strict=True):
            self.tokens[part.group] += len(part.ids)
            self.pairs[part.group] += int(k_T.sum())
            # What a trunk has written stays; a branch is forgotten.
            self.caches[part.group].truncate(self.trunks[part.group])
            asked += [(offset + position - part.start, target, part, index) for position, target, index in part.wanted]
            offset += len(part.ids)
        answers = self._logprobs(hidden_TD, [(row, target) for row, target, _, _ in asked])
        for (_, _, part, index), answer in zip(asked, answers, strict=True):
            self.found[part.group][index].append(answer)

    def _logprobs(self, hidden_TD: Tensor, asked: Sequence[tuple[int, int]]) -> Iterator[tuple[float, bool]]:
        """For each row and target token: its log-probability, and whether it is the likeliest."""
        for start in range(0, len(asked), HEAD_ROWS):
            block = asked[start : start + HEAD_ROWS]
            rows = sorted({row for row, _ in block})
            logits_RV = self.model.head(hidden_TD[rows], self.probe)
            # The least and the largest of all are NaN where one is; looking at each by itself takes as long as a layer.
            if not all(math.isfinite(end) for end in torch.aminmax(logits_RV)):
                raise NumericalError("the logits of a token to score are not finite; the weights are broken.")
            logprobs_RV, highest_R = logits_RV.float().log_softmax(-1), logits_RV.amax(-1).tolist()
            place = {row: index for index, row in enumerate(rows)}
            at = [place[row] for row, _ in block]
            targets = [target for _, target in block]
            values = logprobs_RV[at, targets].tolist()
            chosen = logits_RV[at, targets].tolist()
            for value, i, target, logit in zip(values, at, targets, chosen, strict=True):
                # Of several that are equally likely, the first is the likeliest.
                yield value, logit == highest_R[i] and int(logits_RV[i].argmax()) == target

    def _result(self, group: int) -> Group:
        scores = []
        for (_, ids), answers in zip(self.groups[group], self.found[group], strict=True):
            logprobs = [value for value, _ in answers]
            scores.append(Score(sum(logprobs), logprobs, list(ids), all(best for _, best in answers)))
        return Group(scores, self.tokens[group], self.pairs[group])
