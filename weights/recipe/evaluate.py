"""Measure a model folder: everything that its card says, into `measured.json`, and from there into the card.

Run: python weights/recipe/evaluate.py weights/tiny

Bits per byte and expert load are measured on all held-out documents. The rules are compared on a sample of them (the
first documents of each domain by hash) and on the cloze items. Everything runs in float32 with fixed seeds.

Shape letters: L layers, E experts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accuracy import choices
from bits import held_out, token_streams, total_bits, xz_size
from card import write_card
from data import SHARES
from router_health import RouterHealth
from safetensors.torch import load_file
from tokenizers import Tokenizer as TokenizerFile

import minimoe
from minimoe.config import ModelConfig
from minimoe.experts import find_backend
from minimoe.intervals import wilson
from minimoe.model import Olmoe
from minimoe.routers import ROUTERS, Router
from minimoe.tokenizer import Tokenizer

RECIPE = Path(__file__).parent
GOLDEN_PROMPTS = ("Once upon a time", "The old man opened the door and", "def main():\n")
GOLDEN_TOKENS = 48
SAMPLE_PROMPTS = (
    "Once upon a time",
    "The old man opened the door and",
    '"Where are you going?" said',
    "User: Hello, I'd like a latte.\nAssistant:",
    "12 + 7 =",
    "Es war einmal",
    "def main():\n",
)
CURVE_POINTS = 150


class Measurement:
    """A model folder, loaded in float32, and the texts it is measured on."""

    def __init__(self, folder: Path, corpus: Path, context: int, sample_bytes: float) -> None:
        self.folder = folder
        self.corpus = corpus
        self.context = context
        self.sample_bytes = sample_bytes
        self.config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
        weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.model = Olmoe(self.config, weights, find_backend("bucketed"))
        self.tokenizer = TokenizerFile.from_file(str(folder / "tokenizer.json"))

    def health(self) -> RouterHealth:
        return RouterHealth(self.config.num_layers, self.config.num_experts)

    def parameters(self) -> dict[str, int]:
        """How many there are, and how many of them a token uses (of the embedding it reads one row)."""
        total = sum(tensor.numel() for tensor in load_file(self.folder / "model.safetensors").values())
        c = self.config
        idle = 3 * c.hidden_size * c.intermediate_size * (c.num_experts - c.top_k) * c.num_layers
        return {"total": total, "active": total - idle - c.vocab_size * c.hidden_size}

    def held_out(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Bits per byte of each domain beside xz -9e, and the expert load over all of them."""
        health, domains = self.health(), {}
        for domain in SHARES:
            documents = held_out(self.corpus, domain)
            streams = token_streams(self.tokenizer, domain, documents)
            bits = total_bits(self.model, streams, self.context, health)
            size, packed = sum(len(document.encode()) for document in documents), 8 * xz_size(documents)
            domains[domain] = {
                "documents": len(documents),
                "bytes": size,
                "tokens": sum(map(len, streams)) - len(streams),
                "bits_per_byte": bits / size,
                "xz_bits_per_byte": packed / size,
                "below_xz": 1 - bits / packed,
            }
        load = {
            "least_share": health.shares().amin(dim=1).tolist(),
            "greatest_share": health.shares().amax(dim=1).tolist(),
            "variation": health.variation(),
            "sharp": health.sharp(),
        }
        return domains, load

    def rule(self, router: Router) -> dict[str, Any]:
        """Bits per byte and cloze accuracy of each domain under a rule, and the k it chose."""
        tokenizer = Tokenizer.from_folder(self.folder)
        whole, domains, total, size = self.health(), {}, 0.0, 0
        for domain in SHARES:
            documents = held_out(self.corpus, domain, self.sample_bytes)
            health = self.health()
            streams = token_streams(self.tokenizer, domain, documents)
            bits = total_bits(self.model, streams, self.context, health, router)
            whole.k_LE1 += health.k_LE1
            whole.sharp_L += health.sharp_L
            lines = (self.folder / "cloze" / f"{domain}.jsonl").read_text("utf-8").splitlines()
            items = [json.loads(line) for line in lines]
            chosen = choices(self.model, tokenizer, items, router, self.health())
            right = sum(choice == item["label"] for choice, item in zip(chosen, items, strict=True))
            domain_size = sum(len(document.encode()) for document in documents)
            total, size = total + bits, size + domain_size
            domains[domain] = {
                "bits_per_byte": bits / domain_size,
                "items": len(items),
                "right": right,
                "interval": wilson(right, len(items)),
                "mean_k": health.mean_k(),
            }
        K = self.config.top_k
        k_LK = whole.k_LE1[:, 1 : K + 1] / whole.k_LE1.sum(dim=1, keepdim=True)
        right, items_total = (sum(domain[key] for domain in domains.values()) for key in ("right", "items"))
        return {
            "bits_per_byte": total / size,
            "items": items_total,
            "right": right,
            "interval": wilson(right, items_total),
            "mean_k": whole.mean_k(),
            "k": k_LK.tolist(),
            "sharp": whole.sharp(),
            "domains": domains,
        }

    def rules(self) -> dict[str, Any]:
        """top-k, elbow, and the controls that belong beside elbow."""
        results = {"top_k": self.rule(ROUTERS["top_k"]()), "elbow": self.rule(ROUTERS["elbow"]())}
        results["same_mean_k"] = self.rule(ROUTERS["mixed_k"](k=fmean(results["elbow"]["mean_k"])))
        results["random_tail"] = self.rule(ROUTERS["random_tail"]())
        results["random_head"] = self.rule(ROUTERS["random_head"]())
        return results

    def texts(self) -> dict[str, Any]:
        """Golden text (greedy, both rules) and samples (the first draw of each prompt)."""
        engines = {rule: minimoe.load(self.folder, router=rule, dtype="float32") for rule in ("top_k", "elbow")}
        golden = [
            {"prompt": prompt}
            | {
                rule: engine.generate(prompt, max_new_tokens=GOLDEN_TOKENS, temperature=0).text
                for rule, engine in engines.items()
            }
            for prompt in GOLDEN_PROMPTS
        ]
        samples = [
            {"prompt": p, "text": engines["top_k"].generate(p, max_new_tokens=80, temperature=0.7, seed=0).text}
            for p in SAMPLE_PROMPTS
        ]
        return {"golden_tokens": GOLDEN_TOKENS, "golden": golden, "samples": samples}


