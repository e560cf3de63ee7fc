"""How fast this engine is beside others on the same checkpoint, in bfloat16, with the same threads and tokens.

    python bench/peers.py --save      # on a checkpoint of the whole model's shape, written first if need be
    python bench/peers.py --layers 4 --work "decode 1,prefill 512"
    python bench/peers.py --model weights/tiny --work "decode 1"

How the engines take turns stands in bench/comparison.py. Without --model and --work the table goes on to loading, to
what elbow's pruning saves and the rule costs, and to the embedded model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a file, too

from bench import loading, pruning, step
from bench.comparison import OURS, Speeds, Work, compare
from bench.engines import ENGINES
from bench.limits import Limits, measure
from bench.report import Finding, Spread, at_least_one, bars_table, machine, publish, table
from bench.synthetic import DEFAULT_GATE_SCALE, OLMOE_1B_7B, Recipe, default_folder, write
from bench.worker import ROOT, EngineFailed, read_through
from minimoe.config import ModelConfig
from minimoe.engine import load
from minimoe.errors import InputError

WORKS = {
    "decode 1": Work(sequences=1, prompt=8, new=16, times=6),
    "decode 8": Work(sequences=8, prompt=8, new=16),
    "decode 32": Work(sequences=32, prompt=8, new=8),
    "prefill 512": Work(sequences=1, prompt=512),
    "prefill 2048": Work(sequences=1, prompt=2048),
}
# How many times as fast as a peer this engine is meant to be with its fastest backend: OLMoE-1B-7B's shape, bfloat16,
# 2 threads; and the embedded model.
BARS = {
    ("decode 1", "transformers"): 2.3,
    ("decode 1", "llama.cpp"): 1.25,
    ("decode 8", "transformers"): 2.0,
    ("decode 32", "transformers"): 2.0,
    ("prefill 512", "transformers"): 2.2,
    ("prefill 512", "llama.cpp"): 8.0,
    ("prefill 2048", "transformers"): 1.5,
}
EMBEDDED_BARS = {("decode 1", "transformers"): 3.0}
MAX_FIRST_TOKEN_SECONDS = 2.0
ELBOW_ROUNDS = 100
STEP_CONTEXT = 512  # tokens in the cache


def ratios(speeds: Mapping[str, Spread]) -> dict[str, dict[str, float]]:
    """Of each of this engine's variants, its speed over that of each peer's fastest variant; above 1 is faster."""
    best: dict[str, float] = {}
    for name, spread in speeds.items():
        peer = name.split()[0]
        if peer != OURS:
            best[peer] = max(best.get(peer, 0.0), spread.median)
    return {
        name: {peer: spread.median / speed for peer, speed in best.items()}
        for name, spread in speeds.items()
        if name.split()[0] == OURS
    }


def findings(speeds: Speeds, paces: Speeds, config: ModelConfig) -> list[Finding]:
    """How many times as fast this engine is as every peer in each work.

    With the whole model's shape also how many times as fast it decodes one sequence for what could be read at the time:
    memory is faster at one time than at another. Bars are those of the first variant, the fastest, and of the two
    models that have any.
    """
    whole = config.hidden_size == OLMOE_1B_7B["hidden_size"]
    bars: Mapping[tuple[str, str], float] = BARS if whole else EMBEDDED_BARS
    found = []
    for work, spreads in speeds.items():
        for place, (name, by_peer) in enumerate(ratios(spreads).items()):
            for peer, ratio in by_peer.items():
                found.append(Finding(work, name, peer, ratio, bars.get((work, peer)) if place == 0 else None))
    if whole and "decode 1" in paces:
        name, by_peer = next(iter(ratios(paces["decode 1"]).items()))
        found += [Finding("decode 1", name, f"{peer}, per readable byte", ratio) for peer, ratio in by_peer.items()]
    return found


def first_token(folder: Path, threads: int, repeats: int, engines: Sequence[str]) -> list[Finding]:
    """From the end of the imports to the first logits, beside transformers, and the memory that takes."""
    loadings, skipped = loading.measure(folder, threads, repeats, engines)
    if skipped:
        raise EngineFailed(" ".join(skipped.values()))
    seconds = {engine: Spread.of([run.first_token for run in runs]).median for engine, runs in loadings.items()}
    anonymous = max(run.anonymous for run in loadings[OURS]) / 1e9
    most = loading.MAX_ANONYMOUS_BYTES / 1e9
    found = [
        Finding("load to first token", OURS, "seconds", seconds[OURS], MAX_FIRST_TOKEN_SECONDS, at_most=True),
        Finding("load to first token", OURS, "GB that are no file's", anonymous, most, at_most=True),
    ]
    if "transformers" in seconds:
        ratio = seconds["transformers"] / seconds[OURS]
        found.append(Finding("load to first token", OURS, "transformers", ratio, loading.FIRST_TOKEN_BAR))
    return found


def elbow(folder: Path, threads: int) -> list[Finding]:
    """What pruned pairs save of what they promise, and what the rule, and all but the products, take of a step.

    And how much of the read bandwidth a step uses.
    """
    read_through(ENGINES[OURS].files(folder), anew=True)
    engine = load(folder, router="elbow", threads=threads)
    _, savings = pruning.measure(engine, ELBOW_ROUNDS)
    found = [
        Finding(f"elbow, mean k {of['mean_k']:.1f}", engine.backend, "pruned pairs", of["kept"], pruning.SAVING_BAR)
        for of in savings.values()
    ]
    steps = step.measure(engine, ELBOW_ROUNDS // 2, STEP_CONTEXT)
    read = Finding("decode 1", engine.backend, "read bandwidth", steps["read_share"].median, step.READ_BAR)
    shares = {
        "elbow rule": (steps["elbow_share"], step.RULE_BAR),
        "all but products": (steps["around_share"], step.AROUND_BAR),
    }
    return [read, *found] + [
        Finding(what, engine.backend, "decode step", spread.median, bar, at_most=True)
        for what, (spread, bar) in shares.items()
    ]


def embedded(threads: int, rounds: int, engines: Sequence[str]) -> list[Finding]:
    """Decoding with the embedded model, beside transformers."""
    folder = ROOT / "weights" / "tiny"
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text("utf-8")))
    speeds, paces, *_ = compare(folder, threads, rounds, {"decode 1": WORKS["decode 1"]}, engines)
    best = max(spread.median for name, spread in speeds["decode 1"].items() if name.split()[0] == OURS)
    found = [Finding("decode 1", OURS, "tokens/s", best), *findings(speeds, paces, config)]
    return [replace(finding, work=f"embedded model, {finding.work}") for finding in found]


def _report(
    speeds: Speeds,
    errors: Mapping[str, float],
    skipped: Mapping[str, str],
    limits: Limits,
    found: Sequence[Finding],
) -> str:
    rows = []
    for name, error in errors.items():
        cells = [speeds[work][name].text() if name in speeds[work] else "not run" for work in speeds]
        rows.append([name, f"{error:.4f}", *cells])
    lines = ["Tokens per second:", "", table(["engine", "logits off by", *speeds], rows), ""]
    if found:
        lines += ["How many times as fast as a peer, which part of a limit, or how much, and the bars:", ""]
        lines += [bars_table(found), ""]
    lines.append(f"Read bandwidth {limits.bandwidth.text(1e-9)} GB/s, float32 {limits.float32.text(1e-9, 0)} GFLOP/s.")
    return "\n".join([*lines, *(f"Skipped {reason}" for reason in skipped.values())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="a folder; by default the synthetic checkpoint of bench.synthetic")
    parser.add_argument("--layers", type=at_least_one, default=16, help="of it; 16 is the whole model")
    parser.add_argument("--work", help=f"comma list, by default all of: {', '.join(WORKS)}")
    parser.add_argument("--engines", help=f"comma list, by default all of: {', '.join(ENGINES)}")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="turns of each engine")
    parser.add_argument("--threads", type=at_least_one, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    arguments = parser.parse_args()
    works = {name: WORKS[name] for name in _chosen(parser, "--work", arguments.work, WORKS)}
    engines = _chosen(parser, "--engines", arguments.engines, ENGINES)
    about = machine(arguments.threads)
    folder = arguments.model or default_folder(arguments.layers, DEFAULT_GATE_SCALE)
    try:
        if arguments.model is None:
            write(folder, Recipe(changes={"num_hidden_layers": arguments.layers}))
        limits = measure(arguments.threads, arguments.rounds)
        speeds, paces, errors, skipped = compare(folder, arguments.threads, arguments.rounds, works, engines)
    except InputError as error:
        parser.error(str(error))
    except EngineFailed as error:
        sys.exit(str(error))
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text("utf-8")))
    found = findings(speeds, paces, config)
    if arguments.model is None and arguments.work is None:
        pair = [engine for engine in (OURS, "transformers") if engine in engines and engine not in skipped]
        for name, part in {
            "loading": lambda: first_token(folder, arguments.threads, arguments.rounds, pair),
            "elbow": lambda: elbow(folder, arguments.threads),
            "the embedded model": lambda: embedded(arguments.threads, arguments.rounds, pair),
        }.items():
            print(f"Measuring {name}.", file=sys.stderr)
            try:
                found += part()
            except Exception as error:  # whatever it is, what was measured before is not to be lost
                skipped[name] = f"{name}: {type(error).__name__}: {error}"
    text = _report(speeds, errors, skipped, limits, found)
    model = {"name": folder.name, "layers": config.num_layers, "dtype": "bfloat16"}
    result = {
        "machine": about,
        "model": model,
        "works": works,
        "speeds": speeds,
        "tokens_per_byte": paces,
        "errors": errors,
        "findings": found,
        "limits": limits,
        "skipped": skipped,
    }
    described = f"Model: {model['name']}, {model['layers']} layers, bfloat16. {arguments.rounds} rounds."
    name = f"peers-{folder.name}" if arguments.model else f"peers-{config.num_layers}-layers"
    publish(name, f"{text}\n\n{described}", result, arguments.save)


def _chosen(parser: argparse.ArgumentParser, option: str, text: str | None, known: Iterable[str]) -> list[str]:
    names = list(known) if text is None else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{option} does not know {unknown[0]!r}; choose from {', '.join(known)}.")
    return names if option == "--work" or OURS in names else [OURS, *names]


if __name__ == "__main__":
    main()
