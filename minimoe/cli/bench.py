"""`minimoe bench`: tokens per second of routing rules and backends, side by side."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from minimoe.cli import options
from minimoe.cli.terminal import tell, working, write, write_json
from minimoe.errors import InputError

if TYPE_CHECKING:
    from minimoe.benchmark import Arm, Result

COLUMNS = (
    "model",
    "parameters",
    "dtype",
    "backend",
    "router",
    "threads",
    "test",
    "batch",
    "mean_k",
    "tokens_per_second",
    "low",
    "high",
)
LARGEST = 2**16  # of a length or a batch; more is a slip of the finger
HEADINGS = {"parameters": "params", "mean_k": "mean k", "tokens_per_second": "tok/s"}


def bench(
    model: options.Model = options.DEFAULT_MODEL,
    router: Annotated[
        list[str] | None,
        typer.Option(
            "--router",
            "--routers",
            metavar="SPECS",
            show_default=options.DEFAULT_ROUTER,
            help="Rules to compare, as in top_k,elbow,top_p:p=0.6,cap=16. Can be repeated.",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            "--backends",
            metavar="NAMES",
            help="Backends to compare, with commas between them. By default native where its kernels run.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", "-p", metavar="N,...", help="Prompt lengths to measure (pp); 0 is none.")
    ] = "512",
    new_tokens: Annotated[
        str,
        typer.Option("--new-tokens", "-n", metavar="N,...", help="Numbers of tokens to generate (tg); 0 is none."),
    ] = "128",
    batch: Annotated[str, typer.Option("--batch", "-b", metavar="N,...", help="Sequences side by side.")] = "1",
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", metavar="N", min=1, help="Measured runs of each.")
    ] = 5,
    output: Annotated[Literal["md", "csv", "json"], typer.Option("--output", "-o", help="Form of the table.")] = "md",
    dtype: options.DType = None,
    device: options.Device = options.DEFAULT_DEVICE,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Measure tokens per second, in the manner of llama-bench.

    ppN is a prompt of N tokens; tgN is N single steps after a prompt of 16, on random tokens, without sampling.
    Everything runs once to warm up and then in turns, on new tokens each time. The table gives median and quartiles.
    """
    options.check_sampling(seed=seed)
    specs = split_specs(router or [options.DEFAULT_ROUTER])
    named = [name.strip() for names in backend or [] for name in names.split(",")]
    backends: list[str | None] = [*dict.fromkeys(named)] or [None]
    if not specs:
        raise InputError("name at least one rule, as in --routers top_k,elbow.")
    batches = whole_numbers("--batch", batch, least=1)
    prompts = [n for n in whole_numbers("--prompt-tokens", prompt_tokens, least=0) if n]
    writes = [n for n in whole_numbers("--new-tokens", new_tokens, least=0) if n]
    if not prompts and not writes:
        raise InputError("there is nothing to measure; give --prompt-tokens or --new-tokens above 0.")
    from minimoe.benchmark import Arm, Work, measure
    from minimoe.cli.own_rule import read_router

    works = [Work("pp", n, b) for b in batches for n in prompts] + [Work("tg", n, b) for b in batches for n in writes]
    # What a user's own rule returns is tested while it warms up, and not where that would be measured too.
    rules = {spec: read_router(spec, every_pass=False) for spec in specs}
    loaded = [options.load_engine(model, options.DEFAULT_ROUTER, name, dtype, device, threads) for name in backends]
    noted = [note for engine in loaded for note in engine.notes]
    noted += [note for engine in loaded for rule in rules.values() for note in engine.uncaptured(rule)]
    for line in dict.fromkeys(noted):
        tell(line)
    engines = {engine.backend: engine for engine in loaded}
    arms = [
        Arm(spec, name, rule, engine.model, engine.decoder_for(rule))
        for name, engine in engines.items()
        for spec, rule in rules.items()
    ]
    if writes:
        for line in _asked(arms):
            tell(line)
    engine = loaded[0]
    with working(len(works) * len(arms) * (repetitions + 1)) as ran:
        results = measure(
            arms,
            works,
            vocabulary=min(engine.config.vocab_size, engine.tokenizer.vocab_size),
            repetitions=repetitions,
            seed=seed,
            ran=lambda arm, work: ran(f"{work.name} {arm.router} {arm.backend}"),
        )
    rows = [_row(options.describe(engines[result.arm.backend]), result) for result in results]
    if json or output == "json":
        write_json({"rows": rows, "repetitions": repetitions, "seed": seed, "versions": options.versions()})
    elif output == "csv":
        write(_csv(rows))
    else:
        write(_markdown(rows))


def _asked(arms: Sequence[Arm]) -> Iterator[str]:
    """A note for each backend whose decode steps ask some of the rules in Python, and follow others themselves."""
    for backend in dict.fromkeys(arm.backend for arm in arms):
        here = [arm for arm in arms if arm.backend == backend]
        followed = " and ".join(arm.router for arm in here if arm.decoder and not arm.decoder.asks)
        asked = " and ".join(arm.router for arm in here if not arm.decoder or arm.decoder.asks)
        if followed and asked:
            yield (
                f"tg, {backend}: in every layer Python is asked about {asked}, and not about {followed}, whose steps "
                "are faster for that alone."
            )


def split_specs(texts: Sequence[str]) -> list[str]:
    """SPECs out of comma lists. A part such as cap=16 is a key of the SPEC before it: it has = and no : in front."""
    specs: list[str] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, equals, _ = part.partition("=")
        if equals and ":" not in name and specs:
            specs[-1] += f",{part}"
        elif part:
            specs.append(part)
    return list(dict.fromkeys(specs))


def whole_numbers(option: str, text: str, *, least: int) -> list[int]:
    """The numbers of a comma list, each once.

    Raises:
        InputError: something that is no whole number from `least` to LARGEST.
    """
    numbers = []
    for part in text.split(","):
        try:
            number = int(part)
        except ValueError:
            number = least - 1
        if not least <= number <= LARGEST:
            raise InputError(
                f"{option} takes whole numbers from {least} to {LARGEST}, as in 128,512, not {part.strip()!r}."
            )
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def _row(facts: dict[str, Any], result: Result) -> dict[str, Any]:
    low, median, high = result.quartiles
    return {
        **facts,
        "router": result.arm.router,
        "test": result.work.name,
        "batch": result.work.batch,
        "mean_k": result.mean_k,
        "tokens_per_second": median,
        "low": low,
        "high": high,
        "seconds": result.seconds,
    }


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    def cell(column: str, value: Any) -> str:
        if column == "parameters":
            return options.count(value)
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    cells = [[HEADINGS.get(c, c) for c in COLUMNS], *([cell(c, row[c]) for c in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [isinstance(rows[0][column], (int, float)) for column in COLUMNS]
    lines = [
        "| "
        + " | ".join(f"{text:{'>' if r else '<'}{w}}" for text, w, r in zip(line, widths, right, strict=True))
        + " |"
        for line in cells
    ]
    rule = "| " + " | ".join("-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + " |"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"
