"""Decode steps in one go, where backend and rule allow it."""

from __future__ import annotations

from minimoe.decoding.base import Decoder
from minimoe.decoding.native import NativeDecoder
from minimoe.model import Olmoe
from minimoe.routers import Router


def find_decoder(model: Olmoe, router: Router, backend: str) -> Decoder | None:
    """The decode steps of a model that was loaded with this backend; None where a step is a pass as any other.

    That is with bucketed and reference; with triton also under rules that have to be asked (routers.base.layer_rules).
    """
    name = backend.partition(":")[0]
    if name == "native":
        return NativeDecoder(model, router)
    if name == "triton":
        from minimoe.decoding.graphs import GraphDecoder  # needs triton

        return GraphDecoder.of(model, router)
    return None


__all__ = ["Decoder", "find_decoder"]
