"""Where the paper and its program disagree, or mislead: each fault as a number of our own."""

from __future__ import annotations

import torch

from minimoe.analysis.summary import ALL
from minimoe.config import ModelConfig
from minimoe.curve import deviation
from minimoe.evaluate.tasks import TASKS
from minimoe.flops import paper_block_flops
from minimoe.paper import figures, published
from minimoe.paper.findings import latency_of, layers_of, record, scores_of
from minimoe.paper.report import Section
from minimoe.paper.study import Part

NULL_SPREADS = ((0.5, 7.61), (1.0, 7.46), (1.5, 7.09), (2.0, 6.62))


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


def latency(found: Part, config: ModelConfig) -> Section:
    """Three latency arms, and top-k at the same mean k."""
    section = Section("What saves time")
    section.say(
        "The paper's program gives pruned experts a weight of zero and computes them all the same, so that its −5.3 % "
        "cannot come from skipped work. Here are three arms, and top-k at the same mean k, on the same tokens in turns."
    )
    section.say(f"{found['latency']['rounds']} rounds, {found['latency']['threads']} CPU threads.")
    base = latency_of(found)
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
        by_phase = {phase: record(found, "routers", name, ALL, phase)["k"] for phase in ("prefill", "decode", ALL)}
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
        for r in [*layers_of(found), record(found, "routers")]
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
    own, theirs = scores_of(found, "letters", "own"), scores_of(found, "letters", "published")
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
