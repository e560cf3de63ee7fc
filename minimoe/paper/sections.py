"""The report itself: for each claim of the paper its value, ours and the difference; each of its faults as a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minimoe.analysis.summary import ALL
from minimoe.config import ModelConfig
from minimoe.curve import deviation, elbow
from minimoe.evaluate.tasks import TASKS
from minimoe.flops import paper_block_flops
from minimoe.paper import figures, published
from minimoe.paper.report import Section
from minimoe.paper.study import Part

NULL_SPREADS = ((0.5, 7.61), (1.0, 7.46), (1.5, 7.09), (2.0, 6.62))


def sections(found: Part, config: ModelConfig) -> list[Section]:
    """Every section, from the parts of a Study."""
    makers: list[Callable[[Part, ModelConfig], Section]] = [
        claims,
        readings,
        load,
        accuracy,
        replaced,
        shape,
        samples,
        theorem,
        time,
        flops,
        null,
        parser,
    ]
    return [make(found, config) for make in makers]


def claims(found: Part, config: ModelConfig) -> Section:
    """The paper's claims, one a line."""
    section = Section("What the paper claims, and what is found here")
    whole = _record(found, "routers")
    layers = _layers(found)
    scores = _scores(found, "letters", "own")
    drops = [scores["elbow", name]["change"] for name in TASKS]
    latency = _latency(found)
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


def readings(found: Part, config: ModelConfig) -> Section:
    """The rule, read as printed and as programmed."""
    section = Section("One rule, two readings")
    counted: dict[str, list[int]] = {"program": [], "printed": []}
    for layer in found["samples"]["curves"]:
        curves_NE = torch.tensor(layer)
        for reading in counted:
            k_N = deviation(curves_NE, reading).argmax(-1) + 1  # type: ignore[arg-type]
            counted[reading] += k_N.clamp(max=config.top_k).tolist()
    number = len(counted["program"])
    rows = [
        [reading, f"{sum(k) / number:.2f}", f"{k.count(1) / number:.1%}", f"{k.count(config.top_k) / number:.1%}"]
        for reading, k in counted.items()
    ]
    section.say(
        "The algorithm as printed normalises the curve without turning it over; its deviation from the diagonal is "
        "then largest at the first rank of every falling curve, and it keeps one expert. The published program, and"
        " the angle that the paper reports, turn the curve over first. All else in this report follows the program."
    )
    section.table("readings", ["reading", "mean k", "k = 1", f"k = {config.top_k}"], rows)
    return section


