"""The key and value cache against plain concatenation.

Shape letters: L layers, H kv heads, d head size, N new positions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures import BASE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.config import ModelConfig

CONFIG = ModelConfig.from_hf({**BASE, "model_type": "olmoe"})
L, H, D = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim
CAPACITY = 20


def new_cache(capacity: int = CAPACITY, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(CONFIG, capacity, dtype, torch.device("cpu"))


def positions(count: int, seed: int) -> Tensor:
    """Keys (or values) of every layer for some positions, [L, N, H, d]."""
    return torch.randn(L, count, H, D, generator=torch.Generator().manual_seed(seed))


def forward(cache: KVCache, keys_LNHd: Tensor, *, finish: bool = True) -> list[tuple[Tensor, Tensor]]:
    """What a forward pass does with a cache; the values are minus the keys. One that fails never advances."""
    seen = [cache.extend(layer, keys_NHd, -keys_NHd) for layer, keys_NHd in enumerate(keys_LNHd)]
    if finish:
        cache.advance(keys_LNHd.shape[1])
    return seen


actions = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(1, 6)),
        st.tuples(st.just("failed pass"), st.integers(1, 6)),
        st.tuples(st.just("truncate"), st.integers(0, CAPACITY)),
        st.tuples(st.just("move"), st.integers(0, CAPACITY)),
    ),
    max_size=12,
)


@given(actions)
@settings(deadline=None, max_examples=60)
def test_whatever_happens_attention_sees_the_positions_in_order(actions: list[tuple[str, int]]) -> None:
    cache, kept = new_cache(), torch.empty(L, 0, H, D)
    for seed, (action, count) in enumerate(actions):
        if action == "truncate":
            cache.truncate(count)
            kept = kept[:, :count]
        elif action == "move":
            moved = new_cache(CAPACITY + 5)
            moved.copy_from(cache, min(count, cache.length))
            cache, kept = moved, kept[:, :count]
        elif kept.shape[1] + count <= CAPACITY:
            fresh = positions(count, seed)
            everything = torch.cat([kept, fresh], dim=1)
            for layer, (keys, values) in enumerate(forward(cache, fresh, finish=action == "pass")):
                assert torch.equal(keys, everything[layer].transpose(0, 1))
                assert torch.equal(values, -everything[layer].transpose(0, 1))
            kept = everything if action == "pass" else kept
        assert cache.length == kept.shape[1]


def test_appending_copies_nothing_that_is_there() -> None:
    cache = new_cache()
    forward(cache, positions(3, 0))
    for layer, (keys, values) in enumerate(forward(cache, positions(2, 1))):
        assert keys.shape == values.shape == (H, 5, D)
        assert keys.data_ptr() == cache.keys_LHCd[layer].data_ptr()
        assert values.data_ptr() == cache.values_LHCd[layer].data_ptr()


@pytest.mark.parametrize("capacity", [0, 1, 4])
def test_a_full_cache_refuses_with_both_numbers_and_stays_as_it_was(capacity: int) -> None:
    cache = new_cache(capacity)
    if capacity:
        forward(cache, positions(capacity, 0))
    before = cache.keys_LHCd.clone()
    with pytest.raises(IndexError, match=f"a cache of {capacity} positions cannot hold {capacity + 1}"):
        forward(cache, positions(1, 1))
    assert cache.length == capacity == cache.capacity
    assert torch.equal(cache.keys_LHCd, before)


def test_truncating_forward_is_not_a_thing() -> None:
    cache = new_cache()
    forward(cache, positions(3, 0))
    cache.truncate(10)
    assert cache.length == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_has_the_models_shape_and_dtype(dtype: torch.dtype) -> None:
    cache: Any = new_cache(dtype=dtype)
    for tensor in (cache.keys_LHCd, cache.values_LHCd):
        assert tensor.shape == (3, 2, 20, 16)
        assert tensor.dtype == dtype
