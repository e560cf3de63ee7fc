"""The decode step without a host in it equals the model's own; on the CPU without a graph, its kernels interpreted."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import minimoe
from minimoe.cache import KVCache
from minimoe.engine import Engine
from minimoe.errors import InputError, NumericalError
from minimoe.model import Batch
from tests.accelerator import DEVICE

pytest.importorskip("triton")
DecodeStep = importlib.import_module("minimoe.decoding").DecodeStep
pairs = importlib.import_module("minimoe.triton.pairs")

ROOM = 24
Folders = Callable[..., Path]


def load(folder: Path, router: str = "elbow") -> Engine:
    return minimoe.load(folder, router=router, backend="triton", device=str(DEVICE))


def prompted(engine: Engine, lengths: list[int]) -> list[KVCache]:
    """The caches of prompts of these lengths."""
    model, generator = engine.model, torch.Generator().manual_seed(len(lengths))
    caches = [KVCache(engine.config, ROOM, model.dtype, model.device) for _ in lengths]
    ids = torch.randint(0, engine.config.vocab_size, (sum(lengths),), generator=generator)
    # The prompt by torch alone: this is not about prefill.
    reference = minimoe.load(engine.name, router=engine.router, backend="reference", device=str(DEVICE)).model
    reference.forward(Batch(ids.to(DEVICE), lengths, caches), engine.router)
    return caches


@pytest.mark.parametrize(
    ("variant", "router", "lengths"),
    [
        ("top8_of_64", "elbow", [5]),
        ("clip_qkv", "top_p:p=0.6,cap=4", [3, 9, 1]),
        ("norm_topk_true", "top_k", [4, 2]),
    ],
)
def test_the_step_equals_the_models_own(
    checkpoint: Folders, variant: str, router: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "ROWS", 64)  # in the interpreter every program takes its time
    engine = load(checkpoint(variant, num_hidden_layers=2), router)
    reference = minimoe.load(engine.name, router=router, backend="reference", device=str(DEVICE)).model
    with torch.inference_mode():
        caches = prompted(engine, lengths)
        step = DecodeStep(engine.model, engine.router, len(lengths), ROOM)
        step.begin(caches)
        for token in (7, 11):
            ids_B = torch.full((len(lengths),), token, device=DEVICE) + torch.arange(len(lengths), device=DEVICE)
            hidden_BD = reference.forward(Batch(ids_B, [1] * len(lengths), caches, "decode"), engine.router)
            torch.testing.assert_close(step.step(ids_B), reference.head(hidden_BD), rtol=1e-4, atol=1e-4)
        step.check()


def test_router_logits_that_are_not_finite_name_their_layer(checkpoint: Folders) -> None:
    engine = load(checkpoint("base", num_hidden_layers=2))
    with torch.inference_mode():
        caches = prompted(engine, [2])
        step = DecodeStep(engine.model, engine.router, 1, ROOM)
        step.begin(caches)
        engine.model.layers[1].gate.norm_D.fill_(math.nan)  # a private mapping: the file stays as it is
        step.step(torch.tensor([3]))
        with pytest.raises(NumericalError, match="layer 1: the router logits are not finite"):
            step.check()
        step.begin(caches)
        step.check()


def test_what_does_not_fit_is_refused(checkpoint: Folders) -> None:
    engine = load(checkpoint("base", num_hidden_layers=2))
    with pytest.raises(InputError, match="the rule MixedK has to be asked on the host, so its decode steps cannot be"):
        DecodeStep(engine.model, minimoe.load(engine.name, router="mixed_k").router, 1, ROOM)
    with torch.inference_mode():
        step = DecodeStep(engine.model, engine.router, 2, 4)
        caches = prompted(engine, [4, 2])
        with pytest.raises(ValueError, match="for 2 sequences, not for 1"):
            step.begin(caches[:1])
        step.begin(caches)
        with pytest.raises(IndexError, match="a cache of 4 positions cannot hold 5"):
            step.step(torch.tensor([3, 3]))
        with pytest.raises(IndexError, match="a cache of 4 positions cannot hold 6"):
            step.begin(prompted(engine, [6, 2]))
