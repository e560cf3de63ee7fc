"""Find the value of a rule's key at which a text is routed with a wanted mean k.

The text is run under the rule itself, with the best value so far, and on the same logits the rule is asked what it
would do at other values. Those around the wanted mean k bound the next, finer round, so that a few passes are enough;
the mean k that counts is that of a pass that was really run. All results are whole numbers, kept window by window.

Shape letters: T tokens, E experts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.items import Item
from minimoe.journal import Journal
from minimoe.model import Batch
from minimoe.routers import Router, RouterContext
from minimoe.routers.spec import find_rule, hashes_of, parameters, parse_router, with_key
from minimoe.routers.top_k import TopK
from minimoe.routing import Routing
from minimoe.whole_file import write_whole

ROUNDS = 8  # at most
CLOSE = 1e-3  # of the wanted mean k
STEPS = 16  # of a round's interval
# Where the first round looks: powers of four to both sides of zero. A rule refuses what makes no sense for its key.
FIRST = (*(-(4.0**n) for n in range(7, -9, -1)), 0.0, *(4.0**n for n in range(-8, 8)))

Read = Callable[[str], Router]


class _Scan(Router):
    """Routes by one rule, and counts what others would give the same tokens.

    Attributes:
        pairs: sum of k under each of the others; -1 for one that refused.
        refusal: what the last that refused said.
    """

    def __init__(self, rule: Router, others: Sequence[Router]) -> None:
        self.rule, self.others = rule, others
        self.pairs = [0] * len(others)
        self.own = 0
        self.refusal: InputError | None = None

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        for index, other in enumerate(self.others):
            if self.pairs[index] >= 0:
                try:
                    self.pairs[index] += int(other.route(logits_TE, context).k_T.sum())
                except InputError as error:
                    self.pairs[index], self.refusal = -1, error
        routing = self.rule.route(logits_TE, context)
        self.own += int(routing.k_T.sum())
        return routing


def key_of(spec: str, key: str | None) -> str:
    """The key to find a value for: the one named, or the only one of the rule that takes any number.

    Raises:
        InputError: no such key, one that does not take any number, or several to choose from.
    """
    name, rule, _ = find_rule(spec)
    known = parameters(rule)
    real = [k for k, parameter in known.items() if float in _kinds(parameter.annotation)]
    among = f"; those that take any number are {', '.join(real)}" if real else "; it has none that takes any number"
    if key is None:
        if len(real) == 1:
            return real[0]
        if not real:
            raise InputError(f"{name} has no key that takes any number, so it cannot be fitted to a mean k.")
        raise InputError(f"say with --key which key of {name} to fit to the mean k{among}.")
    key = key.replace("-", "_")
    if key not in known:
        raise InputError(f"router {name} has no key {key!r}{among}.")
    if key not in real:
        raise InputError(f"{key} of router {name} cannot be fitted to a mean k{among}.")
    return key


def _kinds(annotation: Any) -> Sequence[Any]:
    return getattr(annotation, "__args__", (annotation,))


def candidates(spec: str, key: str, values: Sequence[float], read: Read = parse_router) -> list[tuple[float, Router]]:
    """The values that the rule accepts, in their order, each with the rule.

    Raises:
        InputError: it accepts none; what it says of the last.
    """
    found, refusal = [], None
    for value in values:
        try:
            found.append((value, read(with_key(spec, key, value))))
        except InputError as error:
            refusal = error
    if refusal is not None and not found:
        raise refusal
    return found


def tune(
    engine: Engine,
    spec: str,
    key: str,
    mean_k: float,
    items: Sequence[Item],
    path: str | Path | None = None,
    *,
    read: Read = parse_router,
    ran: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Find the value of a key with which the text has the wanted mean k, to CLOSE where the rule can be set so finely.

    Args:
        spec: the rule with its other keys, see minimoe.routers.spec.parse_router.
        key: see key_of.
        path: where the result is written, if anywhere; what is done so far is kept beside it in PATH.part until then.
        read: makes a rule of a SPEC.
        ran: called after each window of each round.

    Returns:
        What was written: the SPEC that came closest as `router`, its `mean_k`, and what that is about.

    Raises:
        InputError: a key whose mean k goes up and down, or does not reach the wanted one; names what it reaches.
    """
    work = [[*item.contexts[0], *item.continuations[0]] for item in items]
    runs_on = [engine.model.fingerprint(), str(engine.model.dtype), engine.backend]
    told = [*runs_on, spec, hashes_of(spec), key, mean_k, work]
    part = None if path is None else Path(f"{path}.part")
    journal = Journal(part, hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16])

    def survey(rule: Router, values: Sequence[float]) -> tuple[float, list[tuple[float, float]]]:
        """A pass over the text: the mean k under the rule, and what it would be at other values of the key."""
        found = candidates(spec, key, values, read)
        own, pairs, refusal = 0, [0] * len(found), ""
        for index, ids in enumerate(work):

            def window(ids: Sequence[int] = ids, index: int = index) -> list[Any]:
                return _window(engine, rule, [other for _, other in found], ids, index)

            seen, counts, said = journal.once(window)
            own, refusal = own + seen, said or refusal
            pairs = [-1 if -1 in both else sum(both) for both in zip(pairs, counts, strict=True)]
            ran()
        if max(pairs) < 0:
            raise InputError(refusal)
        slots = sum(map(len, work)) * engine.config.num_layers
        return own / slots, [(value, n / slots) for (value, _), n in zip(found, pairs, strict=True) if n >= 0]

    _, points = survey(TopK(), FIRST)
    _check_reach(spec, key, points, mean_k)
    trials: dict[str, float] = {}
    for _ in range(ROUNDS):
        _check_monotone(spec, key, points, slack=CLOSE * mean_k)
        value, low, high = _narrow(points, mean_k)
        written = with_key(spec, key, value)
        if written in trials:
            break
        steps = [low + (high - low) * step / STEPS for step in range(STEPS + 1)]
        trials[written], points = survey(read(written), steps)
        if abs(trials[written] - mean_k) <= CLOSE * mean_k:
            break
    journal.close()
    router, reached = min(trials.items(), key=lambda trial: abs(trial[1] - mean_k))
    document = {
        "router": router,
        "mean_k": reached,
        "wanted_mean_k": mean_k,
        "model": engine.name,
        "checkpoint": engine.model.fingerprint(),
        "tokens": sum(map(len, work)),
    }
    if path is not None:
        write_whole(path, json.dumps(document) + "\n")
    if part is not None:
        part.unlink()
    return document


