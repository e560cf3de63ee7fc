"""The report: the paper's claims and its tables beside ours; `shapes` has its figures of elbows, `faults` the rest."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from minimoe.analysis.summary import ALL
from minimoe.config import ModelConfig
from minimoe.flops import block_flops
from minimoe.paper import faults, figures, published, shapes
from minimoe.paper.findings import (
    change,
    eta2,
    groups,
    latency_of,
    layers_of,
    load_changes,
    record,
    scores_of,
    shown,
    span,
    subjects,
    tasks,
)
from minimoe.paper.report import Section
from minimoe.paper.study import SAME_K, SKIPPED, TOP, Part
from minimoe.paper.verdict import verdict

PROTOCOLS = {
    "letters": "By letters, zero-shot, greedy: the paper's protocol, with a parser that knows each item's labels.",
    "cloze": "By the log-probability of the answers' text (OLMES prompts, zero-shot): a small model's better measure.",
}
RULES = {"elbow": "elbow", "mixed_k": "top-k at elbow's mean k"}


def sections(found: Part, config: ModelConfig) -> list[Section]:
    """Every section, from the parts of a Study."""
    makers: list[Callable[[Part, ModelConfig], Section]] = [
        claims,
        load,
        accuracy,
        work,
        replaced,
        shapes.shape,
        shapes.samples,
        shapes.theorem,
        *faults.SECTIONS,
    ]
    return [make(found, config) for make in makers]


def claims(found: Part, config: ModelConfig) -> Section:
    """The paper's claims, one a line, and in words what of them holds."""
    section = Section("What the paper claims, and what is found here")
    section.points(verdict(found))
    whole, layers = record(found, "routers"), layers_of(found)
    top, cv = load_changes(layers)
    l1 = mean(r["l1"] for r in layers)
    skipped = latency_of(found)[SKIPPED, ALL]["change"]
    letters = mean(scores_of(found, "letters")["elbow", name]["change"] for name in tasks(found))
    theirs = mean(row.accuracy[1] - row.accuracy[0] for row in published.TABLE_2.values()) / 100
    rows = [
        _row(f"mean k under elbow, of {config.top_k}", published.MEAN_K, whole["k"], ".3f"),
        _row("change of accuracy by letters, mean", theirs, letters, "+.2%"),
        _row("change of a MoE block's time, pruned experts skipped", published.LATENCY_CHANGE, skipped, "+.1%"),
        _row("share of sharp elbows (135° or less)", published.SHARP, whole["sharp"], ".1%"),
        _row("correlation of the elbow's rank and angle, r", published.CORRELATION, whole["r"], ".2f"),
        _row("variance of the rank between subjects, η²", published.ETA2_ELBOW, eta2(found, "elbow"), ".4f"),
        _row("variance of the angle between subjects, η²", published.ETA2_ANGLE, eta2(found, "angle"), ".4f"),
        _row("ℓ1 shift of the load, mean over layers", published.L1_MEAN, l1, ".3f"),
        _row("change of the largest share of the load", published.LARGEST_SHARE_CHANGE, top, "+.2%"),
        _row("change of the load's CV", published.CV_CHANGE, cv, "+.2%"),
    ]
    section.table("claims", ["", "paper", "here", "difference"], rows)
    section.say(
        f"The paper measured OLMoE-1B-7B-0924-Instruct on one H200; here it is {found['about']['model']} in "
        f"{found['about']['dtype']} on {found['about']['device']}, backend {found['about']['backend']}. Differences of "
        "percentages are in percentage points."
    )
    return section


