"""Small random OLMoE checkpoints on disk, written by transformers and built so that they hide no fault.

A freshly initialised model forgives much: its norm weights are all one, its router is nearly flat and its logits are
nearly zero. Here every norm weight is random around one, the router is decided, and the logits spread by about a half.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from minimoe.experts import BACKENDS
from minimoe.native import instruction_sets

WITHOUT_KERNELS = pytest.mark.skipif(not instruction_sets(), reason="the native kernels were not built")
ON_CPU = [name for name in BACKENDS if name != "triton"]
RUNNABLE = [pytest.param(name, marks=WITHOUT_KERNELS if name == "native" else ()) for name in ON_CPU]
"""Every backend of the CPU as a parameter; native is skipped where there was no compiler. Triton has its own tests."""

ABSENT: Any = object()
"""As a value in VARIANTS: the key is left out of config.json."""

TOKENIZER_SIZE = 307
EOS, PAD = 0, 1

BASE: Mapping[str, Any] = {
    "vocab_size": TOKENIZER_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "norm_topk_prob": False,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
"""The synthetic checkpoint of the benchmarks, made small."""

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "top8_of_64": {"num_experts": 64, "num_experts_per_tok": 8},
    "top2_of_4": {"num_experts": 4},
    "one_expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "kv_heads_equal": {"num_key_value_heads": 4},
    "clip_qkv": {"clip_qkv": 0.05},
    "norm_topk_true": {"norm_topk_prob": True},
    "norm_topk_absent": {"norm_topk_prob": ABSENT},
    "tied_head": {"tie_word_embeddings": True},
    "rope_500000": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "rope_500000_legacy": {"rope_parameters": ABSENT, "rope_theta": 500000.0},
    "larger_vocabulary": {"vocab_size": TOKENIZER_SIZE + 24},
}

SENTENCES = (
    "Once upon a time there was a small fox who lived near the river.",
    "The fox and the owl were friends, and they walked to the river every day.",
    "She said that the sky is blue, and that the sea is blue too.",
    "There were two of them in the boat; the other three stayed on the shore.",
    "What is the answer? The answer is the one that the others did not give.",
)


def write_checkpoint(
    folder: Path,
    variant: str = "base",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    form: Literal["per_expert", "packed"] = "per_expert",
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of one of VARIANTS, with a tokenizer, and return its folder.

    The weights depend on the config and the seed only: every form and number of shards of a variant holds the same
    bits, and every dtype the same values, rounded. (transformers' logits of two forms may still differ by 1e-5: its
    products round differently when mapped weights are aligned differently.)

    Args:
        folder: made if it does not exist.
        form: "per_expert" is the form of the published checkpoints, "packed" that of transformers 5.
        shards: 1 writes model.safetensors; more writes at least that many shards and their index.
        overrides: config.json keys on top of the variant's, for example `num_hidden_layers=2`.
    """
    settings = {**BASE, **VARIANTS[variant], **overrides}
    model = OlmoeForCausalLM(OlmoeConfig(**{key: value for key, value in settings.items() if value is not ABSENT}))
    randomise(model, seed)
    torch.nn.Module.to(model, dtype)  # the override of model.to has a type that mypy cannot call
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(
        folder,
        max_shard_size=10 * size if shards == 1 else math.ceil(size / shards),
        save_original_format=form == "per_expert",
    )
    edit_json(folder / "config.json", settings)
    write_tokenizer(folder)
    return folder


def randomise(model: OlmoeForCausalLM, seed: int) -> None:
    """Give every parameter seeded normal values, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3, generator=generator)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0.0, 50 * 0.02, generator=generator)
            else:
                # Three times OLMoE's initial spread. Much more, and float32 itself strays from float64 by the
                # 1e-4 that parity is measured to, in transformers as here.
                parameter.normal_(0.0, 0.06, generator=generator)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer of TOKENIZER_SIZE entries: two special tokens, 256 bytes, and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|padding|>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def edit_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Set keys of a JSON file, and remove those whose value is ABSENT."""
    content = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    kept = {key: value for key, value in content.items() if value is not ABSENT}
    path.write_text(json.dumps(kept, indent=2), encoding="utf-8")


def reference_model(folder: Path) -> OlmoeForCausalLM:
    """transformers' own model of a checkpoint, in float32, with its plainest attention and expert code."""
    model = OlmoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()
