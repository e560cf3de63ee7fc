"""Several rules on the same items: quality, work and time of each, with intervals paired over the items.

Shape letters: T tokens, V vocabulary, N items, R resamples.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minimoe.engine import Engine
from minimoe.errors import NumericalError
from minimoe.flops import expert_bytes, head_flops, layer_flops
from minimoe.items import Item
from minimoe.journal import Journal
from minimoe.model import Batch
from minimoe.probe import Phase, Probe
from minimoe.profiler import synchronise
from minimoe.routers import Router
from minimoe.routers.mixed_k import MixedK
from minimoe.routers.random import Random
from minimoe.routers.random_slots import RandomSlots
from minimoe.routers.spec import hashes_of
from minimoe.routers.top_k import TopK
from minimoe.routing import Routing

RESAMPLES = 2000
CONTROLS = (TopK, MixedK, Random, RandomSlots)  # need no control of their own


@dataclass(frozen=True, slots=True)
class Seen:
    """One rule on one item.

    Attributes:
        bits: -log2 of the true continuation's probability; tokens and size are its length in tokens and bytes.
        correct: whether the true continuation has the highest log-probability a byte.
        agree: scored tokens where the likeliest next token is that of top-k.
        divergence: sum over those tokens of KL(top-k's next token distribution || this rule's), in nats.
        scored: how many tokens `agree` and `divergence` are about: those of all continuations.
        run: tokens that went through the model.
        pairs: sum of k over layers and tokens run.
        flops: of the pass; see minimoe.flops.
        expert_bytes: of the distinct experts of each layer that had a token in this pass.
        seconds: of the pass.
    """

    bits: float
    tokens: int
    size: int
    correct: bool
    agree: int
    divergence: float
    scored: int
    run: int
    pairs: int
    flops: int
    expert_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Arm:
    """A rule, what it is called, and of which rule it is a control (or None)."""

    name: str
    router: Router
    control_of: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """An arm over all items; the fields of its summary are documented at `summarise` and, for controls, `changes`."""

    arm: Arm
    seen: list[Seen]
    summary: dict[str, Any]


class _Ledger(Probe):
    """Pairs and distinct experts of one pass."""

    def __init__(self) -> None:
        self.pairs: list[int] = []
        self.experts_hit = 0

    def step(self, phase: Phase, new: Sequence[int], past: Sequence[int]) -> None:
        self.pairs, self.experts_hit = [], 0

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        self.pairs.append(int(routing.k_T.sum()))
        used = routing.experts_TK.flatten().bincount(minlength=routing.num_experts + 1)[: routing.num_experts]
        self.experts_hit += int((used > 0).sum())


def compare(
    engine: Engine,
    rules: Sequence[tuple[str, Router]],
    items: Sequence[Item],
    *,
    controls: bool = True,
    seed: int = 0,
    part: Path | None = None,
    ran: Callable[[str], None] = lambda what: None,
) -> list[Outcome]:
    """Run every rule over every item, top-k first, and beside each rule that prunes its two controls.

    The controls are mixed_k and random at the mean k that the rule turned out to have.

    Args:
        rules: names and rules; the model's own top-k is always the first arm and need not be among them.
        part: what is done so far is kept in this file, so that a run of the same work that was cut off goes on from
            there; it is the caller's to remove when the outcomes are safe.
        ran: called after each item, under all rules or under all controls.

    Raises:
        NumericalError: logits that are not finite.
    """
    journal = Journal(part, _identity(engine, [name for name, _ in rules], items, controls, seed))
    baseline = Arm("top_k", TopK())
    arms = [baseline, *(Arm(name, router) for name, router in rules if router != baseline.router)]
    seen = _run(engine, arms, items, seed, journal, lambda: ran("rules"))
    top_k = _mean_k(seen[0], engine)
    added = [
        Arm(f"{name}:k={mean_k:.4g}", make(k=mean_k), arm.name)
        for arm, rows in zip(arms, seen, strict=True)
        if controls and not isinstance(arm.router, CONTROLS) and 0 < (mean_k := _mean_k(rows, engine)) < top_k - 1e-9
        for name, make in (("mixed_k", MixedK), ("random", Random))
    ]
    if added:
        seen += _run(engine, [baseline, *added], items, seed, journal, lambda: ran("controls"))[1:]
    journal.close()
    weights_RN = resamples(len(items), seed)
    outcomes = [
        Outcome(arm, rows, summarise(rows, seen[0], engine, weights_RN))
        for arm, rows in zip([*arms, *added], seen, strict=True)
    ]
    by_name = {outcome.arm.name: outcome for outcome in outcomes}
    for outcome in outcomes:
        if outcome.arm.control_of is not None:
            rule = changes(by_name[outcome.arm.control_of].seen, outcome.seen, weights_RN)
            outcome.summary.update({f"rule_{name}": value for name, value in rule.items()})
    # Each control stands below the rule that it belongs to.
    return [o for top in outcomes if top.arm.control_of is None for o in (top, *_controls(top, outcomes))]


def _identity(engine: Engine, names: Sequence[str], items: Sequence[Item], controls: bool, seed: int) -> str:
    """What the results hang on, hashed; the time they take aside."""
    model = [engine.model.fingerprint(), str(engine.model.dtype), engine.backend, str(engine.model.device)]
    told = [model, list(names), [hashes_of(name) for name in names], [asdict(item) for item in items], controls, seed]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _controls(top: Outcome, outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.arm.control_of == top.arm.name]


def _mean_k(rows: Sequence[Seen], engine: Engine) -> float:
    return sum(row.pairs for row in rows) / (sum(row.run for row in rows) * engine.config.num_layers)


def _run(
    engine: Engine, arms: Sequence[Arm], items: Sequence[Item], seed: int, journal: Journal, ran: Callable[[], None]
) -> list[list[Seen]]:
    """Every arm on an item before the next item, so that a machine that slows down slows all of them."""
    seen: list[list[Seen]] = [[] for _ in arms]
    for index, item in enumerate(items):
        kept = journal.once(lambda item=item, index=index: _item(engine, arms, item, seed + index))  # type: ignore[misc]
        for rows, fields in zip(seen, kept, strict=True):
            rows.append(Seen(**fields))
        ran()
    return seen


@torch.inference_mode()
def _item(engine: Engine, arms: Sequence[Arm], item: Item, seed: int) -> list[dict[str, Any]]:
    """Each arm's Seen of one item as plain data; the first arm is what the others agree with or not."""
    rows, reference_TV = [], None
    for arm in arms:
        # A seed for each item, so that a run that was cut off draws as an uninterrupted one.
        generator = torch.Generator().manual_seed(seed % 2**64)
        row, logprobs_TV = _pass(engine, arm.router, item, generator, reference_TV)
        reference_TV = logprobs_TV if reference_TV is None else reference_TV
        rows.append(asdict(row))
    return rows


