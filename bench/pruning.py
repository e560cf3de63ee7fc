"""Whether time falls with the experts that a rule prunes: the expert block of one token, for every k from 1 to K.

    python -m bench.pruning                        # on the synthetic checkpoint, written first if need be

Blocks of every k take turns, on random experts of rotating layers. The elbow rule is then promised the part of the
pairs that it prunes, and saves the part of the time that its mix of k costs less than K: both over the same curves, of
64 independent Gaussian logits at three spreads. What the rule itself costs is measured by bench.step.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.engines import MiniMoe
from bench.report import Spread, at_least_one, machine, publish, table
from bench.synthetic import DEFAULT_GATE_SCALE, DEFAULT_LAYERS, Recipe, default_folder, write
from bench.worker import read_through
from minimoe.cache import KVCache
from minimoe.engine import Engine, load
from minimoe.errors import InputError
from minimoe.model import Batch
from minimoe.routers import RouterContext
from minimoe.routers.spec import parse_router
from minimoe.routing import Routing

GATE_SCALES = (0.5, 2.65, 6.1)
CURVES = 20_000
SAVING_BAR = 0.9  # of what the pruned pairs promise


def block_seconds(engine: Engine, rounds: int) -> dict[int, Spread]:
    """Seconds of one layer's experts for one token, by k."""
    config, layers = engine.config, engine.model.layers
    draws = torch.Generator().manual_seed(0)
    seconds: dict[int, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        for k in torch.randperm(config.top_k, generator=draws).add(1).tolist():
            x_1D = torch.randn(1, config.hidden_size, generator=draws).to(engine.model.dtype)
            experts_1K = torch.randperm(config.num_experts, generator=draws)[None, :k]
            routing = Routing(experts_1K, torch.rand(1, k, generator=draws), torch.tensor([k]), config.num_experts)
            start = time.perf_counter()
            layers[(turn + k) % len(layers)].experts.run(x_1D, routing)
            if turn:
                seconds[k].append(time.perf_counter() - start)
    return {k: Spread.of(seconds[k]) for k in sorted(seconds)}


def elbow_counts(scale: float, engine: Engine) -> Tensor:
    """How often the elbow rule gives each k, from 0 to K, as parts of all curves."""
    config = engine.config
    draws = torch.Generator().manual_seed(1)
    logits_TE = torch.randn(CURVES, config.num_experts, generator=draws) * scale
    zeros_T = torch.zeros(CURVES, dtype=torch.int64)
    context = RouterContext(0, "decode", zeros_T, zeros_T, zeros_T, config.top_k, config.norm_topk_prob)
    k_T = parse_router("elbow").route(logits_TE, context).k_T
    return torch.bincount(k_T, minlength=config.top_k + 1) / CURVES


def saving(parts: Tensor, seconds: Mapping[int, float], top_k: int) -> dict[str, float]:
    """What is promised and what is saved, as parts of what K experts cost; the parts are by k from 0 on."""
    mean_k = float((parts * torch.arange(len(parts))).sum())
    spent = sum(float(parts[k]) * seconds[k] for k in range(1, len(parts)))
    promised, saved = 1 - mean_k / top_k, 1 - spent / seconds[top_k]
    return {"mean_k": mean_k, "promised": promised, "saved": saved, "kept": saved / promised}


def measure(engine: Engine, rounds: int) -> tuple[dict[int, Spread], dict[str, dict[str, float]]]:
    """Seconds of one layer's experts for one token by k, and what elbow promises and saves by gate scale."""
    config = engine.config
    with torch.inference_mode():
        # A prompt that uses every expert brings the pages of the file into this process.
        warm = torch.randint(config.vocab_size, (512,))
        engine.model.forward(Batch(warm, [512], [KVCache(config, 512, engine.model.dtype, warm.device)]), engine.router)
        blocks = block_seconds(engine, rounds)
        medians = {k: spread.median for k, spread in blocks.items()}
        return blocks, {f"{s:g}": saving(elbow_counts(s, engine), medians, config.top_k) for s in GATE_SCALES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="a folder; by default the synthetic checkpoint of bench.synthetic")
    parser.add_argument("--backend", help="native, bucketed or reference; by default the fastest")
    parser.add_argument("--rounds", type=at_least_one, default=100)
    parser.add_argument("--threads", type=at_least_one, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    arguments = parser.parse_args()
    about = machine(arguments.threads)
    folder = arguments.model or default_folder(DEFAULT_LAYERS, DEFAULT_GATE_SCALE)
    try:
        if arguments.model is None:
            write(folder, Recipe())
        read_through(MiniMoe.files(folder), anew=True)
        engine = load(folder, router="elbow", backend=arguments.backend, threads=arguments.threads)
    except InputError as error:
        parser.error(str(error))
    blocks, savings = measure(engine, arguments.rounds)
    result: dict[str, Any] = {
        "machine": about,
        "model": {"name": folder.name, "layers": engine.config.num_layers, "backend": engine.backend},
        "block_seconds": blocks,
        "savings": savings,
    }
    publish("pruning", _report(blocks, savings), result, arguments.save)


def _report(blocks: Mapping[int, Spread], savings: Mapping[str, Mapping[str, float]]) -> str:
    by_k = table(["experts", "ms"], [[str(k), spread.text(1e3, 2)] for k, spread in blocks.items()])
    rows = [
        [scale, f"{s['mean_k']:.2f}", f"{s['promised']:.1%}", f"{s['saved']:.1%}", f"{s['kept']:.2f}", str(SAVING_BAR)]
        for scale, s in savings.items()
    ]
    return f"{by_k}\n\n{table(['gate scale', 'mean k', 'pairs pruned', 'time saved', 'of the promise', 'bar'], rows)}"


if __name__ == "__main__":
    main()
