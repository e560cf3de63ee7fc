"""Where time, FLOPs and bytes go: a probe that reads the clock around every operation and keeps a ledger of the work.

Reading the clock means waiting for the device, which costs time of its own; so a Profile always holds the
unprobed end-to-end time of the same work beside the sum of the measured parts.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from minimoe.config import ModelConfig
from minimoe.flops import head_flops, layer_flops, paper_block_flops, pass_bytes
from minimoe.probe import Phase, Probe
from minimoe.routing import Routing

T = TypeVar("T")
OPERATIONS = ("embed", "attention", "gate", "rule", "experts", "norm", "head")


@dataclass(frozen=True, slots=True)
class Timing:
    """Latency of one operation in one phase and layer, in seconds.

    `layer` is -1 (ALL_LAYERS) where all spans of an operation are taken together, and these rows' shares add up to
    1; rows of single layers break them down and must not be added to them.
    """

    phase: Phase
    layer: int
    operation: str
    count: int
    median: float
    low: float  # first quartile
    high: float  # third quartile
    total: float
    share: float  # of all measured time in the phase


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """What one phase did, added up over its passes and layers.

    Attributes:
        passes, tokens: forward passes, and tokens they ran.
        seconds: sum of the measured parts.
        flops: by operation: attention, gate, experts, head.
        bytes_read: weights, by operation; experts count each distinct expert of a pass once.
        paper_flops: the paper's own estimate for the MoE blocks, at the real mean k, without its elbow term.
        mean_k, mean_k_by_layer: experts per token.
    """

    phase: Phase
    passes: int
    tokens: int
    seconds: float
    flops: dict[str, int]
    bytes_read: dict[str, int]
    paper_flops: float
    mean_k: float
    mean_k_by_layer: list[float]


@dataclass(frozen=True, slots=True)
class Profile:
    """A report of one piece of work.

    Attributes:
        timings: by phase, layer and operation.
        phases: the ledger, prefill first.
        unprobed_seconds: end-to-end time of the same work without a probe.
        probed_seconds: end-to-end time with it; the difference is the cost of measuring.
        text, prompt_tokens, new_tokens: the work.
    """

    timings: list[Timing]
    phases: list[PhaseWork]
    unprobed_seconds: float
    probed_seconds: float
    text: str
    prompt_tokens: int
    new_tokens: int

    def by_operation(self, phase: Phase) -> list[Timing]:
        """Timings of a phase with the layers taken together: medians and quartiles over all their spans."""
        return [timing for timing in self.timings if timing.phase == phase and timing.layer == ALL_LAYERS]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; seconds, FLOPs and bytes."""
        return asdict(self)


ALL_LAYERS = -1  # the `layer` of a Timing that takes all layers together


@dataclass(slots=True)
class _Pass:
    """One forward pass, as the probe saw it."""

    phase: Phase
    new: list[int]
    past: list[int]
    pairs: list[int]  # sum of k, by layer
    experts_hit: int = 0
    head_rows: int = 0


class Profiler(Probe):
    """Collects spans and work; `report` sums them up.

    Args:
        config: of the model.
        dtype: of its weights, for bytes.
        device: waited for before the clock is read.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._itemsize = dtype.itemsize
        self._device = device
        self._seconds: dict[tuple[Phase, int | None, str], list[float]] = defaultdict(list)
        self._passes: list[_Pass] = []

    def step(self, phase: Phase, new: Sequence[int], past: Sequence[int]) -> None:
        self._passes.append(_Pass(phase, list(new), list(past), []))

    @contextmanager
    def span(self, name: str, layer: int | None = None) -> Iterator[None]:
        synchronise(self._device)
        start = time.perf_counter()
        yield
        synchronise(self._device)
        self._seconds[self._passes[-1].phase, layer, name].append(time.perf_counter() - start)

    def spent(self, name: str, layer: int | None, seconds: float) -> None:
        self._seconds[self._passes[-1].phase, layer, name].append(seconds)

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        current = self._passes[-1]
        current.pairs.append(int(routing.k_T.sum()))
        hit_E = torch.bincount(routing.experts_TK.flatten(), minlength=routing.num_experts + 1)[:-1] > 0
        current.experts_hit += int(hit_E.sum())

    def headed(self, rows: int) -> None:
        self._passes[-1].head_rows += rows

    def report(self, *, unprobed_seconds: float, probed_seconds: float, generation: Any) -> Profile:
        """Everything seen so far, beside the end-to-end times of the same work.

        Args:
            generation: the result of the work, for its text and token counts.
        """
        phases = [phase for phase in ("prefill", "decode") if any(p.phase == phase for p in self._passes)]
        return Profile(
            timings=[timing for phase in phases for timing in self._timings(phase)],  # type: ignore[arg-type]
            phases=[self._work(phase) for phase in phases],  # type: ignore[arg-type]
            unprobed_seconds=unprobed_seconds,
            probed_seconds=probed_seconds,
            text=generation.text,
            prompt_tokens=len(generation.prompt_tokens),
            new_tokens=len(generation.tokens),
        )

    def _timings(self, phase: Phase) -> Iterator[Timing]:
        spans = {key[1:]: values for key, values in self._seconds.items() if key[0] == phase}
        everything = sum(sum(values) for values in spans.values())

        def timing(layer: int, operation: str, values: Sequence[float]) -> Timing:
            low, median, high = quartiles(values)
            total = sum(values)
            return Timing(phase, layer, operation, len(values), median, low, high, total, total / everything)

        for operation in OPERATIONS:
            values = [second for (_, name), part in spans.items() if name == operation for second in part]
            if values:
                yield timing(ALL_LAYERS, operation, values)
        for (layer, operation), values in spans.items():
            if layer is not None:
                yield timing(layer, operation, values)

    def _work(self, phase: Phase) -> PhaseWork:
        config, passes = self._config, [p for p in self._passes if p.phase == phase]
        tokens = sum(sum(p.new) for p in passes)
        flops: dict[str, int] = dict.fromkeys(("attention", "gate", "experts", "head"), 0)
        bytes_read = dict(flops)
        for p in passes:
            for pairs in p.pairs:
                layer = layer_flops(config, p.new, p.past, pairs)
                for name, value in asdict(layer).items():
                    flops[name] += value
            flops["head"] += head_flops(config, p.head_rows)
            read = pass_bytes(config, p.experts_hit, self._itemsize, head=p.head_rows > 0)
            for name, value in asdict(read).items():
                bytes_read[name] += value
        by_layer = [sum(p.pairs[i] for p in passes) / tokens for i in range(config.num_layers)]
        mean_k = sum(by_layer) / len(by_layer)
        return PhaseWork(
            phase=phase,
            passes=len(passes),
            tokens=tokens,
            seconds=sum(sum(values) for key, values in self._seconds.items() if key[0] == phase),
            flops=flops,
            bytes_read=bytes_read,
            paper_flops=config.num_layers * paper_block_flops(config, tokens, mean_k, elbow=False),
            mean_k=mean_k,
            mean_k_by_layer=by_layer,
        )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of at least one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was asked: only then does the clock mean anything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The result of some work and the wall-clock seconds it took, device included."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return result, time.perf_counter() - start