def training(log: Path) -> dict[str, Any]:
    """What the log of a run says: steps, tokens, seconds, and the loss over the tokens in a few points."""
    lines = {line["step"]: line for line in map(json.loads, log.read_text().splitlines())}
    ordered = [lines[step] for step in sorted(lines)]
    tokens = torch.tensor([line["tokens"] for line in ordered]).cumsum(0)
    width = max(len(ordered) // CURVE_POINTS, 1)
    losses = torch.tensor([line["loss"] for line in ordered])
    curve = [
        [int(t[-1]), round(float(loss.mean()), 4)]
        for t, loss in zip(tokens.split(width), losses.split(width), strict=True)
    ]
    seconds = sum(line["seconds"] for line in ordered)
    return {"steps": len(ordered), "tokens": int(tokens[-1]), "seconds": round(seconds), "curve": curve}


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that is shipped and not written by this script."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    own = ("README.md", "measured.json", "loss.svg")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names if name not in own}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--log", type=Path, default=RECIPE / "work" / "run" / "log.jsonl", help="of the training run")
    parser.add_argument("--context", type=int, default=1024, help="tokens in a window")
    parser.add_argument("--sample-bytes", type=float, default=40_000, help="of each domain, to compare rules on")
    options = parser.parse_args(argv)
    measurement = Measurement(options.folder, options.corpus, options.context, options.sample_bytes)
    domains, load = measurement.held_out()
    measured: Mapping[str, Any] = {
        "files": file_hashes(options.folder),
        "parameters": measurement.parameters(),
        "training": training(options.log),
        "context": options.context,
        "domains": domains,
        "load": load,
        "sample_bytes": options.sample_bytes,
        "rules": measurement.rules(),
        **measurement.texts(),
    }
    (options.folder / "measured.json").write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n", "utf-8")
    write_card(options.folder)


if __name__ == "__main__":
    main()
