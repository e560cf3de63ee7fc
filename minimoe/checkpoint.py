"""Reads a checkpoint folder: config.json, and safetensors files mapped into memory under one set of tensor names.

Shape letters: D hidden, E experts, I expert intermediate, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minimoe.config import ModelConfig, token_ids
from minimoe.errors import InputError

Shape = tuple[int, ...]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses longer headers too
GIT_LFS = b"version https://git-lfs.github.com/spec/"


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
        file_bytes: size of the weight files, in bytes.
    """

    folder: Path
    config: ModelConfig
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    file_bytes: int


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
        names_by_file = _weight_files(folder)
        found = {
            name: tensor for path, names in names_by_file.items() for name, tensor in _map_tensors(path, names).items()
        }
        file_bytes = sum(path.stat().st_size for path in names_by_file)
        eos_token_ids = _eos_token_ids(folder, config)
    except OSError as error:
        raise InputError(f"{error.filename or folder} cannot be read ({error.strerror}).") from error
    tensors = _canonical(found, config, folder)
    return Checkpoint(folder, config, tensors, tensors[EMBEDDING].dtype, eos_token_ids, file_bytes)


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
    # A config.json with absurd numbers must not make us list its tensors: each expert takes three elements at least.
    if 3 * config.num_layers * config.num_experts > sum(tensor.numel() for tensor in tensors.values()):
        raise InputError(
            f"{folder}: config.json describes {config.num_layers} layers of {config.num_experts} experts, "
            "more than its weight files can hold; they are not of the same model."
        )
    if config.tie_word_embeddings and (EMBEDDING in tensors) != (HEAD in tensors):
        # If both are there, the head's own values count, as they do in transformers.
        tensors[EMBEDDING] = tensors[HEAD] = tensors[EMBEDDING] if EMBEDDING in tensors else tensors[HEAD]

    shapes = dict(tensor_shapes(config))
    packed = [entry for entry in _packed_shapes(config) if entry[0] in tensors]
    wanted = dict(shapes)
    for name, shape, projections in packed:
        for part in _part_names(name, projections, config.num_experts):
            del wanted[part]
        wanted[name] = shape
    _check_fit({name: tuple(tensor.shape) for name, tensor in tensors.items()}, wanted, config, folder)

    dtype = _common_dtype(tensors, config, folder)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for name, _, projections in packed:
        matrices = (part for expert in tensors.pop(name) for part in expert.chunk(len(projections)))
        tensors.update(zip(_part_names(name, projections, config.num_experts), matrices, strict=True))
    return {name: tensors[name] for name in shapes}


def _part_names(packed_name: str, projections: Sequence[str], num_experts: int) -> list[str]:
    prefix = packed_name.rpartition(".")[0]
    return [f"{prefix}.{e}.{projection}.weight" for e in range(num_experts) for projection in projections]


