"""The report: for each claim, table and figure of the paper its values beside ours; `faults` has the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minimoe.analysis.figures import bound_figure
from minimoe.analysis.summary import ALL
from minimoe.config import ModelConfig
from minimoe.curve import elbow
from minimoe.evaluate.tasks import TASKS
from minimoe.paper import faults, figures, published
from minimoe.paper.findings import latency_of, layers_of, record, scores_of, shown
from minimoe.paper.report import Section
from minimoe.paper.study import Part


def sections(found: Part, config: ModelConfig) -> list[Section]:
    """Every section, from the parts of a Study."""
    makers: list[Callable[[Part, ModelConfig], Section]] = [
        claims,
        faults.readings,
        load,
        accuracy,
        replaced,
        shape,
        samples,
        theorem,
        faults.latency,
        faults.flops,
        faults.null,
        faults.parser,
    ]
    return [make(found, config) for make in makers]


def claims(found: Part, config: ModelConfig) -> Section:
    """The paper's claims, one a line."""
    section = Section("What the paper claims, and what is found here")
    whole = record(found, "routers")
    layers = layers_of(found)
    scores = scores_of(found, "letters", "own")
    drops = [scores["elbow", name]["change"] for name in TASKS]
    latency = latency_of(found)
    skipped = latency["elbow, pruned experts skipped", "decode"] / latency["top-k", "decode"] - 1
    top = sum(_change(r["load_largest"], r["top_load_largest"]) for r in layers) / len(layers)
    cv = sum(_change(r["load_cv"], r["top_load_cv"]) for r in layers) / len(layers)
    l1 = [r["l1"] for r in layers]
    rows = [
        _row("mean k under elbow (of 8)", published.MEAN_K, whole["k"], ".3f"),
        _row("share of sharp elbows", published.SHARP, whole["sharp"], ".1%"),
        _row("correlation of elbow rank and angle", published.CORRELATION, whole["r"], ".2f"),
        _row("variance of the rank between subjects (eta²)", published.ETA2_ELBOW, _eta(found, "elbow"), ".4f"),
        _row("variance of the angle between subjects (eta²)", published.ETA2_ANGLE, _eta(found, "angle"), ".4f"),
        _row("ℓ1 shift of the load, mean over layers", published.L1_MEAN, sum(l1) / len(l1), ".3f"),
        _row("change of the largest share", published.LARGEST_SHARE_CHANGE, top, "+.2%"),
        _row("change of the load's CV", published.CV_CHANGE, cv, "+.2%"),
        _row("change of latency, decode, with skipping", published.LATENCY_CHANGE, skipped, "+.1%"),
    ]
    section.table("claims", ["", "paper", "here", "difference"], rows)
    section.say(
        f"The paper measured OLMoE-1B-7B-0924-Instruct on one H200; here it is {found['about']['model']} in "
        f"{found['about']['dtype']} on {found['about']['device']} with the {found['about']['backend']} backend. "
        f"Over the six benchmarks accuracy by letters changes by {min(drops):+.1%} to {max(drops):+.1%}."
    )
    return section


def load(found: Part, config: ModelConfig) -> Section:
    """Table 1."""
    section = Section("Table 1: load balance by layer")
    rows = []
    for r in layers_of(found):
        top, cv = _change(r["load_largest"], r["top_load_largest"]), _change(r["load_cv"], r["top_load_cv"])
        share, other = r["load_largest"] / config.num_experts, r["top_load_largest"] / config.num_experts
        rows.append(
            [
                str(r["layer"]),
                f"{other:.3%}",
                f"{share:.3%}",
                f"{top:+.2%}",
                f"{r['top_load_cv']:.3f}",
                f"{r['load_cv']:.3f}",
                f"{cv:+.2%}",
                f"{r['l1']:.4f}",
            ]
        )
    heads = ["layer", "largest share, top-k", "elbow", "change", "CV, top-k", "elbow", "change", "ℓ1"]
    section.table("load", heads, rows)
    section.say(
        "Changes are (elbow − top-k) / top-k: above zero, the load is less even. The paper prints (top-k − elbow) /"
        " top-k, so that its negative numbers are increases: +2.16 % of the largest share and +2.83 % of the CV on "
        "average. Load gets slightly worse there, not better."
    )
    return section


