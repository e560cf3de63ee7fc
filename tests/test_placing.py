"""Weights on their way to a GPU; the GPU is played by the CPU, all but the pinning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from minimoe import engine, placing
from minimoe.cache import KVCache
from minimoe.checkpoint import read_checkpoint
from minimoe.errors import InputError

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["base", "tied_head"])
def test_everything_arrives_and_experts_lie_side_by_side(
    checkpoint: Callable[..., Path], variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "STAGING_BYTES", 1 << 10)  # every matrix goes in many parts
    tensors = read_checkpoint(checkpoint(variant)).tensors
    placed = placing.upload(tensors, dtype, CPU, free_bytes=1 << 40)
    assert list(placed) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(placed[name], tensor.to(dtype))
        assert placed[name].data_ptr() != tensor.data_ptr()
    assert (placed["lm_head.weight"] is placed["model.embed_tokens.weight"]) == (variant == "tied_head")
    for kind in ("gate_proj", "up_proj", "down_proj"):
        places = [placed[f"model.layers.1.mlp.experts.{e}.{kind}.weight"] for e in range(8)]
        assert [p.data_ptr() - places[0].data_ptr() for p in places] == [e * places[0].nbytes for e in range(8)]
        assert len({p.untyped_storage().data_ptr() for p in places}) == 1


def test_the_host_makes_no_copy_but_the_two_buffers(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is allocated is what arrives, and the staging buffers."""
    monkeypatch.setattr(placing, "STAGING_BYTES", 1 << 10)
    tensors = read_checkpoint(checkpoint("base")).tensors
    allocated, empty = [], torch.empty

    def counting(*arguments: object, **options: object) -> torch.Tensor:
        tensor = empty(*arguments, **{key: value for key, value in options.items() if key != "pin_memory"})  # type: ignore[call-overload]
        allocated.append(tensor.nbytes)
        return tensor

    with patch.object(placing.torch, "empty", counting):
        placed = placing.upload(tensors, torch.float32, CPU, free_bytes=1 << 40)
    assert sum(allocated) == sum(tensor.nbytes for tensor in placed.values()) + 2 * (1 << 10)


def test_a_model_that_does_not_fit_is_refused_with_both_sizes(checkpoint: Callable[..., Path]) -> None:
    tensors = read_checkpoint(checkpoint("top8_of_64")).tensors
    needed = sum(tensor.numel() for tensor in tensors.values()) * 2
    sizes = rf"take {needed / 1e9:.2f} GB as bfloat16, but cpu has {(needed - 1) / 1e9:.2f} GB of free memory"
    with pytest.raises(InputError, match=sizes):
        placing.upload(tensors, torch.bfloat16, CPU, free_bytes=needed - 1)
    assert placing.upload(tensors, torch.bfloat16, CPU, free_bytes=needed)


def test_the_cache_of_a_full_context_must_fit_too(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `load` asks for it, on a GPU that has room for the weights and for all of the cache but a byte."""
    folder = checkpoint("kv_heads_equal")
    found = read_checkpoint(folder)
    weights = sum(tensor.nbytes for tensor in found.tensors.values())
    cache = KVCache(found.config, found.config.max_positions, torch.float32, CPU)
    room = cache.keys_LHCd.nbytes + cache.values_LHCd.nbytes

    def on_a_gpu(free: int) -> Callable[..., object]:
        return lambda tensors, dtype, device, beside: placing.upload(tensors, dtype, device, free, beside)

    monkeypatch.setattr(engine, "place", on_a_gpu(weights + room - 1))
    with pytest.raises(InputError, match=r"the weights take .* and the cache of a full context .* but cpu has"):
        engine.load(folder)
    monkeypatch.setattr(engine, "place", on_a_gpu(weights + room))
    engine.load(folder)
