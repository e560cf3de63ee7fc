"""What the study measures that no other part of minimoe does: single curves, the time of MoE blocks, and prompts.

Shape letters: T tokens, E experts, K slots, N curves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, product
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from minimoe.analysis.summary import ALL
from minimoe.cache import KVCache
from minimoe.engine import Engine
from minimoe.evaluate.letters import LetterPrompt, read_as_published
from minimoe.journal import Journal
from minimoe.model import Batch
from minimoe.probe import Phase, Probe
from minimoe.profiler import quartiles, synchronise
from minimoe.routers import PrefixRouter, Router, RouterContext, rank
from minimoe.routers.elbow import Elbow
from minimoe.routers.top_k import TopK
from minimoe.routing import Routing

CURVES = 24  # kept of each prompt and layer
STEPS = 4  # a timed prompt's last tokens, which are run one by one
PADDED_BATCH = 20  # prompts that the paper's program pads to one length
BLOCK = ("gate", "rule", "experts")

Ids = Sequence[int]


class Samples(Probe):
    """The first sorted router curves of every layer: tensors [N, E] of probabilities in descending order, float32."""

    def __init__(self) -> None:
        self.curves: list[Tensor] = []

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        self.curves.append(rank(logits_TE)[0][:CURVES].cpu())


def sample_curves(engine: Engine, ids: Ids) -> list[Tensor]:
    """The sorted curves of a prompt's first CURVES tokens in each layer, under the model's own top-k."""
    samples = Samples()
    with torch.inference_mode():
        engine.model.forward(Batch(torch.tensor(ids, device=engine.model.device), [len(ids)]), TopK(), samples)
    return samples.curves


def padding(lengths: Sequence[int]) -> dict[str, int]:
    """Tokens of prompts, and of the pad tokens beside them in batches of PADDED_BATCH in the order of the file."""
    batches = [lengths[first : first + PADDED_BATCH] for first in range(0, len(lengths), PADDED_BATCH)]
    return {"tokens": sum(lengths), "pads": sum(max(batch) * len(batch) - sum(batch) for batch in batches)}


def within_reach(items: Sequence[LetterPrompt]) -> dict[str, int]:
    """What the paper's parser leaves possible: items, those that it counts as right when the model writes their very
    label, and those in whose prompt alone it already finds an answer."""
    right = sum(read_as_published(item, f" {item.labels[item.gold]}") == item.labels[item.gold] for item in items)
    quoted = sum(read_as_published(item, "") is not None for item in items)
    return {"items": len(items), "right": right, "quoted": quoted}


@dataclass(frozen=True, kw_only=True)
class Masked(Router):
    """A rule that prunes as the paper's program does: what it drops gets weight 0, and is computed all the same.

    Attributes:
        rule: says how many experts keep their weight; at most the model's K.
    """

    rule: PrefixRouter = field(default_factory=Elbow)

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        full, kept = TopK().route(logits_TE, context), self.rule.route(logits_TE, context)
        dead_TK = torch.arange(full.width, device=full.k_T.device) >= kept.k_T[:, None]
        return Routing(full.experts_TK, full.weights_TK.masked_fill(dead_TK, 0.0), full.k_T, full.num_experts)


class BlockClock(Probe):
    """Seconds in MoE blocks: gate, rule and experts, with the device waited for before and after, as the paper does.

    Attributes:
        blocks, tokens, pairs: MoE blocks that were run, tokens and (token, expert) pairs over all of them.
        idle: experts without a token, over all blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.blocks = self.tokens = self.pairs = self.idle = 0

    @contextmanager
    def span(self, name: str, layer: int | None = None) -> Iterator[None]:
        if name not in BLOCK:
            yield
            return
        synchronise(self.device)
        start = time.perf_counter()
        yield
        synchronise(self.device)
        self.seconds += time.perf_counter() - start

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        self.blocks += 1
        self.tokens += len(routing.k_T)
        self.pairs += int(routing.k_T.sum())
        used_E = torch.bincount(routing.experts_TK.flatten(), minlength=routing.num_experts + 1)[:-1]
        self.idle += int((used_E == 0).sum())


COUNTED = ("seconds", "blocks", "tokens", "pairs", "idle")
Counts = dict[str, float]
Clocks = Mapping[str, Counts]
"""By phase, what a BlockClock counted."""
PHASES: tuple[Phase, ...] = ("prefill", "decode")


