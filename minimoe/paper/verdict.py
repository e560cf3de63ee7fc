"""What of the paper holds on a model, in sentences whose every word follows from what was measured."""

from __future__ import annotations

from minimoe.analysis.summary import ALL
from minimoe.paper.findings import (
    groups,
    latency_of,
    layers_of,
    load_changes,
    record,
    scores_of,
    shown,
    subjects,
    tasks,
)
from minimoe.paper.study import MASKED, SAME_K, SKIPPED, Part


def verdict(found: Part) -> list[str]:
    """One sentence or two on each claim; together they are a paragraph."""
    return [part(found) for part in (_accuracy, _replaced, _k, _shape, _load, _time)]


def _accuracy(found: Part) -> str:
    names, scores = tasks(found), scores_of(found, "cloze")
    changed = {rule: sum(_differs(scores[rule, name]) for name in names) for rule in ("elbow", "mixed_k")}
    sets = "set" if len(names) == 1 else "benchmarks"
    extremes = [scores["elbow", name]["change"] for name in names]
    reach = f"{extremes[0]:+.1%}" if len(extremes) == 1 else f"{min(extremes):+.1%} to {max(extremes):+.1%}"
    letters = [scores_of(found, "letters")["top_k", name] for name in names]
    named, total = (sum(r["items"] - r["invalid"] for r in letters), sum(r["items"] for r in letters))
    return (
        f"By letters, the paper's protocol, the model names a choice on {named:,} of {total:,} items"
        f"{', so that this protocol says nothing about it' if named < total / 10 else ''}. "
        f"Accuracy by log-probability changes by {reach} under the elbow rule, beyond chance on {changed['elbow']} of "
        f"{len(names)} {sets}; with top-k at the same mean k, which knows nothing of elbows, on {changed['mixed_k']}."
    )


def _replaced(found: Part) -> str:
    scores, name = scores_of(found, "cloze"), subjects(found)
    tail, head = scores["random_tail", name], scores["random_head", name]
    return (
        f"Random experts after the elbow {_moves(tail)} accuracy on {tasks(found)[name]} ({_told(tail)}), and random "
        f"experts before it {_moves(head)} it ({_told(head)}); the paper has no change by the first, a drop by the "
        "second."
    )


def _k(found: Part) -> str:
    whole = record(found, "routers")
    if whole["null_k"] is None or whole["k_low"] is None:
        return f"The mean k is {shown(whole['k'], '.2f')}."
    inside = "not distinguishable from"
    word = "below" if whole["k_high"] < whole["null_k"] else "above" if whole["k_low"] > whole["null_k"] else inside
    return (
        f"The mean k is {whole['k']:.2f}, {word} the {whole['null_k']:.2f} that the rule gives on Gaussian logits of "
        "the same spread."
    )


def _shape(found: Part) -> str:
    whole = record(found, "routers")
    return (
        f"{whole['sharp']:.1%} of the elbows are sharp, where those Gaussian logits have {whole['null_sharp']:.1%}; "
        f"rank and angle correlate with r = {shown(whole['r'], '.2f')}."
    )


def _load(found: Part) -> str:
    layers = layers_of(found)
    worse = sum(load_changes([layer])[1] > 0 for layer in layers)
    held = sum(layer["within_bounds"] for layer in layers)
    return (
        f"The load of the experts gets less even in {worse} of {len(layers)} layers and on "
        f"{sum(load_changes(layers_of(found, name))[1] > 0 for name in groups(found))} of {len(groups(found))} sets, "
        f"within the theorem's bounds in {held} of {len(layers)}."
    )


def _time(found: Part) -> str:
    of = latency_of(found)
    skipped, masked, same = (of[arm, ALL]["change"] for arm in (SKIPPED, MASKED, SAME_K))
    return (
        f"The time of a MoE block changes by {skipped:+.1%} against top-k when pruned experts are really skipped, by "
        f"{masked:+.1%} when they are computed all the same, as in the paper's program, and by {same:+.1%} with top-k "
        "at the same mean k."
    )


def _differs(result: Part) -> bool:
    low, high = result["change_interval"]
    return not low <= 0 <= high


def _moves(result: Part) -> str:
    return "do not change" if not _differs(result) else "raise" if result["change"] > 0 else "lower"


def _told(result: Part) -> str:
    low, high = result["change_interval"]
    return f"{result['change']:+.1%}, 95 % {low:+.1%} to {high:+.1%}"
