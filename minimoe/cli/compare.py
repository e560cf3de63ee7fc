"""`minimoe compare`: what routing rules cost and save, side by side, each beside its controls."""

from __future__ import annotations

import importlib.util
import json as json_format
import lzma
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minimoe.cli import options
from minimoe.cli.bench import split_specs
from minimoe.cli.pictures import scatter
from minimoe.cli.terminal import tell, working, write, write_json
from minimoe.errors import InputError
from minimoe.tables import markdown
from minimoe.whole_file import write_whole

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
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Write the JSON document into a file as well.")
    ] = None,
    backend: options.Backend = None,
    dtype: options.DType = None,
    device: options.Device = options.DEFAULT_DEVICE,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Compare routing rules on one text or cloze file: quality with paired 95 % intervals, work, and time.

    With --out, a run that was cut off goes on where it was when the same command is given again.
    """
    options.check_sampling(seed=seed)
    if (text is None) == (cloze is None):
        raise InputError("give either --text FILE or --cloze FILE.")
    specs = split_specs(["elbow"] if router is None else router)
    if plot is not None:
        _check_plot(plot, options.needed(text, cloze, models=[model], specs=specs))
    if out is not None:
        options.check_output("--out", out, options.needed(text, cloze, plot, models=[model], specs=specs))
    if not specs:
        raise InputError("name at least one rule, as in --router elbow.")
    written = read_text(text) if text is not None else ""
    from minimoe.cli.own_rule import read_router
    from minimoe.comparison import compare as run
    from minimoe.items import cloze_items, read_cloze, text_items

    few = "an interval needs at least two items; give a longer text or a smaller --window."
    if cloze is not None and len(read_cloze(cloze, limit)) < 2:
        raise InputError(few)
    rules = [(spec, read_router(spec)) for spec in specs]
    engine = options.load_engine(model, options.DEFAULT_ROUTER, backend, dtype, device, threads)
    for line in (options.headline(options.describe(engine), "as below"), *engine.notes):
        tell(line)
    items = cloze_items(engine, cloze, limit) if cloze else text_items(engine, written, window)[:limit]
    if len(items) < 2:
        raise InputError(few)
    part = None if out is None else Path(f"{out}.part")
    with working((1 + controls) * len(items)) as ran:
        outcomes = run(engine, rules, items, controls=controls, seed=seed, part=part, ran=ran)
    document = _document(engine, outcomes, items, str(cloze or text), seed)
    if out is not None and part is not None:
        write_whole(out, json_format.dumps(document, allow_nan=False) + "\n")
        part.unlink()
    if json:
        write_json(document)
    else:
        write(table(outcomes, with_accuracy=cloze is not None))
        write("\n" + scatter(points(outcomes), "MFLOPs a token", "bits a byte") + "\n")
        write("* the frontier: no other arm is as cheap and better. The random controls stand in the table only.\n")
        if any(outcome.arm.control_of for outcome in outcomes):
            write("rule - it: from a control to its rule, on the same items at the same mean k.\n")
    if plot is not None:
        _plot(outcomes, plot)


def _check_plot(path: str, others: Iterable[Path]) -> None:
    """Refuse a picture that could not be drawn, before there is work to lose.

    Raises:
        InputError: neither .png nor .svg, no place to write to, or no matplotlib.
    """
    if Path(path).suffix not in (".png", ".svg"):
        raise InputError(f"--plot writes .png or .svg files, not {path!r}.")
    options.check_output("--plot", path, others)
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib; pip install 'minimoe[plot]'.")


def read_text(path: str) -> str:
    """A whole text file, plain or packed with xz.

    Raises:
        InputError: it cannot be read, is not UTF-8, or holds nothing.
    """
    try:
        with lzma.open(path) if path.endswith(".xz") else open(path, "rb") as file:
            text = file.read().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text.") from None
    except (lzma.LZMAError, EOFError):
        raise InputError(f"{path} is no whole xz file.") from None
    if not text.strip():
        raise InputError(f"the text is empty: {path} holds nothing but white space.")
    return text


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
    """A Markdown table; controls are indented under their rule.

    The changes are those against top-k; beside each control stands how its rule differs from it. With 95 % intervals.
    """
    against = any(outcome.arm.control_of for outcome in outcomes)
    compared = ["change", "95 %", *(["rule - it", "95 %"] if against else [])]
    heads = ["rule", "mean k", "bits/byte", *compared, "perplexity"]
    heads += ["accuracy", *compared] if with_accuracy else []
    heads += ["agree", "KL", "MFLOPs/token", "expert MB/token", "µs/token"]
    rows = []
    for outcome in outcomes:
        s, first, control = outcome.summary, outcome is outcomes[0], outcome.arm.control_of is not None
        row = [f"{'· ' if control else ''}{outcome.arm.name}", f"{s['mean_k']:.2f}"]
        for name, form in (
            (("bits_per_byte", ".4f"), ("accuracy", ".1%")) if with_accuracy else (("bits_per_byte", ".4f"),)
        ):
            row += [format(s[name], form), *(["", ""] if first else _change(s, name, form))]
            if against:
                row += _change(s, f"rule_{name}", form) if control else ["", ""]
            row += [f"{s['perplexity']:.2f}"] if name == "bits_per_byte" else []
        row += [f"{s['agreement']:.1%}", f"{s['kl']:.4f}", f"{s['flops'] / 1e6:.3f}"]
        rows.append([*row, f"{s['decode_expert_bytes'] / 1e6:.3f}", f"{s['seconds'] * 1e6:.1f}"])
    return markdown(heads, rows)


def _change(summary: dict[str, Any], name: str, form: str) -> list[str]:
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
    """Quality against compute with its frontier, each point named where it stands."""
    from matplotlib.figure import Figure

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
