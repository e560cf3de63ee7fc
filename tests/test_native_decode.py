"""Decode steps in one call of the native kernels, against the model's own passes.

Shape letters: B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import minimoe
from minimoe.cache import KVCache
from minimoe.decoding.native import NativeDecoder
from minimoe.engine import Engine
from minimoe.errors import NumericalError
from minimoe.experts.native import NativeExperts
from minimoe.generation import Generation
from minimoe.model import Batch
from minimoe.native import Kernels
from minimoe.native.places import ModelPlaces, PrefixRule, StepPlaces
from minimoe.routers import Elbow, Router, RouterContext, TopK
from tests.native_sets import EPS, SETS, each_set, needs_kernels
from tests.watchers import SpanWatcher, Watcher

pytestmark = needs_kernels

Folders = Callable[..., Path]
ROOM = 40


def load(folder: Path | str, router: Any = "elbow", isa: str = "", **options: Any) -> Engine:
    return minimoe.load(folder, router=router, backend=f"native:isa={isa or SETS[0].name}", **options)


def prompted(engine: Engine, lengths: Sequence[int]) -> list[KVCache]:
    model, generator = engine.model, torch.Generator().manual_seed(len(lengths))
    caches = [KVCache(engine.config, ROOM, model.dtype, model.device) for _ in lengths]
    for cache in caches:
        cache.keys_LHCd.zero_()  # fresh memory may hold NaN, which equals nothing
        cache.values_LHCd.zero_()
    if sum(lengths):
        ids = torch.randint(0, engine.config.vocab_size, (sum(lengths),), generator=generator)
        filled = [(length, cache) for length, cache in zip(lengths, caches, strict=True) if length]
        model.forward(Batch(ids, [length for length, _ in filled], [cache for _, cache in filled]), engine.router)
    return caches


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("variant", "router", "lengths"),
    [
        ("base", "elbow", [3, 0, 9]),
        ("top8_of_64", "elbow:floor=2,cap=5", [7]),
        ("top8_of_64", "top_k:k=3", [1, 2, 3, 4, 5]),
        ("clip_qkv", "top_k", [30]),
        ("one_expert", "elbow", [4]),
        ("tied_head", "elbow:floor=0,renorm=none", [2, 2]),
    ],
)
def test_steps_equal_the_models_own_bit_for_bit(
    checkpoint: Folders, variant: str, router: str, lengths: list[int], dtype: str
) -> None:
    engine = load(checkpoint(variant), router, dtype=dtype)
    assert isinstance(engine.decoder, NativeDecoder)
    with torch.inference_mode():
        caches, twins = prompted(engine, lengths), prompted(engine, lengths)
        for token in (7, 11, 13):
            ids_B, ours, theirs = torch.arange(len(lengths)) + token, Watcher(), Watcher()
            logits_BV = engine.decoder.step(ids_B, caches, ours)
            hidden_BD = engine.model.forward(Batch(ids_B, [1] * len(lengths), twins, "decode"), engine.router, theirs)
            assert torch.equal(logits_BV, engine.model.head(hidden_BD, theirs))
            assert ours.seen == theirs.seen
        for cache, twin, length in zip(caches, twins, lengths, strict=True):
            assert cache.length == twin.length == length + 3
            assert torch.equal(cache.keys_LHCd[:, :, : cache.length], twin.keys_LHCd[:, :, : twin.length])
            assert torch.equal(cache.values_LHCd[:, :, : cache.length], twin.values_LHCd[:, :, : twin.length])


@each_set
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_set_steps_as_plain_torch_does(checkpoint: Folders, kernels: Kernels, dtype: str) -> None:
    engine = load(checkpoint("top8_of_64"), "top_k", kernels.name, dtype=dtype)
    reference = minimoe.load(engine.name, backend="reference", dtype=dtype)
    assert isinstance(engine.decoder, NativeDecoder)
    with torch.inference_mode():
        caches, twins = prompted(engine, [5, 1]), prompted(reference, [5, 1])
        ids_B = torch.tensor([7, 300])
        logits_BV = engine.decoder.step(ids_B, caches)
        hidden_BD = reference.model.forward(Batch(ids_B, [1, 1], twins, "decode"), reference.router)
        expected_BV = reference.model.head(hidden_BD)
    if dtype == "float32":
        torch.testing.assert_close(logits_BV, expected_BV, rtol=1e-4, atol=1e-4)
    else:  # near ties route another way in half precision: most logits agree
        distance = (logits_BV.float() - expected_BV.float()).norm() / expected_BV.float().norm()
        assert distance < 8 * EPS[torch.bfloat16]


@dataclass(frozen=True, kw_only=True)
class Mine(TopK):
    """Counts as TopK does, and sets another limit in each layer."""

    def limit(self, context: RouterContext) -> int:
        return 1 + context.layer % 2


@pytest.mark.parametrize(
    ("variant", "router", "decodes"),
    [
        ("base", "top_k", True),
        ("base", "elbow", True),
        ("base", "elbow:renorm=kept", False),
        ("base", "elbow:reading=printed", False),
        ("base", "top_p", False),
        ("base", "layer_k:k=1/2/1", False),
        ("base", Mine(), False),
        ("base", "top_k:k=9", False),  # of 8 experts: refused with a sentence by the rule itself
        ("norm_topk_true", "top_k", False),
        ("norm_topk_true", "top_k:renorm=none", True),
    ],
)
def test_rules_that_only_count_need_no_python(
    checkpoint: Folders, variant: str, router: str | Router, decodes: bool
) -> None:
    engine = load(checkpoint(variant), router)
    assert isinstance(engine.decoder, NativeDecoder) == decodes
    assert engine.notes == ()


def test_other_backends_have_no_such_steps(checkpoint: Folders) -> None:
    for backend in ("bucketed", "reference"):
        assert minimoe.load(checkpoint("base"), backend=backend).decoder is None


def test_a_changed_rule_has_steps_of_its_own(checkpoint: Folders) -> None:
    engine = load(checkpoint("base"))
    first = engine.decoder
    assert first is engine.decoder
    engine.router = Elbow(renorm="kept")
    assert engine.decoder is None
    engine.router = Elbow()
    assert engine.decoder not in (None, first)


@pytest.mark.parametrize("make", [Watcher, SpanWatcher])
def test_generating_goes_through_the_steps_but_under_a_probe_of_spans(
    checkpoint: Folders, make: type[Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts that end one after the other, with tokens that are drawn and routings that are kept."""
    engine, seen, texts, steps = load(checkpoint("base")), [], [], []
    decode = Kernels.decode
    monkeypatch.setattr(Kernels, "decode", lambda self, *given: (steps.append(len(given[0])), decode(self, *given))[1])

    def run(probe: Watcher) -> list[Generation]:
        requests = [
            engine.request(prompt, max_new_tokens=most, temperature=1.5, routing=True)
            for prompt, most in (("Once", 3), ("The fox", 5), ("Who?", 6))
        ]
        with torch.inference_mode():
            return sorted(
                (result for _, _, result in engine.batcher(probe).run(requests) if result),
                key=lambda result: len(result.tokens),
            )

    for probe in (make(), SpanWatcher()):
        texts.append(run(probe))
        seen.append([note for note in probe.seen if not isinstance(note, str)])  # without the names of spans
    assert seen[0] == seen[1]
    assert steps == ([3, 3, 2, 2, 1] if make is Watcher else [])
    for ours, theirs in zip(*texts, strict=True):
        assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
        for mine, other in zip(ours.routing or [], theirs.routing or [], strict=True):
            assert torch.equal(mine.experts_TK, other.experts_TK)
            assert torch.equal(mine.weights_TK, other.weights_TK)


