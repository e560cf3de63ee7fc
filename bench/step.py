"""What a decode step of one sequence spends on everything but the products with weights, which the memory limits.

    python -m bench.step --layers 16               # on the synthetic checkpoint, written first if need be

Whole steps (model, head and the choice of a token, as `generate` runs them) take turns with their products alone: the
experts of each layer, and all other matrices in one call. What is left is norms, RoPE, attention over the cache, the
rule, sampling and Python. The rule is timed inside steps, where the processor's caches hold nothing of it. The read
bandwidth is measured right before and after each step, for it changes within seconds where a machine has other guests.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.engines import MiniMoe
from bench.limits import READ_BYTES, Reading, read_loop
from bench.report import Spread, at_least_one, machine, publish, table
from bench.synthetic import DEFAULT_GATE_SCALE, DEFAULT_LAYERS, Recipe, default_folder, write
from bench.worker import read_through
from minimoe.cache import KVCache
from minimoe.engine import Engine, load
from minimoe.errors import InputError
from minimoe.flops import pass_bytes
from minimoe.model import Batch
from minimoe.probe import Probe
from minimoe.routers import Router
from minimoe.routers.spec import parse_router
from minimoe.routing import Routing
from minimoe.sampling import Sampler, Sampling

AROUND_BAR = 0.08  # of a step
RULE_BAR = 0.02  # of a step
READ_BAR = 0.9  # of the read bandwidth
READINGS = 3  # of it before and after a step
HUGE_PAGE = 1 << 21  # bytes
Step = Callable[[Tensor, KVCache], Tensor]  # from a token's id and the cache, which it extends, to logits [1, V]
RULES = {"top_k": "", "elbow": f"at most {100 * RULE_BAR:.0f}"}  # and their bars in % of a step


class RuleTime(Probe):
    """Seconds that the rule took in all layers of the last pass."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def span(self, name: str, layer: int | None = None) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spent(name, layer, time.perf_counter() - start)

    def spent(self, name: str, layer: int | None, seconds: float) -> None:
        if name == "rule":
            self.seconds += seconds


def as_generated(engine: Engine, router: Router, probe: Probe | None = None) -> Step:
    """A step as `generate` makes it."""
    decoder, model = engine.decoder_for(router), engine.model
    if decoder:
        return lambda ids_1, cache: decoder.step(ids_1, [cache], probe)
    return lambda ids_1, cache: model.head(model.forward(Batch(ids_1, [1], [cache], "decode"), router, probe))


def whole_step(step: Step, engine: Engine, cache: KVCache, sampler: Sampler) -> float:
    """Seconds from a random token to the choice of the next one."""
    ids_1 = torch.randint(engine.config.vocab_size, (1,))
    start = time.perf_counter()
    sampler.choose(step(ids_1, cache)[0], (), step=cache.length)
    return time.perf_counter() - start


def shared_matrices(engine: Engine) -> list[Tensor]:
    """Those of a step that are no expert's."""
    matrices = [engine.model.head_VD]
    for layer in engine.model.layers:
        of = layer.attention
        matrices += [of.query_DD, of.key_GdD, of.value_GdD, of.out_DD, layer.gate.weight_ED]
    return matrices


def products_alone(engine: Engine, routings: list[Routing]) -> float:
    """Seconds of a step's products with weights, one after the other, on random hidden states."""
    model = engine.model
    x_1D, matrices = torch.randn(1, engine.config.hidden_size).to(model.dtype), shared_matrices(engine)
    start = time.perf_counter()
    for layer, routing in zip(model.layers, routings, strict=True):
        layer.experts.run(x_1D, routing)
    model.operations.linears(x_1D, matrices)
    return time.perf_counter() - start


def step_matrices(engine: Engine, routings: list[Routing]) -> list[Tensor]:
    """All weights of a step."""
    matrices = shared_matrices(engine)
    for layer, routing in zip(engine.model.layers, routings, strict=True):
        of = layer.experts.weights
        for e in routing.experts_TK.flatten().tolist():
            matrices += [of.gate_EID[e], of.up_EID[e], of.down_EDI[e]]
    return matrices


def reading_alone(engine: Engine, routings: list[Routing], loop: Callable[[Tensor, int], None]) -> float:
    """Seconds that a read loop takes for the weights of a step, matrix by matrix, where they lie."""
    matrices, threads = step_matrices(engine, routings), torch.get_num_threads()
    start = time.perf_counter()
    for matrix in matrices:
        loop(matrix, threads)
    return time.perf_counter() - start


