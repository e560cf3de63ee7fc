"""What every benchmark ends in: medians and quartiles, the machine they belong to, a table and a line of JSON."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import minimoe
from minimoe.linear import has_native_half
from minimoe.native import best_kernels

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity: median, first and third quartile, and how many there were."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles by linear interpolation between the sorted values (numpy's default). Needs at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Median, and the quartiles in brackets, each times `scale`."""
        median, low, high = (f"{scale * value:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median} ({low}–{high})"


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure that has, or may have, a bar.

    Attributes:
        work: what was done.
        engine: by whom.
        against: what the figure is a ratio to, or its unit.
        value: the figure.
        bar: the least it is meant to be, the most if `at_most`, or None.
    """

    work: str
    engine: str
    against: str
    value: float
    bar: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether there is a bar and the figure meets it; a NaN meets none."""
        return self.bar is not None and (self.value <= self.bar if self.at_most else self.value >= self.bar)


def bars_table(found: Sequence[Finding]) -> str:
    """Every finding beside its bar."""
    rows = []
    for finding in found:
        cells = ["", ""]
        if finding.bar is not None:
            cells = [f"{'at most ' if finding.at_most else ''}{finding.bar:g}", "met" if finding.met else "missed"]
        rows.append([finding.work, finding.engine, finding.against, f"{finding.value:.3g}", *cells])
    return table(["work", "engine", "against", "figure", "bar", ""], rows)


def machine(threads: int) -> dict[str, Any]:
    """What a figure depends on besides the code: processor, memory, load, threads and versions."""
    kernels = best_kernels()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gb": round(memory / 1e9, 1),
        "bfloat16_instructions": has_native_half(torch.bfloat16),
        "kernels": kernels.name if kernels else None,
        "load_average_before": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "minimoe": minimoe.__version__,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
    }


def cpu_name() -> str:
    """The processor as Linux names it, or what Python knows elsewhere.

    With family and model, where it has such: in virtual machines generations that differ much are all an "AMD EPYC".
    """
    try:
        listing = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        listing = ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: *(.*)$", listing, re.MULTILINE))
    if not found.get("model name"):
        return platform.processor() or platform.machine()
    numbers = [f"{key.split()[-1]} {found[key]}" for key in ("cpu family", "model") if key in found]
    return ", ".join([found["model name"].strip(), *([" ".join(numbers)] if numbers else [])])


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well as plain text: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return " | ".join([f"| {first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(line(cells) for cells in (headers, rule, *rows))


def publish(name: str, text: str, result: Mapping[str, Any], save: bool) -> None:
    """Print a report and, as the last line, the same as JSON; keep both under bench/results/ if asked.

    Args:
        name: of the benchmark.
        text: the table and what there is to say about it.
        result: plain data, Spreads and a "machine" entry.
    """
    about = result["machine"]
    described = ", ".join(f"{key} {value}" for key, value in about.items())
    if about["load_average_before"] > 0.5:
        text += "\n\nSomething else was running on this machine: do not keep these times."
    text = f"{text}\n\nMachine: {described}."
    line = json.dumps({"bench": name, **result}, default=asdict)
    print(text)
    print(line)
    if save:
        RESULTS.mkdir(exist_ok=True)
        stem = f"{about['date']}-{re.sub(r'[^a-z0-9]+', '-', about['cpu'].lower()).strip('-')}-{name}"
        (RESULTS / f"{stem}.json").write_text(line + "\n", "utf-8")
        (RESULTS / f"{stem}.md").write_text(f"{text}\n", "utf-8")


def at_least_one(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}.")
    return int(text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
