"""Decode steps in one go: one token of each of B sequences, from ids to logits, with nothing but a rule in between.

Shape letters: B sequences, E experts, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.probe import Probe
from minimoe.routers import Router
from minimoe.routing import Routing


class Told(NamedTuple):
    """What a step tells a probe.

    Attributes:
        routings: of each layer, and the router logits [B, E] that each was made of.
        times: what each operation was, in which layer if in one, and its seconds; as for Probe.spent.
    """

    routings: Sequence[tuple[Routing, Tensor]] = ()
    times: Sequence[tuple[str, int | None, float]] = ()


class Decoder(ABC):
    """The steps of one model under one rule.

    Attributes:
        router: the rule.
        asks: whether it is asked in each layer, which takes Python; else what runs the steps follows it.
        knows_times: whether it can say how long each operation took.
    """

    knows_times: ClassVar[bool] = False

    def __init__(self, router: Router, *, asks: bool) -> None:
        self.router, self.asks = router, asks

    @torch.inference_mode()
    def step(
        self,
        ids_B: Tensor,
        caches: Sequence[KVCache],
        probe: Probe | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Run one token of each sequence and extend the caches; what is refused leaves them as they were.

        Args:
            ids_B: int64.
            caches: of B different sequences.
            probe: is told of routings and times when the step is over; there are no spans.
            generator: randomness for rules that draw.

        Returns:
            logits [B, V] that follow the tokens.

        Raises:
            NumericalError: router logits that are not finite; names the layer.
            IndexError: a cache has no room; the caller reserves it.
            And what the rule raises, if it is asked.
        """
        probe, B = probe or Probe(), len(caches)
        tell = type(probe) is not Probe
        probe.step("decode", [1] * B, [cache.length for cache in caches])
        logits_BV, told = self.run(ids_B, caches, tell, generator)
        for cache in caches:
            cache.advance(1)
        if tell:
            for layer, (routing, logits_BE) in enumerate(told.routings):
                probe.routed(layer, routing, logits_BE)
            probe.headed(B)
            for name, place, seconds in told.times:
                probe.spent(name, place, seconds)
        return logits_BV

    @abstractmethod
    def run(
        self, ids_B: Tensor, caches: Sequence[KVCache], tell: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Told]:
        """A step that is over when this returns, without moving on the caches' lengths; arguments and errors are those
        of `step`. Returns the logits and what is to be told, if anything."""