def _window(engine: Engine, rule: Router, others: Sequence[Router], ids: Sequence[int], seed: int) -> list[Any]:
    scan = _Scan(rule, others)
    with torch.inference_mode():
        batch = Batch(torch.tensor(ids, device=engine.model.device), [len(ids)])
        engine.model.forward(batch, scan, generator=torch.Generator().manual_seed(seed))
    return [scan.own, scan.pairs, str(scan.refusal or "")]


def _check_reach(spec: str, key: str, points: Sequence[tuple[float, float]], mean_k: float) -> None:
    least, most = min(k for _, k in points), max(k for _, k in points)
    if not least - CLOSE * mean_k <= mean_k <= most + CLOSE * mean_k:
        reached = f"{least:.4g}, whatever {key} is" if most - least < 1e-6 else f"from {least:.4g} to {most:.4g}"
        raise InputError(f"the mean k of {spec} on this text is {reached}; {mean_k:g} cannot be reached.")


def _check_monotone(spec: str, key: str, points: Sequence[tuple[float, float]], slack: float) -> None:
    rises = points[-1][1] > points[0][1]
    for (a, k_a), (b, k_b) in pairwise(points):
        if (k_a - k_b if rises else k_b - k_a) > slack:
            raise InputError(
                f"the mean k of {spec} goes up and down with {key} ({k_a:.3f} at {a:g}, {k_b:.3f} at {b:g}), so there "
                "is no one value to find."
            )


def _narrow(points: Sequence[tuple[float, float]], mean_k: float) -> tuple[float, float, float]:
    """A value for the wanted mean k by a straight line between its neighbours, and an interval for the next round.

    The interval is a step wider to both sides, for under the new value the logits are not quite those of this round;
    where they have left all points behind, it is moved and not narrowed.
    """
    for index, ((a, k_a), (b, k_b)) in enumerate(pairwise(points)):
        if k_a != k_b and min(k_a, k_b) <= mean_k <= max(k_a, k_b):
            value = a + (b - a) * (mean_k - k_a) / (k_b - k_a)
            return value, points[max(index - 1, 0)][0], points[min(index + 2, len(points) - 1)][0]
    nearest = min(points, key=lambda point: abs(point[1] - mean_k))[0]
    span = points[-1][0] - points[0][0]
    return nearest, nearest - span, nearest + span
