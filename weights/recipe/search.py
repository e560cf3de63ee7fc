"""Train candidates for the same processor time and compare their held-out bits per byte.

Run: python weights/recipe/search.py base vocabulary-4096

Processor time, not the clock: other programs on the machine then change nothing. Each candidate gets one thread, so
on two cores the script may run twice side by side. Every run has its own complete schedule (warm-up, plateau, fall).
One JSON line a candidate is written to standard output.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bits import held_out, token_streams, total_bits
from data import SHARES, Mixture, training_streams
from parameters import checkpoint_weights
from tokenizers import Tokenizer
from train import RECIPE, Run, arguments, keep_freed_memory

from minimoe.config import ModelConfig
from minimoe.experts import find_backend
from minimoe.model import Olmoe
from minimoe.probe import Probe

# What each candidate changes: keys of config.json, options of train.py, or shares of domains (the others shrink alike).
CANDIDATES: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "vocabulary-4096": {"vocab_size": 4096},
    "batch-2048": {"tokens": 2048},
    "batch-8192": {"tokens": 8192},
    "muon-lr-0.01": {"muon_lr": 0.01},
    "muon-lr-0.02": {"muon_lr": 0.02},
    "adam-lr-double": {"adam_lr": 0.01, "embed_lr": 0.04},
    "layers-5": {"num_hidden_layers": 5},
    "experts-of-32": {"intermediate_size": 32},
    "experts-of-96": {"intermediate_size": 96},
    "width-192": {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 3},
    "width-320": {"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 5},
    "code-8-percent": {"shares": {"code": 0.08}},
    "stories-60-percent": {"shares": {"stories": 0.6}},
}
DECAY_PART = 0.4


def mixed(fixed: Mapping[str, float]) -> dict[str, float]:
    """The shares of all domains with some of them given; those of the others keep their proportions."""
    rest = sum(share for domain, share in SHARES.items() if domain not in fixed)
    left = sum(SHARES.values()) - sum(fixed.values())
    return {domain: fixed.get(domain, share * left / rest) for domain, share in SHARES.items()}


def train(changes: Mapping[str, Any], options: argparse.Namespace) -> tuple[Run, Tokenizer, dict[str, Any]]:
    """A candidate after `options.seconds` of processor time."""
    raw = json.loads((RECIPE / "config.json").read_text())
    raw |= {key: value for key, value in changes.items() if key in raw}
    settings = arguments(["--steps", "1000000", "--warmup", "10", "--parts", "1"])
    vars(settings).update({key: value for key, value in changes.items() if key not in raw and key != "shares"})
    tokenizer = Tokenizer.from_file(str(options.work / f"tokenizer-{raw['vocab_size']}.json"))
    streams = training_streams(options.corpus, tokenizer, options.work / "tokens")
    run = Run(ModelConfig.from_hf(raw), Mixture(streams, mixed(changes.get("shares", {})), settings.seed), settings)
    began = time.process_time()
    while run.steps_done < settings.steps:
        run.step()
        if run.steps_done < (1 - DECAY_PART) * settings.steps:  # the end is still open: plan it from the pace so far
            settings.steps = round(options.seconds * run.steps_done / (time.process_time() - began))
            settings.decay_steps = round(DECAY_PART * settings.steps)
    seconds = time.process_time() - began
    tokens = run.steps_done * settings.tokens
    facts = {"seconds": round(seconds), "steps": run.steps_done, "tokens": tokens, "rate": round(tokens / seconds)}
    return run, tokenizer, facts


def bits_per_byte(run: Run, tokenizer: Tokenizer, corpus: Path, size: int) -> dict[str, float]:
    """Of each domain, over some held-out documents that together have about `size` bytes."""
    model = Olmoe(run.config, checkpoint_weights(run.parameters), find_backend("bucketed"))
    result = {}
    for domain in SHARES:
        documents = held_out(corpus, domain, size)
        bits = total_bits(model, token_streams(tokenizer, domain, documents), run.options.context, Probe())
        result[domain] = round(bits / sum(len(document.encode()) for document in documents), 4)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("candidates", nargs="+", choices=CANDIDATES, metavar="candidate", help=", ".join(CANDIDATES))
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--work", type=Path, default=RECIPE / "work", help="holds tokenizer-<size>.json and tokens/")
    parser.add_argument("--seconds", type=float, default=170, help="processor time of one run")
    parser.add_argument("--bytes", type=int, default=20_000, help="held-out text of each domain")
    options = parser.parse_args(argv)
    keep_freed_memory()
    torch.set_num_threads(1)
    for name in options.candidates:
        run, tokenizer, facts = train(CANDIDATES[name], options)
        measured = bits_per_byte(run, tokenizer, options.corpus, options.bytes)
        mean = sum(SHARES[domain] * bits for domain, bits in measured.items()) / sum(SHARES.values())
        print(json.dumps({"candidate": name, **facts, "mean": round(mean, 4), **measured}), flush=True)


if __name__ == "__main__":
    main()
