"""Model folders with every kind of fault: each is refused with one plain sentence that names the file and the cause."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import ABSENT, edit_json, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from minimoe.checkpoint import EMBEDDING, Checkpoint, read_checkpoint
from minimoe.errors import InputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 4997744872\n"
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that the tests below copy and then damage."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "single": write_checkpoint(folder / "single"),
        "sharded": write_checkpoint(folder / "sharded", shards=3),
    }


@pytest.fixture
def single(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["single"], tmp_path / "single"))


@pytest.fixture
def sharded(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["sharded"], tmp_path / "sharded"))


def refusal(folder: Path) -> str:
    """The sentence with which a folder is refused: one line that names the folder."""
    with pytest.raises(InputError) as caught:
        read_checkpoint(folder)
    sentence = str(caught.value)
    assert str(folder) in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def raw_file(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
    """The bytes of a safetensors file with any header at all."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def assert_same_tensors(found: Checkpoint, wanted: dict[str, Tensor]) -> None:
    assert found.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found.tensors[name], tensor), name


# Faults of the folder


def test_folder_is_missing(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "cannot be read" in refusal(tmp_path / ("x" * 300))


def test_folder_is_a_file(single: Path) -> None:
    assert "is a file" in refusal(single / SINGLE)


def test_no_weights(single: Path) -> None:
    (single / SINGLE).unlink()
    assert "no weights" in refusal(single)
    (single / "pytorch_model.bin").write_bytes(b"pickle")
    sentence = refusal(single)
    assert "pytorch_model.bin" in sentence
    assert "save_pretrained" in sentence


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    sentence = refusal(sharded)
    assert "shards" in sentence
    assert INDEX in sentence


def test_only_the_files_of_the_index_are_read(sharded: Path) -> None:
    wanted, files = dict(read_checkpoint(sharded).tensors), sorted(sharded.glob("*.safetensors"))
    (sharded / SINGLE).write_bytes(b"an old file")
    (sharded / "model-00009-of-00009.safetensors").write_bytes(b"an old shard")
    checkpoint = read_checkpoint(sharded)
    assert_same_tensors(checkpoint, wanted)
    assert sorted(checkpoint.files) == files


def test_links_are_followed(sharded: Path, tmp_path: Path) -> None:
    """A snapshot in the cache of huggingface_hub is a folder of links into another folder."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in sharded.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "sharded" / path.name)
    assert_same_tensors(read_checkpoint(snapshot), read_checkpoint(sharded).tensors)


@pytest.fixture
def nobody() -> Iterator[None]:
    """Run as a user who may not read everything, when the tests themselves may."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", SINGLE])
def test_permission_denied(single: Path, name: str, request: pytest.FixtureRequest) -> None:
    for path in single.iterdir():
        path.chmod(0 if path.name == name else 0o644)
    for folder in (single, *single.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    request.getfixturevalue("nobody")
    sentence = refusal(single)
    assert str(single / name) in sentence
    assert "Permission denied" in sentence


# Faults of the JSON files


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "(0 bytes) is not JSON"),
        (b'{"a": 1', "(7 bytes) is not JSON"),
        (b'{"a": "\xff"}', "is not JSON in UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "is not JSON in UTF-8"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "must hold a JSON object"),
        (LFS_POINTER, f"Git LFS pointer of {len(LFS_POINTER)} bytes"),
    ],
)
def test_broken_json(sharded: Path, name: str, content: bytes, fault: str) -> None:
    (sharded / name).write_bytes(content)
    sentence = refusal(sharded)
    assert str(sharded / name) in sentence
    assert fault in sentence


def test_no_config(single: Path) -> None:
    (single / "config.json").unlink()
    assert "has no config.json" in refusal(single)


def test_faults_in_the_config_name_the_folder(single: Path) -> None:
    edit_json(single / "config.json", {"num_experts_per_tok": 9})
    sentence = refusal(single)
    assert "9" in sentence
    assert "8" in sentence


# Faults of the index


@pytest.mark.parametrize("weight_map", [ABSENT, None, {}, [], "model.safetensors"])
def test_index_without_a_weight_map(sharded: Path, weight_map: Any) -> None:
    edit_json(sharded / INDEX, {"weight_map": weight_map})
    assert "weight_map" in refusal(sharded)


@pytest.mark.parametrize("kind", ["parent", "absolute", "subfolder", "backslash", "control", "number", "null", "list"])
def test_index_that_leads_elsewhere(sharded: Path, kind: str, tmp_path: Path) -> None:
    """Each of these names a file that exists and holds the right tensors, wherever a file name can name one."""
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shutil.copy(shard, tmp_path / shard.name)
    (sharded / "sub").mkdir()
    shutil.copy(shard, sharded / "sub" / shard.name)
    shutil.copy(shard, sharded / f"sub\\{shard.name}")
    shutil.copy(shard, sharded / f"\n{shard.name}")
    file_name: Any = {
        "parent": f"../{shard.name}",
        "absolute": str(tmp_path / shard.name),
        "subfolder": f"sub/{shard.name}",
        "backslash": f"sub\\{shard.name}",
        "control": f"\n{shard.name}",
        "number": 1,
        "null": None,
        "list": [shard.name],
    }[kind]

    def redirect(index: dict[str, Any]) -> None:
        for name, old in index["weight_map"].items():
            if old == shard.name:
                index["weight_map"][name] = file_name

    sentence = refusal(change_index(sharded, redirect))
    assert repr(file_name) in sentence
    assert "not the name of a file in the same folder" in sentence