def load(found: Part, config: ModelConfig) -> Section:
    """Table 1."""
    section = Section("Table 1: load balance by layer")
    rows = []
    for r in _layers(found):
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
        scores = _scores(found, protocol, "own")
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
        scores = _scores(found, protocol, "own")
        of = {rule: scores[rule, "mmlu"] for rule in ("top_k", "elbow", "random_tail", "random_head")}
        values[protocol] = [record["accuracy"] for record in of.values()]
        for rule, record in of.items():
            low, high = record["interval"]
            rows.append([protocol, rule, f"{record['accuracy']:.1%}", f"{low:.1%} to {high:.1%}"])
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
            task.title: [_record(found, "routers", key, layer)[name] + shift for layer in layers]
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
    whole = _record(found, "routers")
    rows = []
    for what, part, groups in (
        ("between MMLU subjects", "subjects", "domains"),
        ("between benchmarks", "routers", "domains"),
        ("between layers", "routers", "layers"),
    ):
        of = found[part]["variance"]
        rows.append([what, *(_value(of[name][groups]["eta2"], ".4f") for name in ("elbow", "angle", "k"))])
        rows.append(["F", *(_value(of[name][groups]["f"], ".1f") for name in ("elbow", "angle", "k"))])
    section.table("variance", ["share of variance (eta²)", "elbow rank", "angle", "k"], rows)
    section.say(
        f"The paper's text has eta² = {published.ETA2_ELBOW} for the rank where its notebook has "
        f"{published.ETA2_ELBOW_NOTEBOOK}, and {published.ETA2_ANGLE} for the angle. Rank and angle correlate: "
        f"r = {_value(whole['r'], '.3f')} here, {published.CORRELATION} there. Both take every token and layer as "
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
    layers = _layers(found)
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
    l1, most = [r["l1"] for r in layers], [r["l1_bound"] for r in layers]
    section.figure(
        "theorem", figures.bounds(l1, most, "ℓ1 shift"), "How far the load moved, and how far it could", {"l1": l1}
    )
    section.say(
        f"The paper measures an ℓ1 of {published.L1_LEAST} to {published.L1_MOST}, here it is {min(l1):.3f} to "
        f"{max(l1):.3f}. The bounds hold and are far away: they would hold as well for experts pruned at random."
    )
    return section


def time(found: Part, config: ModelConfig) -> Section:
    """Three latency arms, and top-k at the same mean k."""
    section = Section("What saves time")
    section.say(
        "The paper's program gives pruned experts a weight of zero and computes them all the same, so that its −5.3 % "
        "cannot come from skipped work. Here are three arms, and top-k at the same mean k, on the same tokens in turns."
    )
    section.say(f"{found['latency']['rounds']} rounds, {found['latency']['threads']} CPU threads.")
    base = _latency(found)
    rows = [
        [
            r["phase"],
            r["arm"],
            f"{r['mean_k']:.2f}",
            f"{1e6 * r['median']:.1f}",
            f"{1e6 * r['low']:.1f} to {1e6 * r['high']:.1f}",
            f"{r['median'] / base['top-k', r['phase']] - 1:+.1%}",
        ]
        for r in sorted(found["latency"]["records"], key=lambda r: r["phase"], reverse=True)
    ]
    heads = ["phase", "arm", "mean k", "µs a token and layer", "quartiles", "against top-k"]
    section.table("latency", heads, rows, text_columns=2)
    arms = list(dict.fromkeys(r["arm"] for r in found["latency"]["records"]))
    section.figure(
        "latency",
        figures.bars(
            {p: [base[arm, p] / base["top-k", p] for arm in arms] for p in ("prefill", "decode")},
            [arm.replace(", ", ",\n") for arm in arms],
            "time, top-k = 1",
        ),
        "Time of a MoE block (gate, rule and experts), top-k = 1",
        found["latency"]["records"],
    )
    return section


def flops(found: Part, config: ModelConfig) -> Section:
    """FLOPs by the paper's formula and as they are; k by phase."""
    section = Section("FLOPs both ways, and k by phase")
    section.say(
        "The paper takes two matrices of 4d for an expert where OLMoE has three of its own size, so that its "
        "numbers are too high while its ratios hardly change. Its FLOPs are those of decode steps alone, one a "
        "question; its mean k averages prefill and decode. The two columns of its Table 2 do not fit each other: "
        "4.86/5.37 would be k = 7.2."
    )
    rows = []
    D, own_size, E, K = config.hidden_size, config.intermediate_size, config.num_experts, config.top_k
    for name, task in TASKS.items():
        by_phase = {phase: _record(found, "routers", name, ALL, phase)["k"] for phase in ("prefill", "decode", ALL)}
        paper = [paper_block_flops(config, 1, k, elbow=e) for k, e in ((K, False), (by_phase["decode"], True))]
        real = [2 * D * E + 6 * k * D * own_size for k in (K, by_phase["decode"])]
        told = published.TABLE_2[name].flops
        rows.append(
            [
                task.title,
                *(f"{by_phase[phase]:.3f}" for phase in ("prefill", "decode", ALL)),
                f"{paper[0]:.3g} → {paper[1]:.3g}",
                f"{paper[1] / paper[0] - 1:+.1%}",
                f"{real[0]:.3g} → {real[1]:.3g}",
                f"{real[1] / real[0] - 1:+.1%}",
                f"{told[1] / told[0] - 1:+.1%}",
            ]
        )
    heads = ["", "k, prefill", "k, decode", "k, all", "paper's formula", "", "real", "", "paper"]
    section.table("flops", heads, rows)
    return section


def null(found: Part, config: ModelConfig) -> Section:
    """Gaussian logits of the same spread."""
    section = Section("Routers that know nothing")
    rows = [
        [
            str(r["layer"]),
            f"{r['spread']:.2f}",
            f"{r['k']:.2f}",
            f"{r['k_low']:.2f} to {r['k_high']:.2f}" if r["k_low"] is not None else "",
            f"{r['null_k']:.2f}",
            f"{r['sharp']:.1%}",
            f"{r['null_sharp']:.1%}",
            f"{r['angle']:.0f}",
            f"{r['null_angle']:.0f}",
        ]
        for r in [*_layers(found), _record(found, "routers")]
    ]
    heads = ["layer", "spread of logits", "mean k", "95 %", "null", "sharp", "null", "angle", "null"]
    section.table("null", heads, rows)
    told = ", ".join(f"{k} at a spread of {spread:g}" for spread, k in NULL_SPREADS)
    section.say(
        "Null is the same rule on independent Gaussian logits of the same spread, token by token. With 64 experts "
        f"and a K of 8 it gives a mean k of {told}. The paper's {published.MEAN_K} alone therefore says little about"
        " a router; what says something is the distance from the null column."
    )
    return section


def parser(found: Part, config: ModelConfig) -> Section:
    """The letter parser's faults as numbers."""
    section = Section("The letter parser")
    own, theirs = _scores(found, "letters", "own"), _scores(found, "letters", "published")
    rows = []
    for name, task in TASKS.items():
        a, b = own["top_k", name], theirs["top_k", name]
        rows.append(
            [
                task.title,
                f"{a['chance']:.1%}",
                f"{b['accuracy']:.1%}",
                f"{a['accuracy']:.1%}",
                f"{a['accuracy'] - b['accuracy']:+.1%}",
                f"{b['invalid']}",
                f"{a['invalid']}",
            ]
        )
    heads = ["", "chance", "the paper's parser", "ours", "difference", "no letter, theirs", "no letter, ours"]
    section.table("parser", heads, rows)
    section.say(
        "Under top-k, the same outputs read twice. The published parser takes the first “Answer: X” of prompt and "
        "output together, knows only A to D, and so counts ARC's items labelled 1 to 4 or E as wrong whatever the "
        "model writes."
    )
    return section


def _record(found: Part, part: str, domain: str = ALL, layer: int | str = ALL, phase: str = ALL) -> Part:
    records: list[Part] = found[part]["records"]
    return next(r for r in records if (r["domain"], r["phase"], r["layer"]) == (domain, phase, layer))


def _layers(found: Part) -> list[Part]:
    """The layers' records over all benchmarks and phases."""
    records: list[Part] = found["routers"]["records"]
    return [r for r in records if r["domain"] == r["phase"] == ALL != r["layer"]]


def _scores(found: Part, protocol: str, parser: str) -> dict[tuple[str, str], Part]:
    """Results by rule and task."""
    return {
        (r["router"], r["task"]): r
        for r in found["scores"]["records"]
        if r["protocol"] == protocol and (protocol != "letters" or r["parser"] == parser)
    }


def _latency(found: Part) -> dict[tuple[str, str], float]:
    return {(r["arm"], r["phase"]): r["median"] for r in found["latency"]["records"]}


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
    return [name, format(paper, form), _value(ours, form), "" if ours is None else format(ours - paper, signed)]


def _value(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
