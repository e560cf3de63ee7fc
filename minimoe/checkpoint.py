"""Reads a checkpoint folder: config.json, and safetensors files mapped into memory under one set of tensor names.

Shape letters: D hidden, E experts, I expert intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minimoe.config import ModelConfig, token_ids
from minimoe.errors import InputError
from minimoe.weight_files import DTYPES, SINGLE_FILE, first_of, map_tensors, read_json, weight_files

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A model's weights, mapped from disk and not yet read: the first use of a tensor reads it.

    Attributes:
        folder: where it was read from; the tokenizer's files are there too.
        config: its shapes and switches.
        tensors: every tensor of `tensor_shapes(config)`, by name, all of one dtype. They are views of private
            mappings of the files: writing to one does not change the file. Data are aligned to the element only.
        dtype: the dtype of the tensors, which is that of the files.
        eos_token_ids: every id that config.json or generation_config.json lists as an end of text.
        files: the weight files, in the order of the index.
    """

    folder: Path
    config: ModelConfig
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    files: tuple[Path, ...]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Map the checkpoint in a folder: model.safetensors, or the shards that model.safetensors.index.json names.

    Experts may be stored one by one, or packed as transformers 5 can write them; the tensors are the same either way,
    and packed ones are split into views. Files of mixed dtypes are converted to config.json's dtype, as transformers
    does, which copies the tensors that differ; nothing else is ever copied.

    Raises:
        InputError: the folder, a file in it, or the set of tensors is not that of a complete OLMoE checkpoint.
    """
    try:
        if not folder.is_dir():
            what = "is a file; give the folder that it is in" if folder.exists() else "does not exist"
            raise InputError(f"The model folder {folder} {what}.")
        config = _read_config(folder)
        names_by_file = weight_files(folder)
        found = {
            name: tensor for path, names in names_by_file.items() for name, tensor in map_tensors(path, names).items()
        }
        eos_token_ids = _eos_token_ids(folder, config)
    except OSError as error:
        raise InputError(f"{error.filename or folder} cannot be read ({error.strerror}).") from error
    tensors = _canonical(found, config, folder)
    return Checkpoint(folder, config, tensors, tensors[EMBEDDING].dtype, eos_token_ids, tuple(names_by_file))


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """The name and shape of every tensor of a model, under the names of the published OLMoE checkpoints."""
    D, I, kv = config.hidden_size, config.intermediate_size, config.kv_width
    yield EMBEDDING, (config.vocab_size, D)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (D,)
        yield f"{prefix}.self_attn.q_proj.weight", (D, D)
        yield f"{prefix}.self_attn.k_proj.weight", (kv, D)
        yield f"{prefix}.self_attn.v_proj.weight", (kv, D)
        yield f"{prefix}.self_attn.o_proj.weight", (D, D)
        yield f"{prefix}.self_attn.q_norm.weight", (D,)
        yield f"{prefix}.self_attn.k_norm.weight", (kv,)
        yield f"{prefix}.post_attention_layernorm.weight", (D,)
        yield f"{prefix}.mlp.gate.weight", (config.num_experts, D)
        for expert in range(config.num_experts):
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (I, D)
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (I, D)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (D, I)
    yield "model.norm.weight", (D,)
    yield HEAD, (config.vocab_size, D)


def _packed_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape, tuple[str, ...]]]:
    """Of every tensor of the packed form: its name, its shape, and the projections that follow each other in it."""
    D, E, I = config.hidden_size, config.num_experts, config.intermediate_size
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        yield f"{prefix}.gate_up_proj", (E, 2 * I, D), ("gate_proj", "up_proj")
        yield f"{prefix}.down_proj", (E, D, I), ("down_proj",)


def _canonical(found: dict[str, Tensor], config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """The found tensors under the names, and in the order, of `tensor_shapes`; refused unless they all fit."""
    tensors = dict(found)
    # A config.json with absurd numbers must not make us list its tensors one by one.
    room = sum(len(tensor) if tensor.dim() == 3 and tensor.numel() else 1 for tensor in tensors.values())
    if config.num_layers * config.num_experts > room:
        raise InputError(
            f"{folder}: config.json describes {config.num_layers} layers of {config.num_experts} experts, which is "
            f"more than its {len(tensors)} tensors can hold; check that all files are of the same model."
        )
    # If a tied model has both matrices on disk, the head's own values count, as they do in transformers.
    shares_head = config.tie_word_embeddings and (EMBEDDING in tensors) != (HEAD in tensors)
    if shares_head:
        tensors[EMBEDDING] = tensors[HEAD] = tensors[EMBEDDING] if EMBEDDING in tensors else tensors[HEAD]

    shapes = dict(tensor_shapes(config))
    packed = [entry for entry in _packed_shapes(config) if entry[0] in tensors]
    wanted = dict(shapes)
    for name, shape, projections in packed:
        for part in _part_names(name, projections, config.num_experts):
            del wanted[part]
        wanted[name] = shape
    _check_fit({name: tuple(tensor.shape) for name, tensor in tensors.items()}, wanted, folder)

    dtype = _common_dtype(tensors, config, folder)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if shares_head:
        tensors[HEAD] = tensors[EMBEDDING]
    for name, _, projections in packed:
        matrices = (part for expert in tensors.pop(name) for part in expert.chunk(len(projections)))
        tensors.update(zip(_part_names(name, projections, config.num_experts), matrices, strict=True))
    return {name: tensors[name] for name in shapes}


def _part_names(packed_name: str, projections: Sequence[str], num_experts: int) -> list[str]:
    prefix = packed_name.rpartition(".")[0]
    return [f"{prefix}.{e}.{projection}.weight" for e in range(num_experts) for projection in projections]


def _check_fit(found: Mapping[str, Shape], wanted: Mapping[str, Shape], folder: Path) -> None:
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    misshapen = [
        f"{name} is {list(found[name])} and should be {list(shape)}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    faults = [
        f"{len(names)} {kind} ({first_of(names)})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", misshapen))
        if names
    ]
    if missing == [HEAD]:
        faults.append("tie_word_embeddings is false, so the model needs a head of its own")
    if faults:
        raise InputError(
            f"The tensors in {folder} do not fit its config.json: {'; '.join(faults)}; "
            "check that the files are complete and all of the same model."
        )


def _common_dtype(tensors: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) == 1:
        return dtypes.pop()
    named = [dtype for dtype in DTYPES.values() if str(dtype) == f"torch.{config.dtype}"]
    if not named:
        raise InputError(
            f"The tensors in {folder} are of mixed dtypes ({', '.join(sorted(map(str, dtypes)))}) and its config.json "
            f"does not say which to use (dtype is {config.dtype!r}); set dtype there, for example to 'bfloat16'."
        )
    return named[0]


def _read_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    if not path.exists():
        raise InputError(f"{folder} has no config.json; a model folder holds config.json and {SINGLE_FILE}.")
    raw = read_json(path)
    try:
        return ModelConfig.from_hf(raw)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error


def _eos_token_ids(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if not path.exists():
        return config.eos_token_ids
    more = token_ids(read_json(path).get("eos_token_id"), f"{path}: eos_token_id")
    return tuple(dict.fromkeys(config.eos_token_ids + more))
