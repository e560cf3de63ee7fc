"""Probes that note what they are told, for comparing one way of running a model with another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from minimoe.probe import Probe
from minimoe.routing import Routing


class Watcher(Probe):
    """Notes all but spans.

    Args:
        digits: to which router logits and weights are noted; all of them by default.
    """

    def __init__(self, digits: int | None = None) -> None:
        self.seen: list[Any] = []
        self._digits = digits

    def step(self, phase: str, new: Sequence[int], past: Sequence[int]) -> None:
        self.seen.append((phase, list(new), list(past)))

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        routing = routing.detach()
        routing.check()
        self.seen.append((layer, routing.experts_TK.tolist(), routing.k_T.tolist()))
        self.seen += [self._noted(values) for values in (routing.weights_TK, logits_TE)]

    def headed(self, rows: int) -> None:
        self.seen.append(rows)

    def _noted(self, values: Tensor) -> list[Any]:
        return (values if self._digits is None else values.round(decimals=self._digits)).tolist()


class SpanWatcher(Watcher):
    """Notes the names of spans as well."""

    def span(self, name: str, layer: int | None = None) -> AbstractContextManager[None]:
        self.seen.append(name)
        return nullcontext()
