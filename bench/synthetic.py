"""Writes a random checkpoint of OLMoE-1B-7B-0924's exact shape, to time engines on without downloading 14 GB.

    python -m bench.synthetic                      # 4 of the 16 layers, 3.8 GB, in the system's temporary folder
    python -m bench.synthetic --layers 16 --gate-scale 2.65

Its texts are noise, but its work is real: names, shapes, dtype and shards are those of the published files, no two
tensors are alike, and every part of a layer weighs in the logits, so that a wrong engine is noticed.

Shape letters: D hidden, I expert intermediate.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from minimoe.checkpoint import Shape, tensor_shapes
from minimoe.config import ModelConfig
from minimoe.errors import InputError
from minimoe.weight_files import INDEX_FILE

# config.json of allenai/OLMoE-1B-7B-0924, in the spelling of transformers 4 that it was published in.
OLMOE_1B_7B: Mapping[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 50304,
}
STAMP = "synthetic.json"
DEFAULT_LAYERS, DEFAULT_GATE_SCALE = 4, 0.5


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the bytes of a synthetic checkpoint.

    Attributes:
        gate_scale: standard deviation of the router logits. It sets how many experts the elbow rule keeps of the
            8: 0.5 gives a mean k of 7.6 (the paper's), 2.65 gives 6.0, 6.1 gives 4.0.
        expert_gain: scale of the down projections. At 1 a layer's experts add little, for the weights of 8 sum to a
            quarter and SiLU halves what it lets through; at 4 the rounding of 16 layers makes the logits diverge.
        changes: config.json keys on top of OLMOE_1B_7B, the number of layers for example.
    """

    gate_scale: float = DEFAULT_GATE_SCALE
    expert_gain: float = 2.0
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=lambda: {"num_hidden_layers": DEFAULT_LAYERS})

    @property
    def raw_config(self) -> dict[str, Any]:
        return {**OLMOE_1B_7B, **self.changes}

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_hf(self.raw_config)


def write(folder: Path, recipe: Recipe) -> bool:
    """Write the checkpoint, unless the folder holds it already; False if it did.

    One layer is in memory at a time, and a folder appears only when it is complete.

    Raises:
        InputError: an impossible recipe, the folder holds something else, or there is no room for it.
    """
    config = recipe.config
    if folder.exists():
        stamp = folder / STAMP
        if not stamp.is_file() or json.loads(stamp.read_text("utf-8")) != asdict(recipe):
            raise InputError(f"{folder} holds something else; give --out another folder, or remove it first.")
        return False
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    try:
        size = 2 * sum(math.prod(shape) for _, shape in tensor_shapes(config))
        free = shutil.disk_usage(partial).free
        if size > free:
            raise InputError(f"{folder} will take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there.")
        _write_weights(partial, recipe)
        _write_tokenizer(partial / "tokenizer.json", config.vocab_size)
        _write_json(partial / "config.json", recipe.raw_config)
        _write_json(partial / STAMP, asdict(recipe))
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _write_weights(folder: Path, recipe: Recipe) -> None:
    """A shard for each layer, and one for the embedding, the last norm and the head."""
    config = recipe.config
    shapes = dict(tensor_shapes(config))
    prefixes = [f"model.layers.{layer}." for layer in range(config.num_layers)]
    shards = [[name for name in shapes if name.startswith(prefix)] for prefix in prefixes]
    shards.append([name for name in shapes if not name.startswith("model.layers.")])
    draw = _source(recipe)
    weight_map: dict[str, str] = {}
    size = 0
    for number, names in enumerate(_progress(shards), start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: draw(name, shapes[name]) for name in names}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file_name))
        size += sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _source(recipe: Recipe) -> Callable[[str, Shape], Tensor]:
    """Draws one bfloat16 tensor after another.

    Matrices are scaled to keep the size of what goes through them, and norm weights vary around 1. Drawing seven
    billion normal values takes minutes, so experts are cut from one long row of them, each at a place of its own.
    """
    config = recipe.config
    D, I = config.hidden_size, config.intermediate_size
    generator = torch.Generator().manual_seed(recipe.seed)
    count = 3 * config.num_layers * config.num_experts
    # An odd stride, so that an expert's rows are not another's, moved down. The row holds every start, and two experts.
    stride = max(4 * D * I // count, 1) | 1
    row = torch.randn(count * stride + D * I, generator=generator).to(torch.bfloat16)
    starts = iter(range(0, count * stride, stride))

    def draw(name: str, shape: Shape) -> Tensor:
        if ".experts." in name:
            start = next(starts)
            gain = recipe.expert_gain if "down_proj" in name else 1.0
            return row[start : start + D * I].view(shape) * (gain / shape[1] ** 0.5)
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            return (1 + 0.1 * values).to(torch.bfloat16)
        scale = 1.0 if "embed" in name else shape[1] ** -0.5
        return (values * scale * (recipe.gate_scale if "mlp.gate" in name else 1)).to(torch.bfloat16)

    return draw


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of OLMoE's size, so that loading it takes as long; its merges join pairs of bytes.

    As in OLMoE's own, <|endoftext|> is the last entry and a few ids of the model's vocabulary have none.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    room = min(vocab_size, OLMOE_1B_7B["eos_token_id"] + 1) - 1 - len(alphabet)
    merges = [(first, second) for first in alphabet for second in alphabet][: max(room, 0)]
    entries = [*alphabet, *(first + second for first, second in merges)]
    model = tokenizers.models.BPE({entry: i for i, entry in enumerate(entries)}, merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _progress(shards: list[list[str]]) -> Iterable[list[str]]:
    return track(shards, "Writing", console=Console(stderr=True), disable=not sys.stderr.isatty())


def default_folder(layers: int, gate_scale: float) -> Path:
    return Path(tempfile.gettempdir()) / f"minimoe-synthetic-{layers}-layers-gate-{gate_scale:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random checkpoint of OLMoE-1B-7B's shape, in bfloat16.")
    parser.add_argument("--layers", type=int, default=DEFAULT_LAYERS, help="of 0.84 GB each; 16 is the whole model")
    parser.add_argument(
        "--gate-scale",
        type=float,
        default=DEFAULT_GATE_SCALE,
        help="spread of the router logits; 0.5, 2.65 and 6.1 give the elbow rule a mean k of 7.6, 6 and 4",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the folder; by default one in the system's temporary folder")
    arguments = parser.parse_args()
    folder = arguments.out or default_folder(arguments.layers, arguments.gate_scale)
    recipe = Recipe(arguments.gate_scale, seed=arguments.seed, changes={"num_hidden_layers": arguments.layers})
    try:
        written = write(folder, recipe)
    except InputError as error:
        parser.error(str(error))
    print(f"{'wrote' if written else 'already there:'} {folder}")


if __name__ == "__main__":
    main()
