"""Decode steps in one call of the native kernels, against the model's own passes.

Shape letters: B sequences.
"""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import minimoe
from minimoe.cache import KVCache
from minimoe.decoding.native import NativeDecoder
from minimoe.engine import Engine
from minimoe.errors import InputError, NumericalError
from minimoe.experts.native import NativeExperts
from minimoe.generation import Generation
from minimoe.model import Batch
from minimoe.native import Kernels
from minimoe.native.places import KernelRules, ModelPlaces, StepPlaces
from minimoe.prefix_rule import PrefixRule
from minimoe.routers import Elbow, Router, RouterContext, TopK
from minimoe.routing import Routing
from tests.native_sets import EPS, SETS, each_set, needs_kernels
from tests.watchers import SpanWatcher, Watcher

pytestmark = needs_kernels

Folders = Callable[..., Path]
ROOM = 40


def load(folder: Path | str, router: Any = "elbow", isa: str = "", **options: Any) -> Engine:
    return minimoe.load(folder, router=router, backend=f"native:isa={isa or SETS[0].name}", **options)


@dataclass(frozen=True, kw_only=True)
class Mine(TopK):
    """Counts as TopK does, and sets another limit in each layer."""

    def limit(self, context: RouterContext) -> int:
        return 1 + context.layer % 2


class Backwards(Router):
    """The two worst experts, in tensors that do not lie row after row."""

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        logits_TE.sort(descending=True)  # it may write to what it is given, too
        T, E = logits_TE.shape
        experts_TK = logits_TE.argsort(stable=True)[:, :2].T.contiguous().T
        return Routing(experts_TK, torch.full((2, T), 0.5).T, torch.full((T,), 2), E)


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
        ("top8_of_64", "top_p:p=0.3,floor=0", [4, 1]),
        ("top8_of_64", "threshold:p=1,floor=0", [2]),
        ("norm_topk_true", "elbow", [1, 6]),
        ("top8_of_64", "entropy:renorm=topk", [1, 6]),
        ("base", "layer_k:k=1/3/2", [3]),
        ("base", "random:k=2", [3, 5, 2]),
        ("base", Mine(), [3, 1]),
        ("base", Backwards(), [2, 4]),
    ],
)
def test_steps_equal_the_models_own_bit_for_bit(
    checkpoint: Folders, variant: str, router: str | Router, lengths: list[int], dtype: str
) -> None:
    """By rules that count, by rules that are asked, and by rules of a user's own."""
    engine = load(checkpoint(variant), router, dtype=dtype)
    assert isinstance(engine.decoder, NativeDecoder)
    with torch.inference_mode():
        caches, twins = prompted(engine, lengths), prompted(engine, lengths)
        draws, same_draws = (torch.Generator().manual_seed(0) for _ in range(2))
        for token in (7, 11, 13):
            ids_B, ours, theirs = torch.arange(len(lengths)) + token, Watcher(), Watcher()
            logits_BV = engine.decoder.step(ids_B, caches, ours, draws)
            batch = Batch(ids_B, [1] * len(lengths), twins, "decode")
            hidden_BD = engine.model.forward(batch, engine.router, theirs, same_draws)
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


