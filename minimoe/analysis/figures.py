"""Figures of an analysis: each shows one thing, says it in its title, and names its lines where they stand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minimoe.analysis.null import NullModel
from minimoe.analysis.run import Analysis
from minimoe.analysis.specialisation import coactivation, domain_shares
from minimoe.analysis.summary import ALL
from minimoe.analysis.tally import ANGLE_BINS, Array
from minimoe.curve import SHARP_DEGREES
from minimoe.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUTER, NULL, MUTED = "tab:blue", "tab:orange", "0.45"


def draw(analysis: Analysis, summary: dict[str, Any], folder: Path) -> list[Path]:
    """Write every figure that there is something for, as PNG.

    Args:
        summary: what `summarise` made of the analysis.

    Raises:
        InputError: matplotlib is not there.
    """
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ImportError:
        raise InputError("figures need matplotlib; pip install 'minimoe[plot]'.") from None
    layers = [record for record in _records(summary) if record["layer"] != ALL]
    figures: dict[str, Callable[[], Figure]] = {
        "k": lambda: k_figure(analysis, layers),
        "curves": lambda: curve_figure(analysis),
        "angles": lambda: angle_figure(analysis, layers),
        "load": lambda: load_figure(analysis, layers),
        "coactivation": lambda: coactivation_figure(analysis),
        "specialisation": lambda: specialisation_figure(summary),
    }
    if any("l1" in record for record in layers):
        figures["bounds"] = lambda: bound_figure(layers)
    if len(analysis.about["domains"]) > 1:
        figures["domains"] = lambda: domain_figure(analysis)
    if any("saturation" in record for record in layers):
        figures["saturation"] = lambda: saturation_figure(analysis, layers)
    paths = []
    for name, make in figures.items():
        path = folder / f"{name}.png"
        make().savefig(path, dpi=110)
        paths.append(path)
    return paths


def _records(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """All domains and phases together."""
    return [record for record in summary["records"] if record["domain"] == record["phase"] == ALL]


def k_figure(analysis: Analysis, layers: list[dict[str, Any]]) -> Figure:
    """The share of tokens by number of experts, a row for each layer."""
    k_LJ = analysis.arrays["k_GFLJ"].sum((0, 1))
    widest = int(np.flatnonzero(k_LJ.sum(0)).max())
    share_LJ = k_LJ[:, : widest + 1] / k_LJ.sum(1, keepdims=True)
    figure, axes = _one(8, 1.6 + 0.35 * len(layers), f"Experts a token under {analysis.about['rule']}, by layer")
    axes.imshow(share_LJ, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for layer, row in enumerate(share_LJ):
        for k, share in enumerate(row):
            if share >= 0.005:
                colour = "white" if share > 0.5 else "black"
                axes.text(k, layer, f"{share:.0%}", ha="center", va="center", fontsize=8, color=colour)
        record = layers[layer]
        axes.text(
            widest + 0.6,
            layer,
            f"mean {record['k']:.2f}   (elbow on Gaussian logits: {record['null_k']:.2f})",
            va="center",
            fontsize=8,
        )
    axes.set_xticks(range(widest + 1))
    axes.set_yticks(range(len(layers)))
    axes.set_xlabel("experts of a token")
    axes.set_ylabel("layer")
    return figure


def curve_figure(analysis: Analysis) -> Figure:
    """The mean sorted router probabilities of each layer beside those of Gaussian logits of the same spread."""
    curve_LE = analysis.arrays["curve_GFLE"].sum((0, 1)) / _tokens(analysis)
    spread_LS = analysis.arrays["spread_GFLS"].sum((0, 1))
    experts, top_k = curve_LE.shape[1], analysis.about["top_k"]
    null = NullModel(experts, top_k, spread_LS.sum(0))
    ranks = np.arange(1, experts + 1)

    def panel(axes: Axes, layer: int) -> None:
        null_E = null.of(spread_LS[layer]).curve_E
        axes.plot(ranks, curve_LE[layer], color=ROUTER)
        axes.plot(ranks, null_E, color=NULL, linestyle="--")
        axes.axvline(top_k + 0.5, color=MUTED, linewidth=0.8)
        axes.set_yscale("log")
        if layer == 0:
            axes.annotate("router", (ranks[0], curve_LE[0, 0]), xytext=(6, 0), textcoords="offset points", color=ROUTER)
            place = experts // 2
            axes.annotate(
                "Gaussian logits,\nsame spread",
                (ranks[place], null_E[place]),
                xytext=(0, 8),
                textcoords="offset points",
                color=NULL,
                fontsize=8,
            )
            axes.annotate(f" top {top_k}", (top_k + 0.5, axes.get_ylim()[0]), va="bottom", fontsize=8, color=MUTED)

    title = "Mean router probability by rank, beside routers that know nothing"
    return _multiples(len(curve_LE), title, "rank of the expert", "probability", panel)


def angle_figure(analysis: Analysis, layers: list[dict[str, Any]]) -> Figure:
    """How sharp the elbows of each layer are."""
    angle_LA = analysis.arrays["angle_GFLA"].sum((0, 1))
    degrees = (np.arange(ANGLE_BINS // 4) + 0.5) * 2
    share_LA = angle_LA.reshape(len(angle_LA), -1, 4).sum(2) / np.maximum(angle_LA.sum(1, keepdims=True), 1)

    def panel(axes: Axes, layer: int) -> None:
        axes.fill_between(degrees, share_LA[layer], color=ROUTER, alpha=0.4, linewidth=0)
        axes.axvline(SHARP_DEGREES, color=MUTED, linewidth=0.8)
        axes.set_xlim(75, 180)
        axes.set_yticks([])
        record = layers[layer]
        if record["sharp"] is not None:
            told = f"{record['sharp']:.1%} sharp\n({record['null_sharp'] or 0:.1%} on\nGaussian logits)"
            axes.text(0.98, 0.95, told, transform=axes.transAxes, ha="right", va="top", fontsize=8)
        if layer == 0:
            axes.annotate("135° ", (SHARP_DEGREES, axes.get_ylim()[1]), ha="right", va="top", fontsize=8, color=MUTED)

    return _multiples(len(layers), "Angle of the elbow; sharp is 135° or less", "degrees", "share of curves", panel)


def load_figure(analysis: Analysis, layers: list[dict[str, Any]]) -> Figure:
    """The load of the experts of each layer, most used first, under the rule and under top-k."""
    arrays, rule = analysis.arrays, analysis.about["rule"]
    loads = [arrays[name].sum((0, 1)) for name in ("load_GFLE", "topload_GFLE")]
    highest = max(float((load_LE.max(1) / np.maximum(load_LE.mean(1), 1e-12)).max()) for load_LE in loads)

    def panel(axes: Axes, layer: int) -> None:
        own_E, top_E = (np.sort(load[layer] / max(load[layer].mean(), 1e-12))[::-1] for load in loads)
        places = np.arange(1, len(own_E) + 1)
        axes.step(places, top_E, where="mid", color=MUTED, linewidth=1)
        axes.step(places, own_E, where="mid", color=ROUTER, linewidth=1.2)
        axes.axhline(1, color=MUTED, linewidth=0.6, linestyle=":")
        axes.set_ylim(0, 1.05 * max(highest, 1))
        record = layers[layer]
        cv, top_cv, dead = record["load_cv"], record["top_load_cv"], record["load_dead"]
        if cv is not None and top_cv is not None:
            axes.text(0.98, 0.95, f"CV {cv:.2f}", transform=axes.transAxes, ha="right", va="top", color=ROUTER)
            told = f"top-k {top_cv:.2f}" + (f"\n{dead} dead" if dead else "")
            axes.text(0.98, 0.82, told, transform=axes.transAxes, ha="right", va="top", color=MUTED, fontsize=8)

    title = f"Load of the experts, most used first: {rule} (blue) and top-k (grey) on the same logits"
    return _multiples(len(layers), title, "expert", "times the fair share", panel)


def bound_figure(layers: list[dict[str, Any]]) -> Figure:
    """How far pruning moved the shares of each layer, beside the theorem's bound."""
    figure, axes = _one(8, 4, "How far pruning moved the load, and the most the theorem allows")
    shown = [record for record in layers if "l1" in record]
    places = [record["layer"] for record in shown]
    axes.bar(places, [record["l1"] for record in shown], width=0.6, color=ROUTER)
    axes.scatter(places, [record["l1_bound"] for record in shown], marker="_", s=400, color=NULL)
    for record in shown:
        axes.text(record["layer"], record["l1"], f"{record['l1']:.3f}", ha="center", va="bottom", fontsize=8)
    first = shown[0]
    axes.annotate(
        "bound 2δ/(1−δ)",
        (first["layer"], first["l1_bound"]),
        xytext=(0, 5),
        textcoords="offset points",
        ha="center",
        color=NULL,
        fontsize=8,
    )
    axes.set_xticks(places)
    axes.margins(y=0.15)
    axes.set_xlabel("layer")
    axes.set_ylabel("sum of |change of share|")
    return figure


