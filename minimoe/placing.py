"""Brings mapped weights to the device that runs them.

On the CPU they stay where they are. A GPU gets them through two small pinned buffers, one being filled while the other
is on its way, so that the host never holds a copy of the model. The matrices of a layer's experts arrive side by side,
which is how the Triton kernels read them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import cycle

import torch
from torch import Tensor

from minimoe.errors import InputError

STAGING_BYTES = 1 << 26  # of each of the two buffers
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.\d+\.(.+)")


def place(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, beside: int = 0
) -> dict[str, Tensor]:
    """Weights in the wanted dtype and place; tied stays tied, and on the CPU nothing that fits already is copied.

    Args:
        beside: bytes that a GPU must have left for the cache of one sequence.

    Raises:
        InputError: the GPU has too little free memory; names all sizes.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return upload(tensors, dtype, device, torch.cuda.mem_get_info(device)[0], beside)
    moved: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device=device, dtype=dtype)
    return {name: moved[id(tensor)] for name, tensor in tensors.items()}


def upload(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, free_bytes: int, beside: int = 0
) -> dict[str, Tensor]:
    """Copies of all weights on a device, experts side by side.

    Args:
        tensors: by checkpoint name, on the CPU.
        free_bytes: what the device can take.
        beside: see `place`.

    Raises:
        InputError: it is too little; names all sizes.
    """
    unique = {id(tensor): tensor for tensor in tensors.values()}
    needed = sum(tensor.numel() for tensor in unique.values()) * dtype.itemsize
    if needed + beside > free_bytes:
        cache = f" and the cache of a full context {beside / 1e9:.2f} GB" if beside else ""
        raise InputError(
            f"the weights take {needed / 1e9:.2f} GB as {str(dtype).removeprefix('torch.')}{cache}, but {device} has "
            f"{free_bytes / 1e9:.2f} GB of free memory; choose --device cpu or a smaller --dtype."
        )
    targets: dict[int, Tensor] = {}
    for group in _groups(tensors):
        room = torch.empty(len(group), *group[0].shape, dtype=dtype, device=device)
        targets.update((id(tensor), target) for tensor, target in zip(group, room, strict=True))
    staging = _Staging(dtype, device)
    for key, tensor in unique.items():
        staging.copy(tensor, targets[key])
    staging.finish()
    return {name: targets[id(tensor)] for name, tensor in tensors.items()}


def _groups(tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
    """Tensors that belong side by side: of a layer's experts those of one kind, in the order of the experts."""
    groups: defaultdict[object, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        groups[match.groups() if match else id(tensor)][id(tensor)] = tensor
    return [list(group.values()) for group in groups.values()]


class _Staging:
    """Two buffers that take turns."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._size = STAGING_BYTES // dtype.itemsize
        buffers = [torch.empty(self._size, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._turns = cycle([(buffer, torch.cuda.Event() if pinned else None) for buffer in buffers])

    def copy(self, source: Tensor, target: Tensor) -> None:
        for part, place in zip(source.reshape(-1).split(self._size), target.view(-1).split(self._size), strict=True):
            buffer, gone = next(self._turns)
            if gone is not None:
                gone.synchronize()  # what the buffer held before has left it
            buffer[: len(part)].copy_(part)
            place.copy_(buffer[: len(part)], non_blocking=True)
            if gone is not None:
                gone.record()

    def finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
