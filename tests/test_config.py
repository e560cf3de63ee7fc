"""config.json in every spelling, transformers' own defaults, and a plain refusal of everything else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fixtures import ABSENT, BASE, VARIANTS
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import OlmoeConfig

from minimoe.config import DEFAULTS, ModelConfig, token_ids
from minimoe.errors import InputError

RAW: dict[str, Any] = {**BASE, "model_type": "olmoe"}
SHAPE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
)
COUNTS = (*SHAPE_KEYS, "num_key_value_heads", "num_experts_per_tok", "max_position_embeddings")


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({key: value for key, value in {**RAW, **changes}.items() if value is not ABSENT})


def test_every_field_is_read() -> None:
    config = read(
        clip_qkv=0.5,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_theta=500000,
        bos_token_id=2,
        dtype="bfloat16",
    )
    assert config == ModelConfig(
        vocab_size=307,
        hidden_size=64,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        num_experts=8,
        top_k=2,
        max_positions=128,
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
        clip_qkv=0.5,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        eos_token_ids=(0,),
        bos_token_id=2,
        dtype="bfloat16",
    )
    assert (config.head_dim, config.kv_width) == (16, 32)


def test_keys_left_out_get_transformers_defaults() -> None:
    theirs: Any = OlmoeConfig(**{key: RAW[key] for key in SHAPE_KEYS})
    ours = ModelConfig.from_hf({"model_type": "olmoe", **{key: RAW[key] for key in SHAPE_KEYS}})
    assert {key: getattr(theirs, key) for key in DEFAULTS} == dict(DEFAULTS)
    assert ours.top_k == theirs.num_experts_per_tok
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.num_kv_heads == theirs.num_key_value_heads == theirs.num_attention_heads
    assert ours.clip_qkv is theirs.clip_qkv is None
    assert ours.norm_topk_prob is theirs.norm_topk_prob is False
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings is False
    assert ours.bos_token_id is theirs.bos_token_id is None
    assert ours.dtype is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_writes_is_read_as_transformers_reads_it(variant: str, tmp_path: Path) -> None:
    settings = {key: value for key, value in {**BASE, **VARIANTS[variant]}.items() if value is not ABSENT}
    OlmoeConfig(**settings).save_pretrained(tmp_path)
    theirs: Any = OlmoeConfig.from_pretrained(tmp_path)
    for raw in (json.loads((tmp_path / "config.json").read_text()), {**settings, "model_type": "olmoe"}):
        ours = ModelConfig.from_hf(raw)
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert (ours.num_experts, ours.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
        assert (ours.clip_qkv, ours.norm_topk_prob) == (theirs.clip_qkv, theirs.norm_topk_prob)
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert ours.vocab_size == theirs.vocab_size


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 10000),
        ({"rope_theta": 500000}, 500000),
        ({"rope_theta": 500000.0, "rope_scaling": None}, 500000),
        ({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, 500000),
        ({"rope_parameters": {"rope_theta": 500000.0}}, 500000),
        ({"rope_parameters": {"rope_theta": 500000.0}, "rope_theta": 10000}, 500000),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 500000}, 500000),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": 500000}, 500000),
        ({"rope_parameters": None, "rope_theta": 500000}, 500000),
        ({"rope_parameters": {}, "rope_theta": 500000}, 500000),
    ],
)
def test_the_rope_base_is_found_in_either_spelling(changes: dict[str, Any], theta: float) -> None:
    assert read(**changes).rope_theta == theta


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_the_dtype_is_found_in_either_spelling(changes: dict[str, Any], dtype: str | None) -> None:
    assert read(**changes).dtype == dtype


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (0, (0,)), (7, (7,)), ([], ()), ([7], (7,)), ([7, 9], (7, 9))])
def test_token_ids_are_null_one_or_a_list(value: Any, ids: tuple[int, ...]) -> None:
    assert token_ids(value, "eos_token_id") == ids
    assert read(eos_token_id=value).eos_token_ids == ids
    assert read(bos_token_id=value).bos_token_id == (ids[0] if ids else None)


def test_num_local_experts_is_another_name_for_num_experts() -> None:
    assert read(num_experts=ABSENT, num_local_experts=4).num_experts == 4


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mixtral"}, "model_type 'mixtral'; minimoe runs 'olmoe' checkpoints only"),
    ({"model_type": ABSENT}, "model_type None"),
    *[({key: ABSENT}, f"config.json has no '{key}'") for key in SHAPE_KEYS],
    *[
        ({key: value}, f"{key} must be a whole number of at least 1")
        for key in COUNTS
        for value in (0, -1, 2.5, 8.0, "8", True, [8], {})
    ],
    ({"num_experts": 4, "num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 4"),
    ({"num_experts": 4, "num_experts_per_tok": ABSENT}, "num_experts_per_tok 8 is more than num_experts 4"),
    ({"num_attention_heads": 3}, "hidden_size 64 is not a multiple of num_attention_heads 3"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"num_key_value_heads": 8}, "num_attention_heads 4 is not a multiple of num_key_value_heads 8"),
    ({"hidden_size": 12}, "even head size, not 3"),
    ({"head_dim": 32}, "head_dim 32 is not hidden_size / num_attention_heads = 16"),
    *[({"clip_qkv": value}, "clip_qkv must be a number above 0") for value in (0, -0.05, math.nan, "1", True)],
    *[({"rms_norm_eps": value}, "rms_norm_eps must be") for value in (0, -1e-5, math.inf, 10**400, "1e-5", [])],
    *[({"rope_theta": value}, "rope_theta must be") for value in (0, -1, math.nan, 10**400, "1e4", False)],
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a number above 0"),
    *[({"rope_parameters": value}, "rope_parameters must be an object") for value in ([], "x", 0, False, [1])],
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "RoPE of type 'yarn'"),
    ({"rope_parameters": {"type": "linear"}}, "RoPE of type 'linear'"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "RoPE of type 'linear'"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "RoPE of type 'llama3'"),
    ({"rope_scaling": "dynamic"}, "RoPE of type 'dynamic'"),
    *[({"norm_topk_prob": value}, "norm_topk_prob must be true or false") for value in (0, 1, "true", [])],
    *[({"tie_word_embeddings": value}, "tie_word_embeddings must be true or false") for value in (1, "no")],
    *[
        ({key: value}, f"{key} must be a token id or a list")
        for key in ("eos_token_id", "bos_token_id")
        for value in (-1, 1.0, "2", True, [1, "2"], [[1]], {})
    ],
    ({"dtype": 16}, "dtype must be a name"),
    ({"torch_dtype": ["bfloat16"]}, "dtype must be a name"),
    ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only 'silu' is supported"),
    ({"hidden_act": None}, "hidden_act None"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_what_cannot_be_run_is_refused_and_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        read(**changes)
    assert str(caught.value).endswith(".")


def test_harmless_settings_are_accepted() -> None:
    plain = read()
    assert plain == read(attention_bias=False, hidden_act="silu", quantization_config=None, rope_scaling=None)
    assert plain == read(head_dim=16, router_aux_loss_coef=0.01, output_router_logits=True, architectures=["Olmoe"])
    assert plain == read(clip_qkv=None, norm_topk_prob=None, rms_norm_eps=None, tie_word_embeddings=None)


JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 64, 2**63, 10**400, 0.0, 0.5, -1.5, 1e-320, math.nan, math.inf, -math.inf),
    *("", "x", "default", "silu", "olmoe", "é", [], [None], [0, "x"], [[]], {}, {"": None}),
    *({"rope_theta": 10**400}, {"rope_theta": []}, {"rope_type": {}}, {"type": None}, {"rope_theta": "x", "factor": 2}),
)
KEYS = [
    *(*COUNTS, *DEFAULTS, "model_type", "num_local_experts", "head_dim", "clip_qkv", "eos_token_id", "bos_token_id"),
    *("rope_theta", "rope_parameters", "rope_scaling", "dtype", "torch_dtype"),
    *("attention_bias", "hidden_act", "quantization_config"),
]


def read_or_refuse(**changes: Any) -> None:
    """Anything but a config that can be built or an InputError fails the test that calls this."""
    try:
        config = read(**changes)
    except InputError:
        return
    assert config.top_k <= config.num_experts
    assert 0 < config.rope_theta < math.inf
    assert config.kv_width <= config.hidden_size


@pytest.mark.parametrize("key", dict.fromkeys(KEYS))
def test_junk_in_a_key_is_never_more_than_an_input_error(key: str) -> None:
    for value in JUNK:
        read_or_refuse(**{key: value})


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from([*JUNK, ABSENT])), max_size=4))
@settings(deadline=None, max_examples=200)
def test_junk_in_several_keys_is_never_more_than_an_input_error(changes: list[tuple[str, Any]]) -> None:
    read_or_refuse(**dict(changes))


@pytest.mark.parametrize("value", JUNK, ids=range(len(JUNK)))
def test_a_file_of_junk_is_refused(value: Any) -> None:
    with pytest.raises(InputError):
        ModelConfig.from_hf(value)