def of_each_page(matrix: Tensor) -> Tensor:
    """A copy of at least one number of each huge page that a matrix has a part in."""
    numbers = matrix.flatten()
    return torch.cat([numbers[:: HUGE_PAGE // numbers.itemsize], numbers[-1:]])


def touched_products(engine: Engine, routings: list[Routing]) -> float:
    """Seconds of a step's products when something of each page has been read just before.

    A virtual machine may have lost pages that its own system holds, and waits for its host at the first access.
    """
    for matrix in step_matrices(engine, routings):
        of_each_page(matrix)
    return products_alone(engine, routings)


def random_routings(engine: Engine) -> list[Routing]:
    """Experts of one token in each layer, as many as top-k takes."""
    E, k = engine.config.num_experts, engine.config.top_k
    chosen = [torch.randperm(E)[None, :k] for _ in engine.model.layers]
    return [Routing(experts_1K, torch.full((1, k), 1 / k), torch.tensor([k]), E) for experts_1K in chosen]


def measure(engine: Engine, rounds: int, context: int) -> dict[str, Spread]:
    """Seconds of whole steps by top-k and of their products, what is left as a share, and each rule's share.

    And the share of the read bandwidth that a step uses: its bytes of weights, over what could be read meanwhile; the
    seconds of products whose pages have just been touched; and what a read loop over the weights of a step, where they
    lie, takes of the time of their products.
    """
    config, model = engine.config, engine.model
    hit, size = config.num_layers * config.top_k, model.dtype.itemsize
    weight_bytes = pass_bytes(config, experts_hit=hit, itemsize=size).total
    reading, loop = Reading(torch.get_num_threads(), READ_BYTES // 4), read_loop()

    def readable() -> float:
        # The first reading after something else is slow on some machines: that is no limit.
        return max(reading() for _ in range(READINGS))

    rules = {name: parse_router(name) for name in RULES}
    with torch.inference_mode():
        cache = KVCache(config, context + (len(rules) + 1) * (rounds + 1), model.dtype, model.device)
        # A prompt that uses every expert brings the pages of the file into this process.
        model.forward(Batch(torch.randint(config.vocab_size, (context,)), [context], [cache]), rules["top_k"])
        sampler, generated = Sampler(Sampling(temperature=0)), as_generated(engine, rules["top_k"])
        steps, products, touched, reads, loops = [], [], [], [], []
        shares: dict[str, list[float]] = {name: [] for name in rules}
        probes = {name: RuleTime() for name in rules}
        ruled = {name: as_generated(engine, rule, probes[name]) for name, rule in rules.items()}
        for turn in range(rounds + 1):
            before = readable()
            step = whole_step(generated, engine, cache, sampler)
            readable_bytes = step * (before + readable()) / 2
            product = products_alone(engine, random_routings(engine))
            no_waits = touched_products(engine, random_routings(engine))
            looped = reading_alone(engine, random_routings(engine), loop) / product
            for probe in probes.values():
                probe.seconds = 0.0
            seconds = {name: whole_step(of, engine, cache, sampler) for name, of in ruled.items()}
            if turn:
                steps.append(step)
                products.append(product)
                touched.append(no_waits)
                reads.append(weight_bytes / readable_bytes)
                loops.append(looped)
                for name, values in shares.items():
                    values.append(probes[name].seconds / seconds[name])
    around = [1 - product / step for step, product in zip(steps, products, strict=True)]
    measured = {"step_seconds": steps, "product_seconds": products, "around_share": around, "read_share": reads}
    measured |= {"touched_product_seconds": touched, "loop_share": loops}
    measured |= {f"{name}_share": values for name, values in shares.items()}
    return {name: Spread.of(values) for name, values in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="a folder; by default the synthetic checkpoint of bench.synthetic")
    parser.add_argument("--layers", type=at_least_one, default=DEFAULT_LAYERS, help="of it; 16 is the whole model")
    parser.add_argument("--context", type=at_least_one, default=512, help="tokens in the cache before the first step")
    parser.add_argument("--rounds", type=at_least_one, default=50)
    parser.add_argument("--threads", type=at_least_one, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    arguments = parser.parse_args()
    about = machine(arguments.threads)
    folder = arguments.model or default_folder(arguments.layers, DEFAULT_GATE_SCALE)
    try:
        if arguments.model is None:
            write(folder, Recipe(changes={"num_hidden_layers": arguments.layers}))
        read_through(MiniMoe.files(folder), anew=True)
        engine = load(folder, threads=arguments.threads)
    except InputError as error:
        parser.error(str(error))
    measured = measure(engine, arguments.rounds, arguments.context)
    rows = [
        ["whole step, ms", measured["step_seconds"].text(1e3), ""],
        ["its products alone, ms", measured["product_seconds"].text(1e3), ""],
        ["its products, pages touched before, ms", measured["touched_product_seconds"].text(1e3), ""],
        ["all else, % of the step", measured["around_share"].text(100), f"at most {100 * AROUND_BAR:.0f}"],
        ["read bandwidth used, %", measured["read_share"].text(100), f"at least {100 * READ_BAR:.0f}"],
        ["read loop over its weights, % of its products", measured["loop_share"].text(100), ""],
        *([f"rule {name}, % of its step", measured[f"{name}_share"].text(100, 2), bar] for name, bar in RULES.items()),
    ]
    text = f"{table(['one decode step', 'median', 'bar'], rows)}\n\n"
    text += f"Model: {folder.name}, backend {engine.backend}, after {arguments.context} tokens."
    result: dict[str, Any] = {
        "machine": about,
        "model": {"name": folder.name, "layers": engine.config.num_layers, "backend": engine.backend},
        "context": arguments.context,
        **measured,
    }
    publish(f"step-{engine.config.num_layers}-layers", text, result, arguments.save)


if __name__ == "__main__":
    main()
