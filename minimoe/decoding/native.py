"""Decode steps in one call of the native kernels: Python between the products of each layer costs some 6 % of a step.

They follow rules that keep a prefix of the ranking themselves. Every other one is asked between calls, one a layer.

Shape letters: B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.decoding.base import Decoder, Told
from minimoe.experts.native import NativeExperts
from minimoe.model import Batch, Olmoe
from minimoe.native.places import ExpertPlaces, KernelRules, ModelPlaces
from minimoe.operations import NativeOperations
from minimoe.routers import Router
from minimoe.routers.base import layer_rules


class NativeDecoder(Decoder):
    """The same bits as the model's own passes.

    Args:
        model: with the native backend.
    """

    knows_times = True

    def __init__(self, model: Olmoe, router: Router) -> None:
        rules = layer_rules(router, model.config, model.fingerprint)
        super().__init__(router, asks=rules is None)
        assert isinstance(model.operations, NativeOperations)
        self._model, self._operations = model, model.operations
        self._rules = KernelRules(rules, model.config.num_experts) if rules else None
        self._places = ModelPlaces(
            model.embed_VD,
            [layer.attention.places for layer in model.layers],
            [layer.gate.places for layer in model.layers],
            [_places(layer.experts) for layer in model.layers],
            model.norm_D,
            model.head_VD,
            model.config.rms_norm_eps,
        )

    def run(
        self, ids_B: Tensor, caches: Sequence[KVCache], tell: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Told]:
        batch = Batch(ids_B, [1] * len(caches), caches, "decode")
        positions_B = batch.positions_T
        steps = self._operations.sequences(batch.new, caches, self._model.rotation(positions_B)).steps
        assert steps is not None
        rules = self._rules or self._model.asking(batch, positions_B, self.router, generator)
        found = self._operations.kernels.decode(ids_B, self._places, steps, rules)
        if not tell:
            return found.logits_TV, Told()
        return found.logits_TV, Told(list(zip(found.routings, found.router_LTE, strict=True)), found.times)


def _places(experts: object) -> ExpertPlaces:
    assert isinstance(experts, NativeExperts)
    return experts.places
