"""How fast `minimoe eval` scores beside plain prefill of as many tokens in passes of the same length.

    python -m bench.evaluation --data DIR --tasks arc_easy,piqa      # without --data the embedded model's own items

Scoring is all that `minimoe eval` does with items once their files are read: tokenising, packing, what an item's
choices have in common once and then the rest of every choice, logits, records. Prefill is one forward pass for each
chunk of the same items: as many tokens as scoring ran for an item laid end to end as one sequence, and logits of as
many positions as are scored; no tokenising. The two take turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.report import Spread, at_least_one, machine, publish, table
from minimoe.engine import Engine, load
from minimoe.errors import InputError
from minimoe.evaluate.likelihood import Fitted, Likelihood
from minimoe.evaluate.log import Log
from minimoe.evaluate.run import CHUNK, Benchmark, evaluate, prepare
from minimoe.evaluate.tasks import RequestSet, find_tasks
from minimoe.model import Batch
from minimoe.packing import chunks, trunk
from minimoe.paper.benchmarks import own_items
from minimoe.routers.top_k import TopK

BAR = 0.7


@dataclass(frozen=True, slots=True)
class Pass:
    """A plain pass: token ids of each item, one after the other, and how many logits are wanted."""

    sequences: list[list[int]]
    rows: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))


def plain_passes(engine: Engine, benchmark: Benchmark) -> list[Pass]:
    """The passes of plain prefill that are as long as those of scoring."""
    fitted = [Likelihood(engine).fit(item) for item in benchmark.items if isinstance(item, RequestSet)]
    parts = chunks([item for item in fitted if item is not None], lambda item: item.room, CHUNK)
    return [Pass([_laid(item) for item in part], sum(map(_scored, part))) for part in parts]


def _laid(item: Fitted) -> list[int]:
    """The tokens that are run for an item: what its choices have in common, then the rest of each."""
    shared = trunk(item.branches)
    fed = [[*context, *ids][:-1] for context, ids in item.branches]
    return fed[0][:shared] + [token for ids in fed for token in ids[shared:]]


def _scored(item: Fitted) -> int:
    return sum(len(ids) for _, ids in item.branches)


def prefill(engine: Engine, passes: Sequence[Pass]) -> None:
    """Run the passes, with the logits of their last positions."""
    with torch.inference_mode():
        for one in passes:
            ids_T = torch.tensor([token for ids in one.sequences for token in ids])
            hidden_TD = engine.model.forward(Batch(ids_T, [len(ids) for ids in one.sequences]), TopK())
            for rows_RD in hidden_TD[-one.rows :].split(256):
                engine.model.head(rows_RD)


def measured(engine: Engine, benchmark: Benchmark, rounds: int) -> dict[str, Any]:
    """Tokens a second of both, in turns, and the ratio in each round; the first round does not count."""
    passes = plain_passes(engine, benchmark)
    plain_tokens = sum(one.tokens for one in passes)
    scoring, plain, ratios, tokens = [], [], [], 0
    for turn in range(rounds + 1):
        start = time.perf_counter()
        with Log(None, {}) as log:
            tokens = evaluate(engine, [benchmark], {"top_k": TopK()}, log)
        between = time.perf_counter()
        prefill(engine, passes)
        end = time.perf_counter()
        if turn:
            scoring.append(tokens / (between - start))
            plain.append(plain_tokens / (end - between))
            ratios.append(scoring[-1] / plain[-1])
    return {
        "task": benchmark.task.name,
        "items": len(benchmark.items),
        "tokens": tokens,
        "plain_tokens": plain_tokens,
        "scoring": Spread.of(scoring),
        "prefill": Spread.of(plain),
        "ratio": Spread.of(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--data", type=Path, help="folder with the benchmarks' files, as minimoe eval reads it")
    parser.add_argument("--tasks", default="arc_easy,piqa")
    parser.add_argument("--items", type=at_least_one, default=200, help="of each task")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--threads", type=at_least_one, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    arguments = parser.parse_args()
    about = machine(arguments.threads)
    torch.set_num_threads(arguments.threads)
    try:
        if arguments.data is None:
            benchmarks = list(own_items(quick=False).cloze)
        else:
            benchmarks = [prepare(task, arguments.data) for task in find_tasks(arguments.tasks.split(","))]
        engine = load(arguments.model, threads=arguments.threads)
    except InputError as error:
        parser.error(str(error))
    cut = [replace(b, items=b.items[:: max(1, len(b.items) // arguments.items)][: arguments.items]) for b in benchmarks]
    found = [measured(engine, benchmark, arguments.rounds) for benchmark in cut]
    rows = [
        [
            one["task"],
            str(one["items"]),
            f"{one['tokens']:,}",
            one["scoring"].text(1, 0),
            one["prefill"].text(1, 0),
            one["ratio"].text(1, 2),
            f"{BAR}, {'met' if one['ratio'].median >= BAR else 'missed'}",
        ]
        for one in found
    ]
    heads = ["task", "items", "tokens run", "eval tokens/s", "prefill tokens/s", "ratio", "bar"]
    text = table(heads, rows) + f"\n\nModel {arguments.model}, backend {engine.backend}."
    publish("evaluation", text, {"machine": about, "model": arguments.model, "results": found}, arguments.save)


if __name__ == "__main__":
    main()