def block_latency(
    engine: Engine,
    arms: Mapping[str, Router],
    prompts: Mapping[str, Sequence[Ids]],
    rounds: int,
    batch: int,
    seed: int,
    journal: Journal,
    ran: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """The time of MoE blocks: `batch` prompts of a group side by side but for their last STEPS tokens, then these.

    The arms take turns on the same prompts, beginning with another one each time, and every round takes the next
    prompts. Each arm runs once before anything counts.

    Args:
        arms: rules by name; changes are against the first.
        prompts: token ids by group; those of STEPS tokens and fewer are left out.
        journal: keeps what was timed, so that nothing is timed twice.

    Returns:
        One record for each group, "all" of them, arm and phase; the phase "all" is the mean of a block in prefill and
        one in decode, as in the paper, where every batch has one pass of each. arm, group, phase; mean_k; idle, the
        share of experts without a token in a block; tokens a block; seconds a block and the change against the first
        arm in the same round: median, low and high quartile.
    """
    taken: dict[tuple[str, str], list[Clocks]] = {key: [] for key in product([*prompts, ALL], arms)}
    pools = {group: [ids for ids in part if len(ids) > STEPS] for group, part in prompts.items()}
    names, done = list(arms), 0
    with torch.inference_mode():
        for router in arms.values():
            _walk(engine, router, next(iter(pools.values()))[:batch], seed)
        for turn, (group, pool) in product(range(rounds), pools.items()):
            chosen = [pool[(turn * batch + place) % len(pool)] for place in range(min(batch, len(pool)))]
            first = turn % len(names)
            order = names[first:] + names[:first]
            clocks = journal.once(lambda: {n: _walk(engine, arms[n], chosen, seed + turn) for n in order})  # noqa: B023
            for name in names:
                taken[group, name].append(clocks[name])
            done += 1
            ran(done, rounds * len(pools))
    for name in names:
        together = zip(*(taken[group, name] for group in pools), strict=True)
        taken[ALL, name] = [{phase: _sum(clocks[phase] for clocks in part) for phase in PHASES} for part in together]
    return [
        _latency(engine, group, arm, phase, taken[group, names[0]], taken[group, arm])
        for group, arm in taken
        for phase in (*PHASES, ALL)
    ]


def _walk(engine: Engine, router: Router, prompts: Sequence[Ids], seed: int) -> Clocks:
    """Prompts side by side, their last tokens one by one."""
    model, draws = engine.model, torch.Generator().manual_seed(seed)
    caches = [KVCache(engine.config, len(ids), model.dtype, model.device) for ids in prompts]
    clocks: dict[Phase, BlockClock] = {phase: BlockClock(model.device) for phase in PHASES}

    def run(parts: Sequence[Ids], phase: Phase) -> None:
        ids_T = torch.tensor(list(chain.from_iterable(parts)), device=model.device)
        model.forward(Batch(ids_T, [len(part) for part in parts], caches, phase), router, clocks[phase], draws)

    run([ids[:-STEPS] for ids in prompts], "prefill")
    for step in range(-STEPS, 0):
        run([[ids[step]] for ids in prompts], "decode")
    return {phase: {name: getattr(clock, name) for name in COUNTED} for phase, clock in clocks.items()}


def _sum(counts: Iterable[Counts]) -> Counts:
    parts = list(counts)
    return {name: sum(part[name] for part in parts) for name in COUNTED}


def _latency(
    engine: Engine, group: str, arm: str, phase: Phase | str, base: Sequence[Clocks], own: Sequence[Clocks]
) -> dict[str, Any]:
    phases = [one for one in PHASES if phase in (one, ALL)]

    def block(clocks: Clocks) -> float:
        return mean(clocks[one]["seconds"] / clocks[one]["blocks"] for one in phases)

    total = _sum(clocks[one] for clocks in own for one in phases)
    low, median, high = quartiles([block(clocks) for clocks in own])
    changes = [block(clocks) / block(other) - 1 for clocks, other in zip(own, base, strict=True)]
    change_low, change, change_high = quartiles(changes)
    return {
        "group": group,
        "arm": arm,
        "phase": phase,
        "mean_k": total["pairs"] / total["tokens"],
        "idle": total["idle"] / (total["blocks"] * engine.config.num_experts),
        "tokens": total["tokens"] / total["blocks"],
        "median": median,
        "low": low,
        "high": high,
        "change": change,
        "change_low": change_low,
        "change_high": change_high,
    }
