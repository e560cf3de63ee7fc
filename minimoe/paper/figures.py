"""The figures of the report: each shows one thing, and names its lines where they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
MUTED = "0.45"


def bars(values: Mapping[str, Sequence[float]], names: Sequence[str], up: str, errors: Any = None) -> Figure:
    """Groups of bars side by side: `values` by series, one value for each of `names`; errors likewise, or None."""
    figure, axes = _one(9, 3.6)
    width = 0.8 / len(values)
    for place, (series, heights) in enumerate(values.items()):
        xs = [index + (place - (len(values) - 1) / 2) * width for index in range(len(names))]
        spread = None if errors is None else errors[series]
        axes.bar(xs, heights, width * 0.92, yerr=spread, color=COLOURS[place], error_kw={"elinewidth": 1})
        axes.annotate(
            series,
            (0, 1),
            xytext=(8 + 150 * place, 6),
            xycoords="axes fraction",
            textcoords="offset points",
            color=COLOURS[place],
            fontsize=9,
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(up)
    return figure


def lines(values: Mapping[str, Sequence[float]], across: str, up: str) -> Figure:
    """A line for each series over layers, named at its right end."""
    figure, axes = _one(9, 3.8)
    ends = sorted(((ys[-1], name) for name, ys in values.items()), key=lambda end: end[0])
    lowest, highest = min(min(ys) for ys in values.values()), max(max(ys) for ys in values.values())
    gap = (highest - lowest or 1) * 0.06
    heights: dict[str, float] = {}
    for value, name in ends:  # names must not stand on each other
        heights[name] = max([value, *(height + gap for height in list(heights.values())[-1:])])
    for place, (name, ys) in enumerate(values.items()):
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(range(len(ys)), ys, color=colour, marker="o", markersize=3)
        axes.text(len(ys) - 1 + 0.02 * len(ys), heights[name], f" {name}", color=colour, va="center", fontsize=9)
    axes.set_xlim(-0.2, len(next(iter(values.values()))) * 1.18)
    axes.set_xticks(range(len(next(iter(values.values())))))
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure


def curves(layers: Sequence[Sequence[Sequence[float]]], ranks: Sequence[Sequence[int]], top_k: int) -> Figure:
    """The first curves of a few layers, normalised as the rule does it, each with its elbow."""
    shown = sorted({0, len(layers) // 3, 2 * len(layers) // 3, len(layers) - 1})
    figure = _figure(3 * len(shown), 3.2)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, layer in zip(panels, shown, strict=True):
        for curve, rank in list(zip(layers[layer], ranks[layer], strict=True))[:6]:
            height = curve[0] - curve[-1] or 1.0
            ys = [(curve[0] - p) / height for p in curve]
            axes.plot(range(1, len(ys) + 1), ys, linewidth=0.8, color=COLOURS[0], alpha=0.6)
            axes.plot(rank + 1, ys[rank], "o", color=COLOURS[3], markersize=4)
        axes.axvline(top_k, color=MUTED, linewidth=0.8)
        axes.plot([1, len(ys)], [0, 1], color=MUTED, linewidth=0.6, linestyle=":")
        axes.set_title(f"layer {layer}", fontsize=9)
        axes.set_xlabel("rank of the expert")
    panels[0].set_ylabel("normalised, flipped probability")
    return figure


def scatter(points: Sequence[tuple[float, float]], across: str, up: str) -> Figure:
    """Points, many on one place drawn darker."""
    figure, axes = _one(6, 4)
    axes.scatter([x for x, _ in points], [y for _, y in points], s=8, alpha=0.25, linewidths=0, color=COLOURS[0])
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _one(width: float, height: float) -> tuple[Figure, Axes]:
    figure = _figure(width, height)
    return figure, figure.subplots()
