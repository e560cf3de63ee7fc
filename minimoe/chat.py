"""A conversation with a model that has a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minimoe.cache import KVCache
from minimoe.generation import Generation, Request, Stream

if TYPE_CHECKING:
    from minimoe.engine import Engine

MAX_NEW_TOKENS = 256


class Chat:
    """A conversation. The cache keeps what is already computed, so that a turn only runs its new tokens.

    Attributes:
        messages: what was said, each with "role" and "content".
        result: the Generation of the last answer, or None.
    """

    def __init__(self, engine: Engine, options: Mapping[str, Any]) -> None:
        self.messages: list[dict[str, str]] = []
        self.result: Generation | None = None
        self._engine = engine
        self._options = {"max_new_tokens": MAX_NEW_TOKENS, **options}
        self._ids: list[int] = []  # tokens whose keys and values the cache holds
        self._cache: KVCache | None = None
        # Refuses a model without a template, and bad options, before anything is typed.
        engine.request(engine.tokenizer.chat([{"role": "user", "content": ""}]), **self._options)

    def say(self, text: str) -> Iterator[str]:
        """The model's answer, piece by piece. A turn that fails or is cut short leaves the conversation as it was.

        Raises:
            InputError: the conversation no longer fits the model's context (names both sizes).
            NumericalError: logits that are not finite.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        request = self._engine.request(self._engine.tokenizer.chat(messages), **self._options)
        cache = self._take_cache(request)
        # Every turn draws anew, or the same question would always get the same answer.
        sampling = request.sampling.reseeded(len(self.messages) // 2)
        stream = Stream(self._engine.batcher().run([replace(request, cache=cache, sampling=sampling)]))
        yield from stream
        assert stream.result is not None
        self._cache, self._ids = cache, [*request.ids, *stream.result.tokens][: cache.length]
        self.messages = [*messages, {"role": "assistant", "content": stream.result.text}]
        self.result = stream.result

    def _take_cache(self, request: Request) -> KVCache:
        """A cache with room for the request, cut back to the tokens that it shares with what was run before.

        The conversation has none until the turn has ended well: a turn that is cut short takes its cache with it.
        """
        shared = 0
        for old, new in zip(self._ids, request.ids[:-1], strict=False):  # the last token must be run for its logits
            if old != new:
                break
            shared += 1
        model = self._engine.model
        wanted = min(len(request.ids) + request.max_new_tokens, model.config.max_positions)
        cache, self._cache, self._ids = self._cache, None, []
        if cache is None or cache.capacity < wanted:
            # Twice what is needed now, so that a long talk moves its cache only now and then.
            capacity = min(2 * wanted, model.config.max_positions)
            roomy = KVCache(model.config, capacity, model.dtype, model.device)
            if cache is not None:
                roomy.copy_from(cache, shared)
            cache = roomy
        cache.truncate(shared)
        return cache
