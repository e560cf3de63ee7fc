"""k, and where it matters which experts, written down by hand for the rules that test_routers.py has no table of.

The curves are probabilities in 64ths, expert 0 first; where a rule looks at names or neighbours, a second token has the
same curve the other way round, expert 7 first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from curves import context, curves
from torch import Tensor

import minimoe
from minimoe.errors import InputError, NumericalError
from minimoe.routers import Router
from minimoe.routers.entropy import Entropy
from minimoe.routers.mask import Mask
from minimoe.routers.skip import Skip
from minimoe.routers.spec import parse_router
from minimoe.routers.top_any import TopAny
from minimoe.routers.union import Union

EIGHT = {
    "flat": [8, 8, 8, 8, 8, 8, 8, 8],
    "linear": [15, 13, 11, 9, 7, 5, 3, 1],
    "one hot": [64, 0, 0, 0, 0, 0, 0, 0],
    "step": [14, 14, 14, 14, 2, 2, 2, 2],
    "plateau of two": [20, 20, 4, 4, 4, 4, 4, 4],
    "two plateaus": [16, 16, 16, 8, 4, 2, 1, 1],
}
FEW = {
    "one": [64],
    "two alike": [32, 32],
    "two": [48, 16],
    "two, one far": [60, 4],
    "three alike": [22, 22, 22],
    "three, two lead": [32, 32, 0],
    "three, one leads": [64, 0, 0],
    "three": [32, 16, 16],
}
CURVES = {**EIGHT, **FEW}


def logits(*rows: Sequence[float]) -> Tensor:
    """A probability of 0 becomes one that float32 does not hold."""
    return (torch.tensor(rows, dtype=torch.float64) / 64).log().clamp(min=-200).float()


# Of each curve, in the order of CURVES. The exponential of the entropy is 8, 6.63, 1, 5.83, 5.85 and 5.54 of eight,
# then 1, 2, 1.75, 1.26, 3, 2, 1 and 2.83.
COUNTS: dict[str, tuple[Router, list[int]]] = {
    "entropy": (Entropy(cap=99), [8, 7, 1, 6, 6, 6, 1, 2, 2, 1, 3, 2, 1, 3]),
    "entropy, halved": (Entropy(scale=0.5, cap=99), [4, 3, 1, 3, 3, 3, 1, 1, 1, 1, 2, 1, 1, 1]),
    "skip": (Skip(beta=0.3, cap=99), [8, 6, 1, 4, 2, 4, 1, 2, 2, 1, 3, 2, 1, 3]),
    "top_any": (TopAny(p=0.1), [8, 5, 1, 4, 2, 4, 1, 2, 2, 1, 3, 2, 1, 3]),
    "top_any, at most 3": (TopAny(p=0.1, cap=3), [3, 3, 1, 3, 2, 3, 1, 2, 2, 1, 3, 2, 1, 3]),
    "top_any, none wanted": (TopAny(p=1), [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize(("index", "curve"), enumerate(CURVES), ids=CURVES)
@pytest.mark.parametrize("rule", COUNTS)
def test_k_of_a_token(rule: str, index: int, curve: str) -> None:
    router, expected = COUNTS[rule]
    E = len(CURVES[curve])
    if isinstance(router, (Entropy, Skip)):
        router = replace(router, cap=E)
    routing = router.route(logits(CURVES[curve]), context(1, E))
    routing.check()
    assert routing.k_T.tolist() == [expected[index]]
    assert routing.experts_TK[0, : expected[index]].tolist() == list(range(expected[index]))  # ties to the lowest


# k of both tokens, with k0 of 1 and 2 among all experts, then with k0 of 2 among each token's best three.
UNION = {
    "flat": [(1, 1), (2, 2), (2, 2)],
    "linear": [(2, 2), (4, 4), (2, 2)],
    "one hot": [(2, 2), (3, 3), (2, 3)],
    "step": [(2, 2), (4, 4), (2, 2)],
    "plateau of two": [(2, 2), (4, 4), (2, 3)],  # the mirror's third choice is 0, which the first token has
    "two plateaus": [(2, 2), (4, 4), (2, 2)],
    "one": [(1, 1)],
    "two alike": [(1, 1), (2, 2)],
    "two": [(2, 2), (2, 2)],
    "two, one far": [(2, 2), (2, 2)],
    "three alike": [(1, 1), (2, 2), (2, 2)],
    "three, two lead": [(2, 2), (3, 3), (3, 3)],
    "three, one leads": [(2, 2), (3, 3), (3, 3)],
    "three": [(2, 2), (3, 3), (3, 3)],
}


@pytest.mark.parametrize("curve", UNION)
def test_union_of_a_curve_and_its_mirror(curve: str) -> None:
    E = len(CURVES[curve])
    both = logits(CURVES[curve], CURVES[curve][::-1])
    for (k0, k), expected in zip([(1, E), (2, E), (2, 3)], UNION[curve], strict=False):
        routing = Union(k0=k0, k=k).route(both, context(2, E))
        routing.check()
        assert tuple(routing.k_T.tolist()) == expected


# Of the mirrored curve, k = 2: without the last expert, then with the first.
MASKED = {
    "flat": ([0, 1], [0, 1]),
    "linear": ([6, 5], [7, 0]),
    "one hot": ([0, 1], [7, 0]),
    "step": ([4, 5], [4, 0]),
    "plateau of two": ([6, 0], [6, 0]),
    "two plateaus": ([5, 6], [5, 0]),
    "three alike": ([0, 1], [0, 1]),
    "three, two lead": ([1, 0], [1, 0]),
    "three, one leads": ([0, 1], [2, 0]),
    "three": ([0, 1], [2, 0]),
}


@pytest.mark.parametrize("curve", MASKED)
def test_mask_of_a_mirrored_curve(curve: str) -> None:
    mirrored = CURVES[curve][::-1]
    last = len(mirrored) - 1
    for rule, expected in zip((Mask(forbid=str(last)), Mask(force="0")), MASKED[curve], strict=True):
        routing = rule.route(logits(mirrored), context(1, 2))
        routing.check()
        assert routing.experts_TK.tolist() == [expected]
        assert routing.weights_TK[0].tolist() == pytest.approx([mirrored[e] / sum(mirrored) for e in expected])


def test_mask_of_one_and_two_experts() -> None:
    assert Mask(force="0").route(logits([64]), context(1, 1)).experts_TK.tolist() == [[0]]
    assert Mask(forbid="0").route(logits([48, 16]), context(1, 1)).experts_TK.tolist() == [[1]]
    for rule, row, k, says in (
        (Mask(forbid="0"), [64], 1, "all 1 experts are forbidden"),
        (Mask(forbid="1/0/1"), [48, 16], 1, "all 2 experts are forbidden"),
        (Mask(forbid="1"), [48, 16], 2, "only 1 of 2 experts are allowed, but a token uses 2"),
    ):
        with pytest.raises(InputError, match=says):
            rule.route(logits(row), context(1, k))


@pytest.mark.parametrize("keys", ["forbid={0}/{5},k=4", "force={3}", "forbid={1},force={2}/{7},k=3"])
def test_a_mask_follows_its_experts_when_they_are_renamed(keys: str) -> None:
    T, E = 500, 16
    logits_TE = curves(E, 600)[torch.arange(600) % 6 != 5]  # without the family of ties
    old_E = torch.randperm(E, generator=torch.Generator().manual_seed(2))
    before = parse_router(f"mask:{keys.format(*range(E))}").route(logits_TE, context(T))
    after = parse_router(f"mask:{keys.format(*old_E.argsort().tolist())}").route(logits_TE[:, old_E], context(T))
    assert (old_E[after.experts_TK] == before.experts_TK).all(dim=1).sum() >= T - 1  # the softmax adds up otherwise


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused_with_their_layer(value: float, checkpoint: Callable[..., Path]) -> None:
    engine = minimoe.load(checkpoint())
    engine.model.layers[1].gate.weight_ED.fill_(value)  # a private mapping: the file stays as it is
    for spec in ("entropy", "skip:beta=0.3", "top_any:p=0.1", "union", "mask:forbid=1"):
        engine.router = parse_router(spec)
        with pytest.raises(NumericalError, match="layer 1"):
            engine.score("a", " fox")
