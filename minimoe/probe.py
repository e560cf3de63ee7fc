"""A probe sees what the model does, and nothing patches the model: profiler, statistics and recorder are probes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Literal

from torch import Tensor

from minimoe.routing import Routing

Phase = Literal["prefill", "decode"]
_NOTHING: AbstractContextManager[None] = nullcontext()


class Probe:
    """Sees one forward pass after another. Every method does nothing; override what you need."""

    @property
    def needs_spans(self) -> bool:
        """Whether nothing but spans tells it of times: decode steps in one go (minimoe.decoding) are not used then."""
        return type(self).span is not Probe.span and not self.takes_times

    @property
    def takes_times(self) -> bool:
        """Whether it overrides `spent`, beside `span`: decode steps in one go are used then, if they know their
        times."""
        return type(self).spent is not Probe.spent

    def step(self, phase: Phase, new: Sequence[int], past: Sequence[int]) -> None:
        """A forward pass begins: for each sequence of the batch, its new tokens and those already cached."""

    def span(self, name: str, layer: int | None = None) -> AbstractContextManager[None]:
        """Wraps one operation: embed, attention, gate, rule, experts (with a layer), norm, head."""
        return _NOTHING

    def spent(self, name: str, layer: int | None, seconds: float) -> None:
        """An operation of a decode step in one go is over: names are those of `span`, which tells of all others."""

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        """A layer's rule has decided, on these router logits (in the model's dtype)."""

    def headed(self, rows: int) -> None:
        """Logits are about to be computed for that many hidden states."""


class RoutingRecorder(Probe):
    """Keeps every routing, by layer, so that it can be read, counted or replayed later."""

    def __init__(self, num_layers: int) -> None:
        self.layers: list[list[Routing]] = [[] for _ in range(num_layers)]

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        self.layers[layer].append(routing.detach())

    def routings(self) -> list[Routing]:
        """One Routing a layer, with the tokens of all passes laid end to end."""
        return [Routing.cat(parts) for parts in self.layers if parts]


class Probes(Probe):
    """Several probes as one."""

    def __init__(self, *probes: Probe) -> None:
        self.probes = probes

    @property
    def needs_spans(self) -> bool:
        return any(probe.needs_spans for probe in self.probes)

    @property
    def takes_times(self) -> bool:
        return any(probe.takes_times for probe in self.probes)

    def step(self, phase: Phase, new: Sequence[int], past: Sequence[int]) -> None:
        for probe in self.probes:
            probe.step(phase, new, past)

    @contextmanager
    def span(self, name: str, layer: int | None = None) -> Iterator[None]:
        with ExitStack() as stack:
            for probe in self.probes:
                stack.enter_context(probe.span(name, layer))
            yield

    def spent(self, name: str, layer: int | None, seconds: float) -> None:
        for probe in self.probes:
            probe.spent(name, layer, seconds)

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        for probe in self.probes:
            probe.routed(layer, routing, logits_TE)

    def headed(self, rows: int) -> None:
        for probe in self.probes:
            probe.headed(rows)
