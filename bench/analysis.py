"""What `minimoe analyze` costs: two million router curves once their logits exist, and a text beside its plain passes.

    python -m bench.analysis                        # the text part on the embedded model

The curves are those of OLMoE's shape (16 layers, 64 experts, its vocabulary), Gaussian logits in bfloat16 under the
elbow rule. The text is the project's own documentation, four times over; analysis and plain forward passes over the
same windows take turns, and the analysis includes reading, tokenising, the rule, counting and writing.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.report import Spread, at_least_one, machine, publish, table
from minimoe.analysis.run import PASS_TOKENS, analyze
from minimoe.analysis.tally import Sizes, Tally, empty_arrays
from minimoe.analysis.texts import Text, text_source, windows
from minimoe.engine import Engine, load
from minimoe.errors import InputError
from minimoe.model import Batch
from minimoe.routers import RouterContext
from minimoe.routers.spec import parse_router

ROOT = Path(__file__).parent.parent
CURVES, LAYERS, EXPERTS, VOCABULARY, TOP_K = 2_000_000, 16, 64, 50_304, 8
SECONDS_BAR, GIGABYTES_BAR, OVERHEAD_BAR = 60, 2, 0.15
WINDOW = 512
TIMES = 4  # the documentation is read so often: what the files cost once should weigh as in a real text


def curves(count: int) -> dict[str, float]:
    """Seconds for routing and counting `count` curves whose logits are in memory, and the process' peak memory."""
    tokens = count // LAYERS
    arrays = empty_arrays(Sizes(1, LAYERS, EXPERTS, VOCABULARY))
    tally, rule = Tally(arrays, TOP_K), parse_router("elbow")
    draws = torch.Generator().manual_seed(0)
    ids_T = torch.randint(VOCABULARY, (tokens,), generator=draws)
    logits = [torch.randn(tokens, EXPERTS, generator=draws).to(torch.bfloat16) for _ in range(LAYERS)]
    start = time.perf_counter()
    for first in range(0, tokens, PASS_TOKENS):
        part = ids_T[first : first + PASS_TOKENS]
        zeros_T = torch.zeros_like(part)
        tally.begin(0)
        tally.reads(part)
        tally.step("prefill", [len(part)], [0])
        for layer, logits_TE in enumerate(logits):
            rows_TE = logits_TE[first : first + PASS_TOKENS]
            context = RouterContext(layer, "prefill", part, zeros_T, zeros_T, TOP_K, norm_topk_prob=False)
            tally.routed(layer, rule.route(rows_TE, context), rows_TE)
        tally.end()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"curves": float(arrays["elbow_GFLE"].sum()), "seconds": seconds, "peak_gb": peak}


def overhead(engine: Engine, text: Text, repeats: int) -> dict[str, Any]:
    """Seconds of plain forward passes and of the analysis of the same windows, in turns."""
    rule = parse_router("elbow")
    plain, analysed, tokens = [], [], 0
    for turn in range(repeats + 1):
        parts = list(windows(text, engine.tokenizer, WINDOW))
        tokens = sum(map(len, parts))
        start = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(parts), PASS_TOKENS // WINDOW):
                group = parts[first : first + PASS_TOKENS // WINDOW]
                ids_T = torch.tensor([i for part in group for i in part])
                engine.model.forward(Batch(ids_T, [len(part) for part in group]), rule)
        between = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            source = text_source([text], engine.tokenizer, WINDOW)
            analyze(engine, ("elbow", rule), source, Path(folder) / "analysis.npz")
        end = time.perf_counter()
        if turn:  # the first brings everything into memory
            plain.append(between - start)
            analysed.append(end - between)
    ratios = [a / p - 1 for p, a in zip(plain, analysed, strict=True)]
    return {"tokens": tokens, "plain": Spread.of(plain), "analysis": Spread.of(analysed), "overhead": Spread.of(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--curves", type=at_least_one, default=CURVES)
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument("--threads", type=at_least_one, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    arguments = parser.parse_args()
    about = machine(arguments.threads)
    torch.set_num_threads(arguments.threads)
    counted = curves(arguments.curves)  # first: the peak is that of the process
    try:
        engine = load(arguments.model, threads=arguments.threads)
    except InputError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documentation.txt"
        pages = "".join((ROOT / name).read_text("utf-8") for name in ("README.md", "ROUTERS.md"))
        path.write_text(pages * TIMES, "utf-8")
        cost = overhead(engine, Text("documentation", path), arguments.repeats)
    rows = [
        ["curves analysed", f"{counted['curves']:.0f}", ""],
        ["seconds", f"{counted['seconds']:.1f}", f"under {SECONDS_BAR}"],
        ["peak memory, GB", f"{counted['peak_gb']:.2f}", f"under {GIGABYTES_BAR}"],
        [f"plain passes over {cost['tokens']} tokens, s", cost["plain"].text(1, 2), ""],
        ["analysis of them, s", cost["analysis"].text(1, 2), ""],
        ["what the analysis adds", cost["overhead"].text(100, 1) + " %", f"at most {OVERHEAD_BAR:.0%}"],
    ]
    publish("analysis", table(["", "measured", "bar"], rows), {"machine": about, **counted, **cost}, arguments.save)


if __name__ == "__main__":
    main()
