"""Decode steps without a host in them equal the model's own; on the CPU without a graph, their kernels interpreted."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import minimoe
from minimoe import benchmark
from minimoe.benchmark import Arm, Work, measure
from minimoe.cache import KVCache
from minimoe.engine import Engine
from minimoe.errors import NumericalError
from minimoe.generation import Generation
from minimoe.model import Batch
from minimoe.routers import Elbow, MixedK
from tests.accelerator import DEVICE
from tests.fixtures import edit_json, write_checkpoint
from tests.watchers import SpanWatcher, Watcher

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
decoding = importlib.import_module("minimoe.decoding.graphs")
GridExecutor = importlib.import_module("triton.runtime.interpreter").GridExecutor
attention, pairs = (importlib.import_module(f"minimoe.triton.{name}") for name in ("attention", "pairs"))

ROOM = 24
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]
Folders = Callable[..., Path]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter every program takes its time."""
    monkeypatch.setattr(attention, "SPLITS", 2)
    monkeypatch.setattr(attention, "TILE", 4)
    monkeypatch.setattr(pairs, "ROWS", 64)


def load(folder: Path | str, router: Any = "elbow", backend: str = "triton") -> Engine:
    return minimoe.load(folder, router=router, backend=backend, device=str(DEVICE))


def prompted(engine: Engine, lengths: list[int], room: int = ROOM) -> list[KVCache]:
    """The caches of prompts of these lengths, by torch alone: this is not about prefill."""
    model, generator = engine.model, torch.Generator().manual_seed(len(lengths))
    caches = [KVCache(engine.config, room, model.dtype, model.device) for _ in lengths]
    ids = torch.randint(0, engine.config.vocab_size, (sum(lengths),), generator=generator)
    load(engine.name, engine.router, "reference").model.forward(Batch(ids.to(DEVICE), lengths, caches), engine.router)
    return caches


@pytest.mark.parametrize(
    ("variant", "router", "lengths"),
    [
        ("clip_qkv", "top_p:p=0.6,cap=4", [3, 9]),
        ("norm_topk_true", "top_k", [2]),
    ],
)
def test_steps_equal_the_models_own(checkpoint: Folders, variant: str, router: str, lengths: list[int]) -> None:
    engine = load(checkpoint(variant, num_hidden_layers=2), router)
    reference = load(engine.name, router, "reference").model
    with torch.inference_mode():
        caches, twins = prompted(engine, lengths), prompted(engine, lengths)
        for token in (7, 11):
            ids_B = torch.full((len(lengths),), token, device=DEVICE) + torch.arange(len(lengths), device=DEVICE)
            assert engine.decoder is not None
            logits_BV = engine.decoder.step(ids_B, caches)
            hidden_BD = reference.forward(Batch(ids_B, [1] * len(lengths), twins, "decode"), engine.router)
            torch.testing.assert_close(logits_BV, reference.head(hidden_BD), rtol=1e-4, atol=1e-4)
        assert [cache.length for cache in caches] == [length + 2 for length in lengths]


def assert_alike(found: Generation, expected: Generation) -> None:
    assert (found.tokens, found.text, found.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)
    for mine, other in zip(found.routing or [], expected.routing or [], strict=True):
        assert torch.equal(mine.experts_TK, other.experts_TK)
        torch.testing.assert_close(mine.weights_TK, other.weights_TK, rtol=1e-4, atol=1e-5)


def test_a_batch_generates_as_ever_while_its_sequences_leave(checkpoint: Folders) -> None:
    """Prompts of several lengths, each with its own limit; one of them ends at a stop text. Tokens are drawn."""
    engine = load(checkpoint("base", num_hidden_layers=1))
    reference = load(engine.name, backend="reference")
    free = reference.generate(PROMPTS[1], max_new_tokens=4, temperature=1.5)
    assert isinstance(free, Generation)
    stop = engine.tokenizer.decode(free.tokens[1:3])

    def run(by: Engine) -> dict[int, Generation]:
        made = [
            by.request(prompt, max_new_tokens=most, temperature=1.5, stop=stop, routing=True)
            for prompt, most in zip(PROMPTS, (2, 5, 5), strict=True)
        ]
        with torch.inference_mode():
            return {index: result for index, _, result in by.batcher().run(made) if result}

    found, expected = run(engine), run(reference)
    assert expected[1].finish_reason == "stop"
    for index in range(len(PROMPTS)):
        assert_alike(found[index], expected[index])
    assert engine.decoder is not None
    assert set(engine.decoder.step_of) >= {2, 3}  # a graph for each