def load(found: Part, config: ModelConfig) -> Section:
    """Table 1."""
    section = Section("Table 1: load balance by layer")
    layers = layers_of(found)
    rows = []
    for r in layers:
        largest, cv = change(r["load_largest"], r["top_load_largest"]), change(r["load_cv"], r["top_load_cv"])
        shares = [r[name] / config.num_experts for name in ("top_load_largest", "load_largest")]
        rows.append(
            [
                str(r["layer"]),
                *(f"{share:.3%}" for share in shares),
                f"{largest:+.2%}",
                *(f"{r[name]:.3f}" for name in ("top_load_cv", "load_cv")),
                f"{cv:+.2%}",
                f"{r['l1']:.4f}",
            ]
        )
    own = (*load_changes(layers), mean(r["l1"] for r in layers))
    theirs = (published.LARGEST_SHARE_CHANGE, published.CV_CHANGE, published.L1_MEAN)
    for name, (largest, cv, l1) in (
        ("mean", own),
        ("paper", theirs),
        ("difference", [a - b for a, b in zip(own, theirs, strict=True)]),
    ):
        sign = "+" if name == "difference" else ""
        rows.append([name, "", "", f"{largest:+.2%}", "", "", f"{cv:+.2%}", f"{l1:{sign}.4f}"])
    heads = ["layer", "largest share, top-k", "elbow", "change", "CV, top-k", "elbow", "change", "ℓ1"]
    section.table("load", heads, rows)
    section.say(
        "Changes are (elbow − top-k) / top-k: above zero, the load is less even. The paper prints (top-k − elbow) / "
        "top-k, so that its −2.16 % and −2.83 % are increases."
    )
    rows = []
    for name, title in groups(found).items():
        top, cv = load_changes(layers_of(found, name))
        rows.append([title, f"{top:+.2%}", f"{cv:+.2%}", f"{mean(r['l1'] for r in layers_of(found, name)):.4f}"])
    section.table("load-groups", ["", "change of the largest share", "change of the CV", "ℓ1"], rows)
    worse = sum(load_changes(layers_of(found, name))[1] > 0 for name in groups(found))
    section.say(
        f"The same by what was read, means over layers: the load gets less even on {worse} of {len(groups(found))} "
        "sets. In the paper it gets slightly worse on all six of its sets."
    )
    return section


def accuracy(found: Part, config: ModelConfig) -> Section:
    """Table 2, its accuracies."""
    section = Section("Table 2: accuracy")
    for protocol, told in PROTOCOLS.items():
        scores = scores_of(found, protocol)
        section.say(told)
        rows, marks = [], []
        for name, title in tasks(found).items():
            top, own, mixed = (scores[rule, name] for rule in ("top_k", "elbow", "mixed_k"))
            row = [
                title,
                f"{top['items']:,}",
                *(f"{value:.1%}" for value in (top["chance"], top["accuracy"], own["accuracy"], mixed["accuracy"])),
                f"{own['change']:+.1%}",
                span(own["change_interval"], "+.1%"),
            ]
            paper = published.TABLE_2.get(name)
            mark = None if paper is None or protocol == "cloze" else (paper.accuracy[1] - paper.accuracy[0]) / 100
            if protocol == "letters":
                pair = "" if paper is None else " → ".join(f"{value:.1f}%" for value in paper.accuracy)
                row += [pair, shown(mark, "+.1%"), "" if mark is None else f"{own['change'] - mark:+.1%}"]
            rows.append(row)
            marks.append(None if mark is None else 100 * mark)
        heads = ["", "items", "chance", "top-k", "elbow", "top-k at elbow's k", "change", "95 %"]
        heads += ["paper", "its change", "difference"] if protocol == "letters" else []
        section.table(f"accuracy-{protocol}", heads, rows)
        values = {
            label: [_points(scores[rule, name], "change", "change_interval") for name in tasks(found)]
            for rule, label in RULES.items()
        }
        if any(any(interval) for row in values.values() for interval in row):
            section.figure(
                f"accuracy-{protocol}",
                figures.dots(values, list(tasks(found).values()), "change of accuracy against top-k, points", marks),
                f"Accuracy by {protocol}: change against top-k on the same items, with 95 % intervals",
                values,
            )
    letters = scores_of(found, "letters")
    invalid = sum(letters["top_k", name]["invalid"] for name in tasks(found))
    total = sum(letters["top_k", name]["items"] for name in tasks(found))
    section.say(
        f"Intervals of changes are paired over items. Under top-k the model's two new tokens name no choice on "
        f"{invalid:,} of {total:,} items, which count as wrong. The two protocols' accuracies cannot be compared."
    )
    return section


