"""`minimoe eval`: accuracy of routing rules on six multiple-choice benchmarks, from local files."""

from __future__ import annotations

import hashlib
import json as json_module
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from minimoe.cli import options
from minimoe.cli.bench import split_specs
from minimoe.cli.terminal import tell, working, write, write_json
from minimoe.errors import InputError
from minimoe.tables import markdown
from minimoe.whole_file import write_whole

if TYPE_CHECKING:
    from minimoe.engine import Engine
    from minimoe.evaluate.run import Benchmark

ALL = "mmlu,arc_easy,arc_challenge,hellaswag,piqa,winogrande"


def eval(
    data: Annotated[
        str, typer.Option(metavar="DIR", help="Folder with a folder for each task: arc_easy/ARC-Easy-Test.jsonl, …")
    ],
    tasks: Annotated[str, typer.Option(metavar="NAMES", help="What to evaluate on, with commas between them.")] = ALL,
    model: options.Model = options.DEFAULT_MODEL,
    router: Annotated[
        list[str] | None,
        typer.Option(
            "--router",
            "--routers",
            metavar="SPECS",
            show_default=options.DEFAULT_ROUTER,
            help="Rules to evaluate, as in top_k,elbow. Can be repeated. Changes are against the first.",
        ),
    ] = None,
    protocol: Annotated[
        Literal["cloze", "choice", "letters"],
        typer.Option(
            help="cloze: log-probability of each choice's text. choice: that of its letter, all choices shown. "
            "letters: the model writes the letter, as in the paper on elbow routing."
        ),
    ] = "cloze",
    shots: Annotated[int, typer.Option(metavar="N", min=0, help="Worked examples before each question.")] = 0,
    normaliser: Annotated[
        Literal["none", "characters", "pmi"] | None,
        typer.Option(
            help="What log-probabilities are divided by, or pmi: less that of the choice without the question. "
            "By default as OLMES has it for the task."
        ),
    ] = None,
    published_parser: Annotated[
        bool, typer.Option("--published-parser", help="Letters: beside each score, that of the paper's own parser.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=2**31, help="Only the first N items of a task (MMLU: of a subject)."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Keep every item's result there; the same command goes on where it stopped."),
    ] = None,
    backend: options.Backend = None,
    dtype: options.DType = None,
    device: options.Device = options.DEFAULT_DEVICE,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Evaluate routing rules on MMLU, ARC, HellaSwag, PIQA and WinoGrande, with intervals and chance beside each score.

    All files are read and checked before the model is loaded.
    """
    options.check_sampling(seed=seed)
    if published_parser and protocol != "letters":
        raise InputError("--published-parser reads letters; give --protocol letters as well.")
    specs = split_specs(router or [options.DEFAULT_ROUTER])
    if not specs:
        raise InputError("name at least one rule, as in --router top_k,elbow.")
    if out is None:
        folder = None
    else:
        read_from = options.needed(models=[model], specs=specs)
        folder = options.make_folder(out, "items.jsonl", "result.json", "table.md", others=read_from)
    from minimoe.evaluate.run import prepare
    from minimoe.evaluate.tasks import find_tasks

    names = [name for name in tasks.split(",") if name.strip()]
    if not names:
        raise InputError(f"name at least one task: {ALL}.")
    benchmarks = [
        prepare(task, Path(data), protocol=protocol, shots=shots, normaliser=normaliser, limit=limit)
        for task in find_tasks(names)
    ]
    from minimoe.cli.own_rule import read_router
    from minimoe.evaluate.log import Log
    from minimoe.evaluate.results import results
    from minimoe.evaluate.run import evaluate, left, settings

    routers = {spec: read_router(spec, every_pass=False) for spec in specs}
    rules = {log_name(spec): rule for spec, rule in routers.items()}
    engine = options.load_engine(model, options.DEFAULT_ROUTER, backend, dtype, device, threads)
    tell(options.headline(options.describe(engine), ", ".join(specs)))
    for note in engine.notes:
        tell(note)
    with Log(None if folder is None else folder / "items.jsonl", settings(engine, seed)) as log:
        start = time.perf_counter()
        try:
            with working(left(benchmarks, rules, log)) as piece:

                def ran(benchmark: Benchmark, rule: str, characters: int) -> None:
                    piece(f"{benchmark.task.title}, {rule}", characters)

                tokens = evaluate(engine, benchmarks, rules, log, seed=seed, ran=ran)
        except KeyboardInterrupt:
            if folder is not None:
                tell(f"Stopped. What is done is in {folder}, and the same command goes on from there.")
            raise
        seconds = time.perf_counter() - start
        found = results(benchmarks, list(rules), log, engine.config.num_layers, published_parser=published_parser)
    shown = dict(zip(rules, specs, strict=True))
    found = [{**result, "router": shown[result["router"]]} for result in found]
    if tokens:
        tell(f"{tokens:,} tokens in {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s")
    document = _document(engine, found, seed)
    if folder is not None:
        write_whole(folder / "result.json", json_module.dumps(document, indent=1, allow_nan=False) + "\n")
        write_whole(folder / "table.md", table(found) + "\n" + notes(found))
    if json:
        write_json(document)
    else:
        write(table(found) + "\n" + notes(found))


def log_name(spec: str) -> str:
    """What the log calls a rule: its SPEC, and a digest of the files it is made of, for a changed rule runs anew."""
    from minimoe.routers.spec import hashes_of

    hashes = hashes_of(spec)
    return f"{spec}#{hashlib.sha256(''.join(hashes).encode()).hexdigest()[:8]}" if hashes else spec


def table(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, one line a result; a change is against the first rule of the task."""
    heads = ["task", "router", "items", "accuracy", "95 %", "chance", "change", "95 %", "mean k"]
    heads += ["invalid", "tied", "cut"]
    lines = []
    for index, result in enumerate(found):
        first = index == 0 or found[index - 1]["task"] != result["task"]
        low, high = result["interval"]
        change = [""] * 2 if first else [f"{result['change']:+.1%}", _range(result["change_interval"], "+.1%")]
        lines.append(
            [
                result["task"],
                "· paper's parser" if result["parser"] == "published" else result["router"],
                f"{result['items']:,}",
                f"{result['accuracy']:.1%}",
                _range([low, high], ".1%"),
                f"{result['chance']:.1%}",
                *change,
                "" if result["mean_k"] is None else f"{result['mean_k']:.2f}",
                *(str(result[name]) for name in ("invalid", "tied", "cut")),
            ]
        )
    return markdown(heads, lines, text_columns=2)


def _range(interval: Sequence[float], form: str) -> str:
    low, high = interval
    return f"{low:{form}} to {high:{form}}"


def notes(found: Sequence[dict[str, Any]]) -> str:
    """What one must know to compare the scores: a line for each task, and how MMLU's subjects are averaged."""
    lines = []
    for result in {result["task"]: result for result in reversed(found)}.values():
        how = f"{result['protocol']}, {result['shots']} shots, normaliser {result['normaliser'] or 'none'}"
        some = result["published_items"] not in (None, result["items"])
        part = f", {result['items']:,} of {result['published_items']:,} items" if some else ""
        lines.append(f"{result['task']}: {result['split']} set{part}; {how}; mean over items.\n")
        if result["shots_dropped"]:
            lines.append(f"{result['task']}: {result['shots_dropped']} items were too long and lost worked examples.\n")
    lines.reverse()
    for result in found:
        if "subject_mean" in result:
            mean, interval = result["subject_mean"], _range(result["subject_mean_interval"], ".1%")
            lines.append(
                f"{result['task']}, {result['router']}: mean over {len(result['subjects'])} subjects {mean:.1%} "
                f"({interval}).\n"
            )
    return "".join(lines)


def _document(engine: Engine, found: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    return {
        **options.describe(engine),
        "checkpoint": engine.model.fingerprint(),
        "seed": seed,
        "results": list(found),
        "versions": options.versions(),
    }
