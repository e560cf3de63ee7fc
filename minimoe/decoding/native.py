"""Decode steps in one call of the native kernels: Python between the products of each layer costs some 6 % of a step.

Shape letters: B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.decoding.base import Decoder, Routings
from minimoe.experts.native import NativeExperts
from minimoe.model import Olmoe
from minimoe.native.places import ExpertPlaces, ModelPlaces, PrefixRule
from minimoe.operations import NativeOperations
from minimoe.routers import Elbow, PrefixRouter, Router, TopK
from minimoe.routing import Routing


class NativeDecoder(Decoder):
    """The same bits as the model's own passes. Made by `of`."""

    def __init__(self, model: Olmoe, router: Router, rule: PrefixRule, operations: NativeOperations) -> None:
        super().__init__(router)
        self._model, self._rule, self._operations = model, rule, operations
        self._places = ModelPlaces(
            model.embed_VD,
            [layer.attention.places for layer in model.layers],
            [layer.gate.places for layer in model.layers],
            [_places(layer.experts) for layer in model.layers],
            model.norm_D,
            model.head_VD,
            model.config.rms_norm_eps,
        )

    @classmethod
    def of(cls, model: Olmoe, router: Router) -> NativeDecoder | None:
        """The steps of a model with the native backend, or None if Python has to be asked what the rule decides."""
        assert isinstance(model.operations, NativeOperations)
        rule = counted(router, model)
        return None if rule is None else cls(model, router, rule, model.operations)

    def run(self, ids_B: Tensor, caches: Sequence[KVCache], tell: bool) -> tuple[Tensor, Routings]:
        rotation = self._model.rotation(torch.tensor([cache.length for cache in caches]))
        steps = self._operations.sequences([1] * len(caches), caches, rotation).steps
        assert steps is not None
        found = self._operations.kernels.decode(ids_B, self._places, steps, self._rule)
        if not tell:
            return found.logits_TV, []
        E = self._model.config.num_experts
        layers = zip(found.experts_LTK, found.weights_LTK, found.k_LT, found.router_LTE, strict=True)
        return found.logits_TV, [
            (Routing(experts_TK, weights_TK, k_T, E), logits_TE) for experts_TK, weights_TK, k_T, logits_TE in layers
        ]


def counted(router: Router, model: Olmoe) -> PrefixRule | None:
    """The rule as the kernels count, or None: the type decides, for a subclass may do otherwise."""
    config = model.config
    if type(router) not in (TopK, Elbow):
        return None
    assert isinstance(router, PrefixRouter)
    count, (limit, mass) = router.native_count(), router.settled(config.top_k, config.norm_topk_prob)
    if count is None or mass != "none" or not router.floor <= limit <= config.num_experts:
        return None  # a floor or a limit that is out of range is refused by the rule itself, with a sentence
    return PrefixRule(count, router.floor, limit)


def _places(experts: object) -> ExpertPlaces:
    assert isinstance(experts, NativeExperts)
    return experts.places