def accuracy(found: Part, config: ModelConfig) -> Section:
    """Table 2."""
    section = Section("Table 2: accuracy and experts on six benchmarks")
    for protocol, told in (
        ("letters", "Letters, zero-shot, greedy: the paper's protocol, with a parser that knows each item's labels."),
        ("cloze", "Log-likelihood of the answers' text (OLMES prompts, zero-shot): a small model's better measure."),
    ):
        scores = scores_of(found, protocol, "own")
        section.say(told)
        rows = []
        for name, task in TASKS.items():
            top, own, mixed = (scores[rule, name] for rule in ("top_k", "elbow", "mixed_k"))
            paper = published.TABLE_2[name]
            low, high = own["change_interval"]
            rows.append(
                [
                    task.title,
                    str(top["items"]),
                    f"{top['chance']:.1%}",
                    f"{top['accuracy']:.1%}",
                    f"{own['accuracy']:.1%}",
                    f"{own['change']:+.1%}",
                    f"{low:+.1%} to {high:+.1%}",
                    f"{mixed['accuracy']:.1%}",
                    f"{own['mean_k']:.3f}",
                    *([f"{paper.accuracy[0]:.1f} → {paper.accuracy[1]:.1f}"] if protocol == "letters" else []),
                    *([f"{paper.mean_k:.3f}"] if protocol == "letters" else []),
                ]
            )
        heads = ["", "items", "chance", "top-k", "elbow", "change", "95 %", "top-k at the same k", "mean k"]
        heads += ["paper", "mean k"] if protocol == "letters" else []
        section.table(f"accuracy-{protocol}", heads, rows)
        section.figure(
            f"accuracy-{protocol}",
            figures.bars(
                {
                    label: [scores[rule, name]["accuracy"] for name in TASKS]
                    for label, rule in (("top-k", "top_k"), ("elbow", "elbow"), ("top-k at elbow's k", "mixed_k"))
                },
                [task.title for task in TASKS.values()],
                "accuracy",
                {
                    label: [
                        [scores[rule, name]["accuracy"] - scores[rule, name]["interval"][0] for name in TASKS],
                        [scores[rule, name]["interval"][1] - scores[rule, name]["accuracy"] for name in TASKS],
                    ]
                    for label, rule in (("top-k", "top_k"), ("elbow", "elbow"), ("top-k at elbow's k", "mixed_k"))
                },
            ),
            f"Accuracy by {protocol}; bars are 95 % intervals",
            {rule: {name: scores[rule, name]["accuracy"] for name in TASKS} for rule in ("top_k", "elbow", "mixed_k")},
        )
    return section


def replaced(found: Part, config: ModelConfig) -> Section:
    """Figure 2."""
    section = Section("Figure 2: experts after the elbow, and before it, replaced at random")
    section.say(
        "random_tail puts random experts in the slots after the elbow, random_head in those before it; the slots "
        "keep their weights, and no expert comes twice. The paper finds MMLU unchanged by the first and lowered by "
        "the second."
    )
    rows, values = [], {}
    for protocol in ("letters", "cloze"):
        scores = scores_of(found, protocol, "own")
        of = {rule: scores[rule, "mmlu"] for rule in ("top_k", "elbow", "random_tail", "random_head")}
        values[protocol] = [result["accuracy"] for result in of.values()]
        for rule, result in of.items():
            low, high = result["interval"]
            rows.append([protocol, rule, f"{result['accuracy']:.1%}", f"{low:.1%} to {high:.1%}"])
    section.table("replaced", ["protocol", "rule", "MMLU", "95 %"], rows, text_columns=2)
    names = ["top-k", "elbow", "random tail", "random head"]
    section.figure("replaced", figures.bars(values, names, "MMLU accuracy"), "MMLU by what is replaced", values)
    return section