def test_streams_and_chats_go_through_the_steps(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, num_hidden_layers=1)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    edit_json(folder / "tokenizer_config.json", {"chat_template": template})
    engine, reference = load(folder), load(folder, backend="reference")
    for by in (engine, reference):
        by.text = "".join(by.stream("fox", max_new_tokens=3, temperature=0))  # type: ignore[attr-defined]
        chat = by.chat(max_new_tokens=3, temperature=0)
        by.answers = ["".join(chat.say(said)) for said in ("Who?", "Why?")]  # type: ignore[attr-defined]
    assert (engine.text, engine.answers) == (reference.text, reference.answers)  # type: ignore[attr-defined]
    assert engine.decoder is not None
    assert set(engine.decoder.step_of) == {1}


@pytest.mark.parametrize("make", [Watcher, SpanWatcher])
def test_probes_see_what_they_ask_for(checkpoint: Folders, make: type[Watcher]) -> None:
    engine, seen = load(checkpoint("base", num_hidden_layers=1)), []
    for by in (engine, load(engine.name, backend="reference")):
        probe = make(digits=3)
        by.generate(PROMPTS[2], max_new_tokens=3, temperature=0, probe=probe)
        seen.append(probe.seen)
    assert seen[0] == seen[1]
    assert engine.decoder is not None
    # Spans can only be seen where the host takes part.
    assert bool(engine.decoder.step_of) == (make is Watcher)


def test_the_benchmark_times_the_steps(checkpoint: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "TG_PROMPT", 1)
    engine = load(checkpoint("base", num_hidden_layers=1))
    arms = [
        Arm("elbow", "triton", Elbow(), engine.model, engine.decoder),
        Arm("elbow", "triton", Elbow(), engine.model),
    ]
    with_steps, without = measure(arms, [Work("tg", 1, 1)], vocabulary=300, repetitions=1)
    assert engine.decoder is not None
    assert set(engine.decoder.step_of) == {1}
    assert with_steps.mean_k == without.mean_k


def test_rules_that_need_the_host_say_so_and_run(checkpoint: Folders) -> None:
    engine = load(checkpoint("base", num_hidden_layers=1), "mixed_k")
    said = "The rule MixedK has to be asked on the host: decode steps are not captured, and slower."
    assert engine.notes == (said,)
    assert engine.decoder is None
    reference = load(engine.name, "mixed_k", "reference")
    options = {"max_new_tokens": 3, "temperature": 0, "seed": 2}
    found, expected = (by.generate(PROMPTS[0], **options) for by in (engine, reference))
    assert isinstance(found, Generation)
    assert isinstance(expected, Generation)
    assert_alike(found, expected)
    assert load(engine.name).notes == ()


def test_another_rule_has_steps_of_its_own(checkpoint: Folders) -> None:
    engine = load(checkpoint("base", num_hidden_layers=1))
    first = engine.decoder
    assert first is engine.decoder
    engine.router = MixedK()
    assert engine.decoder is None
    engine.router = Elbow()
    assert engine.decoder not in (None, first)
    assert engine.uncaptured(Elbow()) == ()


def test_router_logits_that_are_not_finite_name_their_layer(checkpoint: Folders) -> None:
    engine = load(checkpoint("base", num_hidden_layers=2))
    decoder = engine.decoder
    assert decoder is not None
    with torch.inference_mode():
        (cache,) = prompted(engine, [2])
        sound = decoder.step(torch.tensor([3]), [cache]).clone()
        cache.truncate(2)
        norm_D = engine.model.layers[1].gate.norm_D
        kept_D = norm_D.clone()
        norm_D.fill_(math.nan)  # a private mapping: the file stays as it is
        with pytest.raises(NumericalError, match="layer 1: the router logits are not finite"):
            decoder.step(torch.tensor([3]), [cache])
        assert cache.length == 2
        norm_D.copy_(kept_D)
        assert torch.equal(decoder.step(torch.tensor([3]), [cache]), sound)


