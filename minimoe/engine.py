"""The engine: a checkpoint, a model and a rule joined, and everything one can ask of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.checkpoint import read_checkpoint
from minimoe.config import ModelConfig
from minimoe.errors import InputError
from minimoe.experts import find_backend
from minimoe.generation import Batcher, Generation, Request
from minimoe.hub import resolve
from minimoe.linear import has_native_half
from minimoe.model import Batch, Olmoe
from minimoe.probe import Probe
from minimoe.profiler import Profile, Profiler, timed
from minimoe.routers import Router
from minimoe.routers.spec import parse_router
from minimoe.sampling import Sampling
from minimoe.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_MODEL = "tiny"

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a model finds a continuation.

    Attributes:
        logprob: sum over the continuation's tokens, natural logarithm (nats).
        logprobs: one value a token.
        tokens: the continuation's token ids.
        greedy: whether every token was the model's most probable one.
    """

    logprob: float
    logprobs: list[float]
    tokens: list[int]
    greedy: bool


class Engine:
    """A loaded model with a routing rule. Made by `load`.

    Attributes:
        name: what was asked for.
        model, tokenizer, router, config: its parts.
        eos_token_ids: tokens that end a text.
        weight_bytes: size of the weights in memory; tied tensors count once.
        notes: sentences worth a user's attention (what was chosen, what will be slow).
    """

    def __init__(
        self,
        name: str,
        model: Olmoe,
        tokenizer: Tokenizer,
        router: Router,
        eos_token_ids: Sequence[int],
        weight_bytes: int,
        notes: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.router = router
        self.eos_token_ids = tuple(eos_token_ids)
        self.weight_bytes = weight_bytes
        self.notes = tuple(notes)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        routing: bool = True,
        probe: Probe | None = None,
        **sampling: float,
    ) -> Generation | list[Generation]:
        """Continue one prompt, or many in one batch.

        Args:
            prompt: a text, a list of token ids, or a list of either.
            max_new_tokens: the most tokens to write.
            stop: texts that end the continuation and are not part of it.
            routing: keep the routing of every token in the result.
            probe: sees every pass.
            sampling: fields of Sampling (temperature, top_k, top_p, min_p, repetition_penalty, seed). In a
                batch, prompt i draws with seed + i, so that each draws as it would alone with that seed.

        Returns:
            A Generation, or a list of them in the order of the prompts.

        Raises:
            InputError: a value out of range, or a prompt longer than the model's context (names both).
            NumericalError: logits that are not finite.
        """
        many = not isinstance(prompt, str) and any(not isinstance(item, int) for item in prompt)
        prompts: Sequence[Prompt] = prompt if many else [prompt]  # type: ignore[assignment, list-item]
        chosen = _sampling(sampling)
        requests = [
            self._request(item, max_new_tokens, stop, _sampling({**sampling, "seed": chosen.seed + i}), routing)
            for i, item in enumerate(prompts)
        ]
        results: list[Generation | None] = [None] * len(requests)
        with torch.inference_mode():
            for index, _, result in self._batcher(probe).run(requests, chosen.seed):
                if result is not None:
                    results[index] = result
        finished = [result for result in results if result is not None]
        return finished if many else finished[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        routing: bool = False,
        probe: Probe | None = None,
        **sampling: float,
    ) -> Stream:
        """Continue one prompt, text piece by text piece; `Stream.result` holds the Generation at the end.

        Arguments and errors are those of `generate`; bad ones are refused before the first piece.
        """
        chosen = _sampling(sampling)
        request = self._request(prompt, max_new_tokens, stop, chosen, routing)
        return Stream(self._batcher(probe).run([request], chosen.seed))

    def chat(self, **options: object) -> Chat:
        """A conversation; `Chat.say` answers. Options are those of `stream`.

        Raises:
            InputError: the model has no chat template.
        """
        return Chat(self, options)

    def score(self, context: Prompt, continuation: Prompt, *, probe: Probe | None = None) -> Score:
        """How likely `continuation` is after `context`.

        Texts are tokenised together and cut where the context ends; spaces at the end of the context belong to
        the continuation's first token, and so does a token that spans the join. An empty context stands for
        the start of a document.

        Raises:
            InputError: nothing to score, mixed text and ids, or too long for the model's context (names both).
        """
        if isinstance(context, str) != isinstance(continuation, str):
            raise InputError("score needs context and continuation both as text or both as token ids.")
        if isinstance(context, str) and isinstance(continuation, str):
            context_ids, ids = self._cut(context, continuation)
        else:
            context_ids, ids = list(context), list(continuation)  # type: ignore[arg-type]
            self._check_ids(context_ids + ids)
        if not ids:
            raise InputError("there is no continuation to score.")
        context_ids = context_ids or [self._first_token()]
        self._check_length(len(context_ids) + len(ids))
        fed = [*context_ids, *ids][:-1]
        with torch.inference_mode():
            batch = Batch(torch.tensor(fed, device=self.model.device), [len(fed)])
            hidden_TD = self.model.forward(batch, self.router, probe)
            logits_NV = self.model.head(hidden_TD[-len(ids) :], probe).float()
        logprobs_N = _gather_logprobs(logits_NV, ids)
        return Score(
            logprob=sum(logprobs_N),
            logprobs=logprobs_N,
            tokens=ids,
            greedy=logits_NV.argmax(-1).tolist() == ids,
        )

    def profile(self, prompt: Prompt, *, max_new_tokens: int = 64, **sampling: float) -> Profile:
        """Generate twice, once unprobed and once measured, and say where time, FLOPs and bytes go.

        The same tokens are run both times, after a warm-up pass, so that the cost of measuring is visible.
        """
        request = self._request(prompt, max_new_tokens, (), _sampling(sampling), False)

        def work(probe: Probe | None) -> Generation:
            with torch.inference_mode():
                return [result for _, _, result in self._batcher(probe).run([request]) if result][0]

        work(None)
        profiler = Profiler(self.config, self.model.dtype, self.model.device)
        _, unprobed = timed(lambda: work(None), self.model.device)
        generation, probed = timed(lambda: work(profiler), self.model.device)
        return profiler.report(unprobed_seconds=unprobed, probed_seconds=probed, generation=generation)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. An empty one becomes BOS, or EOS in models without BOS: it ends the text before.

        Raises:
            InputError: ids outside the vocabulary, or longer than the context.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        self._check_ids(ids)
        ids = ids or [self._first_token()]
        self._check_length(len(ids))
        return ids

    def _request(
        self, prompt: Prompt, max_new_tokens: int, stop: str | Sequence[str], sampling: Sampling, record: bool
    ) -> Request:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise InputError(f"max_new_tokens must be a whole number of at least 0, not {max_new_tokens!r}.")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise InputError("a stop text must not be empty.")
        return Request(self.encode_prompt(prompt), max_new_tokens, sampling, stops, record=record)

    def _batcher(self, probe: Probe | None) -> Batcher:
        return Batcher(self.model, self.tokenizer, self.router, self.eos_token_ids, probe)

    def _cut(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        spaces = len(context) - len(context.rstrip())
        if spaces:
            continuation, context = context[-spaces:] + continuation, context[:-spaces]
        context_ids = self.tokenizer.encode(context)
        whole = self.tokenizer.encode(context + continuation)
        # Where a token spans the join, the context ends before it.
        while context_ids and whole[: len(context_ids)] != context_ids:
            context_ids.pop()
        return context_ids, whole[len(context_ids) :]

    def _first_token(self) -> int:
        if self.config.bos_token_id is not None:
            return self.config.bos_token_id
        if self.eos_token_ids:
            return self.eos_token_ids[0]
        raise InputError("the prompt is empty, and the model has no BOS or EOS token to start from; give some text.")

    def _check_ids(self, ids: Sequence[int]) -> None:
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.config.vocab_size:
                raise InputError(f"{i!r} is not a token id of this model; they run from 0 to {self.config.vocab_size - 1}.")

    def _check_length(self, length: int) -> None:
        if length > self.config.max_positions:
            raise InputError(
                f"the text has {length} tokens, but the model's context holds {self.config.max_positions}; shorten it."
            )


class Stream(Iterator[str]):
    """Pieces of text as they become certain; joined they are the whole text.

    Attributes:
        result: the Generation, once the stream has ended; None before.
    """

    def __init__(self, events: Iterator[tuple[int, str, Generation | None]]) -> None:
        self._events = events
        self.result: Generation | None = None

    def __next__(self) -> str:
        while self.result is None:
            with torch.inference_mode():
                _, piece, self.result = next(self._events)
            if piece:
                return piece
        raise StopIteration


class Chat:
    """A conversation. The cache keeps what is already computed, so that a turn only runs its new tokens."""

    def __init__(self, engine: Engine, options: Mapping[str, object]) -> None:
        self.engine = engine
        self.messages: list[dict[str, str]] = []
        self._options = dict(options)
        self._ids: list[int] = []  # what the cache holds
        self._cache: KVCache | None = None
        if engine.tokenizer.chat_template is None:
            engine.tokenizer.chat([])  # says that there is no template

    def say(self, text: str) -> Iterator[str]:
        """The model's answer, piece by piece. A turn that fails leaves the conversation as it was.

        Raises:
            InputError: the conversation no longer fits the model's context (names both sizes).
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.engine.tokenizer.chat(messages)
        options = dict(self._options)
        request = self.engine._request(  # noqa: SLF001 - a Chat is a part of the engine
            ids,
            options.pop("max_new_tokens", 256),  # type: ignore[arg-type]
            options.pop("stop", ()),  # type: ignore[arg-type]
            _sampling(options),  # type: ignore[arg-type]
            record=False,
        )
        request = self._resume(request)
        stream = Stream(self.engine._batcher(None).run([request]))  # noqa: SLF001
        yield from stream
        assert stream.result is not None
        self._ids = [*ids, *stream.result.tokens][: request.cache.length if request.cache else 0]
        self.messages = [*messages, {"role": "assistant", "content": stream.result.text}]

    def _resume(self, request: Request) -> Request:
        """Give the request the cache, cut back to the tokens that its prompt shares with what was run before."""
        shared = 0
        for old, new in zip(self._ids, request.ids[:-1], strict=False):
            if old != new:
                break
            shared += 1
        wanted = min(len(request.ids) + request.max_new_tokens, self.engine.config.max_positions)
        if self._cache is None or self._cache.capacity < wanted:
            model = self.engine.model
            # Room for twice what is needed now, so that a long talk moves its cache only now and then.
            grown = KVCache(model.config, min(2 * wanted, model.config.max_positions), model.dtype, model.device)
            if self._cache is not None:
                grown.copy_from(self._cache, shared)
            self._cache = grown
        self._cache.truncate(shared)
        self._ids = self._ids[:shared]  # true from here on, also if this turn is cut short
        return Request(
            request.ids, request.max_new_tokens, request.sampling, request.stop, self._cache, request.record
        )


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    router: str | Router = "top_k",
    backend: str = "bucketed",
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    revision: str | None = None,
) -> Engine:
    """Load a model and give it a routing rule.

    Args:
        model: the embedded model's name ("tiny"), a checkpoint folder, or a hub id ("owner/name").
        router: a SPEC (see minimoe.routers.spec.parse_router) or a Router.
        backend: how the experts are run: "bucketed" or "reference".
        dtype: "float32", "bfloat16" or "float16"; by default what the checkpoint is stored in, which is then
            mapped and not copied.
        device: "cpu", "cuda" or "cuda:N".
        threads: CPU threads for torch; by default torch's own choice.
        revision: branch, tag or commit on the hub.

    Raises:
        InputError: anything that the caller can mend; one sentence.
    """
    rule = parse_router(router)
    experts = find_backend(backend)
    place = _device(device)
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}.")
    if threads is not None:
        if threads < 1:
            raise InputError(f"threads must be at least 1, not {threads}.")
        torch.set_num_threads(threads)
    folder = resolve(str(model), revision=revision)
    checkpoint = read_checkpoint(folder)
    wanted = DTYPES[dtype] if dtype else checkpoint.dtype
    weights = _place(checkpoint.tensors, wanted, place)
    unique = {id(tensor): tensor.nbytes for tensor in weights.values()}
    return Engine(
        name=str(model),
        model=Olmoe(checkpoint.config, weights, experts),
        tokenizer=Tokenizer.from_folder(folder),
        router=rule,
        eos_token_ids=checkpoint.eos_token_ids,
        weight_bytes=sum(unique.values()),
        notes=_notes(wanted, place),
    )


def _place(tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Weights in the wanted dtype and place; nothing is copied where both already fit, and tied stays tied."""
    moved: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device=device, dtype=dtype)
    return {name: moved[id(tensor)] for name, tensor in tensors.items()}


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}; choose cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"unsupported device {name!r}; choose cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no device {name!r} on this machine; torch sees {torch.cuda.device_count()} GPUs.")
    return device


def _notes(dtype: torch.dtype, device: torch.device) -> list[str]:
    if device.type == "cpu" and dtype != torch.float32 and not has_native_half(dtype):
        name = str(dtype).removeprefix("torch.")
        return [f"This CPU has no instructions for {name}, so it is emulated and slow; --dtype float32 is faster."]
    return []


def _sampling(options: Mapping[str, object]) -> Sampling:
    known = Sampling.__dataclass_fields__
    unknown = [key for key in options if key not in known]
    if unknown:
        raise InputError(f"unknown option {unknown[0]!r}; the sampling options are {', '.join(known)}.")
    return Sampling(**options)  # type: ignore[arg-type]


def _gather_logprobs(logits_NV: Tensor, ids: Sequence[int]) -> list[float]:
    chosen_N1 = torch.tensor(ids, device=logits_NV.device)[:, None]
    return logits_NV.double().log_softmax(-1).gather(1, chosen_N1)[:, 0].tolist()
