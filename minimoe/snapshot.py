"""The arrays of a long count on disk, so that a run that was cut off goes on where it was; see journal for pieces."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minimoe.whole_file import not_ours, replacing

BROKEN = (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)
"""What numpy raises on a file that is no whole npz, or not with the arrays that are looked for."""

Arrays = Mapping[str, np.ndarray[Any, Any]]


def write_snapshot(path: Path, arrays: Arrays, identity: str, done: int) -> None:
    """Keep the arrays as they are after `done` pieces of the work that `identity` tells from any other."""
    with replacing(path) as fresh, open(fresh, "wb") as file:
        state: dict[str, Any] = {"identity": np.array(identity), "done": np.int64(done), **arrays}
        np.savez(file, **state)


def read_snapshot(path: Path, arrays: Arrays, identity: str) -> int:
    """Put what was kept into the arrays, and say after how many pieces; 0 where there is no state of this very work.

    Raises:
        InputError: the file is somebody else's, no snapshot.
    """
    if path.is_file() and path.stat().st_size and not _is_archive(path):
        raise not_ours(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file["identity"]) != identity:
                return 0
            kept = {name: file[name] for name in arrays}
            done = int(file["done"])
    except (OSError, *BROKEN):
        return 0
    for name, array in kept.items():
        arrays[name][...] = array
    return done


def _is_archive(path: Path) -> bool:
    """Whether a file begins as numpy's archives do; a kill leaves no other part of one."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"
