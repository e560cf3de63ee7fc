"""Finds the safetensors files of a model folder and maps them into memory; says what is wrong with a broken one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minimoe.errors import InputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
OTHER_FORMATS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"}
MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer headers too
GIT_LFS = b"version https://git-lfs.github.com/spec/"


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to read, each with the names of the tensors that the index says it has (None without an index).

    An index decides alone: a file that it does not name is not read, not even model.safetensors.

    Raises:
        InputError: no weights, a broken index, or one that names a missing file or a file outside the folder.
        OSError: a file or the folder cannot be read.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise InputError(_why_no_weights(folder))
        return {folder / SINGLE_FILE: None}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map that says which file holds which tensor; download it again.")
    names_by_file: defaultdict[str, set[str]] = defaultdict(set)
    for tensor_name, file_name in weight_map.items():
        # The index may come from anywhere: it must not lead out of the folder.
        if not isinstance(file_name, str) or not file_name.isprintable() or set(file_name) & set("/\\"):
            raise InputError(
                f"{index} places {tensor_name!r} in {file_name!r}, which is not the name of a file in the same folder."
            )
        names_by_file[file_name].add(tensor_name)
    for file_name in names_by_file:
        if not (folder / file_name).is_file():
            raise InputError(
                f"{folder} has no file {file_name!r}, though its {INDEX_FILE} names it; download it again."
            )
    return {folder / file_name: names for file_name, names in names_by_file.items()}


def map_tensors(path: Path, indexed: set[str] | None) -> dict[str, Tensor]:
    """Views of all tensors of one file, by name; nothing is read until a view is used.

    The RoPE tables (rotary_emb.inv_freq) that some old checkpoints carry are left out: they follow from the config.

    Args:
        indexed: the names that must be in it, and no others; None if there is no index to say.

    Raises:
        InputError: the file is damaged, holds other tensors than the index says, or one of an unsupported dtype.
        OSError: it cannot be opened.
    """
    with path.open("rb"):
        pass  # the library reports every file that it cannot open as "not found"; this says what the matter is
    try:
        with safe_open(path, framework="pt") as file:
            names = _without_rope_tables(file.keys())
            if indexed is not None:
                _check_index(path, names, _without_rope_tables(indexed))
            for name in names:
                stored = file.get_slice(name).get_dtype()
                if stored not in DTYPES:
                    raise InputError(
                        f"{path} stores {name!r} as {stored}, but only {', '.join(DTYPES)} can be run; "
                        "use the unquantised checkpoint."
                    )
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise InputError(_why_broken(path, str(error))) from error


def why_unreadable(path: Path, what: str, complaint: str) -> str:
    """What is wrong with a file that a library refuses: path, size and likely cause."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(GIT_LFS))
    if size == 0:
        return f"{path} is empty (0 bytes); download it again."
    if start == GIT_LFS:
        return _pointer(path, size)
    return f"{path} ({size:,} bytes) is not {what} ({complaint}); download it again."


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InputError: it is not JSON, not UTF-8, or not an object.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    if content.startswith(GIT_LFS):
        raise InputError(_pointer(path, len(content)))
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} ({len(content):,} bytes) is not JSON in UTF-8 ({error}); download it again."
        ) from error
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, not a {type(value).__name__}; download it again.")
    return value


def first_of(names: Sequence[str], shown: int = 8) -> str:
    """The first few names, and the count of the rest."""
    text = ", ".join(name if name.isprintable() else repr(name) for name in names[:shown])
    return f"{text} and {len(names) - shown:,} more" if len(names) > shown else text


def _without_rope_tables(names: Sequence[str] | set[str]) -> list[str]:
    return sorted(name for name in names if not name.endswith("rotary_emb.inv_freq"))


def _check_index(path: Path, stored: Sequence[str], indexed: Sequence[str]) -> None:
    missing = [name for name in indexed if name not in set(stored)]
    extra = [name for name in stored if name not in set(indexed)]
    faults = [f"lacks {first_of(missing)}"] * bool(missing) + [f"also holds {first_of(extra)}"] * bool(extra)
    if faults:
        raise InputError(
            f"{path} does not hold what {INDEX_FILE} says: it {' and '.join(faults)}; download the model again."
        )


def _why_no_weights(folder: Path) -> str:
    if (folder / SINGLE_FILE).is_symlink():
        return f"{folder / SINGLE_FILE} is a link to a file that is not there; copy or download the file itself."
    others = sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_FORMATS)
    if not others:
        return f"{folder} has no {SINGLE_FILE}, so there are no weights to run; download the model again."
    if all("-of-" in name and name.endswith(".safetensors") for name in others):
        return f"{folder} has shards ({first_of(others)}) but no {INDEX_FILE}; download that file too."
    return (
        f"{folder} has {first_of(others)} but no {SINGLE_FILE}, and no other file is read; "
        "save the model again with transformers' save_pretrained."
    )


def _why_broken(path: Path, complaint: str) -> str:
    """What is wrong with a file that the safetensors library refuses: its size and the likely cause."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(GIT_LFS))
        header_end = 8 + int.from_bytes(start[:8], "little")
        file.seek(8)
        header = file.read(header_end - 8) if header_end <= min(size, MAX_HEADER_BYTES) else b""
    if size == 0:
        return f"{path} is empty (0 bytes); download it again."
    if start == GIT_LFS:
        return _pointer(path, size)
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        promised = header_end + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        promised = header_end if size < header_end <= MAX_HEADER_BYTES else size
    if size < promised:
        return f"{path} is cut short: its header promises {promised:,} bytes, it has {size:,}; download it again."
    if size > promised:
        return f"{path} has {size:,} bytes where its header promises {promised:,}, so it is damaged; download it again."
    return f"{path} ({size:,} bytes) is not a sound safetensors file ({complaint}); download it again."


def _pointer(path: Path, size: int) -> str:
    return f"{path} is a Git LFS pointer of {size:,} bytes, not the file itself; run 'git lfs pull' in its folder."
