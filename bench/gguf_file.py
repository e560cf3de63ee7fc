"""A checkpoint folder as one GGUF file, the form that llama.cpp reads: the same bfloat16 weights, without a tokenizer.

Needs the gguf package. Names and keys are those of llama.cpp's OLMoE architecture.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from minimoe.checkpoint import read_checkpoint

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
WIDE = ("norm", "ffn_gate_inp")  # llama.cpp wants these in float32


def write_gguf(folder: Path) -> Path:
    """Write the file into the system's temporary folder unless it is there; one tensor is in memory at a time.

    It is named after the weight files, their sizes and their times, so other weights never find it.
    """
    import gguf

    files = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")
    ]
    key = hashlib.sha256(repr(sorted(files)).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"minimoe-{folder.name}-{key}.gguf"
    if path.exists():
        return path
    checkpoint = read_checkpoint(folder)
    config = checkpoint.config
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "olmoe")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.top_k)
    names = list(_names(config.num_layers, config.num_experts))

    def tensor(name: str, sources: str | list[str]) -> Tensor:
        read = checkpoint.tensors
        value = read[sources] if isinstance(sources, str) else torch.stack([read[source] for source in sources])
        return value.float() if any(part in name for part in WIDE) else value.to(torch.bfloat16)

    for name, sources in names:
        first = checkpoint.tensors[sources if isinstance(sources, str) else sources[0]]
        shape = list(first.shape) if isinstance(sources, str) else [len(sources), *first.shape]
        wide = any(part in name for part in WIDE)
        kind = gguf.GGMLQuantizationType.F32 if wide else gguf.GGMLQuantizationType.BF16
        size = first.numel() * (1 if isinstance(sources, str) else len(sources)) * (4 if wide else 2)
        writer.add_tensor_info(f"{name}.weight", shape, torch.empty(0).numpy().dtype, size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, sources in names:
        writer.write_tensor_data(tensor(name, sources).contiguous().view(torch.uint8).numpy())
    writer.close()
    partial.rename(path)
    return path


def _names(layers: int, experts: int) -> Iterator[tuple[str, str | list[str]]]:
    """llama.cpp's name of each tensor, without ".weight", and the checkpoint's, or those of all experts."""
    for name, source in OUTER.items():
        yield name, f"{source}.weight"
    for layer in range(layers):
        for name, source in LAYER.items():
            yield f"blk.{layer}.{name}", f"model.layers.{layer}.{source}.weight"
        for name, source in EXPERTS.items():
            prefix = f"model.layers.{layer}.mlp.experts"
            yield f"blk.{layer}.{name}", [f"{prefix}.{expert}.{source}.weight" for expert in range(experts)]
