"""The engine: a checkpoint, a model and a rule joined, and everything one can ask of them."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minimoe.cache import cache_bytes
from minimoe.chat import Chat
from minimoe.checkpoint import read_checkpoint
from minimoe.config import ModelConfig
from minimoe.decoding import Decoder, find_decoder
from minimoe.errors import InputError, shown
from minimoe.experts import default_backend, find_backend
from minimoe.generation import Batcher, Generation, Request, Stream
from minimoe.hub import resolve
from minimoe.linear import has_native_half
from minimoe.model import Olmoe
from minimoe.native import NOT_BUILT, best_kernels, instruction_sets
from minimoe.placing import place
from minimoe.probe import Probe
from minimoe.profiler import Profile, Profiler, timed
from minimoe.read_ahead import Progress, read_ahead
from minimoe.routers import Router
from minimoe.routers.spec import parse_router
from minimoe.sampling import Sampling, stop_texts
from minimoe.scoring import Score, cut, score
from minimoe.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_MODEL = "tiny"
MOST_THREADS = 1024

Prompt = str | Sequence[int]


class Engine:
    """A loaded model with a routing rule. Made by `load`.

    Attributes:
        name: what was asked for.
        model, tokenizer, router, config: its parts.
        backend: the name of what runs its experts.
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
        backend: str,
        eos_token_ids: Sequence[int],
        weight_bytes: int,
        notes: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.router = router
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.weight_bytes = weight_bytes
        self.notes = tuple(notes)
        self._decoder: Decoder | None = None

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def decoder(self) -> Decoder | None:
        """Those of the engine's own rule, kept as long as it stays; see `decoder_for`."""
        if self._decoder is None or self._decoder.router is not self.router:
            self._decoder = self.decoder_for(self.router)
        return self._decoder

    def decoder_for(self, router: Router) -> Decoder | None:
        """Decode steps in one go, or None. See minimoe.decoding."""
        return find_decoder(self.model, router, self.backend)

    def uncaptured(self, router: Router) -> tuple[str, ...]:
        """A sentence, if the backend could decode without the host, and only this rule needs it."""
        if self.backend != "triton" or self.decoder_for(router):
            return ()
        name = getattr(router, "spec", type(router).__name__)  # a rule of the user's own is wrapped, and has its spec
        return (f"The rule {name} has to be asked on the host: decode steps are not captured, and slower.",)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        routing: bool = True,
        probe: Probe | None = None,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """Continue one prompt, or many in one batch.

        Args:
            prompt: a text, a list of token ids, or a list of either; an empty list is a batch of nothing.
            max_new_tokens: the most tokens to write.
            stop: texts that end the continuation and are not part of it.
            routing: keep the routing of every token in the result.
            probe: sees every pass.
            sampling: fields of Sampling (temperature, top_k, top_p, min_p, repetition_penalty, seed). In a
                batch, prompt i draws its tokens with seed + i, as it would alone with that seed. (A rule that
                draws is seeded once for the whole batch, and in half precision another batch may round another
                way.)

        Returns:
            A Generation, or a list of them in the order of the prompts.

        Raises:
            InputError: a value out of range, or a prompt longer than the model's context (names both).
            NumericalError: logits that are not finite.
        """
        many, prompts = _as_batch(prompt)
        options = {"max_new_tokens": max_new_tokens, "stop": stop, "routing": routing, **sampling}
        requests = [self.request(item, **options) for item in prompts]
        requests = [replace(request, sampling=request.sampling.reseeded(i)) for i, request in enumerate(requests)]
        with torch.inference_mode():
            results = {index: result for index, _, result in self.batcher(probe).run(requests) if result}
        in_order = [results[index] for index in range(len(requests))]
        return in_order if many else in_order[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        routing: bool = False,
        probe: Probe | None = None,
        **sampling: Any,
    ) -> Stream:
        """Continue one prompt, text piece by text piece; `Stream.result` holds the Generation at the end.

        Arguments and errors are those of `generate`; bad ones are refused before the first piece.
        """
        request = self.request(prompt, max_new_tokens=max_new_tokens, stop=stop, routing=routing, **sampling)
        return Stream(self.batcher(probe).run([request]))

    def chat(self, **options: Any) -> Chat:
        """A conversation; `Chat.say` answers. Options: max_new_tokens, stop and fields of Sampling.

        Raises:
            InputError: the model has no chat template, or an option is out of range.
        """
        return Chat(self, options)

    def score(self, context: Prompt, continuation: Prompt, *, seed: int = 0, probe: Probe | None = None) -> Score:
        """How likely `continuation` is after `context`.

        Texts are tokenised together and cut where the context ends; white space at the end of the context belongs
        to the continuation's first token, and so does a token that spans the join. An empty context stands for
        the start of a document. `seed` is that of rules that draw.

        Raises:
            InputError: nothing to score, mixed text and ids, or too long for the model's context (names both).
        """
        if isinstance(context, str) != isinstance(continuation, str):
            raise InputError("score needs context and continuation both as text or both as token ids.")
        if isinstance(context, str) and isinstance(continuation, str):
            context_ids, ids = cut(self.tokenizer, context, continuation)
        else:
            context_ids, ids = self._token_ids(context), self._token_ids(continuation)
        if not continuation or not ids:
            raise InputError("there is no continuation to score.")
        context_ids = context_ids or [self._first_token()]
        self._check_length(len(context_ids) + len(ids))
        return score(self.model, self.router, context_ids, ids, probe, seed)

    def profile(self, prompt: Prompt, *, max_new_tokens: int = 64, **sampling: Any) -> Profile:
        """Generate twice, once unprobed and once measured, and say where time, FLOPs and bytes go.

        The same tokens are run both times, after a warm-up pass, so that the cost of measuring is visible. Decode steps
        are those of `generate` where they know their times. Elsewhere the host takes part in every operation both
        times, as it must to measure it.
        """
        request = self.request(prompt, max_new_tokens=max_new_tokens, **sampling)
        decoder = self.decoder if self.decoder and self.decoder.knows_times else None

        def work(probe: Probe | None) -> Generation:
            batcher = Batcher(self.model, self.tokenizer, self.router, self.eos_token_ids, probe, decoder)
            with torch.inference_mode():
                return next(result for _, _, result in batcher.run([request]) if result)

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
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self._token_ids(prompt)
        ids = ids or [self._first_token()]
        self._check_length(len(ids))
        return ids

    def request(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        routing: bool = False,
        **sampling: Any,
    ) -> Request:
        """A checked Request; arguments and errors are those of `generate`."""
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise InputError(f"max_new_tokens must be a whole number of at least 0, not {max_new_tokens!r}.")
        stops = stop_texts(stop)
        unknown = [key for key in sampling if key not in Sampling.__dataclass_fields__]
        if unknown:
            known = ", ".join(Sampling.__dataclass_fields__)
            raise InputError(f"unknown option {unknown[0]!r}; the sampling options are {known}.")
        return Request(self.encode_prompt(prompt), max_new_tokens, Sampling(**sampling), stops, record=routing)

    def batcher(self, probe: Probe | None = None) -> Batcher:
        """What runs requests on this engine."""
        return Batcher(self.model, self.tokenizer, self.router, self.eos_token_ids, probe, self.decoder)

    def _first_token(self) -> int:
        bos = () if self.config.bos_token_id is None else (self.config.bos_token_id,)
        for token in (*bos, *self.eos_token_ids):
            if token < self.config.vocab_size:
                return token
        raise InputError("the prompt is empty, and the model has no BOS or EOS token to start from; give some text.")

    def _token_ids(self, prompt: object) -> list[int]:
        """Token ids as plain numbers; numpy's and torch's integers are as good.

        Raises:
            InputError: something else than a list of token ids, or ids outside the vocabulary.
        """
        if not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, bytearray)):
            raise InputError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}.")
        ids = []
        for item in prompt:
            token = _as_index(item)
            if token is None or not 0 <= token < self.config.vocab_size:
                last = self.config.vocab_size - 1
                raise InputError(f"{item!r} is not a token id of this model; they run from 0 to {last}.")
            ids.append(token)
        return ids

    def _check_length(self, length: int) -> None:
        if length > self.config.max_positions:
            raise InputError(
                f"the text has {length} tokens, but the model's context holds {self.config.max_positions}; shorten it."
            )


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    router: str | Router = "top_k",
    backend: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Load a model and give it a routing rule.

    Args:
        model: the embedded model's name ("tiny"), a checkpoint folder, or a hub id ("owner/name").
        router: a SPEC (see minimoe.routers.spec.parse_router) or a Router.
        backend: how the experts are run: "native" (also "native:isa=avx2"), "bucketed", "reference" or, on a GPU,
            "triton"; by default native where its kernels run, else bucketed.
        dtype: "float32", "bfloat16" or "float16"; by default what the checkpoint is stored in, which is then
            mapped and not copied.
        device: "cpu", "cuda" or "cuda:N".
        threads: CPU threads for torch; by default torch's own choice.
        revision: branch, tag or commit on the hub.
        progress: called with the bytes read so far and in all while files that are not in memory yet are read.

    Raises:
        InputError: anything that the caller can mend; one sentence.
    """
    rule = parse_router(router)
    target = _device(str(device))
    chosen = None if backend is None else find_backend(backend)
    if dtype is not None and (not isinstance(dtype, str) or dtype not in DTYPES):
        raise InputError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}.")
    if threads is not None:
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
            raise InputError(f"threads must be a whole number from 1 to {MOST_THREADS}, not {shown(threads)}.")
        torch.set_num_threads(threads)
    folder = resolve(str(model), revision=revision)
    checkpoint = read_checkpoint(folder)
    wanted = DTYPES[dtype] if dtype else checkpoint.dtype
    read_ahead(checkpoint.files, progress)
    config = checkpoint.config
    weights = place(checkpoint.tensors, wanted, target, beside=cache_bytes(config, config.max_positions, wanted))
    unique = {id(tensor): tensor.nbytes for tensor in weights.values()}
    backend = backend or default_backend(wanted, target)
    engine = Engine(
        name=str(model),
        model=Olmoe(config, weights, chosen or find_backend(backend)),
        tokenizer=Tokenizer.from_folder(folder),
        router=rule,
        backend=backend,
        eos_token_ids=checkpoint.eos_token_ids,
        weight_bytes=sum(unique.values()),
        notes=_notes(wanted, target, backend),
    )
    engine.notes += engine.uncaptured(rule)
    return engine


def _as_batch(prompt: Any) -> tuple[bool, list[Any]]:
    """Whether what `generate` was given is a batch, and its prompts."""
    if isinstance(prompt, (str, bytes, bytearray)) or not isinstance(prompt, Iterable):
        return False, [prompt]
    items = list(prompt)
    single = bool(items) and all(_as_index(item) is not None for item in items)
    return not single, [items] if single else items


def _as_index(value: object) -> int | None:
    """A whole number of whatever type as an int, or None."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _device(name: str) -> torch.device:
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise InputError(f"unknown device {name!r}; choose cpu, cuda or cuda:N.")
    # Compared as written: torch itself takes the number modulo 256.
    if name != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no device {name!r} on this machine; torch sees {torch.cuda.device_count()} GPUs.")
    return torch.device(name)


def _notes(dtype: torch.dtype, device: torch.device, backend: str) -> list[str]:
    if device.type != "cpu":
        return []
    notes, threads, processors = [], torch.get_num_threads(), _processors()
    if threads > processors:
        notes.append(f"{threads} threads share the {processors} processors there are, which is slower than as many.")
    if backend.startswith("native"):
        return notes
    if not instruction_sets():
        notes.append(f"Running without the native kernels, which is slower: {NOT_BUILT}.")
    by_kernels = backend == "bucketed" and dtype == torch.bfloat16 and best_kernels()
    if dtype in (torch.bfloat16, torch.float16) and not has_native_half(dtype) and not by_kernels:
        name = str(dtype).removeprefix("torch.")
        notes.append(f"This CPU has no instructions for {name}, so it is emulated and slow; --dtype float32 is faster.")
    return notes


def _processors() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
