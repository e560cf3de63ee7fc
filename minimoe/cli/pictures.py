"""Tables and pictures for people, in plain characters; colours are added where a terminal shows them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from minimoe.cli.options import count

if TYPE_CHECKING:
    from minimoe.profiler import Profile
    from minimoe.routing import Routing

KEPT, DROPPED = "#", "."
CURVE_ROWS = 10
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def profile_tables(profile: Profile) -> list[Table]:
    """Where the time went, by phase and operation, how much work each phase was, and the layers one by one."""
    times = _table("phase", "operation", "spans", "median", "quartiles", "total", "share", text_columns=2)
    times.title = "time"
    for phase in profile.phases:
        for timing in profile.by_operation(phase.phase):
            times.add_row(
                phase.phase,
                timing.operation,
                str(timing.count),
                _milliseconds(timing.median),
                f"{_milliseconds(timing.low)} to {_milliseconds(timing.high)}",
                _milliseconds(timing.total),
                f"{timing.share:.1%}",
            )
    works = _table(
        "phase", "passes", "tokens", "mean k", "FLOPs", "of experts", "paper's *", "bytes read", "of experts"
    )
    works.title = "work"
    for phase in profile.phases:
        works.add_row(
            phase.phase,
            str(phase.passes),
            str(phase.tokens),
            f"{phase.mean_k:.2f}",
            count(sum(phase.flops.values()), "G"),
            count(phase.flops["experts"], "G"),
            count(round(phase.paper_flops), "G"),
            count(sum(phase.bytes_read.values()), "G"),
            count(phase.bytes_read["experts"], "G"),
        )
    works.caption = (
        f"end to end {_milliseconds(profile.unprobed_seconds)} unmeasured, "
        f"{_milliseconds(profile.probed_seconds)} while measured, "
        f"of which the parts above are {_milliseconds(sum(phase.seconds for phase in profile.phases))}\n"
        "* what the paper's formula gives for the MoE blocks: two matrices of 4 D, where there are three of I"
    )
    return [times, works, _layer_table(profile)]


def _layer_table(profile: Profile) -> Table:
    """Layer by layer: mean k, and the median time of the two operations that take most of it."""
    phases = [phase.phase for phase in profile.phases]
    headings = [f"{what}, {phase}" for phase in phases for what in ("mean k", "attention", "experts")]
    table = _table("layer", *headings)
    table.title = "layers"
    median = {(t.phase, t.layer, t.operation): _milliseconds(t.median) for t in profile.timings}
    for layer in range(len(profile.phases[0].mean_k_by_layer) if profile.phases else 0):
        cells = [
            cell
            for phase in profile.phases
            for cell in (
                f"{phase.mean_k_by_layer[layer]:.2f}",
                median[phase.phase, layer, "attention"],
                median[phase.phase, layer, "experts"],
            )
        ]
        table.add_row(str(layer), *cells)
    return table


def expert_counts(texts: Sequence[str], layers: Sequence[Routing]) -> Text:
    """A row for every token that was run: its text, a character per layer for its k (a is 10), and their mean."""
    picture = Text().append("experts of each token, one character per layer, and their mean", "dim")
    if not layers:
        return picture.append(": no token was run")
    k_by_token = list(zip(*(layer.k_T.tolist() for layer in layers), strict=True))
    shown = [repr(text)[1:-1] for text in texts]
    width = max(len(text) for text in shown)
    for text, k_of_layers in zip(shown, k_by_token, strict=False):  # the last token was written, and not run
        row = "".join(DIGITS[k] if k < len(DIGITS) else "+" for k in k_of_layers)
        picture.append(f"\n{text:>{width}}  ")
        picture.append(row, "cyan").append(f"  {sum(k_of_layers) / len(k_of_layers):.2f}")
    return picture


def curve(probs: Sequence[float], kept: Collection[int]) -> Text:
    """A bar for every probability in descending order, those of the kept ranks in another character.

    Args:
        probs: sorted, descending.
        kept: ranks from 0 that the rule keeps.
    """
    lines = []
    for row in range(CURVE_ROWS, 0, -1):
        label = f"{probs[0]:.3f} " if row == CURVE_ROWS else " " * 6
        floor = probs[0] * (row - 1) / CURVE_ROWS  # rounded up, so that a tiny one shows too
        bars = ((KEPT if rank in kept else DROPPED) if p > floor else " " for rank, p in enumerate(probs))
        lines.append(label + "".join(bars))
    lines.append(" " * 6 + "-" * (max(kept, default=-1) + 1) + f"| k = {len(kept)} of {len(probs)}")
    picture = Text("\n".join(lines))
    picture.highlight_regex(f"{KEPT}+|-+", "bold green")
    picture.highlight_regex(re.escape(DROPPED) + "{2,}", "dim")
    picture.highlight_regex(r"\|.*", "bold")
    return picture


def scatter(points: Sequence[tuple[str, float, float, bool]], across: str, up: str) -> str:
    """Points as letters on a plane of characters, with their names below; those with a mark have a * there.

    Args:
        points: name, place across, place up, mark.
    """
    columns, rows = 60, 14
    xs, ys = [x for _, x, _, _ in points], [y for _, _, y, _ in points]
    plane = [[" "] * columns for _ in range(rows)]
    for index, (_, x, y, _) in enumerate(points):
        column = round((x - min(xs)) / ((max(xs) - min(xs)) or 1) * (columns - 1))
        row = round((max(ys) - y) / ((max(ys) - min(ys)) or 1) * (rows - 1))
        taken = plane[row][column] != " "
        plane[row][column] = "+" if taken else _letter(index)
    edge = [f"{max(ys):.4f}", *[""] * (rows - 2), f"{min(ys):.4f}"]
    lines = [up, *(f"{label:>8} |{''.join(line)}" for label, line in zip(edge, plane, strict=True))]
    lines += [" " * 9 + "+" + "-" * columns, f"{'':10}{min(xs):<30.4g}{max(xs):>30.4g}  {across}"]
    lines += [f"  {_letter(i)}{'*' if mark else ' '} {name}" for i, (name, _, _, mark) in enumerate(points)]
    return "\n".join(lines) + "\n"


def _letter(index: int) -> str:
    return DIGITS[10 + index % (len(DIGITS) - 10)]


def _table(*columns: str, text_columns: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text_columns else "right", no_wrap=True)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
