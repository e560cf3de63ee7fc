"""What the machine could do at most: bytes read from memory and multiply-adds per second, by threads.

    python -m bench.limits

Decoding reads every weight it needs once, so its limit is the read bandwidth; prefill computes, so its limit is the
matrix rate. The bandwidth is that of a plain loop in C over memory that no cache holds, compiled when it is needed; the
matrix rate that of torch's own product of two large matrices.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.report import Spread, at_least_one, machine, publish, table

READ_BYTES = 1 << 30
MATRIX_SIZE = 2048
TIMES_THE_CACHE = 4
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
SOURCE = Path(__file__).with_name("limits.c")


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one number of threads.

    Attributes:
        bandwidth: bytes read per second.
        float32, bfloat16: floating-point operations per second of a product of two matrices; an addition and a
            multiplication are two.
    """

    bandwidth: Spread
    float32: Spread
    bfloat16: Spread


def read_loop() -> Callable[[torch.Tensor, int], None]:
    """A function (tensor, threads) that reads all of it, but for less than 32 bytes at its end.

    Raises:
        FileNotFoundError: no C compiler, here called cc.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limits.so"
        # No OpenMP runtime is linked: torch's own serves, as it does for the kernels.
        flags = ("-O3", "-march=native", "-fopenmp", "-fPIC")
        subprocess.run(["cc", *flags, "-c", SOURCE, "-o", f"{library}.o"], check=True)
        subprocess.run(["cc", "-shared", f"{library}.o", "-o", library], check=True)
        loop = ctypes.CDLL(str(library)).read_all
    loop.argtypes, loop.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_uint64
    return lambda tensor, threads: loop(tensor.data_ptr(), tensor.nbytes // 32, threads)


class Reading:
    """Read bandwidth now: bytes per second that `threads` threads read of memory that no cache holds.

    Each call reads `read_bytes`, and not those that the calls before it have read: in all there are several times as
    many as the largest cache holds.
    """

    def __init__(self, threads: int, read_bytes: int = READ_BYTES) -> None:
        self._loop, self._threads = read_loop(), threads
        parts = max(1, -(-TIMES_THE_CACHE * cache_bytes() // read_bytes))
        pages = mmap.mmap(-1, parts * read_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Small pages would slow the loop down, and a limit that is too low flatters whatever is set against it.
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        words = torch.frombuffer(pages, dtype=torch.int64).fill_(1)
        self._parts = itertools.cycle(words.split(read_bytes // words.itemsize))

    def __call__(self) -> float:
        words = next(self._parts)
        return words.nbytes / _seconds(lambda: self._loop(words, self._threads))


def cache_bytes() -> int:
    """Of the processor's largest cache, which it may share with other guests; 0 where the system does not tell."""
    sizes = [path.read_text("ascii").strip() for path in CACHES.glob("index*/size")]
    return max((int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes if size[-1:] in "KM"), default=0)


def measure(threads: int, rounds: int, *, read_bytes: int = READ_BYTES, size: int = MATRIX_SIZE) -> Limits:
    """The limits with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    reading = Reading(threads, read_bytes)
    matrix = torch.randn(size, size)
    half = matrix.to(torch.bfloat16)
    flops = 2 * size**3
    read = [reading() for _ in range(rounds)]
    single = [flops / _seconds(lambda: matrix @ matrix) for _ in range(rounds)]
    # A processor that emulates bfloat16 would take minutes over the whole product; a slice shows its rate as well.
    rows = half[:64]
    halves = [2 * len(rows) * size**2 / _seconds(lambda: rows @ half.T) for _ in range(rounds)]
    torch.set_num_threads(before)
    return Limits(Spread.of(read), Spread.of(single), Spread.of(halves))


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    about = machine(cores)
    limits = {threads: measure(threads, arguments.rounds) for threads in sorted({1, cores})}
    rows = [
        [str(threads), limit.bandwidth.text(1e-9), limit.float32.text(1e-9, 0), limit.bfloat16.text(1e-9, 0)]
        for threads, limit in limits.items()
    ]
    text = table(["threads", "read GB/s", "float32 GFLOP/s", "bfloat16 GFLOP/s"], rows)
    publish("limits", text, {"machine": about, "limits": limits}, arguments.save)


if __name__ == "__main__":
    main()
