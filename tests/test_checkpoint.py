"""Reading a checkpoint folder: the same tensors whatever the form, in place, and one plain sentence for every fault."""

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
from fixtures import ABSENT, EOS, VARIANTS, edit_json, reference_model, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from minimoe.checkpoint import EMBEDDING, HEAD, Checkpoint, read_checkpoint, tensor_shapes
from minimoe.config import ModelConfig
from minimoe.errors import InputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
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
        "packed": write_checkpoint(folder / "packed", form="packed"),
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


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Write a single-file checkpoint again after a change to its tensors."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


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


# What is read


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_form_gives_the_tensors_of_transformers(variant: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "per_expert", variant)
    model = reference_model(folder)
    wanted = dict(model.state_dict())
    for name in [name for name in wanted if ".mlp.experts." in name]:
        stacked, prefix = wanted.pop(name), name.rpartition(".")[0]
        for e in range(stacked.shape[0]):
            if name.endswith("gate_up_proj"):
                half = stacked.shape[1] // 2
                wanted[f"{prefix}.{e}.gate_proj.weight"] = stacked[e, :half]
                wanted[f"{prefix}.{e}.up_proj.weight"] = stacked[e, half:]
            else:
                wanted[f"{prefix}.{e}.down_proj.weight"] = stacked[e]
    assert_same_tensors(read_checkpoint(folder), wanted)
    packed = write_checkpoint(tmp_path / "packed", variant, form="packed")
    assert_same_tensors(read_checkpoint(packed), wanted)
    sharded = write_checkpoint(tmp_path / "sharded", variant, shards=3)
    assert len(list(sharded.glob("*.safetensors"))) >= 3
    assert_same_tensors(read_checkpoint(sharded), wanted)
    packed_shards = write_checkpoint(tmp_path / "packed_shards", variant, form="packed", shards=3)
    assert_same_tensors(read_checkpoint(packed_shards), wanted)


@pytest.mark.parametrize("form", ["single", "sharded", "packed"])
def test_tensors_come_in_the_order_and_shape_of_the_list(originals: dict[str, Path], form: str) -> None:
    checkpoint = read_checkpoint(originals[form])
    assert [(name, tuple(tensor.shape)) for name, tensor in checkpoint.tensors.items()] == list(
        tensor_shapes(checkpoint.config)
    )
    assert all(tensor.is_contiguous() for tensor in checkpoint.tensors.values())


@pytest.mark.parametrize("form", ["single", "sharded", "packed"])
def test_size_and_folder(originals: dict[str, Path], form: str) -> None:
    checkpoint = read_checkpoint(originals[form])
    assert checkpoint.folder == originals[form]
    assert checkpoint.file_bytes == sum(path.stat().st_size for path in originals[form].glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtype_stays_that_of_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, dtype=dtype))
    assert checkpoint.dtype == dtype
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {dtype}


def test_layers_of_both_forms_in_one_file(single: Path, originals: dict[str, Path]) -> None:
    wanted = read_checkpoint(single).tensors
    packed = load_file(originals["packed"] / SINGLE)

    def pack_layer_1(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]:
            del tensors[name]
        tensors.update({name: x for name, x in packed.items() if name.startswith("model.layers.1.mlp.experts.")})

    assert_same_tensors(read_checkpoint(change_tensors(single, pack_layer_1)), wanted)


def test_packed_experts_are_views(originals: dict[str, Path]) -> None:
    tensors = read_checkpoint(originals["packed"]).tensors
    prefix = "model.layers.1.mlp.experts"
    first = tensors[f"{prefix}.0.gate_proj.weight"].data_ptr()
    size = tensors[f"{prefix}.0.gate_proj.weight"].nbytes
    assert tensors[f"{prefix}.0.up_proj.weight"].data_ptr() == first + size
    assert tensors[f"{prefix}.5.gate_proj.weight"].data_ptr() == first + 10 * size


@pytest.mark.parametrize("form", ["single", "packed"])
def test_writing_to_a_tensor_does_not_change_the_file(originals: dict[str, Path], form: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals[form], tmp_path / form))
    before = (folder / SINGLE).read_bytes()
    for tensor in read_checkpoint(folder).tensors.values():
        tensor.zero_()
    assert (folder / SINGLE).read_bytes() == before