def shape(found: Part, config: ModelConfig) -> Section:
    """Figure 3 a to d, and the analysis of variance."""
    section = Section("Figure 3: where the elbow is, and how sharp")
    layers = range(config.num_layers)
    for name, up, caption in (
        ("elbow", "rank of the elbow (from 1)", "a. Mean rank of the elbow by layer and benchmark, before any clamp"),
        ("angle", "degrees", "b. Mean angle of the elbow by layer and benchmark"),
    ):
        shift = 1 if name == "elbow" else 0
        by_task = {
            task.title: [record(found, "routers", key, layer)[name] + shift for layer in layers]
            for key, task in TASKS.items()
        }
        section.figure(f"by-layer-{name}", figures.lines(by_task, "layer", up), caption, by_task)
    subjects = [r for r in found["subjects"]["records"] if r["domain"] != ALL and r["phase"] == r["layer"] == ALL]
    points = [(r["elbow"] + 1, r["angle"]) for r in subjects]
    section.figure(
        "by-subject",
        figures.scatter(points, "mean rank of the elbow (from 1)", "mean angle, degrees"),
        f"c. The {len(subjects)} subjects of MMLU: each a point",
        {r["domain"]: {"elbow": r["elbow"] + 1, "angle": r["angle"]} for r in subjects},
    )
    ranks, angles = _sampled(found)
    pairs = [(rank + 1.0, angle) for rank, angle in zip(ranks, angles, strict=True) if angle == angle]
    section.figure(
        "rank-angle",
        figures.scatter(pairs, "rank of the elbow (from 1)", "angle, degrees"),
        f"d. Rank and angle of {len(pairs)} sample curves",
        pairs,
    )
    whole = record(found, "routers")
    rows = []
    for what, part, groups in (
        ("between MMLU subjects", "subjects", "domains"),
        ("between benchmarks", "routers", "domains"),
        ("between layers", "routers", "layers"),
    ):
        of = found[part]["variance"]
        rows.append([what, *(shown(of[name][groups]["eta2"], ".4f") for name in ("elbow", "angle", "k"))])
        rows.append(["F", *(shown(of[name][groups]["f"], ".1f") for name in ("elbow", "angle", "k"))])
    section.table("variance", ["share of variance (eta²)", "elbow rank", "angle", "k"], rows)
    section.say(
        f"The paper's text has eta² = {published.ETA2_ELBOW} for the rank where its notebook has "
        f"{published.ETA2_ELBOW_NOTEBOOK}, and {published.ETA2_ANGLE} for the angle. Rank and angle correlate: "
        f"r = {shown(whole['r'], '.3f')} here, {published.CORRELATION} there. Both take every token and layer as "
        "independent, which they are not; the intervals of means in this report are over prompts."
    )
    return section


def samples(found: Part, config: ModelConfig) -> Section:
    """The appendix's sample curves."""
    section = Section("Sample curves")
    curves = found["samples"]["curves"]
    ranks = [elbow(torch.tensor(layer))[0].tolist() for layer in curves]
    section.figure(
        "samples",
        figures.curves(curves, ranks, config.top_k),
        f"Router curves as the rule sees them, with their elbows; the upright line is rank {config.top_k}",
        {"curves": [layer[:6] for layer in curves], "ranks": [layer[:6] for layer in ranks]},
    )
    section.say(
        "The paper's figures for ARC-Challenge load the file of ARC-Easy. These are of the six benchmarks' own prompts."
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
            f"{r['l1_bound']:.4f}",
            f"{r['largest_change']:.5f}",
            f"{r['cv2_change']:.4f}",
            f"{r['cv2_bound']:.2f}",
            "yes" if r["within_bounds"] else "no",
        ]
        for r in layers
    ]
    heads = ["layer", "δ", "ℓ1", "2δ/(1−δ)", "change of largest share", "|ΔCV²|", "2Nδ/(1−δ)²", "within"]
    section.table("theorem", heads, rows)
    l1 = [r["l1"] for r in layers]
    data = {"l1": l1, "bound": [r["l1_bound"] for r in layers]}
    section.figure("theorem", bound_figure(layers), "How far the load moved, and how far it could", data)
    section.say(
        f"The paper measures an ℓ1 of {published.L1_LEAST} to {published.L1_MOST}, here it is {min(l1):.3f} to "
        f"{max(l1):.3f}. The bounds hold and are far away: they would hold as well for experts pruned at random."
    )
    return section


def _eta(found: Part, name: str) -> float | None:
    value: float | None = found["subjects"]["variance"][name]["domains"]["eta2"]
    return value


def _sampled(found: Part) -> tuple[list[int], list[float]]:
    ranks, angles = [], []
    for layer in found["samples"]["curves"]:
        rank_N, degrees_N = elbow(torch.tensor(layer))
        ranks += rank_N.tolist()
        angles += degrees_N.tolist()
    return ranks, angles


def _change(value: float, base: float) -> float:
    return value / base - 1 if base else 0.0


def _row(name: str, paper: float, ours: Any, form: str) -> list[str]:
    signed = form if form.startswith("+") else f"+{form}"
    return [name, format(paper, form), shown(ours, form), "" if ours is None else format(ours - paper, signed)]
