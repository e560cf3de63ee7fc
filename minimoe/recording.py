"""A recorded routing on disk: one npz file with the token ids of one sequence and, for each layer, its Routing.

Shape letters: L layers, T tokens, K slots.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minimoe.errors import InputError
from minimoe.routing import Routing
from minimoe.whole_file import replacing


@dataclass(frozen=True, slots=True)
class Recording:
    """A sequence and how it was routed.

    Attributes:
        ids_T: int64, its tokens.
        layers: one Routing of T tokens a layer.
    """

    ids_T: Tensor
    layers: list[Routing]


def write_recording(path: str | Path, ids: Sequence[int], layers: Sequence[Routing]) -> None:
    """Write npz: ids [T] int64, num_experts, and experts [L, T, K] int64, weights [L, T, K] float32, k [L, T] int64.

    Raises:
        InputError: the ids and the routings are not of one length, or there is nothing to write.
    """
    if not layers or not ids or any(layer.num_tokens != len(ids) for layer in layers):
        raise InputError(f"a recording needs a routing of all {len(ids)} tokens for every layer.")
    tokens = len(ids)
    whole = Routing.cat(layers)  # one width for all layers
    with replacing(path) as fresh, open(fresh, "wb") as file:  # given a name, numpy would add .npz to it
        np.savez_compressed(
            file,
            ids=np.asarray(ids, dtype=np.int64),
            num_experts=np.int64(whole.num_experts),
            experts=whole.experts_TK.reshape(len(layers), tokens, -1).numpy(),
            weights=whole.weights_TK.reshape(len(layers), tokens, -1).numpy(),
            k=whole.k_T.reshape(len(layers), tokens).numpy(),
        )


def read_recording(path: str | Path) -> Recording:
    """Read what write_recording wrote.

    Raises:
        InputError: no such file, or not a whole and sound recording.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            ids_T = torch.from_numpy(file["ids"])
            experts, weights, k = (torch.from_numpy(file[key]) for key in ("experts", "weights", "k"))
            num_experts = int(file["num_experts"])
            layers = [Routing(e, w, n, num_experts) for e, w, n in zip(experts, weights, k, strict=True)]
        for layer in layers:
            layer.check()
        if ids_T.dtype != torch.int64 or ids_T.dim() != 1:
            raise ValueError("ids are int64 [T]")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        AttributeError,
        OverflowError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ):
        raise InputError(f"{path} is no recording of a routing; make one with 'minimoe generate --record'.") from None
    if not layers or any(layer.num_tokens != len(ids_T) for layer in layers):
        raise InputError(f"{path} is a damaged recording: its parts have different lengths.")
    return Recording(ids_T, layers)
