"""`minimoe paper`: the whole of "Elbow-based MoE Routing" on any checkpoint, as a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minimoe.cli import options
from minimoe.cli.terminal import counting, tell, write, write_json
from minimoe.errors import InputError


def paper(
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Where the report and its parts go.")],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The six benchmarks' files, a folder for each; see 'minimoe eval'. "
            "Without it, the embedded model's own cloze items stand in for them.",
        ),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few items of each benchmark: minutes, wide intervals.")
    ] = False,
    backend: options.Backend = None,
    dtype: options.DType = None,
    device: options.Device = options.DEFAULT_DEVICE,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Do the paper's tables and figures again, and show each of its faults by a number.

    Writes report.html (everything in one file), report.md, figures/ (SVG) and data/ (CSV and JSON). A run that was cut
    off goes on where it was when the same command is given again, and ends with the same report.
    """
    options.check_sampling(seed=seed)
    folder = options.make_folder(out, "report.html", "report.md")
    for part in ("parts", "figures", "data"):
        options.make_folder(str(folder / part))
    if data is not None and not Path(data).is_dir():
        raise InputError(f"--data {data} is no folder; it must hold a folder for each benchmark.")
    try:
        import markdown_it  # noqa: F401
        import matplotlib  # noqa: F401 - found out before the work
    except ImportError:
        raise InputError("the report needs matplotlib; pip install 'minimoe[plot]'.") from None
    from minimoe.paper.benchmarks import own_items, six_benchmarks
    from minimoe.paper.estimate import seconds
    from minimoe.paper.report import write_report
    from minimoe.paper.sections import sections
    from minimoe.paper.study import Progress, Study

    benchmarks = own_items(quick=quick) if data is None else six_benchmarks(Path(data), quick=quick)
    engine = options.load_engine(model, options.DEFAULT_ROUTER, backend, dtype, device, threads)
    study = Study(engine, benchmarks, folder, quick=quick, seed=seed)
    for line in (options.headline(options.describe(engine), "as the paper needs them"), *engine.notes):
        tell(line)
    if data is None:
        tell("without --data the embedded model's own cloze items stand in for the six benchmarks")
    left = seconds(study)
    tell(f"this will take about {_duration(left)}" if left else "everything is measured already")
    with counting() as (told, ran):
        found = study.run(Progress(told, ran))
        told("report")
        page = write_report(folder, TITLE, _lead(found["about"]), sections(found, engine.config))
    if json:
        write_json(found)
    else:
        write(f"{page}\n")


TITLE = "Elbow-based MoE Routing, done again"


def _lead(about: dict[str, object]) -> str:
    items = about["items"]
    assert isinstance(items, dict)
    total = sum(items.values())
    own = " They are the embedded model's own cloze items, which stand in for the six benchmarks." * ("own" in items)
    quick = " A quick run: few items, wide intervals." if about["quick"] else ""
    return (
        f"Model {about['model']} (router weights {about['checkpoint']}), {about['dtype']}, {about['backend']} backend "
        f"on {about['device']}, seed {about['seed']}; {total:,} items.{own}{quick}"
    )


def _duration(seconds: float) -> str:
    """Seconds up to three minutes, minutes up to three hours: so that rounding hides little."""
    if seconds < 180:
        return f"{max(5 * round(seconds / 5), 5)} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 10_800 else f"{seconds / 3600:.0f} hours"