@pytest.mark.parametrize("file_name", ["", ".", "..", "no-such-shard.safetensors"])
def test_index_that_names_no_file(sharded: Path, file_name: str) -> None:
    sentence = refusal(change_index(sharded, lambda index: index["weight_map"].update({EMBEDDING: file_name})))
    assert f"no file {file_name!r}" in sentence


def test_shard_is_missing(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    sentence = refusal(sharded)
    assert shard.name in sentence
    assert INDEX in sentence


def test_index_and_shard_disagree(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name = sorted(load_file(first))[0]
    change_index(sharded, lambda index: index["weight_map"].update({name: second.name}))
    sentence = refusal(sharded)
    assert name in sentence
    assert str(first) in sentence or str(second) in sentence


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = sorted(load_file(first).items())[0]
    save_file({**load_file(second), name: tensor + 1}, second)
    assert f"{second} does not hold what {INDEX} says: it also holds {name}" in refusal(sharded)


def test_a_tensor_that_only_the_index_has(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    change_index(sharded, lambda index: index["weight_map"].update({"ghost": shard.name}))
    assert f"{shard} does not hold what {INDEX} says: it lacks ghost" in refusal(sharded)


# Faults of the safetensors files

ONE_TENSOR = {"a": entry([2], 0, 8)}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is empty (0 bytes)"),
        (b"12345", "(5 bytes) is not a sound safetensors file"),
        (b"PK\x03\x04 some other kind of file", "is not a sound safetensors file"),
        (LFS_POINTER, f"Git LFS pointer of {len(LFS_POINTER)} bytes"),
        # The header of one tensor is 61 bytes, so the file should have 8 + 61 + 8.
        (raw_file(ONE_TENSOR, b"0" * 7), "cut short: its header promises 77 bytes, it has 76"),
        (raw_file(ONE_TENSOR)[:20], "cut short: its header promises 69 bytes, it has 20"),
        (raw_file(ONE_TENSOR, b"0" * 9), "has 78 bytes where its header promises 77"),
        (raw_file(b"{broken", b"0" * 8), "is not a sound safetensors file"),
        (raw_file(b"\xff\xfe{}"), "is not a sound safetensors file"),
        (raw_file(b"[]"), "is not a sound safetensors file"),
        (raw_file(b"[" * 100_000), "is not a sound safetensors file"),
        (raw_file({"a": 1}), "is not a sound safetensors file"),
        (raw_file({"a": {**entry([2], 0, 8), "data_offsets": []}}, b"0" * 8), "is not a sound safetensors file"),
        (raw_file({"a": {**entry([2], 0, 8), "data_offsets": ["x", "y"]}}, b"0" * 8), "is not a sound"),
        (raw_file({"a": entry([-2], 0, 8)}, b"0" * 8), "is not a sound safetensors file"),
        (raw_file({"a": entry([3], 0, 8)}, b"0" * 8), "is not a sound safetensors file"),
        (raw_file({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"0" * 12), "is not a sound safetensors file"),
        (raw_file({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, b"0" * 20), "is not a sound safetensors file"),
        (raw_file({"a": entry([2], 0, 8, "Q4")}, b"0" * 8), "is not a sound safetensors file"),
        (raw_file({"a": entry([2**62, 8], 0, 8)}, b"0" * 8), "is not a sound safetensors file"),
        (raw_file({"a": entry([2**40], 0, 2**42)}, b"0" * 8), "cut short: its header promises 4,398,046,511,197"),
        (struct.pack("<Q", 2**60) + b"{}" * 100, "is not a sound safetensors file"),
        (struct.pack("<Q", 99_000_000) + b"{}" * 100, "cut short: its header promises 99,000,008 bytes, it has 208"),
    ],
)
def test_broken_weight_file(single: Path, content: bytes, fault: str) -> None:
    (single / SINGLE).write_bytes(content)
    sentence = refusal(single)
    assert str(single / SINGLE) in sentence
    assert fault in sentence


def test_absurd_sizes_are_refused_without_allocating_them(single: Path) -> None:
    """In a process that may not have more than a little memory of its own."""
    broken = [
        raw_file({"a": entry([2**40], 0, 2**42)}, b"0" * 8),
        struct.pack("<Q", 2**60) + b"{}" * 100,
        struct.pack("<Q", 99_000_000) + b"{}" * 100,
    ]
    folders = [Path(shutil.copytree(single, single.with_name(str(i)))) for i in range(len(broken))]
    for folder, content in zip(folders, broken, strict=True):
        (folder / SINGLE).write_bytes(content)
    script = f"""
import resource
from pathlib import Path
import minimoe.checkpoint
from minimoe.errors import InputError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20, used + 64 * 2**20))
for folder in {list(map(str, folders))!r}:
    try:
        minimoe.checkpoint.read_checkpoint(Path(folder))
    except InputError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for folder, sentence in zip(folders, done.stdout.splitlines(), strict=True):
        assert str(folder / SINGLE) in sentence


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_never_escapes_as_anything_but_a_sentence(
    originals: dict[str, Path], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any byte of the header changed, or the file cut anywhere: it still loads, or one sentence says why not."""
    whole = (originals["single"] / SINGLE).read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copy(originals["single"] / "config.json", folder)
    (folder / SINGLE).write_bytes(damaged[:cut])
    try:
        read_checkpoint(folder)
    except InputError as error:
        sentence = str(error)
    else:
        return
    assert str(folder) in sentence
    assert "\n" not in sentence
