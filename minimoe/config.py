"""The architecture of an OLMoE checkpoint, as plain frozen data, read once from its config.json."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minimoe.errors import InputError

# The values that transformers' OlmoeConfig gives to a key that a config.json leaves out. Keys that
# decide a tensor's shape are not among them: a guess there would only fail later, and less clearly.
DEFAULTS: Mapping[str, Any] = {
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
    "eos_token_id": 50279,
}
ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of one model. All sizes are counts of elements.

    `dtype` is the name of the dtype that the checkpoint says it is stored in ("bfloat16"), or None.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    top_k: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    clip_qkv: float | None
    norm_topk_prob: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of a key or value projection: head_dim x kv heads."""
        return self.head_dim * self.num_kv_heads

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a Hugging Face config.json, in the spelling of transformers 4 or 5.

        Raises:
            InputError: another architecture, a missing or impossible value, or a feature that this
                engine does not have (it is refused, never ignored).
        """
        if not isinstance(raw, Mapping):
            raise InputError("config.json must hold a JSON object.")
        if raw.get("model_type") != "olmoe":
            raise InputError(
                f"config.json says model_type {raw.get('model_type')!r}; minimoe runs 'olmoe' checkpoints only."
            )
        _refuse_unsupported(raw)
        num_heads = _count(raw, "num_attention_heads")
        config = cls(
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=_count(raw, "hidden_size"),
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=_count(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_count(raw, "num_key_value_heads", num_heads),
            num_experts=_count(raw, "num_experts", raw.get("num_local_experts")),
            top_k=_count(raw, "num_experts_per_tok", DEFAULTS["num_experts_per_tok"]),
            max_positions=_count(raw, "max_position_embeddings", DEFAULTS["max_position_embeddings"]),
            rms_norm_eps=_positive(raw, "rms_norm_eps", DEFAULTS["rms_norm_eps"]),
            rope_theta=_rope_theta(raw),
            clip_qkv=None if raw.get("clip_qkv") is None else _positive(raw, "clip_qkv"),
            norm_topk_prob=_switch(raw, "norm_topk_prob"),
            tie_word_embeddings=_switch(raw, "tie_word_embeddings"),
            eos_token_ids=token_ids(raw.get("eos_token_id", DEFAULTS["eos_token_id"]), "eos_token_id"),
            bos_token_id=next(iter(token_ids(raw.get("bos_token_id"), "bos_token_id")), None),
            dtype=_dtype(raw),
        )
        _check_shapes(config, raw)
        return config


def token_ids(value: Any, key: str) -> tuple[int, ...]:
    """A token id field as a tuple: null, one id and a list of ids are all in use.

    Raises:
        InputError: anything else.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise InputError(f"{key} must be a token id or a list of token ids, not {value!r}.")
    return tuple(ids)


def _count(raw: Mapping[str, Any], key: str, default: Any = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"config.json has no {key!r}.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"config.json: {key} must be a whole number of at least 1, not {value!r}.")
    return value


def _positive(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise InputError(f"config.json: {key} must be a number above 0, not {value!r}.")
    return float(value)


def _switch(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    value = DEFAULTS[key] if value is None else value
    if not isinstance(value, bool):
        raise InputError(f"config.json: {key} must be true or false, not {value!r}.")
    return value


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """The RoPE base: `rope_theta` in transformers 4, `rope_parameters.rope_theta` in transformers 5."""
    parameters = raw.get("rope_parameters")
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, Mapping):
        raise InputError(f"config.json: rope_parameters must be an object, not {parameters!r}.")
    for source in (parameters, raw.get("rope_scaling") or {}):
        kind = source.get("rope_type", source.get("type", "default")) if isinstance(source, Mapping) else source
        if kind != "default":
            raise InputError(f"config.json asks for RoPE of type {kind!r}; only the default type is supported.")
    factor = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if factor not in (None, 1):
        raise InputError(f"config.json asks for a partial_rotary_factor of {factor!r}; only whole heads are rotated.")
    return _positive(raw if parameters.get("rope_theta") is None else parameters, "rope_theta", ROPE_THETA)


def _dtype(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("dtype")
    value = raw.get("torch_dtype") if value is None else value
    if value is not None and not isinstance(value, str):
        raise InputError(f"config.json: dtype must be a name such as 'bfloat16', not {value!r}.")
    return value.removeprefix("torch.") if value else None


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("attention_bias"):
        raise InputError("config.json asks for attention_bias, which OLMoE does not have and minimoe does not run.")
    if raw.get("hidden_act", "silu") != "silu":
        raise InputError(f"config.json asks for hidden_act {raw['hidden_act']!r}; only 'silu' is supported.")
    if raw.get("quantization_config"):
        raise InputError("config.json has a quantization_config; only unquantised checkpoints are supported.")


def _check_shapes(config: ModelConfig, raw: Mapping[str, Any]) -> None:
    if config.hidden_size % config.num_heads:
        raise InputError(
            f"config.json: hidden_size {config.hidden_size} is not a multiple of "
            f"num_attention_heads {config.num_heads}."
        )
    if raw.get("head_dim") not in (None, config.head_dim):
        raise InputError(
            f"config.json: head_dim {raw['head_dim']} is not hidden_size / num_attention_heads = {config.head_dim}."
        )
    if config.head_dim % 2:
        raise InputError(f"config.json: RoPE needs an even head size, not {config.head_dim}.")
    if config.num_heads % config.num_kv_heads:
        raise InputError(
            f"config.json: num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}."
        )
    if config.top_k > config.num_experts:
        raise InputError(
            f"config.json: num_experts_per_tok {config.top_k} is more than num_experts {config.num_experts}."
        )
