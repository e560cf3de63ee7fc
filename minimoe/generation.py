"""Many prompts at once: sequences enter the running batch, take steps together, and leave when they finish.

Every pass is schedule, run, postprocess. No pad token exists and nobody waits for the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.model import Batch, Olmoe
from minimoe.probe import Phase, Probe, Probes, RoutingRecorder
from minimoe.routers import Router
from minimoe.routing import Routing
from minimoe.sampling import Sampler, Sampling
from minimoe.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from minimoe.decoding import Decoder

FinishReason = Literal["eos", "stop", "length"]

MAX_BATCH = 32  # sequences that decode together
PREFILL_TOKENS = 2048  # most prompt tokens in one pass; longer prompts go through in chunks


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        ids: the prompt, at least one token.
        max_new_tokens: stop after so many.
        sampling: how tokens are chosen.
        stop: texts that end the continuation; they are not part of it.
        cache: what is already computed of the prompt's first tokens (fewer than all), or None.
        record: whether to keep the routing of every token.
    """

    ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    cache: KVCache | None = None
    record: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """What came of one prompt.

    Attributes:
        text: the continuation, without special tokens and without the stop text.
        prompt_tokens, tokens: token ids; `tokens` includes the EOS token that ended it.
        finish_reason: "eos", "stop" (a stop text) or "length" (max_new_tokens, or the model's context is full).
        routing: one Routing a layer over every token that was run (the prompt and all but the last new token),
            or None if it was not recorded.
    """

    text: str
    prompt_tokens: list[int]
    tokens: list[int]
    finish_reason: FinishReason
    routing: list[Routing] | None


@dataclass(slots=True)
class _Active:
    """One sequence in the running batch."""

    index: int
    request: Request
    cache: KVCache
    stream: TextStream
    sampler: Sampler
    text: str = ""
    given: int = 0  # characters of `text` already handed out
    tokens: list[int] = field(default_factory=list)
    routings: list[list[Routing]] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, token: int, eos_ids: frozenset[int], capacity: int) -> None:
        """Add a new token and decide whether it was the last."""
        self.tokens.append(token)
        if token in eos_ids:
            self.finish_reason = "eos"
        else:
            self.text += self.stream.push(token)
            if self._cut_at_stop():
                return
            full = len(self.request.ids) + len(self.tokens) >= capacity
            if len(self.tokens) >= self.request.max_new_tokens or full:
                self.finish_reason = "length"
        if self.finish_reason:
            self.text += self.stream.finish()
            self._cut_at_stop()

    def _cut_at_stop(self) -> bool:
        places = [place for stop in self.request.stop if (place := self.text.find(stop)) >= 0]
        if places:
            self.text = self.text[: min(places)]
            self.finish_reason = "stop"
        return bool(places)

    def news(self) -> str:
        """Text that is certain by now: an ending that may grow into a stop text is held back."""
        end = len(self.text)
        if self.finish_reason is None:
            held = (
                size
                for stop in self.request.stop
                for size in range(min(len(stop) - 1, end), 0, -1)
                if self.text.endswith(stop[:size])
            )
            end -= max(held, default=0)
        piece = self.text[self.given : end]
        self.given = max(self.given, end)
        return piece

    def result(self) -> Generation:
        routing = [Routing.cat(parts) for parts in self.routings] if self.request.record else None
        reason = self.finish_reason or "length"
        return Generation(self.text, list(self.request.ids), self.tokens, reason, routing)


