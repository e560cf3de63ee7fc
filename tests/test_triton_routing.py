"""The routing kernel against minimoe's own rules: the same experts in the same order, the same k, the same weights."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minimoe.routers import PrefixRouter, Router, RouterContext, rank
from minimoe.routers.spec import parse_router
from minimoe.routing import Routing
from tests.accelerator import DEVICE

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter", "rules_by_torch")
route = importlib.import_module("minimoe.triton.routing").route

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
    "entropy:cap=64",
    "entropy:scale=0.4,floor=0",
    "skip:beta=0.3,cap=64",
    "layer_k:k=5,cap=9",
]


@pytest.fixture(scope="module")
def rules_by_torch() -> Iterator[None]:
    """As on a GPU: the native kernels' softmax adds up in another order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minimoe.native.sets.best_kernels", lambda: None)
        yield


def curves(E: int) -> Tensor:
    """Logits [T, E], bfloat16 so that there are ties: random ones of several spreads, and the awkward shapes."""
    generator = torch.Generator().manual_seed(E)
    random = [torch.randn(2, E, generator=generator) * spread for spread in (0.1, 1.0, 4.0, 30.0)]
    rising = torch.arange(E, dtype=torch.float32)
    awkward = [torch.zeros(E), 20.0 * (rising == E // 2), rising % 2, torch.full((E,), -3e38), rising / E, -rising]
    straight = [torch.log(rising + 1), 3e38 * (rising == 1), -3e38 * (rising == 1)]
    return torch.cat([*random, torch.stack([*awkward, *straight])]).to(torch.bfloat16)


def context(T: int, E: int) -> RouterContext:
    tokens_T = torch.zeros(T, dtype=torch.int64)
    return RouterContext(0, "decode", tokens_T, tokens_T, tokens_T, top_k=min(8, E), norm_topk_prob=False)


def by_kernel(rule: Router, logits_TE: Tensor) -> tuple[Routing, bool]:
    T, E = logits_TE.shape
    assert isinstance(rule, PrefixRouter)
    followed, broken_1 = rule.prefix_rule(context(T, E), E), torch.zeros(1, dtype=torch.int32).to(DEVICE)
    assert followed is not None
    # What nobody has written is no routing.
    routing = Routing(
        torch.full((T, followed.limit), -1, device=DEVICE),
        torch.full((T, followed.limit), math.nan, device=DEVICE),
        torch.full((T,), -1, device=DEVICE),
        E,
    )
    route(followed, logits_TE.to(DEVICE), routing, broken_1)
    return routing.detach(), bool(broken_1)


def by_rule(rule: Router, logits_TE: Tensor) -> Routing:
    return rule.route(logits_TE.to(DEVICE), context(*logits_TE.shape)).detach()


def assert_equal(found: Routing, expected: Routing, rtol: float = 0) -> None:
    assert torch.equal(found.experts_TK, expected.experts_TK)
    assert torch.equal(found.k_T, expected.k_T)
    torch.testing.assert_close(found.weights_TK, expected.weights_TK, rtol=rtol, atol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_the_kernel_decides_as_the_rule_does(spec: str) -> None:
    logits_TE = curves(64)
    rule = parse_router(spec)
    assert isinstance(rule, PrefixRouter)
    found, broken = by_kernel(rule, logits_TE)
    found.check()
    assert not broken
    # Renormalising adds weights up, in an order of its own.
    assert_equal(found, by_rule(rule, logits_TE), rtol=0 if rule.renorm == "model" else 1e-6)


@pytest.mark.parametrize("spec", ["elbow", "max_gap", "gap_ratio", "top_p"])
@pytest.mark.parametrize("E", [1, 2, 5])
def test_any_number_of_experts(E: int, spec: str) -> None:
    assert_equal(by_kernel(parse_router(spec), curves(E))[0], by_rule(parse_router(spec), curves(E)))


@pytest.mark.parametrize("spec", ["gap_ratio", "top_p:p=1,cap=5", "elbow", "max_gap"])
@given(
    logits=st.lists(
        st.integers(-6, 6).map(lambda n: n / 2) | st.sampled_from([3e38, -3e38, 88.0]), min_size=5, max_size=5
    )
)
@settings(max_examples=15)
def test_where_decisions_hang_on_the_last_bit(spec: str, logits: list[float]) -> None:
    """Equal ratios, straight lines, sums that just reach 1, and logits as large as they may be."""
    logits_TE = torch.tensor([logits])
    assert_equal(by_kernel(parse_router(spec), logits_TE)[0], by_rule(parse_router(spec), logits_TE))


def test_ranking_and_probabilities_are_those_of_rank() -> None:
    logits_TE = curves(64).float()
    found, _ = by_kernel(parse_router("top_k:k=64"), logits_TE)
    sorted_TE, experts_TE = rank(logits_TE.to(DEVICE))
    assert torch.equal(found.experts_TK, experts_TE.cpu())
    assert torch.equal(found.weights_TK, sorted_TE.cpu())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_told_and_do_no_harm(bad: float) -> None:
    """The reference refuses them, so all that counts is that they are told, and other tokens' routing is as ever."""
    logits_TE = curves(8).float()
    whole, _ = by_kernel(parse_router("elbow"), logits_TE)
    logits_TE[3, 5] = bad
    logits_TE[6] = bad
    found, broken = by_kernel(parse_router("elbow"), logits_TE)
    assert broken
    found.check()
    others = torch.tensor([t for t in range(len(logits_TE)) if t not in (3, 6)])
    assert_equal(found.rows(others), whole.rows(others))
