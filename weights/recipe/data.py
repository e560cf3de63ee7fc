"""The corpus: which documents are held out, how much of each domain is read, and in which order.

Shape letters: N documents, B sequences in a step, C tokens in a sequence (the context).
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

SEPARATOR = "<|endoftext|>"
HELD_OUT_ONE_IN = 50

# The part of every step that each domain gets. Stories and classics carry the readable English; code needs much more
# than its part of the corpus to be packed better than xz packs it; the small domains (dialogue, math) get little, so
# that a run repeats none of them more than a few times.
SHARES: Mapping[str, float] = {
    "stories": 0.42,
    "classics": 0.12,
    "poetry": 0.06,
    "dictionary": 0.05,
    "german": 0.06,
    "code": 0.20,
    "encyclopedia": 0.04,
    "math": 0.035,
    "dialogue": 0.015,
}


def read_documents(path: Path) -> list[str]:
    """The documents of one `<domain>.txt.xz` file, in file order, without the separator lines."""
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        text = file.read()
    parts = (part.strip("\n") for part in f"\n{text}\n".split(f"\n{SEPARATOR}\n"))
    return [part for part in parts if part]


def is_held_out(document: str) -> bool:
    """Whether this document is kept from training: one in fifty, chosen by the hash of its text.

    The choice depends on nothing but the text, so two copies of a document always fall on the same side.
    """
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def split(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """The training documents and the held-out documents, each in file order."""
    kept = [document for document in documents if not is_held_out(document)]
    return kept, [document for document in documents if is_held_out(document)]


def render(domain: str, document: str) -> str:
    """The text that the model is trained on: a reply in a dialogue ends with the end-of-text token.

    This is what the chat template writes too, and it is what makes a chat stop after one reply.
    """
    if domain != "dialogue":
        return document
    lines = document.split("\n")
    ended = [line + SEPARATOR if line.startswith("Assistant:") else line for line in lines[:-1]]
    return "\n".join([*ended, lines[-1]])


def token_stream(tokenizer: Tokenizer, domain: str, documents: Sequence[str]) -> NDArray[np.uint16]:
    """All documents end to end as token ids, each one followed by the end-of-text token."""
    end = tokenizer.token_to_id(SEPARATOR)
    encoded = tokenizer.encode_batch_fast([render(domain, document) for document in documents])
    return np.concatenate([np.array([*one.ids, end], dtype=np.uint16) for one in encoded])


def training_streams(corpus: Path, tokenizer: Tokenizer, cache: Path) -> dict[str, NDArray[np.uint16]]:
    """The training tokens of every domain, encoded once and then mapped from `cache`.

    A cached file is named by the hash of the tokenizer, so another tokenizer never reads it.
    """
    key = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:12]
    streams = {}
    for domain in SHARES:
        path = cache / f"{domain}-{key}.npy"
        if not path.exists():
            kept, _ = split(read_documents(corpus / f"{domain}.txt.xz"))
            cache.mkdir(parents=True, exist_ok=True)
            np.save(path, token_stream(tokenizer, domain, kept))
        streams[domain] = np.load(path, mmap_mode="r")
    return streams


@dataclass(frozen=True)
class Mixture:
    """An endless deterministic order of windows: the n-th one is a function of the seed and n alone.

    There is no state to save, so a resumed run reads exactly what an unbroken run would have read.
    Every `cycle` windows hold each domain in its share, shuffled. Within a domain the windows are read in a
    random order without repeats until all have been read; then a new epoch begins with another offset and order.
    """

    streams: Mapping[str, NDArray[np.uint16]]
    shares: Mapping[str, float]
    seed: int
    cycle: int = 200
    counts: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        total = sum(self.shares.values())
        bounds = np.rint(np.cumsum([share / total for share in self.shares.values()]) * self.cycle).astype(int)
        object.__setattr__(self, "counts", dict(zip(self.shares, np.diff(bounds, prepend=0).tolist(), strict=True)))

    def batch(self, first: int, sequences: int, context: int) -> tuple[Tensor, Tensor]:
        """Windows `first` to `first + sequences - 1`, as inputs and the tokens that follow them.

        Returns:
            inputs_BC and targets_BC, int64, the targets one token later in the same stream.
        """
        windows = [self._window(n, context) for n in range(first, first + sequences)]
        tokens = torch.from_numpy(np.stack(windows).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _window(self, n: int, context: int) -> NDArray[np.uint16]:
        cycle, place = divmod(n, self.cycle)
        order = _cycle_order(tuple(self.counts.items()), self.seed, cycle)
        domain = order[place]
        ordinal = cycle * self.counts[domain] + order[:place].count(domain)
        stream = self.streams[domain]
        # One window less than would fit leaves room for the offset.
        windows = max((len(stream) - 1) // context - 1, 1)
        epoch, index = divmod(ordinal, windows)
        name = int.from_bytes(domain.encode()[:8], "big")
        offset, permutation = _epoch_order(self.seed, name, epoch, windows, context)
        start = offset + int(permutation[index]) * context
        return stream[start : start + context + 1]


@lru_cache(maxsize=2)
def _cycle_order(counts: tuple[tuple[str, int], ...], seed: int, cycle: int) -> tuple[str, ...]:
    order = [domain for domain, count in counts for _ in range(count)]
    np.random.default_rng((seed, cycle)).shuffle(order)
    return tuple(order)


@lru_cache(maxsize=32)
def _epoch_order(seed: int, name: int, epoch: int, windows: int, context: int) -> tuple[int, NDArray[np.int64]]:
    generator = np.random.default_rng((seed, name, epoch))
    return int(generator.integers(context)), generator.permutation(windows)
