"""Decode steps on a device in which the host decides nothing: one token of each of B sequences, from ids to logits.

Every shape is fixed, what is routed and how long the caches are stays on the device, and inputs and outputs lie at
fixed places, so that a CUDA graph can replay the whole step. The same code runs without a graph on any device that the
triton backend runs on.

Shape letters: B sequences, L layers, D hidden, G kv heads, d head size, E experts, K slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.decoding.base import Decoder, Told
from minimoe.errors import router_error
from minimoe.model import Olmoe, Pass
from minimoe.operations import Attention
from minimoe.prefix_rule import PrefixRule
from minimoe.probe import Probe
from minimoe.routers import Router
from minimoe.routers.base import layer_rules
from minimoe.routing import Routing
from minimoe.triton.attention import attend_one_each, cache_table
from minimoe.triton.routing import route


class GraphDecoder(Decoder):
    """Steps of any number of sequences; those of each number are made when it first comes.

    Steps lie at fixed places, so one thread at a time may run them, and logits are overwritten by the next step of as
    many sequences.

    Attributes:
        step_of: the steps there are, by number of sequences: no more than a batch may have.
    """

    def __init__(self, model: Olmoe, router: Router, rules: Sequence[PrefixRule]) -> None:
        super().__init__(router, asks=False)
        self.step_of: dict[int, DecodeStep] = {}
        self._model, self._rules = model, rules

    @classmethod
    def of(cls, model: Olmoe, router: Router) -> GraphDecoder | None:
        """The steps of a model with the triton backend, or None if the rule has to be asked on the host."""
        rules = layer_rules(router, model.config, model.fingerprint)
        return None if rules is None else cls(model, router, rules)

    def run(
        self, ids_B: Tensor, caches: Sequence[KVCache], tell: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Told]:
        B = len(caches)
        if B not in self.step_of:
            self.step_of[B] = DecodeStep(self._model, self._rules, B)
        step = self.step_of[B]
        logits_BV = step.run(ids_B, caches)
        step.finish()
        return logits_BV, Told(step.routings()) if tell else Told()


class DecodeStep(Pass):
    """Steps of a fixed number of sequences. On a GPU the second one is captured, and from then on they are replayed.

    The first is run as it is: it compiles the kernels and lets the libraries allocate what they keep.

    Args:
        model: with the triton backend: others ask the host how many tokens an expert has.
        rules: of each layer, all of one limit.
        sequences: B.

    Attributes:
        captures: whether there are graphs on this device.
    """

    def __init__(self, model: Olmoe, rules: Sequence[PrefixRule], sequences: int) -> None:
        config, device = model.config, model.device
        L, K = config.num_layers, rules[0].limit
        self._model, self._rules = model, rules
        self.captures = device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ran = False
        self._gates: list[Tensor] = []
        self.ids_T = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._table_4B = torch.zeros(4, sequences, dtype=torch.int64, device=device)
        self._experts_LBK = torch.empty(L, sequences, K, dtype=torch.int64, device=device)
        self._weights_LBK = torch.empty(L, sequences, K, device=device)
        self._k_LB = torch.empty(L, sequences, dtype=torch.int64, device=device)
        self._broken_L = torch.zeros(L, dtype=torch.int32, device=device)
        self._logits_BV = torch.empty(sequences, config.vocab_size, dtype=model.dtype, device=device)

    def run(self, ids_B: Tensor, caches: Sequence[KVCache]) -> Tensor:
        """Start a step; the host does not wait, and the caches are extended but not advanced.

        Returns:
            logits_BV, overwritten by the next step.

        Raises:
            IndexError: a cache has no room.
        """
        table_4B = cache_table(caches)
        with torch.cuda.device_of(self.ids_T):
            self.ids_T.copy_(ids_B, non_blocking=True)
            self._table_4B.copy_(table_4B, non_blocking=True)
            if self._graph is None and self._ran and self.captures:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._run()
                self._graph = graph
            if self._graph is None:
                self._run()
                self._ran = True
            else:
                self._graph.replay()
        return self._logits_BV

    def finish(self) -> None:
        """Wait for the device, and refuse the steps since the last call if router logits were not finite.

        Raises:
            NumericalError: names the layer.
        """
        broken = self._broken_L.nonzero().flatten().tolist()
        if broken:
            self._broken_L.zero_()
            raise router_error(broken[0])

    def routings(self) -> list[tuple[Routing, Tensor]]:
        """What the last step routed, one a layer, copied to the CPU, and on which logits, copied on the device."""
        parts = (self._experts_LBK, self._weights_LBK, self._k_LB)
        experts_LBK, weights_LBK, k_LB = (part.to("cpu", copy=True) for part in parts)
        layers = zip(experts_LBK, weights_LBK, k_LB, strict=True)
        routings = [Routing(*layer, num_experts=self._model.config.num_experts) for layer in layers]
        return list(zip(routings, torch.stack(self._gates), strict=True))

    def _run(self) -> None:
        """What is captured: nothing here, nor in what it calls, may look at a value."""
        self._rotation, self._gates = self._model.rotation(self._table_4B[3]), []
        self._logits_BV.copy_(self._model.head(self._model.run(self, Probe())))

    def attend(self, of: Attention, x_TD: Tensor) -> Tensor:
        operations = self._model.operations
        q_TD, k_TGd, v_TGd = operations.projections(of, x_TD)
        mixed_TD = attend_one_each(of, q_TD, k_TGd, v_TGd, self._rotation, self._table_4B)
        return x_TD + operations.linear(mixed_TD, of.out_DD)

    def check(self, layer: int, logits_TE: Tensor) -> None:
        """The rule notes it on the device, and `finish` tells. Logits that are kept are not overwritten before the
        next step."""
        self._gates.append(logits_TE)

    def route(self, layer: int, logits_TE: Tensor) -> Routing:
        routing = Routing(
            self._experts_LBK[layer], self._weights_LBK[layer], self._k_LB[layer], self._model.config.num_experts
        )
        route(self._rules[layer], logits_TE, routing, self._broken_L[layer : layer + 1])
        return routing
