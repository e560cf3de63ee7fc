"""Bits per byte of a model on documents, and what `xz -9e` makes of the same documents.

Every document is read on its own, from an end-of-text token on; a long one in windows that overlap by half, so that
from the second window on each scored token has at least half a window before it. The price of the end-of-text token
is counted, its bytes are not. `xz -9e` packs the same documents, all of a domain as one file.

Shape letters: T tokens, D hidden.
"""

from __future__ import annotations

import hashlib
import lzma
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from data import SEPARATOR, read_documents, render, split
from tokenizers import Tokenizer

from minimoe.model import Batch, Olmoe
from minimoe.probe import Probe
from minimoe.routers import ROUTERS, Router

TOKENS_A_PASS = 8192


def windows(ids: Sequence[int], length: int) -> Iterator[tuple[Sequence[int], int]]:
    """Cut a document into overlapping windows of at most `length` inputs.

    Yields (tokens, skip): predict tokens[1:], and score all but the first `skip` of these predictions. Every token
    but the very first is scored exactly once.
    """
    start, scored = 0, 0
    while scored < len(ids) - 1:
        end = min(start + length, len(ids) - 1)
        yield ids[start : end + 1], scored - start
        scored = end
        start += length // 2


def passes(parts: Sequence[tuple[Sequence[int], int]], tokens: int) -> Iterator[list[tuple[Sequence[int], int]]]:
    """Group windows, longest first so that neighbours are alike in length, into passes of about `tokens` tokens."""
    group: list[tuple[Sequence[int], int]] = []
    for part in sorted(parts, key=lambda part: -len(part[0])):
        if group and sum(len(ids) for ids, _ in group) + len(part[0]) > tokens:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


@torch.inference_mode()
def total_bits(
    model: Olmoe, streams: Sequence[Sequence[int]], context: int, probe: Probe, router: Router | None = None
) -> float:
    """Bits to tell every token of every stream but its first, under a rule (by default the model's own top-k)."""
    router = router or ROUTERS["top_k"]()
    draws = torch.Generator().manual_seed(0)
    parts = [part for ids in streams for part in windows(ids, context)]
    bits = 0.0
    for group in passes(parts, TOKENS_A_PASS):
        inputs_T = torch.tensor([i for ids, _ in group for i in ids[:-1]])
        targets_T = torch.tensor([i for ids, _ in group for i in ids[1:]])
        counted_T = torch.cat([torch.arange(len(ids) - 1) >= skip for ids, skip in group])
        hidden_TD = model.forward(Batch(inputs_T, [len(ids) - 1 for ids, _ in group]), router, probe, draws)
        losses_T = F.cross_entropy(model.head(hidden_TD).float(), targets_T, reduction="none")
        bits += float(losses_T[counted_T].double().sum()) / math.log(2)
    return bits


def xz_size(documents: Sequence[str]) -> int:
    """Bytes that `xz -9e` packs these documents into, as one file in the form of the corpus."""
    text = f"\n{SEPARATOR}\n".join(documents)
    return len(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def held_out(corpus: Path, domain: str, size: float = math.inf) -> list[str]:
    """A domain's held-out documents in file order: all, or the first by hash that together have `size` bytes."""
    _, documents = split(read_documents(corpus / f"{domain}.txt.xz"))
    taken, total = set(), 0
    for document in sorted(documents, key=lambda document: hashlib.sha256(document.encode()).digest()):
        if total >= size:
            break
        taken.add(document)
        total += len(document.encode())
    return [document for document in documents if document in taken]


def token_streams(tokenizer: Tokenizer, domain: str, documents: Sequence[str]) -> list[list[int]]:
    """Each document's tokens with an end-of-text token before and after them."""
    end = tokenizer.token_to_id(SEPARATOR)
    encoded = tokenizer.encode_batch_fast([render(domain, document) for document in documents])
    return [[end, *one.ids, end] for one in encoded]
