"""The routing kernel against minimoe's own rules: the same experts in the same order, the same k, the same weights."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor

from minimoe.routers import PrefixRouter, Router, RouterContext, base, rank
from minimoe.routers.spec import parse_router
from minimoe.routing import Routing
from tests.accelerator import DEVICE

pytest.importorskip("triton")
on_device = importlib.import_module("minimoe.triton.routing").on_device

SPECS = [
    "top_k",
    "top_k:k=3",
    "elbow",
    "elbow:cap=64",
    "elbow:reading=printed,floor=2",
    "max_gap:cap=20",
    "gap_ratio",
    "gap_ratio:cap=64",
    "top_p:p=0.3,cap=64",
    "top_p:p=0,floor=0",
    "top_p:p=1,cap=64",
    "min_p:p=0.1,cap=64",
    "threshold:floor=0",
    "threshold:p=0.9,floor=0",
    "elbow:renorm=kept",
    "min_p:renorm=topk",
]


def curves(E: int) -> Tensor:
    """Logits [T, E], bfloat16 so that there are ties: random ones of several spreads, and the awkward shapes."""
    generator = torch.Generator().manual_seed(E)
    random = [torch.randn(2, E, generator=generator) * spread for spread in (0.1, 1.0, 4.0, 30.0)]
    rising = torch.arange(E, dtype=torch.float32)
    awkward = [torch.zeros(E), 20.0 * (rising == E // 2), rising % 2, torch.full((E,), -1e4), rising / E, -rising / E]
    return torch.cat([*random, torch.stack(awkward)]).to(torch.bfloat16)


GEOMETRIC = 2  # the last so many curves: each probability is the same multiple of the next, up to rounding


def context(T: int, E: int) -> RouterContext:
    tokens_T = torch.zeros(T, dtype=torch.int64)
    return RouterContext(0, "decode", tokens_T, tokens_T, tokens_T, top_k=min(8, E), norm_topk_prob=False)


def by_kernel(rule: Router, logits_TE: Tensor) -> tuple[Routing, bool]:
    E, broken_1 = logits_TE.shape[1], torch.zeros(1, dtype=torch.int32, device=DEVICE)
    routing = on_device(rule, min(8, E), E, norm_topk_prob=False).route(logits_TE.to(DEVICE), broken_1)
    return routing.detach(), bool(broken_1)


@pytest.fixture(scope="module")
def every() -> Routing:
    """All experts of all curves, ranked by the kernel."""
    return by_kernel(parse_router("top_k:k=64"), curves(64))[0]


@pytest.mark.parametrize("spec", SPECS)
def test_on_the_same_probabilities_the_kernel_decides_as_the_rule_does(
    spec: str, every: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_TE = curves(64)
    rule = parse_router(spec)
    assert isinstance(rule, PrefixRouter)
    found, broken = by_kernel(rule, logits_TE)
    found.check()
    assert not broken
    monkeypatch.setattr(base, "rank", lambda logits_TE: (every.weights_TK, every.experts_TK))
    expected = rule.route(logits_TE, context(*logits_TE.shape))
    assert torch.equal(found.experts_TK, expected.experts_TK)
    assert torch.equal(found.k_T, expected.k_T)
    # Renormalising adds weights up, in an order of its own.
    torch.testing.assert_close(
        found.weights_TK, expected.weights_TK, rtol=0 if rule.renorm == "model" else 1e-6, atol=0
    )


@pytest.mark.parametrize("spec", ["elbow", "max_gap:cap=20", "gap_ratio", "top_p:p=0.3", "min_p:renorm=topk"])
def test_from_the_logits_on_the_kernel_decides_as_the_rule_does(spec: str) -> None:
    """Not where a decision hangs on the last bit of the softmax, which torch computes in another order."""
    logits_TE = curves(64)[:-GEOMETRIC]
    found, _ = by_kernel(parse_router(spec), logits_TE)
    expected = parse_router(spec).route(logits_TE, context(*logits_TE.shape))
    assert torch.equal(found.experts_TK, expected.experts_TK)
    assert torch.equal(found.k_T, expected.k_T)
    torch.testing.assert_close(found.weights_TK, expected.weights_TK, rtol=1e-6, atol=0)


@pytest.mark.parametrize("spec", ["elbow", "max_gap", "gap_ratio", "top_p"])
@pytest.mark.parametrize("E", [1, 2, 5])
def test_any_number_of_experts(E: int, spec: str) -> None:
    logits_TE = curves(E)
    found, _ = by_kernel(parse_router(spec), logits_TE)
    expected = parse_router(spec).route(logits_TE, context(*logits_TE.shape))
    assert torch.equal(found.experts_TK, expected.experts_TK)
    assert torch.equal(found.k_T, expected.k_T)


def test_ranking_and_probabilities_are_those_of_rank() -> None:
    logits_TE = curves(64).float()
    found, _ = by_kernel(parse_router("top_k:k=64"), logits_TE)
    sorted_TE, experts_TE = rank(logits_TE)
    assert torch.equal(found.experts_TK, experts_TE)
    torch.testing.assert_close(found.weights_TK, sorted_TE, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_told_and_do_no_harm(bad: float) -> None:
    logits_TE = curves(8).float()
    logits_TE[3, 5] = bad
    found, broken = by_kernel(parse_router("elbow"), logits_TE)
    assert broken
    found.check()


@pytest.mark.parametrize(
    "spec", ["random", "mixed_k", "mask:forbid=1", "union", "entropy", "elbow:method=kneed", "tests/free_rules.py"]
)
def test_rules_that_need_the_host_are_told_apart(spec: str) -> None:
    class Own(type(parse_router("elbow"))):  # type: ignore[misc]
        """A user's rule may count in any way."""

    rule = Own() if spec.endswith(".py") else parse_router(spec)
    assert on_device(rule, 8, 64, norm_topk_prob=False) is None
