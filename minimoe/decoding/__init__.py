"""Decode steps without Python between their layers, where backend and rule allow it."""

from __future__ import annotations

from minimoe.decoding.base import Decoder
from minimoe.decoding.native import NativeDecoder
from minimoe.model import Olmoe
from minimoe.routers import Router


def find_decoder(model: Olmoe, router: Router, backend: str) -> Decoder | None:
    """The decode steps of a model that was loaded with this backend; None where each layer is run from Python.

    That is with bucketed and reference, and with all but some rules with triton (see minimoe.triton.routing).
    """
    name = backend.partition(":")[0]
    if name == "native":
        return NativeDecoder(model, router)
    if name == "triton":
        from minimoe.decoding.graphs import GraphDecoder  # needs triton

        return GraphDecoder.of(model, router)
    return None


__all__ = ["Decoder", "find_decoder"]
