"""The engine end to end: batches, streams, chats, scores, limits and refusals."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import EOS, edit_json, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

import minimoe
from minimoe.engine import Engine
from minimoe.errors import InputError, NumericalError
from minimoe.generation import Batcher
from minimoe.model import Batch
from minimoe.probe import Probe
from minimoe.routers import Router, RouterContext
from minimoe.routing import Routing
from minimoe.sampling import Sampler

PROMPTS = ["Once upon a time", "", "   ", "What is the answer?", "é🙂한", "The fox and the owl were friends, and"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    return minimoe.load(checkpoint("top8_of_64"), router="elbow")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model with a chat template and a context of 128 tokens."""
    folder = write_checkpoint(tmp_path_factory.mktemp("chatty"), "base")
    edit_json(folder / "tokenizer_config.json", {"chat_template": TEMPLATE})
    return minimoe.load(folder)


class Passes(Probe):
    """Remembers the phase and the sizes of every pass."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int], list[int]]] = []

    def step(self, phase: str, new: Any, past: Any) -> None:
        self.seen.append((phase, list(new), list(past)))


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_batched_equals_alone(engine: Engine, temperature: float) -> None:
    together = engine.generate(PROMPTS, max_new_tokens=12, temperature=temperature, seed=5)
    for i, prompt in enumerate(PROMPTS):
        alone = engine.generate(prompt, max_new_tokens=12, temperature=temperature, seed=5 + i)
        assert alone.tokens == together[i].tokens
        assert alone.text == together[i].text
        for one, other in zip(alone.routing, together[i].routing, strict=True):
            assert torch.equal(one.experts_TK, other.experts_TK)
            assert torch.allclose(one.weights_TK, other.weights_TK, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), data=st.data())
def test_logits_of_a_batch_equal_those_alone(engine: Engine, lengths: list[int], data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1000))
    ids = torch.randint(0, 300, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    model, router = engine.model, engine.router
    together = model.head(model.forward(Batch(ids, lengths), router))
    alone = [model.head(model.forward(Batch(part, [len(part)]), router)) for part in ids.split(lengths)]
    assert (together - torch.cat(alone)).abs().max() <= 1e-5


def test_two_runs_are_identical(engine: Engine) -> None:
    first, second = (engine.generate(PROMPTS, max_new_tokens=20, temperature=1.0, seed=3) for _ in range(2))
    assert [g.tokens for g in first] == [g.tokens for g in second]
    assert engine.generate("Once", temperature=1.0, seed=4).tokens != engine.generate("Once", temperature=1.0).tokens


@pytest.mark.parametrize("max_batch", [1, 2, 32])
@pytest.mark.parametrize("prefill_tokens", [1, 3, 2048])
def test_limits_of_a_pass_change_nothing(engine: Engine, max_batch: int, prefill_tokens: int) -> None:
    """Sequences wait, enter and leave in whatever order the limits force; the texts are the same."""
    counts = (3, 9, 0, 5, 1, 7)
    requests = [engine.request(p, max_new_tokens=n, temperature=0) for p, n in zip(PROMPTS, counts, strict=True)]
    probe = Passes()
    batcher = Batcher(
        engine.model,
        engine.tokenizer,
        engine.router,
        engine.eos_token_ids,
        probe,
        max_batch=max_batch,
        prefill_tokens=prefill_tokens,
    )
    with torch.inference_mode():
        done = {index: result for index, _, result in batcher.run(requests) if result}
    for index, request in enumerate(requests):
        expected = engine.generate(list(request.ids), max_new_tokens=request.max_new_tokens, temperature=0)
        assert done[index].tokens == expected.tokens
    for phase, new, past in probe.seen:
        assert len(new) <= max_batch
        assert all(n == 1 for n in new) if phase == "decode" else sum(new) <= prefill_tokens
        assert all(p > 0 for p in past) if phase == "decode" else True
    # No filler: every prompt token once, and every new token but each sequence's last.
    ran = sum(sum(new) for _, new, _ in probe.seen)
    assert ran == sum(len(r.ids) + len(done[i].tokens) - 1 for i, r in enumerate(requests) if r.max_new_tokens)


def test_a_one_token_prompt_is_a_prefill(engine: Engine) -> None:
    probe = Passes()
    engine.generate([7], max_new_tokens=3, temperature=0, probe=probe)
    assert [phase for phase, _, _ in probe.seen] == ["prefill", "decode", "decode"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("temperature", [0, 2.0])
def test_streamed_equals_whole(engine: Engine, prompt: str, temperature: float) -> None:
    options = {"max_new_tokens": 30, "temperature": temperature, "seed": 11}
    whole = engine.generate(prompt, **options)
    stream = engine.stream(prompt, **options)
    pieces = list(stream)
    assert "".join(pieces) == whole.text
    assert stream.result is not None
    assert stream.result.tokens == whole.tokens
    assert all(pieces)


def test_routing_covers_every_token_that_was_run(engine: Engine) -> None:
    result = engine.generate("The fox", max_new_tokens=6, temperature=0)
    assert result.routing is not None
    assert len(result.routing) == engine.config.num_layers
    for routing in result.routing:
        routing.check()
        assert routing.num_tokens == len(result.prompt_tokens) + len(result.tokens) - 1
        assert 1 <= routing.k_T.float().mean() < engine.config.top_k
    assert engine.generate("The fox", max_new_tokens=1, routing=False).routing is None


def meddle(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], None]) -> None:
    """Change the logits of every new token before it is chosen."""
    choose = Sampler.choose

    def changed(self: Sampler, logits_V: torch.Tensor, history: Sequence[int], step: int) -> int:
        change(logits_V)
        return choose(self, logits_V, history, step)

    monkeypatch.setattr(Sampler, "choose", changed)


def logit_bias(monkeypatch: pytest.MonkeyPatch, *tokens: int) -> None:
    """Make the model write these tokens one after the other, whatever it thinks."""
    queue = list(tokens)

    def bias(logits_V: torch.Tensor) -> None:
        if queue:
            logits_V[queue.pop(0)] = 1e4

    meddle(monkeypatch, bias)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "written"),
    [(EOS, None, EOS), ([9, 12], None, 12), (9, [12, 15], 15), (None, 12, 12), (9, [12], 9)],
)
def test_any_eos_id_ends_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_config: Any, in_generation: Any, written: int
) -> None:
    folder = write_checkpoint(tmp_path, "base")
    edit_json(folder / "config.json", {"eos_token_id": in_config})
    (folder / "generation_config.json").write_text("{}")
    edit_json(folder / "generation_config.json", {"eos_token_id": in_generation})
    engine = minimoe.load(folder)
    logit_bias(monkeypatch, 40, 41, written)
    result = engine.generate("Once", max_new_tokens=10, temperature=0)
    assert result.tokens == [40, 41, written]
    assert result.finish_reason == "eos"
    assert "<|endoftext|>" not in result.text


def test_without_eos_the_text_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    logit_bias(monkeypatch, 40, 41, 42)
    result = engine.generate("Once", max_new_tokens=3, temperature=0)
    assert (result.tokens, result.finish_reason) == ([40, 41, 42], "length")


@pytest.mark.parametrize("cut_at", range(1, 8))
def test_stop_texts(engine: Engine, cut_at: int) -> None:
    """A stop text ends the text before it, also when it spans tokens; nothing of it is ever streamed."""
    full = engine.generate("Once", max_new_tokens=20, temperature=1.0, seed=1)
    stop = full.text[cut_at : cut_at + 4]
    expected = full.text[: full.text.find(stop)]
    result = engine.generate("Once", max_new_tokens=20, temperature=1.0, seed=1, stop=stop)
    assert (result.text, result.finish_reason) == (expected, "stop")
    assert full.tokens[: len(result.tokens)] == result.tokens
    stream = engine.stream("Once", max_new_tokens=20, temperature=1.0, seed=1, stop=["never there", stop])
    assert "".join(stream) == expected


def test_text_held_for_a_stop_that_never_comes_is_given_at_the_end(engine: Engine) -> None:
    full = engine.generate("Once", max_new_tokens=8, temperature=0)
    stream = engine.stream("Once", max_new_tokens=8, temperature=0, stop=full.text[-3:] + "never")
    assert "".join(stream) == full.text
    assert stream.result is not None
    assert stream.result.finish_reason == "length"


def test_seeds_go_round_at_the_end(engine: Engine) -> None:
    largest = engine.generate(["Once", "Once"], max_new_tokens=3, seed=2**63 - 1)
    assert largest[1].tokens == engine.generate("Once", max_new_tokens=3, seed=-(2**63)).tokens


def test_the_context_is_the_limit(engine: Engine) -> None:
    limit = engine.config.max_positions
    with pytest.raises(InputError, match=rf"{limit + 1} tokens.* {limit}"):
        engine.generate([5] * (limit + 1))
    result = engine.generate([5] * (limit - 3), max_new_tokens=50, temperature=0)
    assert result.finish_reason in ("length", "eos")
    assert len(result.tokens) <= 3
    full = engine.generate([5] * limit, max_new_tokens=50)
    assert (full.tokens, full.finish_reason) == ([], "length")


@pytest.mark.parametrize("count", [0, 1])
def test_few_new_tokens(engine: Engine, count: int) -> None:
    result = engine.generate("Once", max_new_tokens=count, temperature=0)
    assert (len(result.tokens), result.finish_reason) == (count, "length")
    assert "".join(engine.stream("Once", max_new_tokens=count, temperature=0)) == result.text


def test_an_empty_prompt_starts_a_document(engine: Engine) -> None:
    assert engine.generate("", max_new_tokens=2).prompt_tokens == [EOS]
    assert engine.generate([[]], max_new_tokens=2)[0].prompt_tokens == [EOS]
    assert engine.generate([]) == []
    assert engine.generate(["", "Once"], max_new_tokens=2)[0].prompt_tokens == [EOS]


@pytest.mark.parametrize(("bos", "eos", "first"), [(7, 9, 7), (None, [9, 12], 9), (10**6, 9, 9)])
def test_what_an_empty_prompt_starts_with(tmp_path: Path, bos: Any, eos: Any, first: int) -> None:
    folder = write_checkpoint(tmp_path, "base")
    edit_json(folder / "config.json", {"bos_token_id": bos, "eos_token_id": eos})
    (folder / "generation_config.json").unlink()
    assert minimoe.load(folder).encode_prompt("") == [first]


def test_an_empty_prompt_needs_something_to_start_with(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "base")
    edit_json(folder / "config.json", {"bos_token_id": None, "eos_token_id": None})
    (folder / "generation_config.json").unlink()
    with pytest.raises(InputError, match="prompt is empty"):
        minimoe.load(folder).generate("")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 1.1}, "top-p"),
        ({"heat": 1}, "'heat'.*temperature"),
        ({"stop": ""}, "stop"),
        ({"prompt": [10**6]}, "1000000 is not a token id"),
        ({"prompt": [-1]}, "-1 is not a token id"),
        ({"prompt": [[3, "a"]]}, "'a' is not a token id"),
        ({"prompt": [True]}, "not bool"),
        ({"prompt": b"Once"}, "not bytes"),
        ({"prompt": None}, "not NoneType"),
        ({"prompt": [None]}, "not NoneType"),
        ({"stop": [1]}, "stop"),
    ],
)
def test_bad_arguments_are_named(engine: Engine, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        engine.generate(**{"prompt": "Once", **arguments})


def test_logits_that_are_not_finite_name_the_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def break_third(logits_V: torch.Tensor) -> None:
        calls.append(1)
        logits_V[7] = math.nan if len(calls) == 3 else 0

    meddle(monkeypatch, break_third)
    with pytest.raises(NumericalError, match="token 2"):
        engine.generate("Once", max_new_tokens=5)


def test_router_logits_that_are_not_finite_name_the_layer(checkpoint: Callable[..., Path]) -> None:
    engine = minimoe.load(checkpoint("base"))
    engine.model.layers[1].gate.weight_ED[3, 5] = math.inf  # a private mapping: the file stays as it is
    with pytest.raises(NumericalError, match="layer 1"):
        engine.generate("Once", max_new_tokens=1)


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("The sky is", " blue"),
        ("The sky is ", "blue"),  # a trailing space
        ("Once upon a ti", "me there was"),  # a token may span the join
        ("", "Once upon"),
        ("é", "🙂"),
    ],
)
def test_scores_equal_a_plain_loop(engine: Engine, context: str, continuation: str) -> None:
    """The whole text is scored as it would be tokenised, whatever the cut; each token by its own full pass."""
    score = engine.score(context, continuation)
    whole = engine.tokenizer.encode(context + continuation)
    assert whole[len(whole) - len(score.tokens) :] == score.tokens
    head = [EOS] if len(score.tokens) == len(whole) else []
    ids = [*head, *whole]
    expected = []
    for end in range(len(ids) - len(score.tokens), len(ids)):
        logits = engine.model.head(engine.model.forward(Batch(torch.tensor(ids[:end]), [end]), engine.router))[-1]
        expected.append(torch.log_softmax(logits.double(), -1)[ids[end]].item())
    assert score.logprobs == pytest.approx(expected, abs=1e-5)
    assert score.logprob == pytest.approx(sum(expected), abs=1e-4)


def test_a_trailing_space_goes_to_the_continuation(engine: Engine) -> None:
    assert engine.score("The sky is ", "blue").tokens == engine.score("The sky is", " blue").tokens


def test_numbers_of_any_library_are_token_ids(engine: Engine) -> None:
    expected = engine.generate([5, 6], max_new_tokens=3, temperature=0).tokens
    for prompt in (np.array([5, 6]), torch.tensor([5, 6]), (np.int64(5), 6)):
        assert engine.generate(prompt, max_new_tokens=3, temperature=0).tokens == expected
    batch = engine.generate(iter([[5, 6], "Once"]), max_new_tokens=3, temperature=0)
    assert [len(batch), batch[0].tokens] == [2, expected]


class Drawing(Router):
    """Draws which expert every token uses."""

    def route(self, logits_TE: torch.Tensor, context: RouterContext) -> Routing:
        T, E = logits_TE.shape
        experts = torch.randint(E, (T, 1), generator=context.generator)
        return Routing(experts, torch.ones(T, 1), torch.ones(T, dtype=torch.int64), E)


def test_a_rule_that_draws_is_repeatable(checkpoint: Callable[..., Path]) -> None:
    engine = minimoe.load(checkpoint("base"), router=Drawing())
    assert engine.score("The sky", " is blue") == engine.score("The sky", " is blue")
    assert engine.score("The sky", " is blue", seed=1) != engine.score("The sky", " is blue")
    assert engine.generate("The sky", seed=2).tokens == engine.generate("The sky", seed=2).tokens


def test_scores_that_are_not_finite_name_the_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    head = engine.model.head

    def broken(hidden: torch.Tensor, probe: Probe | None = None) -> torch.Tensor:
        logits = head(hidden, probe)
        logits[1, 7] = math.nan
        return logits

    monkeypatch.setattr(engine.model, "head", broken)
    with pytest.raises(NumericalError, match="token 1"):
        engine.score("Once", " upon a time")


def test_two_turns_at_once_do_not_mix(chatty: Engine) -> None:
    chat, other = (chatty.chat(max_new_tokens=6, temperature=0) for _ in range(2))
    unfinished = chat.say("Hello")
    next(unfinished)
    assert "".join(chat.say("Good")) == "".join(other.say("Good"))
    list(unfinished)


def test_greedy_continuations_are_known_as_such(engine: Engine) -> None:
    result = engine.generate("Once", max_new_tokens=5, temperature=0)
    prompt = engine.encode_prompt("Once")
    assert engine.score(prompt, result.tokens).greedy
    assert not engine.score(prompt, [*result.tokens[:-1], (result.tokens[-1] + 1) % 300]).greedy


def test_scores_refuse_what_they_cannot_score(engine: Engine) -> None:
    limit = engine.config.max_positions
    with pytest.raises(InputError, match="no continuation"):
        engine.score("The sky", "")
    with pytest.raises(InputError, match=rf"{limit + 2} tokens.* {limit}"):
        engine.score([5] * limit, [5, 5])
    with pytest.raises(InputError, match="both"):
        engine.score("The sky", [5])


def test_a_conversation_equals_whole_prompts(chatty: Engine) -> None:
    """Turns on one cache give what a fresh engine gives on the whole conversation."""
    chat = chatty.chat(max_new_tokens=6, temperature=0)
    for text in ("Hello", "And you?", "Good"):
        messages = [*chat.messages, {"role": "user", "content": text}]
        expected = chatty.generate(chatty.tokenizer.chat(messages), max_new_tokens=6, temperature=0)
        assert "".join(chat.say(text)) == expected.text
        assert chat.messages == [*messages, {"role": "assistant", "content": expected.text}]


def test_turns_draw_anew_and_repeatably(chatty: Engine) -> None:
    def talk() -> list[str]:
        chat = chatty.chat(max_new_tokens=6, temperature=1.0, seed=3)
        return ["".join(chat.say("Hello")) for _ in range(2)]

    first, second = talk()
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first}]
    prompt = chatty.tokenizer.chat([*messages, {"role": "user", "content": "Hello"}])
    assert second == chatty.generate(prompt, max_new_tokens=6, temperature=1.0, seed=4).text
    assert talk() == [first, second]


def test_a_turn_only_runs_its_new_tokens(chatty: Engine) -> None:
    chat = chatty.chat(max_new_tokens=4, temperature=0)
    "".join(chat.say("Hello there, how are you today?"))
    messages = [*chat.messages, {"role": "user", "content": "And you?"}]
    cache = chat._take_cache(chatty.request(chatty.tokenizer.chat(messages)))
    assert cache.length > 10


def test_a_turn_cut_short_leaves_no_trace(chatty: Engine) -> None:
    chat, other = (chatty.chat(max_new_tokens=8, temperature=0) for _ in range(2))
    for each in (chat, other):
        "".join(each.say("Hello"))
    next(chat.say("Tell me about the river and the fox"))  # abandoned after one piece
    with pytest.raises(InputError, match="128"):
        "".join(chat.say("too long " * 100))
    assert chat.messages == other.messages
    assert "".join(chat.say("And you?")) == "".join(other.say("And you?"))


def test_chat_needs_a_template(engine: Engine) -> None:
    with pytest.raises(InputError, match="no chat template"):
        engine.chat()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"router": "elbw"}, "unknown router 'elbw'.*elbow"),
        ({"backend": "fast"}, "unknown backend 'fast'.*bucketed"),
        ({"dtype": "int8"}, "unknown dtype 'int8'.*bfloat16"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:256"}, "no device"),
        ({"device": "cuda:-1"}, "device"),
        ({"threads": 0}, "threads"),
        ({"threads": 10**5000}, "threads must be a whole number from 1 to 1024, not something too long to show"),
        ({"router": "top_k:k=9"}, "9 experts.* 8"),
    ],
)
def test_load_refuses_in_a_sentence(checkpoint: Callable[..., Path], arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        minimoe.load(checkpoint("base"), **arguments).generate("Once", max_new_tokens=1)


def test_dtype_is_kept_and_overridden(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("tied_head", dtype=torch.bfloat16)
    kept, widened = minimoe.load(folder), minimoe.load(folder, dtype="float32")
    assert (kept.model.dtype, widened.model.dtype) == (torch.bfloat16, torch.float32)
    assert widened.weight_bytes == 2 * kept.weight_bytes
    assert widened.model.head_VD is widened.model.embed_VD


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
@pytest.mark.parametrize(("variable", "threads"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_affinity_and_the_environment_set_the_threads(variable: dict[str, str], threads: int) -> None:
    code = "import minimoe, torch; print(torch.get_num_threads(), *minimoe.load('tiny').notes, torch.get_num_threads())"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    run = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}); {code}"],
        env={**environment, **variable},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *notes, last = run.stdout.split()
    assert (int(first), int(last)) == (threads, threads)
    assert (" ".join(notes[:2]) == "2 threads") == (threads == 2)


def test_more_threads_than_processors_are_warned_of(checkpoint: Callable[..., Path]) -> None:
    crowded = minimoe.load(checkpoint(), threads=(os.cpu_count() or 1) + 1).notes
    alone = minimoe.load(checkpoint(), threads=1).notes
    assert next(note for note in crowded if note not in alone).endswith("which is slower than as many.")
    assert len(crowded) == len(alone) + 1
