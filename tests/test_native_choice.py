"""Which instruction set and which backend run, and what happens without the library."""

from __future__ import annotations

import pytest
import torch

import minimoe
from minimoe.errors import InputError
from minimoe.experts import default_backend, find_backend
from minimoe.experts.native import Native
from minimoe.operations import NativeOperations
from tests.native_sets import SETS, needs_kernels

pytestmark = needs_kernels


def test_the_instruction_set_can_be_chosen() -> None:
    assert SETS[-1].name == "scalar"
    for kernels in SETS:
        backend = find_backend(f"native:isa={kernels.name}")
        assert isinstance(backend, Native)
        assert backend.kernels is kernels
        assert isinstance(backend.operations, NativeOperations)
    with pytest.raises(InputError, match=r"no kernels 'mmx' for this processor; choose one of .*scalar"):
        find_backend("native:isa=mmx")
    for spec in ("native:avx2", "native:threads=2", "bucketed:isa=avx2", "native:", "bucketed:", "native:isa="):
        with pytest.raises(InputError, match="native:isa=avx2"):
            find_backend(spec)


def test_every_set_writes_the_same_text() -> None:
    texts = {
        kernels.name: minimoe.load("tiny", backend=f"native:isa={kernels.name}", dtype="float32")
        .generate("Once upon a time", max_new_tokens=12, temperature=0)
        .text
        for kernels in SETS
    }
    reference = minimoe.load("tiny", backend="reference", dtype="float32")
    texts["reference"] = reference.generate("Once upon a time", max_new_tokens=12, temperature=0).text
    assert len(set(texts.values())) == 1, texts


def test_native_is_the_default_where_its_kernels_run() -> None:
    cpu = torch.device("cpu")
    fastest = "native" if len(SETS) > 1 else "bucketed"  # plain loops are no match for torch
    assert default_backend(torch.float32, cpu) == default_backend(torch.bfloat16, cpu) == fastest
    assert default_backend(torch.float16, cpu) == "bucketed"
    assert default_backend(torch.bfloat16, torch.device("cuda")) == "bucketed"
    assert minimoe.load("tiny").backend == default_backend(torch.bfloat16, cpu)
    assert minimoe.load("tiny", dtype="float16").backend == "bucketed"


def test_without_the_library_the_package_runs_on_torch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("native.sets", "engine"):
        monkeypatch.setattr(f"minimoe.{place}.instruction_sets", lambda: ())
    for place in ("experts", "linear", "native.sets"):
        monkeypatch.setattr(f"minimoe.{place}.best_kernels", lambda: None)
    engine = minimoe.load("tiny", router="elbow")
    assert engine.backend == "bucketed"
    assert "not built" in engine.notes[0]
    assert engine.generate("Once", max_new_tokens=3, temperature=0).tokens
    with pytest.raises(InputError, match=r"not built.*--backend bucketed"):
        minimoe.load("tiny", backend="native")
