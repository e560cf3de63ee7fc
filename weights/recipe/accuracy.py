"""How often a model finds the true ending of a cloze item the likeliest.

An ending's score is its log-probability after the passage, divided by its length in bytes: what lm-evaluation-harness
calls acc_norm, but for bytes in place of characters.

Shape letters: T tokens, D hidden, V vocabulary, N tokens of an ending.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from cloze import continuation
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.model import Batch, Olmoe
from minimoe.probe import Probe
from minimoe.routers import Router
from minimoe.scoring import cut
from minimoe.tokenizer import Tokenizer

ITEMS_A_PASS = 32


@torch.inference_mode()
def choices(
    model: Olmoe, tokenizer: Tokenizer, items: Sequence[Mapping[str, Any]], router: Router, probe: Probe
) -> list[int]:
    """The ending of each item that the model finds likeliest; the passage is computed once for all its endings."""
    draws = torch.Generator().manual_seed(0)
    chosen = []
    for first in range(0, len(items), ITEMS_A_PASS):
        group = items[first : first + ITEMS_A_PASS]
        passages, endings = zip(*(_tokens(tokenizer, item) for item in group), strict=True)
        longest = max(len(p) + max(map(len, e)) for p, e in zip(passages, endings, strict=True))
        caches = [KVCache(model.config, longest, model.dtype, model.device) for _ in group]
        before = [passage[:-1] for passage in passages]
        model.forward(_batch(before, caches), router, probe, draws)
        columns = []
        for ways in zip(*endings, strict=True):
            fed = [[passage[-1], *ending[:-1]] for passage, ending in zip(passages, ways, strict=True)]
            logits_TV = model.head(model.forward(_batch(fed, caches), router, probe, draws))
            columns.append(list(_totals(logits_TV, ways)))
            for cache, passage in zip(caches, before, strict=True):
                cache.truncate(len(passage))
        for item, totals in zip(group, zip(*columns, strict=True), strict=True):
            scores = [total / len(text.encode()) for total, text in zip(totals, item["endings"], strict=True)]
            chosen.append(scores.index(max(scores)))
    return chosen


def _tokens(tokenizer: Tokenizer, item: Mapping[str, Any]) -> tuple[list[int], list[list[int]]]:
    """The passage's tokens and each ending's; a token that spans the join of any ending belongs to all endings."""
    parts = [cut(tokenizer, item["ctx"], continuation(item, ending)) for ending in item["endings"]]
    shared = min(len(passage) for passage, _ in parts)
    return parts[0][0][:shared], [(passage + ending)[shared:] for passage, ending in parts]


def _batch(sequences: Sequence[Sequence[int]], caches: Sequence[KVCache]) -> Batch:
    ids_T = torch.tensor([token for ids in sequences for token in ids])
    return Batch(ids_T, [len(ids) for ids in sequences], caches)


def _totals(logits_TV: Tensor, endings: Sequence[Sequence[int]]) -> Iterator[float]:
    targets_T1 = torch.tensor([token for ids in endings for token in ids])[:, None]
    logprobs_T = logits_TV.double().log_softmax(-1).gather(1, targets_T1)[:, 0]
    for logprobs_N in logprobs_T.split([len(ids) for ids in endings]):
        yield float(logprobs_N.sum())