def _check_fit(found: Mapping[str, Shape], wanted: Mapping[str, Shape], config: ModelConfig, folder: Path) -> None:
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    misshapen = [
        f"{name} is {list(found[name])} and should be {list(shape)}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    faults = [
        f"{len(names)} {kind} ({_first_of(names)})"
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
    raw = _read_json(path)
    try:
        return ModelConfig.from_hf(raw)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error


def _eos_token_ids(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if not path.exists():
        return config.eos_token_ids
    more = token_ids(_read_json(path).get("eos_token_id"), f"{path}: eos_token_id")
    return tuple(dict.fromkeys(config.eos_token_ids + more))


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to read, each with the names of the tensors that the index says it has (None without an index)."""
    if not (folder / INDEX_FILE).exists():
        if not (folder / SINGLE_FILE).exists():
            raise InputError(_no_weights(folder))
        return {folder / SINGLE_FILE: None}
    index = folder / INDEX_FILE
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map that says which file holds which tensor; download it again.")
    files: dict[Path, set[str] | None] = {}
    for tensor_name, file_name in weight_map.items():
        # The index may come from anywhere: it must not lead out of the folder.
        if not isinstance(file_name, str) or not file_name.endswith(".safetensors") or set(file_name) & set("/\\\0"):
            raise InputError(
                f"{index} says that {tensor_name!r} is in {file_name!r}, which is not the name of a .safetensors file "
                "in the same folder."
            )
        names = files.setdefault(folder / file_name, set())
        assert names is not None
        names.add(tensor_name)
    for path in files:
        if not path.exists():
            raise InputError(f"{path} is missing, though {INDEX_FILE} names it; download the model again.")
    return files


def _no_weights(folder: Path) -> str:
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"}
    )
    if not others:
        return f"{folder} has no {SINGLE_FILE}, so there are no weights to run; download the model again."
    if others[0].endswith("-of-00001.safetensors") or any("-of-" in name and "safetensors" in name for name in others):
        return f"{folder} has shards ({_first_of(others)}) but no {INDEX_FILE}; download the index too."
    return (
        f"{folder} has {_first_of(others)} but no {SINGLE_FILE}; only safetensors files of these names are read, "
        "so save the model again with transformers' save_pretrained."
    )


def _map_tensors(path: Path, names: set[str] | None) -> dict[str, Tensor]:
    """Views of all tensors of one file, without reading them."""
    with path.open("rb"):
        pass  # the library reports every failure to open a file as "not found"; this one says what it is
    try:
        with safe_open(path, framework="pt") as file:
            found = {name for name in file.keys() if not name.endswith("rotary_emb.inv_freq")}  # noqa: SIM118
            if names is not None:
                _check_index(path, found, {name for name in names if not name.endswith("rotary_emb.inv_freq")})
            for name in sorted(found):
                stored = file.get_slice(name).get_dtype()
                if stored not in DTYPES:
                    raise InputError(
                        f"{path}: tensor {name!r} is stored as {stored}; only {', '.join(DTYPES)} can be run, so "
                        "quantised checkpoints must be converted first."
                    )
            return {name: file.get_tensor(name) for name in found}
    except SafetensorError as error:
        raise InputError(_why_broken(path, str(error))) from error


def _check_index(path: Path, found: set[str], indexed: set[str]) -> None:
    if found == indexed:
        return
    missing, extra = sorted(indexed - found), sorted(found - indexed)
    faults = [f"lacks {_first_of(missing)}"] * bool(missing) + [f"also holds {_first_of(extra)}"] * bool(extra)
    raise InputError(
        f"{path} does not hold what {INDEX_FILE} says: it {' and '.join(faults)}; download the model again."
    )


def _why_broken(path: Path, said: str) -> str:
    """What is wrong with a file that the safetensors library refuses, and how large it is."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = file.read(header_size) if header_size <= min(MAX_HEADER, size) else b""
        file.seek(0)
        start = file.read(len(GIT_LFS))
    if size == 0:
        return f"{path} is empty (0 bytes); download it again."
    if start == GIT_LFS:
        return f"{path} is a Git LFS pointer of {size:,} bytes, not the weights; run 'git lfs pull' in its folder."
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        described = 8 + header_size + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        described = size
        if size < 8 + header_size <= 8 + MAX_HEADER:
            described = 8 + header_size
    if size < described:
        return f"{path} is cut short: it has {size:,} of at least {described:,} bytes; download it again."
    if size > described:
        return (
            f"{path} is {size:,} bytes long, but its header describes {described:,}; the rest does not belong to it, "
            "so download it again."
        )
    return f"{path} ({size:,} bytes) is not a sound safetensors file ({said}); download it again."


def _read_json(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    if content.startswith(GIT_LFS):
        raise InputError(
            f"{path} is a Git LFS pointer of {len(content):,} bytes, not the file; run 'git lfs pull' in its folder."
        )
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = (
            "it is empty" if not content else "it is nested too deeply" if isinstance(error, RecursionError) else error
        )
        raise InputError(
            f"{path} ({len(content):,} bytes) is not JSON in UTF-8: {reason}; download it again."
        ) from error
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, not {type(value).__name__}; download it again.")
    return value


def _first_of(names: Sequence[str]) -> str:
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names[:8])
    return f"{shown} and {len(names) - 8:,} more" if len(names) > 8 else shown
