"""Expert backends, one a file, and the registry that gives them their names."""

from collections.abc import Callable

import torch

from minimoe.errors import InputError
from minimoe.experts.base import Backend, Experts, ExpertWeights
from minimoe.experts.bucketed import BucketedExperts
from minimoe.experts.native import Native
from minimoe.experts.reference import ReferenceExperts
from minimoe.native import best_kernels
from minimoe.native.places import DTYPES

BACKENDS: dict[str, Callable[..., Backend]] = {
    "native": Native,
    "bucketed": lambda: BucketedExperts,
    "reference": lambda: ReferenceExperts,
    "triton": lambda: _triton(),
}


def _triton() -> Backend:
    """The GPU kernels; triton is imported here and nowhere sooner.

    Raises:
        InputError: triton is not installed.
    """
    try:
        from minimoe.experts.triton import Triton
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise InputError("the triton backend needs the package triton; pip install 'minimoe[triton]'.") from None
    return Triton()


def find_backend(spec: str) -> Backend:
    """The backend of that name: `bucketed`, `reference`, `triton`, `native`, or `native:isa=NAME` for one set of them.

    Raises:
        InputError: lists the names there are; or the native kernels or triton cannot run here.
    """
    name, colon, option = spec.partition(":")
    if name not in BACKENDS:
        raise InputError(f"unknown backend {spec!r}; choose one of {', '.join(BACKENDS)}.")
    key, _, value = option.partition("=")
    if not colon:
        return BACKENDS[name]()
    if name != "native" or key != "isa" or not value:
        raise InputError(f"backend {name} takes no option {option!r}; only native does, as in native:isa=avx2.")
    return Native(isa=value)


def default_backend(dtype: torch.dtype, device: torch.device) -> str:
    """The backend expected to be the fastest for a dtype on a device: native where its kernels run, else bucketed."""
    return "native" if device.type == "cpu" and dtype in DTYPES and best_kernels() else "bucketed"


__all__ = ["BACKENDS", "Backend", "ExpertWeights", "Experts", "default_backend", "find_backend"]
