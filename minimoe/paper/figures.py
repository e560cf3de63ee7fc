"""The figures of the report: each shows one thing, and names its lines where they stand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan",
)  # fmt: skip
MUTED = "0.45"

Interval = tuple[float, float, float]
"""A value, and the ends of its interval."""


def dots(
    values: Mapping[str, Sequence[Interval]],
    names: Sequence[str],
    across: str,
    marks: Sequence[float | None] = (),
    zero: bool = True,
) -> Figure:
    """Values with their intervals on a common scale, `names` from top to bottom, each with one dot of every series.

    Args:
        marks: what the paper has for each name, as an upright stroke; None where it has nothing.
        zero: whether zero means "no change" and gets a line.
    """
    figure, axes = _one(8, 1.1 + 0.24 * len(names) * (len(values) + 1))
    for place, (series, row) in enumerate(values.items()):
        ys = [index + (place - (len(values) - 1) / 2) * 0.24 for index in range(len(names))]
        middles = [value for value, _, _ in row]
        spread = [[max(v - low, 0) for v, low, _ in row], [max(high - v, 0) for v, _, high in row]]
        axes.errorbar(
            middles, ys, xerr=spread, fmt="o", color=COLOURS[place], markersize=5, linewidth=1.4, label=series
        )
    known = [(mark, index) for index, mark in enumerate(marks) if mark is not None]
    if known:
        axes.plot(*zip(*known, strict=True), "|", color="black", markersize=22, markeredgewidth=1.5, label="paper")
    if zero:
        axes.axvline(0, color=MUTED, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(across)
    axes.grid(axis="x", color="0.9")
    figure.legend(loc="outside upper left", ncols=4, frameon=False)
    return figure


def lines(values: Mapping[str, Sequence[float]], across: str, up: str) -> Figure:
    """A line for each series over layers, named at its right end."""
    figure, axes = _one(8, 3.8)
    ends = sorted(((ys[-1], name) for name, ys in values.items()), key=lambda end: end[0])
    lowest, highest = min(min(ys) for ys in values.values()), max(max(ys) for ys in values.values())
    gap = (highest - lowest or 1) * 0.062
    heights: dict[str, float] = {}
    for value, name in ends:  # names must not stand on each other
        heights[name] = max([value, *(height + gap for height in list(heights.values())[-1:])])
    count = len(next(iter(values.values())))
    for place, (name, ys) in enumerate(values.items()):
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(range(count), ys, color=colour, marker="o", markersize=3, linewidth=1.3)
        axes.annotate(
            name, (1.01, heights[name]), xycoords=("axes fraction", "data"), color=colour, va="center", fontsize=9
        )
    axes.set_xticks(range(count))
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(axis="y", color="0.9")
    return figure


def curves(
    groups: Mapping[str, Sequence[Sequence[Sequence[float]]]], ranks: Mapping[str, Sequence[Sequence[int]]], top_k: int
) -> Figure:
    """A panel for each group: a few curves of a few layers, normalised as the rule does it, each with its elbow."""
    wide = 3
    rows = math.ceil(len(groups) / wide)
    figure = _figure(9, 0.5 + 2.5 * rows)
    panels = figure.subplots(rows, wide, sharex=True, sharey=True, squeeze=False)
    layers = len(next(iter(groups.values())))
    shown = sorted({0, layers // 3, 2 * layers // 3, layers - 1})
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    for axes, (name, of) in zip(panels.flat, groups.items(), strict=False):
        for colour, layer in zip(COLOURS, shown, strict=False):
            for curve, rank in list(zip(of[layer], ranks[name][layer], strict=True))[1:4]:
                height = curve[0] - curve[-1] or 1.0
                ys = [(curve[0] - p) / height for p in curve]
                label = f"layer {layer}" if curve is of[layer][1] and axes is panels.flat[0] else None
                axes.plot(range(1, len(ys) + 1), ys, linewidth=0.9, color=colour, alpha=0.8, label=label)
                axes.plot(rank + 1, ys[rank], "o", color=colour, markersize=4)
        axes.axvline(top_k, color=MUTED, linewidth=0.8)
        axes.plot([1, len(of[0][0])], [0, 1], color=MUTED, linewidth=0.6, linestyle=":")
        axes.set_title(name, fontsize=9)
        _plain(axes)
    figure.supxlabel("rank of the expert", fontsize=10)
    figure.supylabel("normalised, flipped probability", fontsize=10)
    figure.legend(loc="outside upper left", ncols=4, frameon=False)
    return figure


def scatter(points: Sequence[tuple[float, float]], across: str, up: str) -> Figure:
    """Points, many on one place drawn darker."""
    figure, axes = _one(6, 3.8)
    axes.scatter([x for x, _ in points], [y for _, y in points], s=10, alpha=0.35, linewidths=0, color=COLOURS[0])
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(color="0.92")
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _one(width: float, height: float) -> tuple[Figure, Axes]:
    figure = _figure(width, height)
    axes = figure.subplots()
    _plain(axes)
    return figure, axes


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