def test_a_full_cache_is_refused(checkpoint: Folders) -> None:
    engine = load(checkpoint("base", num_hidden_layers=1))
    assert engine.decoder is not None
    with torch.inference_mode(), pytest.raises(IndexError, match="a cache of 4 positions cannot hold 5"):
        engine.decoder.step(torch.tensor([3, 3]), prompted(engine, [2, 4], room=4))


class NoLooking(TorchDispatchMode):
    """Refuses operations whose result, or its shape, hangs on values: a device that is being captured has none yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looking = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        assert not looking, f"{func} looks at values"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("router", ["elbow", "top_p:renorm=kept", "gap_ratio", "entropy"])
def test_nothing_that_is_captured_looks_at_a_value(checkpoint: Folders, router: str) -> None:
    engine = load(checkpoint("base", num_hidden_layers=1), router)
    with torch.inference_mode():
        caches = prompted(engine, [2, 5])
        step = decoding.DecodeStep(engine.model, engine.decoder._rules, 2)
        with NoLooking():
            step.run(torch.tensor([3, 4]), caches)
        with NoLooking(), pytest.raises(AssertionError, match="looks at values"):
            step.finish()


class Launches(TorchDispatchMode):
    """Counts what a GPU would be told to do: kernels, and operations that are no view and only make room."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in func.name()
        return func(*args, **(kwargs or {}))

    def launch(self, kernel: Any, *arguments: Any, **options: Any) -> None:
        self.count += 1
        with _disable_current_modes():
            RUN(kernel, *arguments, **options)


RUN = GridExecutor.__call__


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts what the interpreter is told")
@pytest.mark.parametrize(("lengths", "launched"), [([2], 16), ([2, 1], 19)])
def test_the_launches_of_a_layer(
    checkpoint: Folders, lengths: list[int], launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two norms, five products, three for attention, two for routing, two sums; and for the experts two or five."""
    counts = []
    for layers in (1, 2):
        engine = load(checkpoint("base", num_hidden_layers=layers))
        step = decoding.DecodeStep(engine.model, engine.decoder._rules, len(lengths))
        with torch.inference_mode():
            caches = prompted(engine, lengths)
        with torch.inference_mode(), Launches() as launches, monkeypatch.context() as patch:
            patch.setattr(GridExecutor, "__call__", lambda *given, by=launches, **more: by.launch(*given, **more))
            step.run(torch.tensor([3] * len(lengths)), caches)
        counts.append(launches.count)
    assert counts[1] - counts[0] == launched


def test_a_capture_that_fails_is_not_kept(checkpoint: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(checkpoint("base", num_hidden_layers=1))
    step = decoding.DecodeStep(engine.model, engine.decoder._rules, 1)
    step.captures = True

    @contextmanager
    def capture(graph: object) -> Iterator[None]:
        yield
        raise RuntimeError("no room for a graph")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    with torch.inference_mode():
        caches, twins = prompted(engine, [4]), prompted(engine, [4])
        first = step.run(torch.tensor([3]), caches).clone()
        assert torch.equal(first, engine.decoder.step(torch.tensor([3]), twins))
        caches[0].advance(1)
        with pytest.raises(RuntimeError, match="no room"):
            step.run(torch.tensor([5]), caches)
        step.captures = False
        found = step.run(torch.tensor([5]), caches)
        assert torch.equal(found, engine.decoder.step(torch.tensor([5]), twins))


def test_the_second_step_is_captured_and_then_replayed(checkpoint: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA's graphs, whose replay runs again what ran while it was captured."""
    engine, events = load(checkpoint("base", num_hidden_layers=1)), []
    step = decoding.DecodeStep(engine.model, engine.decoder._rules, 1)
    step.captures = True
    body = step._run

    def run() -> None:
        events.append("run")
        body()

    @contextmanager
    def capture(graph: object) -> Iterator[None]:
        events.append("capture")
        yield

    step._run = run
    replay = SimpleNamespace(replay=lambda: (events.append("replay"), body()))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: replay)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    with torch.inference_mode():
        caches, twins = prompted(engine, [4]), prompted(engine, [4])
        for token in (3, 5, 7):
            found = step.run(torch.tensor([token]), caches).clone()
            caches[0].advance(1)
            assert torch.equal(found, engine.decoder.step(torch.tensor([token]), twins))
    assert events == ["run", "capture", "run", "replay", "replay"]