def _pass(
    engine: Engine, router: Router, item: Item, generator: torch.Generator, reference_TV: Tensor | None
) -> tuple[Seen, Tensor]:
    model, config = engine.model, engine.config
    pairs = list(zip(item.contexts, item.continuations, strict=True))
    fed = [[*context, *ids][:-1] for context, ids in pairs]
    new = [len(ids) for ids in fed]
    ledger = _Ledger()
    ids_T = torch.tensor([token for ids in fed for token in ids], device=model.device)
    synchronise(model.device)
    start = time.perf_counter()
    hidden_TD = model.forward(Batch(ids_T, new), router, ledger, generator)
    ends = np.cumsum(new).tolist()
    scored = [row for end, ids in zip(ends, item.continuations, strict=True) for row in range(end - len(ids), end)]
    logits_TV = model.head(hidden_TD[scored])
    synchronise(model.device)
    seconds = time.perf_counter() - start
    if not bool(torch.isfinite(logits_TV).all()):
        raise NumericalError("the logits are not finite; the weights are broken.")
    logprobs_TV = logits_TV.double().log_softmax(-1)
    targets_T1 = torch.tensor([token for ids in item.continuations for token in ids], device=model.device)[:, None]
    lengths = [len(ids) for ids in item.continuations]
    totals = [float(part.double().sum()) for part in logprobs_TV.gather(1, targets_T1).split(lengths)]
    scores = [total / max(size, 1) for total, size in zip(totals, item.sizes, strict=True)]
    if reference_TV is None:
        reference_TV = logprobs_TV
    divergence_T = (reference_TV.exp() * (reference_TV - logprobs_TV)).sum(-1)
    work = [layer_flops(config, new, [0] * len(new), count) for count in ledger.pairs]
    row = Seen(
        bits=-totals[item.label] / math.log(2),
        tokens=lengths[item.label],
        size=item.sizes[item.label],
        correct=scores.index(max(scores)) == item.label,
        agree=int((reference_TV.argmax(-1) == logprobs_TV.argmax(-1)).sum()),
        divergence=float(divergence_T.double().sum()),
        scored=len(scored),
        run=len(ids_T),
        pairs=sum(ledger.pairs),
        flops=sum(layer.attention + layer.gate + layer.experts for layer in work) + head_flops(config, len(scored)),
        expert_bytes=ledger.experts_hit * expert_bytes(config, model.dtype.itemsize),
        seconds=seconds,
    )
    return row, logprobs_TV