def test_router_logits_that_are_not_finite_name_their_layer(checkpoint: Folders) -> None:
    engine = load(checkpoint("base"))
    assert engine.decoder is not None
    with torch.inference_mode():
        (cache,) = prompted(engine, [2])
        sound = engine.decoder.step(torch.tensor([3]), [cache])
        cache.truncate(2)
        norm_D = engine.model.layers[1].gate.norm_D
        kept_D = norm_D.clone()
        norm_D.fill_(math.nan)  # a private mapping: the file stays as it is
        with pytest.raises(NumericalError, match="layer 1: the router logits are not finite"):
            engine.decoder.step(torch.tensor([3]), [cache])
        assert cache.length == 2
        norm_D.copy_(kept_D)
        assert torch.equal(engine.decoder.step(torch.tensor([3]), [cache]), sound)


def test_what_is_refused_leaves_every_cache_as_it_was(checkpoint: Folders) -> None:
    engine = load(checkpoint("base"))
    assert isinstance(engine.decoder, NativeDecoder)
    with torch.inference_mode():
        caches = prompted(engine, [2, 4])
        caches[1].length = ROOM
        before = [(cache.keys_LHCd.clone(), cache.values_LHCd.clone()) for cache in caches]
        with pytest.raises(IndexError, match="no room"):
            engine.decoder.step(torch.tensor([3, 3]), caches)
        caches[1].length = 4
        for wrong in (engine.config.vocab_size, -1):
            with pytest.raises(ValueError, match="not one of the 307"):
                engine.decoder.step(torch.tensor([3, wrong]), caches)
        for ids_B in (torch.tensor([3]), torch.tensor([3, 3], dtype=torch.int32), torch.tensor([[3], [3]])):
            with pytest.raises(ValueError, match="one token of each"):
                engine.decoder.step(ids_B, caches)
        for cache, (keys_LHCd, values_LHCd) in zip(caches, before, strict=True):
            assert torch.equal(cache.keys_LHCd, keys_LHCd)
            assert torch.equal(cache.values_LHCd, values_LHCd)
        assert [cache.length for cache in caches] == [2, 4]


