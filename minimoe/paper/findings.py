"""Looking things up in the parts of a Study."""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch
from torch import Tensor

from minimoe.analysis.summary import ALL
from minimoe.paper.study import Part


def tasks(found: Part) -> dict[str, str]:
    """Titles of the scored benchmarks by name."""
    return dict(found["about"]["tasks"])


def groups(found: Part) -> dict[str, str]:
    """Titles of what routers are told apart on by name: the benchmarks, or the sets of own items."""
    return dict(found["about"]["groups"])


def subjects(found: Part) -> str:
    """Name of the benchmark whose subjects are compared."""
    return str(found["about"]["subjects"])


def record(found: Part, part: str, domain: str = ALL, layer: int | str = ALL, phase: str = ALL) -> Part:
    records: list[Part] = found[part]["records"]
    return next(r for r in records if (r["domain"], r["phase"], r["layer"]) == (domain, phase, layer))


def layers_of(found: Part, domain: str = ALL) -> list[Part]:
    """A group's records by layer, over all phases."""
    records: list[Part] = found["routers"]["records"]
    return [r for r in records if (r["domain"], r["phase"]) == (domain, ALL) and r["layer"] != ALL]


def load_changes(layers: list[Part]) -> tuple[float, float]:
    """How far the rule changes the largest share and the CV of the load, means over layers."""
    return tuple(mean(change(r[f"load_{name}"], r[f"top_load_{name}"]) for r in layers) for name in ("largest", "cv"))  # type: ignore[return-value]


def scores_of(found: Part, protocol: str, parser: str = "own") -> dict[tuple[str, str], Part]:
    """Results by rule and task."""
    return {
        (r["router"], r["task"]): r
        for r in found["scores"]["records"]
        if r["protocol"] == protocol and (protocol != "letters" or r["parser"] == parser)
    }


def latency_of(found: Part, group: str = ALL) -> dict[tuple[str, str], Part]:
    """Records of time by arm and phase."""
    return {(r["arm"], r["phase"]): r for r in found["latency"]["records"] if r["group"] == group}


def sampled(found: Part) -> Tensor:
    """All sample curves [N, E], float32."""
    return torch.cat([torch.tensor(layer) for layers in found["samples"]["curves"].values() for layer in layers])


def eta2(found: Part, name: str) -> float | None:
    """The share of a quantity's variance that lies between subjects."""
    value: float | None = found["subjects"]["variance"][name]["domains"]["eta2"]
    return value


def change(value: float, base: float) -> float:
    return value / base - 1 if base else 0.0


def shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def span(interval: Any, form: str) -> str:
    low, high = interval
    return f"{low:{form}} to {high:{form}}"