@pytest.mark.parametrize(
    ("variant", "router", "counts"),
    [
        ("base", "top_k", True),
        ("base", "elbow", True),
        ("base", "elbow:renorm=kept,reading=printed", True),
        ("base", "top_p", True),
        ("base", "layer_k:k=1/2/1", True),
        ("norm_topk_true", "top_k", True),
        ("base", Mine(), False),
        ("base", "mixed_k:k=1.5", False),
        ("base", "top_k:k=9", False),  # of 8 experts: refused with a sentence by the rule itself
    ],
)
def test_rules_that_only_count_are_not_asked(
    checkpoint: Folders, variant: str, router: str | Router, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = load(checkpoint(variant), router), []
    route = type(engine.router).route
    monkeypatch.setattr(
        type(engine.router), "route", lambda *given: (asked.append(given[2].layer), route(*given))[1], raising=True
    )
    assert engine.decoder is not None
    with torch.inference_mode():
        caches = prompted(engine, [0])
        if router == "top_k:k=9":
            with pytest.raises(InputError, match="up to 9 experts a token, but the model has 8"):
                engine.decoder.step(torch.tensor([3]), caches)
        else:
            engine.decoder.step(torch.tensor([3]), caches)
    layers = [0] if router == "top_k:k=9" else [0, 1, 2]
    assert asked == ([] if counts else layers)
    assert engine.notes == ()


class Failing(Router):
    """Fails in the second layer, one way or another."""

    def __init__(self, failure: BaseException | Routing) -> None:
        self.failure, self.layers = failure, list[int]()

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        self.layers.append(context.layer)
        if context.layer == 0:
            return TopK(k=2).route(logits_TE, context)
        if isinstance(self.failure, Routing):
            return self.failure
        raise self.failure


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ZeroDivisionError("by nought"), "by nought"),
        (KeyboardInterrupt("stop"), "stop"),
        (Routing(torch.tensor([[9]]), torch.ones(1, 1), torch.tensor([1]), 8), "broken Routing"),
        (Routing(torch.tensor([[1]]), torch.ones(1, 1).double(), torch.tensor([1]), 8), "broken Routing"),
        (Routing(torch.tensor([[1], [1]]), torch.ones(2, 1), torch.tensor([1, 1]), 8), "was given logits"),
    ],
)
def test_what_a_rule_raises_comes_through_the_kernels(
    checkpoint: Folders, failure: BaseException | Routing, told: str
) -> None:
    engine = load(checkpoint("base"))
    rule = Failing(failure)
    decoder = engine.decoder_for(rule)
    assert decoder is not None
    kind = InputError if isinstance(failure, Routing) else type(failure)
    with torch.inference_mode():
        (cache,) = prompted(engine, [2])
        with pytest.raises(kind, match=told):
            decoder.step(torch.tensor([3]), [cache])
        assert (cache.length, rule.layers) == (2, [0, 1])
        (twin,) = prompted(engine, [2])
        assert engine.decoder is not None
        sound, again = (engine.decoder.step(torch.tensor([3]), [one]) for one in (twin, cache))
        assert torch.equal(sound, again)


def test_the_kernels_refuse_a_routing_that_nobody_looked_at(checkpoint: Folders) -> None:
    """As a rule of minimoe's own might give it."""
    engine = load(checkpoint("base"))
    decoder = engine.decoder
    assert isinstance(decoder, NativeDecoder)
    cache = KVCache(engine.config, 4, engine.model.dtype, engine.model.device)
    rotation = engine.model.rotation(torch.tensor([0]))
    steps = StepPlaces([cache.keys_LHCd], [cache.values_LHCd], [0], *rotation)
    one, ids_B = torch.ones(1, 1), torch.tensor([3])
    for wrong in (
        Routing(torch.tensor([[8]]), one, torch.tensor([1]), 8),
        Routing(torch.tensor([[-1]]), one, torch.tensor([1]), 8),
        Routing(torch.tensor([[1]]), one, torch.tensor([2]), 8),
        Routing(torch.tensor([[1]]), one, torch.tensor([-1]), 8),
    ):
        with pytest.raises(InputError, match="it holds k between 0"):
            SETS[0].decode(ids_B, decoder._places, steps, lambda layer, logits_TE, wrong=wrong: wrong)
    for wrong in (
        Routing(torch.tensor([[1], [1]]), torch.ones(2, 1), torch.tensor([1, 1]), 8),
        Routing(torch.tensor([[1]]), one.double(), torch.tensor([1]), 8),
        Routing(torch.tensor([[1]], dtype=torch.int32), one, torch.tensor([1]), 8),
    ):
        with pytest.raises(ValueError, match=r"fit together|hold float32"):
            SETS[0].decode(ids_B, decoder._places, steps, lambda layer, logits_TE, wrong=wrong: wrong)


class Late(Exception):
    """What the alarm raises."""


