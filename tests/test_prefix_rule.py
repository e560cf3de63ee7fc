"""Which rules kernels follow, and what they are told of each layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import minimoe
from minimoe.config import ModelConfig
from minimoe.errors import InputError
from minimoe.prefix_rule import PrefixRule
from minimoe.routers import Elbow
from minimoe.routers.base import layer_rules
from minimoe.routers.spec import parse_router


@pytest.fixture
def config(checkpoint: Callable[..., Path]) -> ModelConfig:
    """Of three layers of 64 experts, of which a token uses 8."""
    return minimoe.load(checkpoint("top8_of_64")).config


@pytest.mark.parametrize(
    "spec", ["random", "mixed_k", "mask:forbid=1", "union", "elbow:method=kneed", "top_k:k=65", "a user's own"]
)
def test_rules_that_have_to_be_asked_are_told_apart(spec: str, config: ModelConfig) -> None:
    class Own(Elbow):
        """May look at tokens anywhere."""

    if "kneed" in spec:
        pytest.importorskip("kneed")
    rule = Own() if spec == "a user's own" else parse_router(spec)
    assert layer_rules(rule, config) is None


def test_every_layer_has_its_own_rule(config: ModelConfig, tmp_path: Path) -> None:
    L = config.num_layers
    rules = layer_rules(parse_router("layer_k:k=" + "/".join(str(1 + layer) for layer in range(L))), config)
    assert rules == [PrefixRule("number", 1 + layer, 1, L, "none", 8) for layer in range(L)]
    file = tmp_path / "skip.json"
    betas = [layer / L for layer in range(L)]
    file.write_text(json.dumps({"rule": "skip", "checkpoint": "this", "values": betas}))
    rules = layer_rules(parse_router(f"skip:file={file}"), config, lambda: "this")
    assert rules == [PrefixRule("min_p", beta, 1, 8, "none", 8) for beta in betas]
    with pytest.raises(InputError, match="made for another checkpoint"):
        layer_rules(parse_router(f"skip:file={file}"), config, lambda: "that")