def test_what_does_not_fit_together_is_refused(checkpoint: Folders) -> None:
    model, other = load(checkpoint("base")).model, load(checkpoint("top8_of_64")).model
    halves = load(checkpoint("base"), dtype="bfloat16").model

    def places(**changes: Any) -> ModelPlaces:
        experts = [layer.experts for layer in model.layers]
        given = {
            "embed_VD": model.embed_VD,
            "attention": [layer.attention.places for layer in model.layers],
            "gates": [layer.gate.places for layer in model.layers],
            "experts": [of.places for of in experts if isinstance(of, NativeExperts)],
            "norm_D": model.norm_D,
            "head_VD": model.head_VD,
        }
        return ModelPlaces(**{**given, **changes}, eps=1e-5)

    gates, attention = [layer.gate.places for layer in model.layers], [layer.attention.places for layer in model.layers]
    wrong: list[dict[str, Any]] = [
        {"gates": gates[:2]},
        {"gates": [*gates[:2], other.layers[2].gate.places]},
        {"attention": attention[::-1]},
        {"attention": [*attention[:2], halves.layers[2].attention.places]},
        {"head_VD": model.head_VD[1:]},
        {"norm_D": model.norm_D[1:]},
        {"embed_VD": halves.embed_VD, "norm_D": halves.norm_D, "head_VD": halves.head_VD},
    ]
    for changes in wrong:
        with pytest.raises(ValueError, match="fit together"):
            places(**changes)
    for count, floor in (("all", 3), ("all", -1), ("some", 1)):
        with pytest.raises(ValueError, match="cannot be kept"):
            PrefixRule(count, floor, 2)  # type: ignore[arg-type]
    kernels, ids_B = SETS[0], torch.tensor([3])
    cache = KVCache(halves.config, 4, halves.dtype, halves.device)
    steps = StepPlaces([cache.keys_LHCd], [cache.values_LHCd], [0], *halves.rotation(torch.tensor([0])))
    with pytest.raises(ValueError, match="fit together"):
        kernels.decode(ids_B, places(), steps, PrefixRule("all", 1, 2))
    cache = KVCache(model.config, 4, model.dtype, model.device)
    steps = StepPlaces([cache.keys_LHCd], [cache.values_LHCd], [0], *model.rotation(torch.tensor([0])))
    with pytest.raises(ValueError, match="fit together"):
        kernels.decode(ids_B, places(), steps, PrefixRule("all", 1, 9))
