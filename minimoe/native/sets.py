"""The instruction sets of the native kernels: finding their library, and choosing one.

It is C++ with a plain C interface, built with the package where there is a compiler and absent elsewhere. It is
compiled with OpenMP but not linked to a runtime of its own, so that it shares torch's threads; that is why torch has to
be imported first.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from torch import Tensor

from minimoe.errors import InputError
from minimoe.native.kernels import Kernels
from minimoe.native.places import DTYPES

NOT_BUILT = "the native kernels were not built on this machine; reinstall minimoe where a C++ compiler is found"
NO_MEMORY = -9  # as in interface.h
_INT, _INT64, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


@functools.cache
def instruction_sets() -> tuple[Kernels, ...]:
    """The kernels that this processor can run, the fastest first and plain loops, `scalar`, last; () if not built."""
    files = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not files:
        return ()
    try:
        library = ctypes.CDLL(str(files[0]))
    except OSError:  # built for another machine, or torch brings another OpenMP than the library was compiled for
        return ()
    library.minimoe_set_name.restype = ctypes.c_char_p
    library.minimoe_linear.argtypes = [*[_INT] * 3, *[_INT64] * 3, *[_POINTER] * 4]
    library.minimoe_rank.argtypes = [*[_INT] * 3, *[_INT64] * 2, *[_POINTER] * 3]
    library.minimoe_keep.argtypes = [*[_INT64] * 3, *[_POINTER] * 5]
    library.minimoe_keep.restype = None
    library.minimoe_prefix.argtypes = [*[_INT] * 3, *[_INT64] * 2, *[_POINTER] * 5]
    library.minimoe_norm.argtypes = [*[_INT] * 3, *[_INT64] * 2, _FLOAT, *[_POINTER] * 3]
    library.minimoe_turn.argtypes = [*[_INT] * 3, *[_INT64] * 3, *[_FLOAT] * 2, *[_POINTER] * 5]
    library.minimoe_finite.argtypes = [_INT, _INT64, _POINTER]
    library.minimoe_gate.argtypes = [*[_INT] * 2, _POINTER, _INT64, *[_POINTER] * 3]
    library.minimoe_attention.argtypes = [*[_INT] * 2, *[_POINTER] * 4]
    library.minimoe_attend.argtypes = [*[_INT] * 3, *[_INT64] * 7, *[_POINTER] * 4]
    library.minimoe_experts.argtypes = [*[_INT] * 2, _POINTER, *[_INT64] * 2, *[_POINTER] * 5]
    library.minimoe_experts.restype = _INT64
    library.minimoe_decode.argtypes = [*[_INT] * 2, *[_POINTER] * 5, _INT64, _POINTER]
    library.minimoe_decode.restype = _INT64
    for kernel in ("linear", "rank", "prefix", "norm", "turn", "gate", "attention", "attend", "experts", "decode"):
        getattr(library, f"minimoe_{kernel}").errcheck = _enough_memory
    return tuple(
        Kernels(library.minimoe_set_name(index).decode(), index, library)
        for index in range(library.minimoe_sets())
        if library.minimoe_set_supported(index)
    )


def _enough_memory(result: int, _call: object, _arguments: object) -> int:
    if result == NO_MEMORY:
        raise MemoryError("the native kernels found no memory")
    return result


@functools.cache
def best_kernels() -> Kernels | None:
    """The fastest kernels there are, or None where only plain loops would be left: torch is faster than these."""
    return next((kernels for kernels in instruction_sets() if kernels.name != "scalar"), None)


def kernels_for(tensor: Tensor) -> Kernels | None:
    """The fastest kernels, if they can run a tensor: on the CPU, of a dtype that they read, without gradients."""
    return None if tensor.requires_grad or not tensor.is_cpu or tensor.dtype not in DTYPES else best_kernels()


def find_kernels(isa: str | None = None) -> Kernels:
    """The kernels of an instruction set, or the fastest ones.

    Raises:
        InputError: not built, or not of this processor; lists the names there are.
    """
    known = {kernels.name: kernels for kernels in instruction_sets()}
    if not known:
        raise InputError(f"{NOT_BUILT}, or choose --backend bucketed.")
    if isa is None:
        return next(iter(known.values()))
    if isa not in known:
        raise InputError(f"there are no kernels {isa!r} for this processor; choose one of {', '.join(known)}.")
    return known[isa]
