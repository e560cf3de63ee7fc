"""Keys and values of one sequence, in room that is reserved once: appending never copies what is there."""

from __future__ import annotations

import torch
from torch import Tensor

from minimoe.config import ModelConfig


def cache_bytes(config: ModelConfig, capacity: int, dtype: torch.dtype) -> int:
    """Memory of the cache of one sequence of at most that many positions."""
    return 2 * config.num_layers * config.num_kv_heads * capacity * config.head_dim * dtype.itemsize


class KVCache:
    """The cache of one sequence: L layers, H kv heads, room for C positions of size d.

    A forward pass writes each layer's new keys and values after `length`, and calls `advance` once at its end;
    a pass that fails half-way therefore leaves the cache as it was.

    Attributes:
        length: positions that hold finished keys and values.
        capacity: C, positions there is room for.
    """

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_layers, config.num_kv_heads, capacity, config.head_dim)
        self.keys_LHCd = torch.empty(shape, dtype=dtype, device=device)
        self.values_LHCd = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys_LHCd.shape[2]

    def extend(self, layer: int, keys_NHd: Tensor, values_NHd: Tensor) -> tuple[Tensor, Tensor]:
        """Write N new positions of one layer and return all of them: keys and values [H, length + N, d], views.

        Raises:
            IndexError: there is no room; the caller reserves it.
        """
        end = self.length + keys_NHd.shape[0]
        if end > self.capacity:
            raise IndexError(f"a cache of {self.capacity} positions cannot hold {end}")
        self.keys_LHCd[layer, :, self.length : end] = keys_NHd.transpose(0, 1)
        self.values_LHCd[layer, :, self.length : end] = values_NHd.transpose(0, 1)
        return self.keys_LHCd[layer, :, :end], self.values_LHCd[layer, :, :end]

    def advance(self, count: int) -> None:
        """Count the positions that a whole forward pass has written."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        self.length = min(self.length, length)

    def copy_from(self, other: KVCache, length: int) -> None:
        """Take over the first `length` positions of another cache of the same model."""
        self.keys_LHCd[:, :, :length] = other.keys_LHCd[:, :, :length]
        self.values_LHCd[:, :, :length] = other.values_LHCd[:, :, :length]
        self.length = length