def work(found: Part, config: ModelConfig) -> Section:
    """Table 2, the rest of its columns."""
    section = Section("Table 2: experts, FLOPs and latency")
    K = config.top_k
    rows = []
    for name, title in groups(found).items():
        k, paper = record(found, "routers", name)["k"], published.TABLE_2.get(name)
        flops = [block_flops(config, value) for value in (K, k)]
        rows.append(
            [
                title,
                f"{k:.3f}",
                *(["", ""] if paper is None else [f"{paper.mean_k:.3f}", f"{k - paper.mean_k:+.3f}"]),
                " → ".join(f"{value / 1e6:.3f}" for value in flops),
                *_compared(change(flops[1], flops[0]), None if paper is None else change(*paper.flops[::-1])),
            ]
        )
    heads = ["", "mean k", "paper", "difference", "MFLOPs", "change", "paper", "difference"]
    section.table("experts", heads, rows)
    section.say(
        "Mean k is over all tokens of prompts and answers; MFLOPs are those of a token in one MoE block, counted from "
        "the real shapes (gate, and three matrices for each expert) at that k. The paper's own formula is further down."
    )
    rows = []
    for name, title in groups(found).items():
        of, paper = latency_of(found, name), published.TABLE_2.get(name)
        top, own, same = (of[arm, ALL] for arm in (TOP, SKIPPED, SAME_K))
        rows.append(
            [
                title,
                " → ".join(f"{1e3 * r['median']:.3f}" for r in (top, own)),
                f"{own['change']:+.1%}",
                f"{own['change_low']:+.1%} to {own['change_high']:+.1%}",
                f"{same['change']:+.1%}",
                *_compared(own["change"], None if paper is None else change(*paper.latency[::-1]))[1:],
            ]
        )
    heads = ["", "ms a block", "change", "quartiles", "top-k at elbow's k", "paper", "difference"]
    section.table("latency-groups", heads, rows)
    told = found["latency"]
    section.say(
        f"Timed are gate, rule and experts of every layer, as the paper does, with pruned experts skipped: "
        f"{told['batch']} prompts side by side without padding, then their last {told['steps']} tokens one by one; a "
        f"figure is the mean of a block in the one and in the other. The rules took turns on the same prompts in "
        f"{told['rounds']} rounds, on {told['threads']} CPU threads; medians, and changes within a round. The paper "
        "timed padded batches of 20 on an H200, so that only changes can be compared, and theirs came about otherwise "
        "(see “What saves time”)."
    )
    return section


def replaced(found: Part, config: ModelConfig) -> Section:
    """Figure 2."""
    title = tasks(found)[subjects(found)]
    section = Section("Figure 2: experts after the elbow, and before it, replaced at random")
    section.say(
        "random_tail puts random experts in the slots after the elbow, random_head in those before it; the slots "
        "keep their weights, and no expert comes twice. The paper finds MMLU unchanged by the first and lowered by "
        "the second."
    )
    rows, values = [], {}
    names = {"top_k": "top-k", "elbow": "elbow", "random_tail": "random tail", "random_head": "random head"}
    for protocol in PROTOCOLS:
        scores = scores_of(found, protocol)
        of = {rule: scores[rule, subjects(found)] for rule in names}
        values[protocol] = [_points(result, "accuracy", "interval") for result in of.values()]
        for rule, result in of.items():
            changed = (
                ["", ""] if rule == "top_k" else [f"{result['change']:+.1%}", span(result["change_interval"], "+.1%")]
            )
            rows.append([protocol, rule, f"{result['accuracy']:.1%}", span(result["interval"], ".1%"), *changed])
    section.table("replaced", ["protocol", "rule", title, "95 %", "against top-k", "95 %"], rows, text_columns=2)
    figure = figures.dots(values, list(names.values()), f"accuracy on {title}, %", zero=False)
    section.figure("replaced", figure, f"{title} by what is replaced, with 95 % intervals", values)
    return section


def _points(result: Part, value: str, interval: str) -> figures.Interval:
    low, high = result[interval]
    return 100 * result[value], 100 * low, 100 * high


def _compared(ours: float, paper: float | None) -> list[str]:
    return [f"{ours:+.1%}", shown(paper, "+.1%"), "" if paper is None else f"{ours - paper:+.1%}"]


def _row(name: str, paper: float, ours: Any, form: str) -> list[str]:
    signed = form if form.startswith("+") else f"+{form}"
    return [name, format(paper, form), shown(ours, form), "" if ours is None else format(ours - paper, signed)]