def test_what_a_signal_raises_is_not_lost(checkpoint: Folders) -> None:
    """It comes when Python runs again after a call of the kernels: nowhere may it be caught, or told and forgotten."""
    engine = load(checkpoint("base"), "mixed_k")
    decoder = engine.decoder
    assert decoder is not None

    def ring(*_: object) -> None:
        raise Late

    def step_for_ever(cache: KVCache, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            decoder.step(torch.tensor([3]), [cache])
            cache.truncate(2)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with torch.inference_mode():
            (cache,) = prompted(engine, [2])
            for turn in range(60):
                cache.truncate(2)
                with pytest.raises(Late):
                    step_for_ever(cache, 1e-4 * (1 + turn % 7))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_step_leaves_nothing_behind(checkpoint: Folders) -> None:
    """No cycle keeps a step's tensors until Python looks."""
    engine = load(checkpoint("base"), "top_p")
    assert engine.decoder is not None
    with torch.inference_mode():
        (cache,) = prompted(engine, [2])
        engine.decoder.step(torch.tensor([3]), [cache])
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                engine.decoder.step(torch.tensor([3]), [cache])
            assert gc.collect() == 0
        finally:
            gc.enable()


def test_other_backends_have_no_such_steps(checkpoint: Folders) -> None:
    for backend in ("bucketed", "reference"):
        assert minimoe.load(checkpoint("base"), backend=backend).decoder is None


def test_a_changed_rule_has_steps_of_its_own(checkpoint: Folders) -> None:
    engine = load(checkpoint("base"))
    first = engine.decoder
    assert first is engine.decoder
    engine.router = Elbow(renorm="kept")
    assert engine.decoder not in (None, first)
    assert engine.decoder is not None
    assert engine.decoder.router is engine.router


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


class Timekeeper(Watcher):
    """Notes what took how long."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[str, int | None, float]] = []

    def span(self, name: str, layer: int | None = None) -> AbstractContextManager[None]:
        self.times.append((name, layer, 0.0))
        return nullcontext()

    def spent(self, name: str, layer: int | None, seconds: float) -> None:
        self.times.append((name, layer, seconds))


@pytest.mark.parametrize("router", ["elbow", "mixed_k:k=1.5"])
def test_a_step_tells_what_its_parts_took(checkpoint: Folders, router: str) -> None:
    engine, steps, spans = load(checkpoint("base"), router), Timekeeper(), Timekeeper()
    assert engine.decoder is not None
    with torch.inference_mode():
        (cache,) = prompted(engine, [3])
        start = time.perf_counter()
        engine.decoder.step(torch.tensor([3]), [cache], steps)
        whole = time.perf_counter() - start
        hidden_1D = engine.model.forward(Batch(torch.tensor([4]), [1], [cache], "decode"), engine.router, spans)
        engine.model.head(hidden_1D, spans)
    assert [part[:2] for part in steps.times] == [part[:2] for part in spans.times]
    assert all(seconds > 0 for name, _, seconds in steps.times if name in ("attention", "experts", "head"))
    assert all(seconds >= 0 for _, _, seconds in steps.times)
    assert sum(seconds for _, _, seconds in steps.times) < whole


def test_a_rule_that_takes_long_is_what_took_long(checkpoint: Folders) -> None:
    class Slow(TopK):
        def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
            time.sleep(0.01 * (context.layer == 1))
            return super().count(sorted_probs_TE, context)

    engine, told = load(checkpoint("base")), Timekeeper()
    decoder = engine.decoder_for(Slow())
    assert decoder is not None
    with torch.inference_mode():
        decoder.step(torch.tensor([3]), prompted(engine, [3]), told)
    assert max(told.times, key=lambda part: part[2])[:2] == ("rule", 1)
    assert max(seconds for _, _, seconds in told.times) >= 0.01


def test_a_profile_is_of_the_steps_that_generate_runs(checkpoint: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = load(checkpoint("base")), []
    decode = Kernels.decode
    monkeypatch.setattr(Kernels, "decode", lambda self, *given: (steps.append(1), decode(self, *given))[1])
    profile = engine.profile("Once upon", max_new_tokens=4, temperature=0)
    assert len(steps) == 3 * 3  # to warm up, without a probe, and with one
    parts = {row.operation: row for row in profile.by_operation("decode")}
    assert [parts[name].count for name in ("embed", "rule", "head")] == [3, 9, 3]
    assert 0 < sum(part.total for part in parts.values()) < profile.probed_seconds


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

    def rules(*limits: int, experts: int = 8) -> KernelRules:
        return KernelRules([PrefixRule("number", 1, 0, limit, "none", 2) for limit in limits], experts)

    for limits, told in (((2, 2, 1), "one limit"), ((), "one limit"), ((9, 9, 9), "cannot be routed")):
        with pytest.raises(ValueError, match=told):
            rules(*limits)
    kernels, ids_B = SETS[0], torch.tensor([3])
    cache = KVCache(halves.config, 4, halves.dtype, halves.device)
    steps = StepPlaces([cache.keys_LHCd], [cache.values_LHCd], [0], *halves.rotation(torch.tensor([0])))
    with pytest.raises(ValueError, match="fit together"):
        kernels.decode(ids_B, places(), steps, rules(2, 2, 2))
    cache = KVCache(model.config, 4, model.dtype, model.device)
    steps = StepPlaces([cache.keys_LHCd], [cache.values_LHCd], [0], *model.rotation(torch.tensor([0])))
    kernels.decode(ids_B, places(), steps, rules(2, 2, 2))
    for wrong_rules in (rules(2, 2), rules(2, 2, 2, experts=7)):
        with pytest.raises(ValueError, match="fit together"):
            kernels.decode(ids_B, places(), steps, wrong_rules)
