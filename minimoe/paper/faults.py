"""Where the paper and its program disagree, or mislead: each fault as a number of our own."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from minimoe.analysis.summary import ALL
from minimoe.config import ModelConfig
from minimoe.curve import deviation, elbow
from minimoe.errors import InputError
from minimoe.flops import block_flops, paper_block_flops
from minimoe.intervals import Z
from minimoe.paper import figures, published
from minimoe.paper.findings import change, groups, latency_of, layers_of, record, sampled, scores_of, shown, tasks
from minimoe.paper.measures import PADDED_BATCH
from minimoe.paper.report import Section
from minimoe.paper.study import MASKED, SAME_K, SKIPPED, TOP, Part
from minimoe.routers.elbow import Elbow

SPREADS = (0.5, 1.0, 1.5, 2.0)
DRAWS = 20_000  # Gaussian curves of each spread
NOISE = 1e-6
ARMS = (TOP, MASKED, SKIPPED, SAME_K)


def readings(found: Part, config: ModelConfig) -> Section:
    """The rule, read as printed and as programmed; its edge cases; and what kneed finds."""
    section = Section("One rule, two readings")
    curves_NE = sampled(found)
    rows = []
    for reading in ("program", "printed"):
        k_N = (deviation(curves_NE, reading).argmax(-1) + 1).clamp(max=config.top_k)
        shares = [float((k_N == k).double().mean()) for k in (1, config.top_k)]
        rows.append([reading, f"{float(k_N.double().mean()):.2f}", *(f"{share:.1%}" for share in shares)])
    section.say(
        "The algorithm as printed normalises the curve without turning it over; its deviation from the diagonal is "
        "then largest at the first rank of every falling curve, and it keeps one expert. The published program, and"
        " the angle that the paper reports, turn the curve over first. All else in this report follows the program."
    )
    section.table("readings", ["reading", "mean k", "k = 1", f"k = {config.top_k}"], rows)
    section.say(f"On the {len(curves_NE):,} sample curves. {_kneed(curves_NE)}")
    return section


def _kneed(curves_NE: torch.Tensor) -> str:
    """How often the library finds the same elbow as the largest deviation."""
    try:
        rule = Elbow(method="kneed")
    except InputError:
        return "The library kneed is not installed, so that its elbows cannot be compared (pip install kneed)."
    theirs_N = torch.tensor([rule.knee(curve) for curve in curves_NE.double().numpy()])
    same = float((theirs_N == elbow(curves_NE)[0] + 1).double().mean())
    return (
        f"The library kneed, which the rule is likened to, finds the same elbow on {same:.1%} of them: it takes the "
        "first bend past a threshold, not the highest."
    )


def edges(found: Part, config: ModelConfig) -> Section:
    """What the rule does where a router is sure, or knows nothing."""
    section = Section("Edge cases of the rule")
    E, K = config.num_experts, config.top_k
    draws = torch.Generator().manual_seed(0)
    alike = min(3, E)
    cases = {
        "all experts alike": torch.zeros(1, E),
        "one expert alone": torch.full((1, E), -100.0).index_fill(1, torch.tensor([0]), 100.0),
        f"{alike} alike, the others nothing": torch.full((1, E), -100.0).index_fill(1, torch.arange(alike), 100),
        f"all alike but for noise of {NOISE:g}, 1,000 draws": NOISE * torch.randn(1000, E, generator=draws),
    }
    rows = []
    for name, logits_NE in cases.items():
        sorted_NE = logits_NE.double().softmax(-1).sort(-1, descending=True).values
        k_N = (deviation(sorted_NE).argmax(-1) + 1).clamp(max=K)
        least, most = int(k_N.min()), int(k_N.max())
        rows.append([name, str(least) if least == most else f"{least} to {most}", f"{float(k_N.double().mean()):.2f}"])
    section.table("edges", ["router logits", "k", "mean k"], rows)
    section.say(
        "A router that cannot tell experts apart gets the fewest experts, one that is sure of a single expert gets two,"
        " and noise far below bfloat16's resolution decides anything in between."
    )
    return section


def latency(found: Part, config: ModelConfig) -> Section:
    """Three latency arms, and top-k at the same mean k."""
    section = Section("What saves time")
    section.say(
        "The paper's program gives pruned experts a weight of zero and computes them all the same, so that its −5.3 % "
        "cannot come from skipped work. Here are three arms and top-k at the same mean k, on the same prompts in turns."
    )
    of, told = latency_of(found), found["latency"]
    rows = []
    for phase in ("prefill", "decode"):
        for arm in ARMS:
            r = of[arm, phase]
            changed = ["", ""]
            if arm != TOP:
                changed = [f"{r['change']:+.1%}", f"{r['change_low']:+.1%} to {r['change_high']:+.1%}"]
            row = [phase, arm, f"{r['mean_k']:.2f}", f"{1e3 * r['median']:.3f}", *changed, f"{r['idle']:.1%}"]
            rows.append(row)
    heads = ["phase", "rule", "mean k", "ms a block", "change", "quartiles", "experts without a token"]
    section.table("latency", heads, rows, text_columns=2)
    section.say(
        f"Medians of {told['rounds']} rounds over all sets, on {told['threads']} CPU threads; about "
        f"{of[TOP, 'prefill']['tokens']:,.0f} tokens a block in prefill, {of[TOP, 'decode']['tokens']:,.0f} in decode. "
        "The last column is what the paper's baseline paid for besides: its top-k block also ran experts that had no "
        "token, while its elbow block left them out."
    )
    values = {
        phase: [tuple(100 * of[arm, phase][key] for key in ("change", "change_low", "change_high")) for arm in ARMS[1:]]
        for phase in ("prefill", "decode")
    }
    names = [arm.replace(", ", ",\n") for arm in ARMS[1:]]
    figure = figures.dots(values, names, "change of a MoE block's time against top-k, %")
    section.figure("latency", figure, "Time of a MoE block (gate, rule and experts), with quartiles", told["records"])
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
    times = _formula(config) / block_flops(config, config.top_k)
    for name, title in groups(found).items():
        k = {phase: record(found, "routers", name, ALL, phase)["k"] for phase in ("prefill", "decode", ALL)}
        paper = {phase: change(paper_block_flops(config, 1, k[phase], elbow=True), _formula(config)) for phase in k}
        real = change(block_flops(config, k[ALL]), block_flops(config, config.top_k))
        told = published.TABLE_2.get(name)
        theirs = None if told is None else change(*told.flops[::-1])
        rows.append(
            [
                title,
                *(f"{k[phase]:.3f}" for phase in ("prefill", "decode", ALL)),
                f"{paper['decode']:+.1%}",
                f"{paper[ALL]:+.1%}",
                f"{real:+.1%}",
                shown(theirs, "+.1%"),
                "" if theirs is None else f"{paper['decode'] - theirs:+.1%}",
            ]
        )
    heads = ["", "k, prefill", "k, decode", "k, all", "formula, decode", "formula, all", "real, all"]
    section.table("flops", [*heads, "paper", "difference"], rows)
    section.say(
        f"Changes of FLOPs against top-k. For top-k the paper's formula gives {times:.1f} times the FLOPs that this "
        "model's block really has; for OLMoE-1B-7B it is 5.3 times. The difference is of its own kind of figure: its "
        "formula, at the k of decode."
    )
    return section


def _formula(config: ModelConfig) -> float:
    return paper_block_flops(config, 1, config.top_k, elbow=False)


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
    section.say(
        "Null is the same rule on independent Gaussian logits of the same spread, token by token. What says something "
        f"about a router is its distance from the null column, not that its mean k is {published.MEAN_K}:"
    )
    draws = torch.Generator().manual_seed(0)
    rows = []
    for spread in SPREADS:
        logits_NE = spread * torch.randn(DRAWS, config.num_experts, generator=draws)
        rank_N, degrees_N = elbow(logits_NE.softmax(-1).sort(-1, descending=True).values)
        k = float((rank_N + 1).clamp(max=config.top_k).double().mean())
        rows.append([f"{spread:g}", f"{k:.2f}", f"{k - published.MEAN_K:+.2f}", f"{float(degrees_N.nanmean()):.0f}"])
    section.table("gaussian", ["spread of Gaussian logits", "mean k", "against the paper's", "angle"], rows)
    section.say(f"{DRAWS:,} curves each, of {config.num_experts} experts with at most {config.top_k} kept.")
    return section


def independence(found: Part, config: ModelConfig) -> Section:
    """How many of the tokens are worth one."""
    section = Section("Tokens are not independent")
    whole = record(found, "routers")
    ranks_N = elbow(sampled(found))[0].double()
    alone = Z * float(ranks_N.std()) / math.sqrt(whole["curves"])
    half = (whole["elbow_high"] - whole["elbow_low"]) / 2
    times = half / alone if alone else 0.0
    rows = [
        ["tokens and layers as independent, as the paper takes them", f"{whole['curves']:,}", f"±{alone:.4f}"],
        ["prompts as independent", f"{round(whole['curves'] / times**2):,}" if times else "", f"±{half:.4f}"],
    ]
    section.table("independence", ["the mean rank's 95 % interval, with", "as good as so many", "half width"], rows)
    section.say(
        f"What comes from one prompt is alike: the honest interval is {times:.1f} times as wide. An F statistic over "
        "tokens and layers is too large by about the square of that, and with N = 1,704,247 anything is significant."
        if times
        else "All curves of the sample bend at the same rank, so that there is nothing to compare."
    )
    return section


def parser(found: Part, config: ModelConfig) -> Section:
    """The letter parser's faults as numbers."""
    section = Section("The letter parser")
    own, theirs = scores_of(found, "letters"), scores_of(found, "letters", "published")
    rows = []
    for name, title in tasks(found).items():
        a, b, reach = own["top_k", name], theirs["top_k", name], found["prompts"]["reach"][name]
        rows.append(
            [
                title,
                f"{reach['right'] / reach['items']:.1%}",
                f"{reach['quoted']:,} of {reach['items']:,}",
                f"{a['chance']:.1%}",
                f"{b['accuracy']:.1%}",
                f"{a['accuracy']:.1%}",
                f"{b['accuracy'] - a['accuracy']:+.1%}",
                f"{b['invalid']:,}",
                f"{a['invalid']:,}",
            ]
        )
    heads = ["", "a perfect model's", "found in the question", "chance", "its parser", "ours", "difference"]
    section.table("parser", [*heads, "no letter, its", "no letter, ours"], rows)
    section.say(
        "The paper's parser takes the first “Answer: X” of prompt and output together and knows only A to D. A model "
        "that writes the right label every time gets the first column from it: ARC's items labelled 1 to 4 or E count "
        "as wrong whatever is written. In the prompts of the second column it reads an answer before there is one. "
        "The others are under top-k, the same outputs read twice. WinoGrande is at chance in the paper (50.4 %)."
    )
    return section


def padding(found: Part, config: ModelConfig) -> Section:
    """How many of the tokens that the paper's program routes and times are padding."""
    section = Section("Padding")
    parts = found["prompts"]["padding"]
    rows = [
        [title, f"{parts[name]['tokens']:,}", f"{parts[name]['pads']:,}", f"{_pads([parts[name]]):.1%}"]
        for name, title in groups(found).items()
    ]
    rows.append(["all", *(f"{sum(p[key] for p in parts.values()):,}" for key in ("tokens", "pads")),
                 f"{_pads(list(parts.values())):.1%}"])  # fmt: skip
    section.table("padding", ["", "tokens of prompts", "pad tokens beside them", "share that is padding"], rows)
    section.say(
        f"The paper's latency program pads batches of {PADDED_BATCH} prompts, in the order of the file, to one length; "
        "pad tokens are routed and timed like others. Nothing is padded here."
    )
    return section


def _pads(parts: list[Part]) -> float:
    pads, tokens = (sum(part[key] for part in parts) for key in ("pads", "tokens"))
    return pads / (pads + tokens)


SECTIONS: tuple[Callable[[Part, ModelConfig], Section], ...] = (
    readings,
    edges,
    latency,
    flops,
    null,
    independence,
    parser,
    padding,
)
