"""Measure a model folder on the held-out documents: bits per byte by domain beside xz, expert load, samples.

Run: python weights/recipe/evaluate.py weights/tiny

Every document is read on its own, from an end-of-text token on; a long one in windows that overlap by half, so that
from the second window on each scored token has at least half a window before it. The price of the end-of-text token
is counted, its bytes are not. `xz -9e` packs the same documents, all of a domain as one file.

Shape letters: T tokens, E experts.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from data import SEPARATOR, SHARES, read_documents, render, split
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from minimoe.config import ModelConfig
from minimoe.experts import find_backend
from minimoe.model import Batch, Olmoe
from minimoe.probe import Probe
from minimoe.routers import ROUTERS
from minimoe.routing import Routing

TOKENS_A_PASS = 8192


class LoadCount(Probe):
    """Counts how many (token, expert) pairs each expert of each layer gets."""

    def __init__(self, layers: int, experts: int) -> None:
        self.counts_LE = torch.zeros(layers, experts, dtype=torch.int64)

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        E = routing.num_experts
        self.counts_LE[layer] += torch.bincount(routing.experts_TK.reshape(-1), minlength=E + 1)[:E].cpu()

    def smallest_shares(self) -> list[float]:
        """Of each layer, the load of its least used expert, as a part of the fair share (1 = even load)."""
        even_L1 = self.counts_LE.sum(dim=1, keepdim=True) / self.counts_LE.shape[1]
        return (self.counts_LE / even_L1).amin(dim=1).tolist()


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
def total_bits(model: Olmoe, streams: Sequence[Sequence[int]], context: int, probe: Probe) -> float:
    """Bits to tell every token of every stream but its first."""
    router = ROUTERS["top_k"]()
    parts = [part for ids in streams for part in windows(ids, context)]
    bits = 0.0
    for group in passes(parts, TOKENS_A_PASS):
        inputs_T = torch.tensor([i for ids, _ in group for i in ids[:-1]])
        targets_T = torch.tensor([i for ids, _ in group for i in ids[1:]])
        counted_T = torch.cat([torch.arange(len(ids) - 1) >= skip for ids, skip in group])
        hidden_TD = model.forward(Batch(inputs_T, [len(ids) - 1 for ids, _ in group]), router, probe)
        losses_T = F.cross_entropy(model.head(hidden_TD).float(), targets_T, reduction="none")
        bits += float(losses_T[counted_T].double().sum()) / math.log(2)
    return bits


def xz_size(documents: Sequence[str]) -> int:
    """Bytes that `xz -9e` packs these documents into, as one file in the form of the corpus."""
    text = f"\n{SEPARATOR}\n".join(documents)
    return len(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def measure(model: Olmoe, tokenizer: Tokenizer, corpus: Path, context: int) -> dict[str, object]:
    """Bits per byte of each domain's held-out documents beside xz -9e, and the expert load over all of them."""
    end = model.config.eos_token_ids[0]
    load = LoadCount(model.config.num_layers, model.config.num_experts)
    domains = {}
    for domain in SHARES:
        _, held_out = split(read_documents(corpus / f"{domain}.txt.xz"))
        encoded = tokenizer.encode_batch_fast([render(domain, document) for document in held_out])
        bits = total_bits(model, [[end, *one.ids, end] for one in encoded], context, load)
        size, packed = sum(len(document.encode()) for document in held_out), xz_size(held_out)
        domains[domain] = {
            "documents": len(held_out),
            "bytes": size,
            "bits_per_byte": round(bits / size, 4),
            "xz_bits_per_byte": round(8 * packed / size, 4),
            "below_xz_percent": round(100 * (1 - bits / (8 * packed)), 1),
        }
    return {"context": context, "domains": domains, "smallest_expert_share_by_layer": load.smallest_shares()}


@torch.inference_mode()
def sample(model: Olmoe, tokenizer: Tokenizer, prompt: str, tokens: int, seed: int, temperature: float) -> str:
    """Continue a prompt by drawing tokens at a temperature (0: the best one), until end of text."""
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    begun = len(ids)
    while len(ids) < min(begun + tokens, model.config.max_positions):
        hidden_TD = model.forward(Batch(torch.tensor(ids), [len(ids)]), ROUTERS["top_k"]())
        logits_V = model.head(hidden_TD[-1:])[0].float()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial((logits_V / temperature).softmax(dim=0), 1, generator=generator))
        if token in model.config.eos_token_ids:
            break
        ids.append(token)
    return str(tokenizer.decode(ids))


def load(folder: Path) -> tuple[Olmoe, Tokenizer]:
    """A model folder as a float32 model and its tokenizer."""
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    return Olmoe(config, weights, find_backend("bucketed")), Tokenizer.from_file(str(folder / "tokenizer.json"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--context", type=int, default=1024, help="tokens in a window")
    parser.add_argument("--prompt", action="append", default=[], help="also continue this text; may be repeated")
    options = parser.parse_args(argv)
    model, tokenizer = load(options.folder)
    report = measure(model, tokenizer, options.corpus, options.context)
    report["samples"] = [
        sample(model, tokenizer, prompt, tokens=80, seed=0, temperature=0.7) for prompt in options.prompt
    ]
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
