"""Looking things up in the parts of a Study."""

from __future__ import annotations

from minimoe.analysis.summary import ALL
from minimoe.paper.study import Part


def record(found: Part, part: str, domain: str = ALL, layer: int | str = ALL, phase: str = ALL) -> Part:
    records: list[Part] = found[part]["records"]
    return next(r for r in records if (r["domain"], r["phase"], r["layer"]) == (domain, phase, layer))


def layers_of(found: Part) -> list[Part]:
    """The layers' records over all benchmarks and phases."""
    records: list[Part] = found["routers"]["records"]
    return [r for r in records if r["domain"] == r["phase"] == ALL != r["layer"]]


def scores_of(found: Part, protocol: str, parser: str) -> dict[tuple[str, str], Part]:
    """Results by rule and task."""
    return {
        (r["router"], r["task"]): r
        for r in found["scores"]["records"]
        if r["protocol"] == protocol and (protocol != "letters" or r["parser"] == parser)
    }


def latency_of(found: Part) -> dict[tuple[str, str], float]:
    return {(r["arm"], r["phase"]): r["median"] for r in found["latency"]["records"]}


def shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
