"""What the study measures that no other part of minimoe does: single curves, and the time of MoE blocks.

Shape letters: T tokens, E experts, K slots, N curves.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.engine import Engine
from minimoe.model import Batch
from minimoe.probe import Phase, Probe
from minimoe.profiler import quartiles, synchronise
from minimoe.routers import PrefixRouter, Router, RouterContext, rank
from minimoe.routers.elbow import Elbow
from minimoe.routers.top_k import TopK
from minimoe.routing import Routing

CURVES = 100  # kept of each layer
PROMPT, STEPS = 128, 16  # tokens of a timed prefill, and decode steps after it
BLOCK = ("gate", "rule", "experts")


class Samples(Probe):
    """The first sorted router curves of every layer.

    Attributes:
        curves: by layer, tensors [N, E] of probabilities in descending order, float32.
    """

    def __init__(self, layers: int) -> None:
        self.curves: list[Tensor] = [torch.empty(0)] * layers

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        room = CURVES - len(self.curves[layer])
        fresh = rank(logits_TE)[0][:room].cpu()
        self.curves[layer] = torch.cat([self.curves[layer], fresh]) if len(self.curves[layer]) else fresh


def sample_curves(engine: Engine, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """CURVES sorted curves of each layer, or as many as the sequences have tokens, under the model's own top-k."""
    samples = Samples(engine.config.num_layers)
    with torch.inference_mode():
        for ids in sequences:
            if len(samples.curves[-1]) >= CURVES:
                break
            engine.model.forward(Batch(torch.tensor(ids, device=engine.model.device), [len(ids)]), TopK(), samples)
    return samples.curves


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
    """Seconds in MoE blocks: gate, rule and experts, with the device waited for before and after, as the paper does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.pairs = 0

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
        self.pairs += int(routing.k_T.sum())


def block_latency(engine: Engine, arms: Mapping[str, Router], rounds: int, seed: int) -> list[dict[str, Any]]:
    """Seconds of a MoE block for a token, by arm and phase: a prefill of PROMPT tokens, then STEPS tokens one by one.

    The arms take turns on the same random tokens, new ones in each round; the first round does not count.

    Returns:
        One record for each arm and phase: arm, phase, mean_k, and seconds a token and layer (median, low, high).
    """
    config, model = engine.config, engine.model
    draws = torch.Generator().manual_seed(seed)
    taken: dict[tuple[str, Phase], list[BlockClock]] = defaultdict(list)
    tokens: dict[Phase, int] = {"prefill": PROMPT, "decode": STEPS}
    with torch.inference_mode():
        for turn in range(rounds + 1):
            ids_T = torch.randint(config.vocab_size, (PROMPT + STEPS,), generator=draws).to(model.device)
            for name, router in arms.items():
                cache = KVCache(config, PROMPT + STEPS, model.dtype, model.device)
                own = torch.Generator().manual_seed(seed + turn)
                clocks: dict[Phase, BlockClock] = {phase: BlockClock(model.device) for phase in tokens}
                model.forward(Batch(ids_T[:PROMPT], [PROMPT], [cache]), router, clocks["prefill"], own)
                for id_1 in ids_T[PROMPT:].split(1):
                    model.forward(Batch(id_1, [1], [cache], "decode"), router, clocks["decode"], own)
                for phase, clock in clocks.items():
                    if turn:
                        taken[name, phase].append(clock)
    records = []
    for (name, phase), clocks_of in taken.items():
        each = tokens[phase] * config.num_layers
        low, median, high = quartiles([clock.seconds / each for clock in clocks_of])
        mean_k = sum(clock.pairs for clock in clocks_of) / (each * len(clocks_of))
        records.append({"arm": name, "phase": phase, "mean_k": mean_k, "median": median, "low": low, "high": high})
    return records
