"""Decode steps without Python in them, where backend and rule allow it."""

from __future__ import annotations

from minimoe.decoding.base import Decoder
from minimoe.decoding.native import NativeDecoder
from minimoe.model import Olmoe
from minimoe.routers import Router


def find_decoder(model: Olmoe, router: Router, backend: str) -> Decoder | None:
    """The decode steps of a model that was loaded with this backend; None where the rule has to be asked in Python.

    That is with bucketed and reference, with every rule but top_k and elbow with native (see minimoe.decoding.native),
    and with all but some rules with triton (see minimoe.triton.routing).
    """
    name = backend.partition(":")[0]
    if name == "native":
        return NativeDecoder.of(model, router)
    if name == "triton":
        from minimoe.decoding.graphs import GraphDecoder  # needs triton

        return GraphDecoder.of(model, router)
    return None


__all__ = ["Decoder", "find_decoder"]