class Batcher:
    """Runs requests on a model.

    Args:
        model, tokenizer, router: the engine's.
        eos_ids: tokens that end a text.
        probe: sees every pass, or None.
        decoder: decode steps of this model and rule in one go, or None. They have no spans, and some know no times:
            under a probe that needs these every pass is the model's own.
        max_batch, prefill_tokens: limits of one pass.
    """

    def __init__(
        self,
        model: Olmoe,
        tokenizer: Tokenizer,
        router: Router,
        eos_ids: Sequence[int],
        probe: Probe | None = None,
        decoder: Decoder | None = None,
        *,
        max_batch: int = MAX_BATCH,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.router = router
        self.eos_ids = frozenset(eos_ids)
        self.probe = probe or Probe()
        untold = self.probe.needs_spans or (self.probe.takes_times and not (decoder and decoder.knows_times))
        self.decoder = None if untold else decoder
        self.max_batch = max_batch
        self.prefill_tokens = prefill_tokens

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, str, Generation | None]]:
        """Continue every request. Rules that draw are seeded with the first request's seed.

        Args:
            requests: checked by the caller: prompts that fit, ids in the vocabulary.

        Yields:
            (index of the request, new text, None) as text becomes certain, and last for each request
            (index, remaining text, its Generation).

        Raises:
            NumericalError: logits that are not finite.
        """
        generator = torch.Generator().manual_seed(requests[0].sampling.seed if requests else 0)
        waiting = deque(enumerate(requests))
        running: list[_Active] = []
        while waiting or running:
            while waiting and len(running) < self.max_batch:
                running.append(self._enter(*waiting.popleft()))
            alive = [active for active in running if active.finish_reason is None]
            fresh = [active for active in alive if not active.tokens]
            if fresh:
                self._prefill(fresh, generator)
            elif alive and self.decoder:
                self._step(alive, self.decoder, generator)
            elif alive:
                self._pass("decode", [(active, [active.tokens[-1]]) for active in alive], generator)
            for active in running:
                piece = active.news()
                if active.finish_reason:
                    yield active.index, piece, active.result()
                elif piece:
                    yield active.index, piece, None
            running = [active for active in running if active.finish_reason is None]

    def _enter(self, index: int, request: Request) -> _Active:
        capacity = min(len(request.ids) + request.max_new_tokens, self.model.config.max_positions)
        cache = request.cache or KVCache(self.model.config, capacity, self.model.dtype, self.model.device)
        active = _Active(index, request, cache, TextStream(self.tokenizer), Sampler(request.sampling))
        if request.record:
            config = self.model.config
            active.routings = [[Routing.empty(config.num_experts)] for _ in range(config.num_layers)]
        if request.max_new_tokens == 0 or len(request.ids) >= self.model.config.max_positions:
            active.finish_reason = "length"
        return active

    def _prefill(self, fresh: Sequence[_Active], generator: torch.Generator) -> None:
        """Run the prompts, several to a pass and long ones over several passes, up to each one's first new token."""
        left = deque((active, list(active.request.ids[active.cache.length :])) for active in fresh)
        while left:
            room, work = self.prefill_tokens, []
            while left and room:
                active, ids = left.popleft()
                work.append((active, ids[:room]))
                if len(ids) > room:
                    left.appendleft((active, ids[room:]))
                room -= min(room, len(ids))
            self._pass("prefill", work, generator)

    def _pass(self, phase: Phase, work: Sequence[tuple[_Active, list[int]]], generator: torch.Generator) -> None:
        """One forward pass; a sequence whose tokens are then all run gets its next one."""
        ids_T = torch.tensor([i for _, ids in work for i in ids], device=self.model.device)
        batch = Batch(ids_T, [len(ids) for _, ids in work], [active.cache for active, _ in work], phase)
        recorder, probe = self._recorder(work)
        hidden_TD = self.model.forward(batch, self.router, probe, generator)
        _deal_out(recorder, work)
        done = [
            (active, row)
            for (active, _), row in zip(work, batch.last_rows, strict=True)
            if active.cache.length == len(active.request.ids) + len(active.tokens)
        ]
        if done:
            logits_SV = self.model.head(hidden_TD[[row for _, row in done]], self.probe)
            self._choose([active for active, _ in done], logits_SV)

    def _step(self, alive: Sequence[_Active], decoder: Decoder, generator: torch.Generator) -> None:
        """A decode step in one go."""
        work = [(active, active.tokens[-1:]) for active in alive]
        ids_B = torch.tensor([token for _, (token,) in work])
        recorder, probe = self._recorder(work)
        logits_BV = decoder.step(ids_B, [active.cache for active in alive], probe, generator)
        _deal_out(recorder, work)
        self._choose(alive, logits_BV)

    def _recorder(self, work: Sequence[tuple[_Active, list[int]]]) -> tuple[RoutingRecorder, Probe]:
        """What keeps the routings of a pass, where a sequence wants its own, and the probe that sees all of it."""
        recorder = RoutingRecorder(self.model.config.num_layers)
        recording = any(active.request.record for active, _ in work)
        return recorder, Probes(self.probe, recorder) if recording else self.probe

    def _choose(self, active: Sequence[_Active], logits_SV: Tensor) -> None:
        """The next token of each sequence."""
        for one, logits_V in zip(active, logits_SV.cpu(), strict=True):  # off the device in one go
            token = one.sampler.choose(logits_V, [*one.request.ids, *one.tokens], step=len(one.tokens))
            one.take(token, self.eos_ids, self.model.config.max_positions)


def _deal_out(recorder: RoutingRecorder, work: Sequence[tuple[_Active, list[int]]]) -> None:
    """Give every sequence its own rows of a pass's routings."""
    start = 0
    for active, ids in work:
        if active.request.record:
            for kept, (routing,) in zip(active.routings, recorder.layers, strict=True):
                kept.append(routing.rows(slice(start, start + len(ids))))
        start += len(ids)


class Stream(Iterator[str]):
    """Pieces of one request's text as they become certain; joined they are the whole text.

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