def resamples(items: int, seed: int, count: int = RESAMPLES) -> np.ndarray[Any, Any]:
    """How often each item is drawn in each bootstrap resample, [R, N]; one set for all arms makes them paired."""
    return np.random.default_rng(seed % 2**64).multinomial(items, [1 / items] * items, size=count)


def interval(statistic_R: np.ndarray[Any, Any]) -> list[float]:
    """The 95 % percentile interval of a bootstrapped statistic. Source: Efron and Tibshirani 1993, chapter 13."""
    low, high = np.percentile(statistic_R, [2.5, 97.5])
    return [float(low), float(high)]


def summarise(
    rows: Sequence[Seen], base: Sequence[Seen], engine: Engine, weights_RN: np.ndarray[Any, Any]
) -> dict[str, Any]:
    """One arm in numbers. Every *_change is against top-k on the same items, with a 95 % interval.

    bits_per_byte: total bits over total bytes of the true continuations; perplexity: 2 to the bits a token;
    accuracy: share of correct items; agreement and kl (nats): per scored token, with top-k; mean_k: per token and
    layer; flops and expert_bytes: per token run, the latter in passes of this size; decode_expert_bytes: what a lone
    step reads at this mean k; seconds: median over the items, per token run.
    """

    def of(name: str) -> np.ndarray[Any, Any]:
        return np.array([getattr(row, name) for row in rows], dtype=np.float64)

    bits, size = of("bits"), of("size")
    run, scored = of("run").sum(), of("scored").sum()
    mean_k = _mean_k(rows, engine)
    return {
        "bits_per_byte": bits.sum() / size.sum(),
        "bits_per_byte_interval": interval(weights_RN @ bits / np.maximum(weights_RN @ size, 1)),
        "perplexity": float(2 ** (bits.sum() / of("tokens").sum())),
        "accuracy": of("correct").mean(),
        **changes(rows, base, weights_RN),
        "agreement": of("agree").sum() / scored,
        "kl": of("divergence").sum() / scored,
        "mean_k": mean_k,
        "flops": of("flops").sum() / run,
        "expert_bytes": of("expert_bytes").sum() / run,
        "decode_expert_bytes": mean_k
        * engine.config.num_layers
        * expert_bytes(engine.config, engine.model.dtype.itemsize),
        "seconds": float(np.median(of("seconds") / of("run"))),
    }


def changes(rows: Sequence[Seen], base: Sequence[Seen], weights_RN: np.ndarray[Any, Any]) -> dict[str, Any]:
    """From one arm to another on the same items, in bits a byte and in accuracy, each with a paired 95 % interval.

    In the summary of a control they stand with rule_ before their names: from the control to its rule.
    """
    size = np.array([row.size for row in rows], dtype=np.float64)
    bits = np.array([row.bits - other.bits for row, other in zip(rows, base, strict=True)])
    correct = np.array([float(row.correct) - other.correct for row, other in zip(rows, base, strict=True)])
    return {
        "bits_per_byte_change": bits.sum() / size.sum(),
        "bits_per_byte_change_interval": interval(weights_RN @ bits / np.maximum(weights_RN @ size, 1)),
        "accuracy_change": correct.mean(),
        "accuracy_change_interval": interval(weights_RN @ correct / len(rows)),
    }


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which (cost, loss) points no other one beats in both; in order of cost.

    Costs that agree in three digits count as equal: a control meets its rule's mean k only so closely.
    """
    found: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (float(f"{points[i][0]:.3g}"), points[i][1])):
        if not found or points[index][1] < points[found[-1]][1]:
            found.append(index)
    return found
