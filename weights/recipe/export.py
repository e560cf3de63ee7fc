"""Turn a training checkpoint into a model folder, in the form that transformers and minimoe read.

Run: python weights/recipe/export.py --out weights/tiny
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from parameters import checkpoint_weights
from safetensors.torch import save_file
from tokenizer import tokenizer_config

RECIPE = Path(__file__).parent


def export(checkpoint: Path, config: Path, tokenizer: Path, out: Path) -> None:
    """Write the configs, model.safetensors (bfloat16, one tensor an expert) and the tokenizer into `out`."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    raw = json.loads(config.read_text())
    out.mkdir(parents=True, exist_ok=True)
    weights = checkpoint_weights(state["parameters"])
    halves = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(halves, out / "model.safetensors", metadata={"format": "pt"})
    ids = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, value in (
        ("config.json", raw),
        ("generation_config.json", ids),
        ("tokenizer_config.json", tokenizer_config(raw["max_position_embeddings"])),
    ):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    shutil.copyfile(tokenizer, out / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=RECIPE / "work" / "run" / "checkpoint.pt")
    parser.add_argument("--config", type=Path, default=RECIPE / "config.json")
    parser.add_argument("--tokenizer", type=Path, default=RECIPE / "work" / "tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    export(options.checkpoint, options.config, options.tokenizer, options.out)


if __name__ == "__main__":
    main()
