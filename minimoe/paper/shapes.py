"""The report's sections on elbows: Figure 3 with the analysis of variance, sample curves, and the theorem."""

from __future__ import annotations

import math

import torch

from minimoe.analysis.figures import bound_figure
from minimoe.analysis.summary import ALL
from minimoe.config import ModelConfig
from minimoe.curve import elbow
from minimoe.paper import figures, published
from minimoe.paper.findings import eta2, groups, layers_of, record, sampled, shown, subjects, tasks
from minimoe.paper.report import Section
from minimoe.paper.study import Part


def shape(found: Part, config: ModelConfig) -> Section:
    """Figure 3 a to d, and the analysis of variance."""
    section = Section("Figure 3: where the elbow is, and how sharp")
    layers = range(config.num_layers)
    for name, up, caption in (
        ("elbow", "rank of the elbow, from 1", "a. Mean rank of the elbow by layer and set, before any clamp to K"),
        ("angle", "degrees", "b. Mean angle of the elbow by layer and set; 135° or less is sharp"),
    ):
        first = 1 if name == "elbow" else 0
        by_group = {
            title: [record(found, "routers", key, layer)[name] + first for layer in layers]
            for key, title in groups(found).items()
        }
        section.figure(f"by-layer-{name}", figures.lines(by_group, "layer", up), caption, by_group)
    of = [r for r in found["subjects"]["records"] if r["domain"] != ALL and r["phase"] == r["layer"] == ALL]
    points = [(r["elbow"] + 1, r["angle"]) for r in of]
    section.figure(
        "by-subject",
        figures.scatter(points, "mean rank of the elbow, from 1", "mean angle, degrees"),
        f"c. The {len(of)} subjects of {tasks(found)[subjects(found)]}, each a point",
        {r["domain"]: {"elbow": r["elbow"] + 1, "angle": r["angle"]} for r in of},
    )
    ranks, angles = (values.tolist() for values in elbow(sampled(found)))
    pairs = [(rank + 1.0, angle) for rank, angle in zip(ranks, angles, strict=True) if not math.isnan(angle)]
    section.figure(
        "rank-angle",
        figures.scatter(pairs, "rank of the elbow, from 1", "angle, degrees"),
        f"d. Rank and angle of {len(pairs):,} sample curves",
        pairs,
    )
    rows = [
        [
            title,
            *(f"{r[name] + (name == 'elbow'):.2f}" for name in ("elbow", "angle", "k")),
            f"{r['sharp']:.1%}",
            shown(r["r"], ".3f"),
        ]
        for title, r in (
            *((title, record(found, "routers", key)) for key, title in groups(found).items()),
            ("all", record(found, "routers")),
        )
    ]
    section.table("elbows", ["", "mean rank", "mean angle", "mean k", "sharp", "r of rank and angle"], rows)
    rows = []
    for what, part, by in (
        ("subjects", "subjects", "domains"),
        ("sets", "routers", "domains"),
        ("layers", "routers", "layers"),
    ):
        variance = found[part]["variance"]
        for figure, symbol, form in (("eta2", "η²", ".4f"), ("f", "F", ",.1f")):
            values = [shown(variance[name][by][figure], form) for name in ("elbow", "angle", "k")]
            rows.append([f"between {what}", symbol, *values])
    theirs = [published.ETA2_ELBOW, published.ETA2_ANGLE]
    ours = [eta2(found, name) for name in ("elbow", "angle")]
    rows.append(["paper, between subjects", "η²", *(f"{value:.4f}" for value in theirs), ""])
    differences = ["" if a is None else f"{a - b:+.4f}" for a, b in zip(ours, theirs, strict=True)]
    rows.append(["difference", "η²", *differences, ""])
    section.table("variance", ["variance", "", "elbow rank", "angle", "k"], rows, text_columns=2)
    section.say(
        f"The paper's text has η² = {published.ETA2_ELBOW} for the rank where its notebook has "
        f"{published.ETA2_ELBOW_NOTEBOOK}; the rank there is not clamped and counts from 0. r is "
        f"{shown(record(found, 'routers')['r'], '.3f')} here and {published.CORRELATION} there."
    )
    return section


def samples(found: Part, config: ModelConfig) -> Section:
    """The appendix's sample curves."""
    section = Section("Sample curves")
    named = {groups(found)[key]: layers for key, layers in found["samples"]["curves"].items()}
    ranks = {name: [elbow(torch.tensor(layer))[0].tolist() for layer in layers] for name, layers in named.items()}
    section.figure(
        "samples",
        figures.curves(named, ranks, config.top_k),
        f"Router curves as the rule sees them, each with its elbow; the upright line is rank {config.top_k}",
        {name: {"curves": [layer[:4] for layer in layers], "ranks": [r[:4] for r in ranks[name]]}
         for name, layers in named.items()},
    )  # fmt: skip
    section.say(
        "Three tokens of one prompt of each set. The paper's figure for ARC-Challenge loads the file of ARC-Easy; "
        "here every panel is of its own set."
    )
    return section


def theorem(found: Part, config: ModelConfig) -> Section:
    """The theorem and both corollaries against what is measured."""
    section = Section("The theorem and its corollaries")
    layers = layers_of(found)
    rows = [
        [
            str(r["layer"]),
            f"{r['delta']:.4f}",
            f"{r['l1']:.4f}",
            f"{r['largest_change']:.5f}",
            f"{r['l1_bound']:.4f}",
            f"{r['cv2_change']:.4f}",
            f"{r['cv2_bound']:.2f}",
            "yes" if r["within_bounds"] else "no",
        ]
        for r in layers
    ]
    heads = ["layer", "δ", "ℓ1", "Δ largest share", "2δ/(1−δ)", "ΔCV²", "2Nδ/(1−δ)²", "within"]
    section.table("theorem", heads, rows)
    l1 = [r["l1"] for r in layers]
    data = {"l1": l1, "bound": [r["l1_bound"] for r in layers]}
    section.figure("theorem", bound_figure(layers), "How far the load moved, and how far it could", data)
    most = max(r["l1"] / r["l1_bound"] if r["l1_bound"] else 0.0 for r in layers)
    section.say(
        f"The paper measures an ℓ1 of {published.L1_LEAST} to {published.L1_MOST}, here it is {min(l1):.3f} to "
        f"{max(l1):.3f}, at most {most:.0%} of what the theorem allows. "
        "The bounds follow from δ alone: they hold as well for experts pruned at random."
    )
    return section
