"""Reading a checkpoint: the same tensors as transformers whatever the form, in place, and only if all of them fit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import ABSENT, EOS, VARIANTS, edit_json, reference_model, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from minimoe.checkpoint import EMBEDDING, HEAD, Checkpoint, read_checkpoint, tensor_shapes
from minimoe.config import ModelConfig
from minimoe.errors import InputError

SINGLE = "model.safetensors"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


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
    assert sorted(checkpoint.files) == sorted(originals[form].glob("*.safetensors"))


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
print(before, peak(), sum(path.stat().st_size for checkpoint in checkpoints for path in checkpoint.files))
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
        (ABSENT, 4, (50279, 4)),  # the id that transformers gives a config without one
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
