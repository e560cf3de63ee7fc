"""Brings cold weight files into the system's page cache, in file order.

A mapped file is read page by page as its weights are first used, in whatever order the router asks for them; a disk is
many times faster at reading from front to back. Warm files are left alone, so loading them still takes no time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

SAMPLES = 32  # places of a file that are looked at
CHUNK = 1 << 24  # bytes read at a time

Progress = Callable[[int, int], None]  # bytes read so far, bytes to read in all


def is_cold(path: Path) -> bool:
    """Whether some of a file is not in the page cache, judged by places spread evenly over it.

    A system that cannot tell (not Linux, or a file system without support) counts as warm.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    size = path.stat().st_size
    page = bytearray(1)
    file = os.open(path, os.O_RDONLY)
    try:
        for sample in range(SAMPLES):
            os.preadv(file, [page], size * sample // SAMPLES, os.RWF_NOWAIT)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(file)
    return False


def read_ahead(paths: Sequence[Path], progress: Progress | None = None) -> int:
    """Read the cold ones among the files; returns how many bytes were read.

    Nothing is read if the files are larger than the machine's memory: the end would drive out the beginning.

    Args:
        paths: in the order in which to read them.
        progress: called after each chunk.
    """
    cold = [path for path in paths if is_cold(path)]
    total, done = sum(path.stat().st_size for path in cold), 0
    if sum(path.stat().st_size for path in paths) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        return 0
    buffer = bytearray(min(CHUNK, total))
    for path in cold:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                done += count
                if progress:
                    progress(done, total)
    return done
