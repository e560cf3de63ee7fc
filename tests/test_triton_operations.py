"""Norms and the attention of decode steps by Triton kernels against those in torch.

Shape letters: B sequences, D hidden, H heads, G kv heads, d head size, L layers, C room of a cache.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.operations import Attention, Operations, Sequences
from tests.accelerator import DEVICE
from tests.triton_device import bfloat16_as_on_a_gpu

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
attention = importlib.import_module("minimoe.triton.attention")
TritonOperations = importlib.import_module("minimoe.triton.operations").TritonOperations

LAYERS, LAYER = 2, 1
FEW = torch.Generator()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=FEW).to(DEVICE, dtype)


def caches(lengths: list[int], G: int, d: int, dtype: torch.dtype) -> list[KVCache]:
    """Of several rooms; what is not filled holds NaN, and so would what is read past the end."""
    config: Any = SimpleNamespace(num_layers=LAYERS, num_kv_heads=G, head_dim=d)
    made = []
    for i, length in enumerate(lengths):
        cache = KVCache(config, length + 1 + i, dtype, DEVICE)
        for part in (cache.keys_LHCd, cache.values_LHCd):
            part.fill_(math.nan)
            part[:, :, :length] = randn(LAYERS, G, length, d, dtype=dtype)
        cache.length = length
        made.append(cache)
    return made


def attention_of(H: int, G: int, d: int, clip: float | None, dtype: torch.dtype = torch.float32) -> Attention:
    """With nothing in it that only products use."""
    none, norms = torch.empty(0), (randn(H * d, dtype=dtype), randn(G * d, dtype=dtype))
    return Attention(LAYER, H, G, none, none, none, none, *norms, none, 1e-5, clip)


def twins(of: list[KVCache], G: int, d: int) -> list[KVCache]:
    copies = caches([cache.length for cache in of], G, d, of[0].keys_LHCd.dtype)
    for copy, cache in zip(copies, of, strict=True):
        copy.copy_from(cache, cache.length)
    return copies


@pytest.mark.parametrize(
    ("H", "G", "d", "clip", "lengths"),
    [
        (4, 2, 16, None, [5, 0, 40]),
        (3, 3, 6, 0.5, [17]),
        (3, 1, 10, None, [7, 8, 15, 16]),  # where tiles and splits begin and end
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_attention_of_one_token_each_is_torchs(
    H: int,
    G: int,
    d: int,
    clip: float | None,
    lengths: list[int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "TILE", 8)
    monkeypatch.setattr(attention, "SPLITS", 2)
    FEW.manual_seed(H)
    B = len(lengths)
    of = attention_of(H, G, d, clip, dtype)
    projections = [randn(B, heads * d, dtype=dtype) for heads in (H, G, G)]
    angles = randn(B, 1, d // 2).repeat(1, 1, 2)
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    ours = caches(lengths, G, d, dtype)
    theirs = twins(ours, G, d)
    before = [cache.keys_LHCd[1 - LAYER].clone() for cache in ours]
    expected = Operations().mix(of, *projections, Sequences([1] * B, theirs, rotation))
    with bfloat16_as_on_a_gpu():
        found = TritonOperations().mix(of, *projections, Sequences([1] * B, ours, rotation))
    # bfloat16: a step of the largest values, since float32 sums here are rounded sums there.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    for cache, twin, length, old in zip(ours, theirs, lengths, before, strict=True):
        for mine, other in ((cache.keys_LHCd, twin.keys_LHCd), (cache.values_LHCd, twin.values_LHCd)):
            torch.testing.assert_close(mine[LAYER, :, length], other[LAYER, :, length], **tolerance)
            assert mine[LAYER, :, length + 1 :].isnan().all()
        torch.testing.assert_close(cache.keys_LHCd[1 - LAYER], old, rtol=0, atol=0, equal_nan=True)
        assert cache.length == length


def test_a_nan_among_the_keys_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLITS", 2)
    FEW.manual_seed(0)
    of = attention_of(2, 2, 4, 0.1)
    (cache,) = caches([3], 2, 4, torch.float32)
    cache.keys_LHCd[LAYER, 0, 1, 2] = math.nan
    k_BGd = randn(1, 8)
    k_BGd[0, 7] = math.nan  # of the other head, through norm and clip
    sequences = Sequences([1], [cache], (randn(1, 1, 4),) * 2)
    mixed_BD = TritonOperations().mix(of, randn(1, 8), k_BGd, randn(1, 8), sequences)
    assert mixed_BD.isnan().all()


def test_caches_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    full, roomy = caches([4], 2, 4, torch.float32)[0], caches([4], 2, 4, torch.float32)[0]
    full.length = full.capacity
    rotation, projections = (randn(2, 1, 4),) * 2, [randn(2, 8) for _ in range(3)]
    before = roomy.keys_LHCd.clone()
    for given, error in (([roomy, full], IndexError), ([roomy], ValueError)):
        with pytest.raises(error, match=r"cannot hold 6|as many caches"):
            TritonOperations().mix(attention_of(2, 2, 4, None), *projections, Sequences([1, 1], given, rotation))
    torch.testing.assert_close(roomy.keys_LHCd, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "D"), [(3, 64), (1, 37), (0, 8)])
def test_the_norm_is_torchs(T: int, D: int, dtype: torch.dtype) -> None:
    FEW.manual_seed(D)
    x_TD, weight_D = randn(D, T, dtype=dtype).T * 3, randn(D, dtype=dtype)
    with bfloat16_as_on_a_gpu():
        found = TritonOperations().norm(x_TD, weight_D, 1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3  # one step of bfloat16
    torch.testing.assert_close(found, Operations().norm(x_TD, weight_D, 1e-5), rtol=tolerance, atol=1e-6)


def test_every_kernel_compiles_for_an_h100(tmp_path: Path) -> None:
    """As the code calls it; ptxas comes with triton."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.compile_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    compiled = cast("dict[str, int]", json.loads(done.stdout))
    sources = "".join(path.read_text("utf-8") for path in Path(attention.__file__).parent.glob("*.py"))
    assert set(compiled) == set(re.findall(r"def (_\w+_kernel)\(", sources))
