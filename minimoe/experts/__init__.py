"""Expert backends, one a file, and the registry that gives them their names."""

from minimoe.errors import InputError
from minimoe.experts.base import Experts, ExpertWeights
from minimoe.experts.bucketed import BucketedExperts
from minimoe.experts.reference import ReferenceExperts

BACKENDS: dict[str, type[Experts]] = {
    "bucketed": BucketedExperts,
    "reference": ReferenceExperts,
}


def find_backend(name: str) -> type[Experts]:
    """The backend class of that name.

    Raises:
        InputError: lists the names there are.
    """
    if name not in BACKENDS:
        raise InputError(f"unknown backend {name!r}; choose one of {', '.join(BACKENDS)}.")
    return BACKENDS[name]


__all__ = ["BACKENDS", "ExpertWeights", "Experts", "find_backend"]