def coactivation_figure(analysis: Analysis) -> Figure:
    """Of the tokens that use the expert of the row, the share that also uses that of the column."""
    together_LEE = analysis.arrays["together_GFLEE"].sum((0, 1))
    load_LE = analysis.arrays["load_GFLE"].sum((0, 1))
    shares = [coactivation(together_EE, load_E) for together_EE, load_E in zip(together_LEE, load_LE, strict=True)]
    highest = max(float(share_EE.max()) for share_EE in shares)

    def panel(axes: Axes, layer: int) -> None:
        axes.imshow(shares[layer], cmap="magma", vmin=0, vmax=highest or 1)

    title = f"Experts that work together: black is never, bright is {highest:.0%} of the row's tokens"
    return _multiples(len(shares), title, "expert", "expert", panel, square=True)


def domain_figure(analysis: Analysis) -> Figure:
    """How much each domain prefers each expert of a layer."""
    load_GLE, tokens_G = analysis.arrays["load_GFLE"].sum(1), analysis.arrays["tokens_GF"].sum(1)
    names = analysis.about["domains"]
    layers = load_GLE.shape[1]
    figure = _figure(11, 0.9 + layers * (0.35 + 0.2 * len(names)))
    panels = figure.subplots(layers, 1, squeeze=False, sharex=True)[:, 0]
    for layer, axes in enumerate(panels):
        share_GE = domain_shares(load_GLE[:, layer], tokens_G)
        ratio_GE = np.divide(share_GE, share_GE.mean(0), out=np.ones_like(share_GE), where=share_GE.mean(0) > 0)
        image = axes.imshow(ratio_GE, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylabel(f"layer {layer}", fontsize=8)
    panels[-1].set_xlabel("expert")
    figure.colorbar(image, ax=list(panels), shrink=0.6, label="use, as a multiple of the domains' average")
    figure.suptitle("Which domains use which experts")
    return figure


def specialisation_figure(summary: dict[str, Any]) -> Figure:
    """What an expert tells about tokens and domains, by layer."""
    figure, axes = _one(8, 4, "How far the token alone decides about its experts")
    layers = [record["layer"] for record in summary["layers"]]
    values = [record["vocabulary"] if record["vocabulary"] is not None else math.nan for record in summary["layers"]]
    axes.bar(layers, values, width=0.6, color=ROUTER)
    for layer, value in zip(layers, values, strict=True):
        if value == value:
            axes.text(layer, value, f"{value:.0%}", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.08)
    axes.set_xticks(layers)
    axes.set_xlabel("layer")
    axes.set_ylabel("mean over token ids of the share of their uses\nthat their favourite expert takes part in")
    return figure


def saturation_figure(analysis: Analysis, layers: list[dict[str, Any]]) -> Figure:
    """How many of the other router's choices this one makes too, by layer."""
    other = analysis.about["versus"]
    figure, axes = _one(8, 4, f"Choices of {other['rule']} on {Path(other['model']).name} that this router makes too")
    shown = [record for record in layers if "saturation" in record]
    axes.bar([r["layer"] for r in shown], [r["saturation"] for r in shown], width=0.6, color=ROUTER)
    for record in shown:
        told = f"{record['saturation']:.1%}"
        axes.text(record["layer"], record["saturation"], told, ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.08)
    axes.set_xticks([record["layer"] for record in shown])
    axes.set_xlabel("layer")
    axes.set_ylabel("share of the other's pairs")
    return figure


def _tokens(analysis: Analysis) -> Array:
    """Tokens of each layer, [L, 1]; the same for all."""
    return analysis.arrays["k_GFLJ"].sum((0, 1)).sum(1, keepdims=True)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _one(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    figure = _figure(width, height)
    axes = figure.subplots()
    axes.set_title(title, fontsize=11)
    return figure, axes


def _multiples(
    layers: int, title: str, across: str, up: str, panel: Callable[[Axes, int], None], *, square: bool = False
) -> Figure:
    """A small panel for each layer, all on the same axes."""
    columns = min(4, layers)
    rows = math.ceil(layers / columns)
    figure = _figure(3 * columns + 1, (3 if square else 2.3) * rows + 0.8)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for place, axes in enumerate(grid.flat):
        if place >= layers:
            axes.set_visible(False)
            continue
        axes.set_title(f"layer {place}", fontsize=9)
        panel(axes, place)
    figure.suptitle(title)
    figure.supxlabel(across)
    figure.supylabel(up)
    return figure