def test_memory_stays_at_one_copy(originals: dict[str, Path], tmp_path: Path) -> None:
    """Peak memory of a process that loads two checkpoints of about 150 MB, and touches every page of them once."""
    for form in ("single", "packed"):
        folder = Path(shutil.copytree(originals[form], tmp_path / form))
        edit_json(folder / "config.json", {"hidden_size": 512, "intermediate_size": 1024, "num_experts": 16})
        config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
        shapes = dict(tensor_shapes(config))
        if form == "packed":
            shapes = {name: shape for name, shape in shapes.items() if ".experts." not in name}
            for layer in range(config.num_layers):
                prefix = f"model.layers.{layer}.mlp.experts"
                shapes.update({f"{prefix}.gate_up_proj": (16, 2048, 512), f"{prefix}.down_proj": (16, 512, 1024)})
        save_file({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, folder / SINGLE)
    script = f"""
from pathlib import Path
import minimoe.checkpoint
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
before = peak()
checkpoints = [minimoe.checkpoint.read_checkpoint(Path({str(tmp_path)!r}, form)) for form in ("single", "packed")]
for checkpoint in checkpoints:
    for tensor in checkpoint.tensors.values():
        tensor.view(-1)[::1024].sum()
print(before, peak(), sum(checkpoint.file_bytes for checkpoint in checkpoints))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, after, file_bytes = map(int, done.stdout.split())
    assert file_bytes > 280e6
    assert 0.9 * file_bytes < after - before < 1.15 * file_bytes


# Token ids


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "wanted"),
    [
        (EOS, EOS, (EOS,)),
        ([7, 0], [3, 7], (7, 0, 3)),
        (5, [5, 6], (5, 6)),
        (ABSENT, 4, (4,)),
        (4, ABSENT, (4,)),
        (None, None, ()),
        ([], 2, (2,)),
    ],
)
def test_end_of_text_ids_of_both_files(single: Path, config_ids: Any, generation_ids: Any, wanted: tuple[int]) -> None:
    edit_json(single / "config.json", {"eos_token_id": config_ids})
    edit_json(single / "generation_config.json", {"eos_token_id": generation_ids})
    assert read_checkpoint(single).eos_token_ids == wanted


def test_generation_config_may_be_absent(single: Path) -> None:
    (single / "generation_config.json").unlink()
    assert read_checkpoint(single).eos_token_ids == (EOS,)


def test_generation_config_with_an_impossible_id(single: Path) -> None:
    edit_json(single / "generation_config.json", {"eos_token_id": "</s>"})
    assert "generation_config.json: eos_token_id" in refusal(single)


# The tied head: what transformers does in each case


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", ["both, different", "both, equal", "embedding only", "head only"])
def test_tied_head_as_in_transformers(single: Path, tied: bool, present: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        if present == "both, equal":
            tensors[HEAD] = tensors[EMBEDDING].clone()
        elif present == "embedding only":
            del tensors[HEAD]
        elif present == "head only":
            del tensors[EMBEDDING]

    change_tensors(single, change)
    edit_json(single / "config.json", {"tie_word_embeddings": tied})
    if not tied and "only" in present:
        sentence = refusal(single)
        assert f"1 missing ({HEAD if present == 'embedding only' else EMBEDDING})" in sentence
        assert ("tie_word_embeddings is false" in sentence) == (present == "embedding only")
        return
    model, tensors = reference_model(single), read_checkpoint(single).tensors
    assert torch.equal(tensors[EMBEDDING], model.model.embed_tokens.weight)
    assert torch.equal(tensors[HEAD], model.lm_head.weight)
    assert (tensors[EMBEDDING] is tensors[HEAD]) == (tied and "only" in present)


def test_tied_head_of_mixed_dtypes_is_still_one_tensor(single: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[HEAD]
        tensors[EMBEDDING] = tensors[EMBEDDING].bfloat16()

    change_tensors(single, change)
    edit_json(single / "config.json", {"tie_word_embeddings": True})
    tensors = read_checkpoint(single).tensors
    assert tensors[EMBEDDING] is tensors[HEAD]


# dtypes


def mix(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.bfloat16()
        elif "attn" in name:
            tensors[name] = tensor.half()


@pytest.mark.parametrize("named", ["float32", "bfloat16", "float16"])
def test_mixed_dtypes_become_that_of_the_config_as_in_transformers(single: Path, named: str) -> None:
    change_tensors(single, mix)
    edit_json(single / "config.json", {"dtype": ABSENT, "torch_dtype": named})
    stored = load_file(single / SINGLE)
    checkpoint = read_checkpoint(single)
    assert checkpoint.dtype == getattr(torch, named)
    assert_same_tensors(checkpoint, {name: stored[name].to(checkpoint.dtype) for name in checkpoint.tensors})


@pytest.mark.parametrize("named", [ABSENT, "int8", "no such dtype"])
def test_mixed_dtypes_with_no_usable_dtype_in_the_config(single: Path, named: Any) -> None:
    change_tensors(single, mix)
    edit_json(single / "config.json", {"dtype": named})
    sentence = refusal(single)
    assert "torch.bfloat16, torch.float16, torch.float32" in sentence
    assert "set dtype" in sentence


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.bool, "BOOL")]
)
def test_other_dtypes_are_refused(single: Path, dtype: torch.dtype, name: str) -> None:
    sentence = refusal(change_tensors(single, lambda x: x.update({GATE_UP: torch.zeros(4, dtype=dtype)})))
    assert name in sentence
    assert GATE_UP in sentence


# Tensors that do not fit the config


def test_rope_tables_are_ignored(single: Path) -> None:
    wanted = read_checkpoint(single).tensors.keys()
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(single, lambda tensors: tensors.update({table: torch.ones(8, dtype=torch.int64)}))
    assert read_checkpoint(single).tensors.keys() == wanted


def test_every_kind_of_misfit_is_named_at_once(single: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.9.extra.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(65)

    sentence = refusal(change_tensors(single, change))
    assert "1 missing (model.layers.1.mlp.experts.3.up_proj.weight)" in sentence
    assert "1 unexpected (model.layers.9.extra.weight)" in sentence
    assert "1 of the wrong shape (model.norm.weight is [65] and should be [64])" in sentence


def test_a_long_list_of_misfits_is_cut(single: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for e in range(4):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                del tensors[f"model.layers.2.mlp.experts.{e}.{projection}.weight"]

    sentence = refusal(change_tensors(single, change))
    assert "12 missing" in sentence
    assert sentence.count("model.layers.2.mlp.experts.") == 8
    assert "and 4 more" in sentence


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "base"])
def test_config_of_another_model(variant: str, single: Path) -> None:
    """A variant's config beside the base model's weights is refused exactly when its tensors have other shapes."""
    edit_json(single / "config.json", VARIANTS[variant])
    same_shapes = VARIANTS[variant].keys().isdisjoint({"num_experts", "num_key_value_heads", "vocab_size"})
    if same_shapes:
        read_checkpoint(single)
    else:
        assert "config.json" in refusal(single)


def test_packed_tensors_of_the_wrong_shape(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["packed"], tmp_path / "packed"))
    change_tensors(folder, lambda tensors: tensors.update({GATE_UP: tensors[GATE_UP].transpose(1, 2).contiguous()}))
    assert f"{GATE_UP} is [8, 64, 96] and should be [8, 96, 64]" in refusal(folder)


def test_packed_and_single_experts_of_one_layer(single: Path, originals: dict[str, Path]) -> None:
    packed = load_file(originals["packed"] / SINGLE)
    sentence = refusal(change_tensors(single, lambda tensors: tensors.update({GATE_UP: packed[GATE_UP]})))
    assert "16 unexpected (model.layers.1.mlp.experts.0.gate_proj.weight" in sentence


@pytest.mark.parametrize("key", ["num_experts", "num_hidden_layers"])
def test_absurd_config_is_refused_at_once(single: Path, key: str) -> None:
    edit_json(single / "config.json", {key: 10**15})
    assert "more than its" in refusal(single)


def test_names_that_cannot_be_printed_are_quoted(single: Path) -> None:
    sentence = refusal(change_tensors(single, lambda tensors: tensors.update({"\x1b[31mred\n": torch.zeros(1)})))
    assert r"'\x1b[31mred\n'" in sentence


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
    wanted = dict(read_checkpoint(sharded).tensors)
    (sharded / SINGLE).write_bytes(b"an old file")
    (sharded / "model-00009-of-00009.safetensors").write_bytes(b"an old shard")
    checkpoint = read_checkpoint(sharded)
    assert_same_tensors(checkpoint, wanted)
    assert checkpoint.file_bytes < sum(path.stat().st_size for path in sharded.glob("*.safetensors"))


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
    whole = (originals["packed"] / SINGLE).read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copy(originals["packed"] / "config.json", folder)
    (folder / SINGLE).write_bytes(damaged[:cut])
    try:
        read_checkpoint(folder)
    except InputError as error:
        sentence = str(error)
    else:
        return
    assert str(folder) in sentence
    assert "\n" not in sentence
