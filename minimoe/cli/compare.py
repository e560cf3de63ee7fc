"""`minimoe compare`: what routing rules cost and save, side by side, each beside its controls."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minimoe.cli import options
from minimoe.cli.bench import split_specs
from minimoe.cli.terminal import tell, write, write_json
from minimoe.errors import InputError

if TYPE_CHECKING:
    from minimoe.comparison import Outcome
    from minimoe.engine import Engine
    from minimoe.items import Item


def compare(
    model: options.Model = options.DEFAULT_MODEL,
    router: Annotated[
        list[str] | None,
        typer.Option(
            "--router", "--routers", metavar="SPECS", show_default="elbow", help="Rules to compare with top_k."
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="FILE", help="A text to measure on, UTF-8.")] = None,
    cloze: Annotated[
        str | None, typer.Option(metavar="FILE", help="Cloze items instead: JSON lines with ctx, endings and label.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=2, help="Only the first N windows or items.")] = None,
    window: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of one window of the text.")] = 512,
    controls: Annotated[
        bool, typer.Option(help="Beside each rule that prunes, mixed_k and random at the same mean k.")
    ] = True,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw quality against compute into a .png or .svg file.")
    ] = None,
    backend: options.Backend = None,
    dtype: options.DType = None,
    device: options.Device = options.DEFAULT_DEVICE,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Compare routing rules on one text or cloze file: quality with paired 95 % intervals, work, and time."""
    options.check_sampling(seed=seed)
    if (text is None) == (cloze is None):
        raise InputError("give either --text FILE or --cloze FILE.")
    if plot is not None and Path(plot).suffix not in (".png", ".svg"):
        raise InputError(f"--plot writes .png or .svg files, not {plot!r}.")
    if plot is not None:
        options.check_output("--plot", plot)
    written = read_text(text) if text is not None else ""
    from minimoe.cli.own_rule import read_router
    from minimoe.comparison import compare as run
    from minimoe.items import cloze_items, text_items

    rules = [(spec, read_router(spec)) for spec in split_specs(router or ["elbow"])]
    engine = options.load_engine(model, options.DEFAULT_ROUTER, backend, dtype, device, threads)
    tell(options.headline(options.describe(engine), "as below"))
    items = cloze_items(engine, cloze, limit) if cloze else text_items(engine, written, window)[:limit]
    if len(items) < 2:
        raise InputError("an interval needs at least two items; give a longer text or a smaller --window.")
    outcomes = run(engine, rules, items, controls=controls, seed=seed)
    source = str(cloze or text)
    if json:
        write_json(_document(engine, outcomes, items, source, seed))
        if plot is not None:
            _plot(outcomes, plot)
        return
    from minimoe.cli.pictures import scatter

    write(table(outcomes, with_accuracy=cloze is not None))
    write("\n" + scatter(points(outcomes), "MFLOPs a token", "bits a byte") + "\n")
    if plot is not None:
        _plot(outcomes, plot)
    write("* the frontier: no other arm is as cheap and better. The random controls stand in the table only.\n")


def read_text(path: str) -> str:
    """A whole text file.

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text.") from None


def points(outcomes: list[Outcome]) -> list[tuple[str, float, float, bool]]:
    """Name, MFLOPs a token, bits a byte, and whether the arm is on the frontier.

    Without the random controls, beside which all others would lie on one line; the table has them.
    """
    from minimoe.comparison import frontier
    from minimoe.routers.random import Random

    outcomes = [o for o in outcomes if not (o.arm.control_of and isinstance(o.arm.router, Random))]
    places = [(o.summary["flops"] / 1e6, o.summary["bits_per_byte"]) for o in outcomes]
    best = set(frontier(places))
    return [(o.arm.name, *place, i in best) for i, (o, place) in enumerate(zip(outcomes, places, strict=True))]


def table(outcomes: list[Outcome], *, with_accuracy: bool) -> str:
    """A Markdown table; controls are indented under their rule. Intervals are those of the change against top-k."""
    heads = ["rule", "mean k", "bits/byte", "change", "95 %", "perplexity"]
    heads += ["accuracy", "change", "95 %"] if with_accuracy else []
    heads += ["agree", "KL", "MFLOPs/token", "expert MB/token", "µs/token"]
    lines = [heads, ["-" * len(head) for head in heads]]
    for outcome in outcomes:
        s, first = outcome.summary, outcome is outcomes[0]
        name = f"{'· ' if outcome.arm.control_of else ''}{outcome.arm.name}"
        row = [name, f"{s['mean_k']:.2f}", f"{s['bits_per_byte']:.4f}", *_change(s, "bits_per_byte", ".4f", first)]
        row.append(f"{s['perplexity']:.2f}")
        if with_accuracy:
            row += [f"{s['accuracy']:.1%}", *_change(s, "accuracy", ".1%", first)]
        row += [f"{s['agreement']:.1%}", f"{s['kl']:.4f}", f"{s['flops'] / 1e6:.3f}"]
        row += [f"{s['decode_expert_bytes'] / 1e6:.3f}", f"{s['seconds'] * 1e6:.1f}"]
        lines.append(row)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines[1] = ["-" * width for width in widths]

    def cell(column: int, text: str) -> str:
        return text.rjust(widths[column]) if column else text.ljust(widths[column])

    return "".join(f"| {' | '.join(cell(i, text) for i, text in enumerate(line))} |\n" for line in lines)


def _change(summary: dict[str, Any], name: str, form: str, first: bool) -> list[str]:
    if first:
        return ["", ""]
    low, high = summary[f"{name}_change_interval"]
    return [f"{summary[f'{name}_change']:+{form}}", f"{low:+{form}} to {high:+{form}}"]


def _document(engine: Engine, outcomes: list[Outcome], items: list[Item], source: str, seed: int) -> dict[str, Any]:
    on_frontier = {name for name, _, _, best in points(outcomes) if best}
    return {
        **options.describe(engine),
        "checkpoint": engine.model.fingerprint(),
        "source": source,
        "items": len(items),
        "seed": seed,
        "arms": [
            {
                "router": o.arm.name,
                "control_of": o.arm.control_of,
                "frontier": o.arm.name in on_frontier,
                **o.summary,
                "per_item": [asdict(row) for row in o.seen],
            }
            for o in outcomes
        ],
        "versions": options.versions(),
    }


def _plot(outcomes: list[Outcome], path: str) -> None:
    """Quality against compute with its frontier, each point named where it stands.

    Raises:
        InputError: matplotlib is not there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib; pip install 'minimoe[plot]'.") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    drawn = points(outcomes)
    best = sorted((x, y) for _, x, y, on_frontier in drawn if on_frontier)
    axes.plot(*zip(*best, strict=True), color="tab:green", linewidth=1, zorder=1)
    by_name = {outcome.arm.name: outcome for outcome in outcomes}
    for name, x, y, _ in drawn:
        outcome = by_name[name]
        low, high = outcome.summary["bits_per_byte_change_interval"]
        change, control = outcome.summary["bits_per_byte_change"], outcome.arm.control_of is not None
        colour = "tab:gray" if control else "tab:blue"
        axes.errorbar(x, y, yerr=[[max(0, change - low)], [max(0, high - change)]], fmt="o", color=colour, markersize=4)
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8, color=colour)
    axes.margins(x=0.15)  # room for the names
    axes.set_xlabel("MFLOPs a token")
    axes.set_ylabel("bits a byte (less is better)")
    axes.set_title(
        "Quality against compute; bars: 95 % interval of the change against top_k; line: frontier", fontsize=9
    )
    figure.savefig(path, dpi=150)
