"""From how many rows on a bfloat16 product is faster with its weight widened to float32; decides WIDEN_FROM_ROWS.

    python -m bench.products --threads 1

Only a question on a CPU without bfloat16 instructions. Three ways to compute x W^T take turns, each time on another
weight than the last: as it is, with the whole weight widened first, and with blocks of its rows widened one by one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor

from bench.report import Spread, at_least_one, machine, publish, table
from minimoe.linear import WIDEN_ELEMENTS

ROWS = (1, 2, 4, 6, 8, 12, 16, 32, 64)
SHAPES = {"expert up": (1024, 2048), "expert down": (2048, 1024), "attention": (2048, 2048), "head": (50304, 2048)}
WEIGHTS_BYTES = 100_000_000  # of different weights of a shape, so that none is found in the cache


def as_it_is(x_TA: Tensor, weight_BA: Tensor) -> Tensor:
    return F.linear(x_TA, weight_BA)


def widened(x_TA: Tensor, weight_BA: Tensor) -> Tensor:
    return F.linear(x_TA.float(), weight_BA.float()).to(x_TA.dtype)


def widened_in_blocks(x_TA: Tensor, weight_BA: Tensor) -> Tensor:
    x32_TA = x_TA.float()
    blocks = weight_BA.split(max(1, WIDEN_ELEMENTS // weight_BA.shape[1]))
    return torch.cat([F.linear(x32_TA, block.float()) for block in blocks], dim=1).to(x_TA.dtype)


WAYS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as it is": as_it_is,
    "widened": widened,
    "in blocks": widened_in_blocks,
}


def measure(shape: tuple[int, int], rows: Sequence[int], repeats: int) -> dict[int, dict[str, Spread]]:
    """Seconds by number of rows and way; the first turn is a warm-up."""
    count = max(WEIGHTS_BYTES // (2 * shape[0] * shape[1]), 1)
    weights = [torch.randn(shape).to(torch.bfloat16) for _ in range(count)]
    seconds: dict[int, dict[str, list[float]]] = {n: defaultdict(list) for n in rows}
    used = 0
    for turn in range(repeats + 1):
        for n in rows:
            x_TA = torch.randn(n, shape[1]).to(torch.bfloat16)
            for way, product in WAYS.items():
                used += 1
                start = time.perf_counter()
                product(x_TA, weights[used % count])
                if turn > 0:
                    seconds[n][way].append(time.perf_counter() - start)
    return {n: {way: Spread.of(values) for way, values in ways.items()} for n, ways in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=at_least_one, default=15)
    parser.add_argument("--threads", type=at_least_one, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    arguments = parser.parse_args()
    about = machine(arguments.threads)
    torch.set_num_threads(arguments.threads)
    shapes = track(SHAPES.items(), "Multiplying", console=Console(stderr=True), disable=not sys.stderr.isatty())
    seconds = {name: measure(shape, ROWS, arguments.repeats) for name, shape in shapes}
    rows = [
        [f"{name} {list(SHAPES[name])}", str(n), *(spread.text(1e3, 2) for spread in ways.values())]
        for name, by_rows in seconds.items()
        for n, ways in by_rows.items()
    ]
    text = table(["weight", "rows", *(f"{way} ms" for way in WAYS)], rows)
    publish("products", text, {"machine": about, "seconds": seconds}, arguments.save)


if __name__ == "__main__":
    main()
