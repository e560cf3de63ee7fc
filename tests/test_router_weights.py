"""What all rules share: floor and cap, the weights that are kept, and what is refused.

Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch
from curves import context, curves
from torch import Tensor

from minimoe.errors import InputError
from minimoe.routers import ROUTERS, PrefixRouter, RouterContext
from minimoe.routers.base import Renorm
from minimoe.routers.elbow import Elbow
from minimoe.routers.min_p import MinP
from minimoe.routers.threshold import Threshold
from minimoe.routers.top_k import TopK
from minimoe.routers.top_p import TopP

PREFIX_RULES = {
    name: rule for name, rule in ROUTERS.items() if issubclass(rule, PrefixRouter) and rule.needs == "nothing"
}


def probabilities(logits_TE: Tensor) -> np.ndarray[Any, Any]:
    p = np.exp(logits_TE.double().numpy())
    return np.asarray(p / p.sum(1, keepdims=True))


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("renorm", get_args(Renorm))
@pytest.mark.parametrize("name", PREFIX_RULES)
def test_kept_weights_sum_to_what_renorm_says(name: str, renorm: Renorm, norm_topk_prob: bool) -> None:
    logits_TE = curves(64, T=600)
    p = probabilities(logits_TE)
    routing = PREFIX_RULES[name](cap=12, renorm=renorm).route(logits_TE, context(600, norm_topk_prob=norm_topk_prob))
    routing.check()
    live = (np.arange(12) < routing.k_T.numpy()[:, None]).astype(float)
    raw = np.take_along_axis(np.c_[p, np.zeros(600)], routing.experts_TK.numpy(), 1) * live
    mass = raw.sum(1)
    wanted = {
        "none": mass,
        "kept": np.ones(600),
        "topk": np.sort(p, 1)[:, -8:].sum(1),
        "model": np.ones(600) if norm_topk_prob else mass,
    }[renorm]
    np.testing.assert_allclose(routing.weights_TK, raw * (wanted / mass)[:, None], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("renorm", get_args(Renorm))
def test_tokens_without_experts_get_weight_0_and_never_nan(renorm: Renorm) -> None:
    logits_TE = torch.tensor([[0.0] * 8, [9.0] + [0.0] * 7, [0.0] * 8])
    routing = Threshold(p=0.5, floor=0, renorm=renorm).route(logits_TE, context(3, norm_topk_prob=True))
    routing.check()
    assert routing.k_T.tolist() == [0, 1, 0]
    assert routing.weights_TK[[0, 2]].eq(0).all()
    assert routing.weights_TK[1, 0] > 0.99


@pytest.mark.parametrize("name", PREFIX_RULES)
def test_no_tokens_is_a_routing_of_no_tokens(name: str) -> None:
    routing = PREFIX_RULES[name](renorm="topk").route(torch.zeros(0, 16), context(0))
    routing.check()
    assert (routing.num_tokens, routing.width, routing.num_experts) == (0, 8, 16)


@pytest.mark.parametrize("name", PREFIX_RULES)
def test_floor_and_cap_bound_k(name: str) -> None:
    own: dict[str, Any] = {"k": 4.5} if name == "mixed_k" else {}  # whose k must lie within them
    k_T = PREFIX_RULES[name](cap=5, floor=3, **own).route(curves(64, T=600), context(600)).k_T
    assert k_T.min() >= 3
    assert k_T.max() <= 5


def test_top_k_takes_the_smaller_of_k_and_cap_or_the_models_own() -> None:
    logits_TE = curves(16, T=2)
    for rule, k in ((TopK(), 8), (TopK(k=3), 3), (TopK(k=12), 12), (TopK(cap=5), 5), (TopK(k=6, cap=4), 4)):
        routing = rule.route(logits_TE, context(2))
        assert routing.k_T.tolist() == [k, k]
        assert routing.width == k


@dataclass(frozen=True, kw_only=True)
class ElbowForcedToK(Elbow):
    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        return torch.full_like(super().count(sorted_probs_TE, context), context.top_k)


@pytest.mark.parametrize("renorm", get_args(Renorm))
def test_an_elbow_forced_to_k_is_top_k_bit_for_bit(renorm: Renorm) -> None:
    logits_TE = curves(64, T=600)
    forced = ElbowForcedToK(renorm=renorm).route(logits_TE, context(600))
    plain = TopK(renorm=renorm).route(logits_TE, context(600))
    for name in ("experts_TK", "weights_TK", "k_T"):
        assert torch.equal(getattr(forced, name), getattr(plain, name))


@pytest.mark.parametrize(
    ("rule", "top_k", "sentence"),
    [
        (TopK(k=9), 8, "up to 9 experts a token, but the model has 8"),
        (TopK(), 12, "up to 12 experts a token, but the model has 8"),
        (Elbow(cap=64), 8, "up to 64 experts a token, but the model has 8"),
        (MinP(floor=3), 2, "floor 3 is above its cap of 2"),
        (TopK(k=2, floor=4), 8, "floor 4 is above its cap of 2"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_with_both_numbers(
    rule: PrefixRouter, top_k: int, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        rule.route(torch.zeros(2, 8), context(2, top_k=top_k))


@pytest.mark.parametrize(
    ("rule", "options", "sentence"),
    [
        (TopK, {"k": 0}, "k must be a whole number of at least 1, not 0"),
        (TopK, {"k": True}, "k must be a whole number"),
        (Elbow, {"cap": 0}, "cap must be a whole number of at least 1, not 0"),
        (Elbow, {"cap": 2.5}, "cap must be a whole number"),
        (Elbow, {"cap": "8"}, "cap must be a whole number of at least 1, not '8'"),
        (Elbow, {"floor": -1}, "floor must be a whole number of at least 0, not -1"),
        (Elbow, {"floor": None}, "floor must be a whole number"),
        (Elbow, {"floor": 5, "cap": 4}, "floor 5 is above cap 4"),
        (Elbow, {"renorm": "sum"}, "renorm must be one of model, none, kept, topk, not 'sum'"),
        (Elbow, {"reading": "papers"}, "reading must be one of program, printed, not 'papers'"),
        (TopP, {"p": -0.1}, "p must be a number from 0 to 1, not -0.1"),
        (MinP, {"p": 1.1}, "p must be a number from 0 to 1, not 1.1"),
        (Threshold, {"p": math.nan}, "p must be a number from 0 to 1, not nan"),
        (Threshold, {"p": "half"}, "p must be a number from 0 to 1, not 'half'"),
        (TopP, {"p": None}, "p must be a number from 0 to 1, not None"),
        (TopP, {"p": True}, "p must be a number from 0 to 1, not True"),
    ],
)
def test_impossible_arguments_are_refused(rule: Callable[..., PrefixRouter], options: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        rule(**options)


class Returns(PrefixRouter):
    """Counts whatever it is told to."""

    answer: object = None

    def count(self, sorted_probs_TE: torch.Tensor, context: RouterContext) -> torch.Tensor:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (torch.tensor([3]), r"int64 \[1\]"),
        (torch.ones(2), r"float32 \[2\]"),
        (torch.ones(2, 1, dtype=torch.int64), r"int64 \[2, 1\]"),
        (torch.tensor([True, False]), r"bool \[2\]"),
        (3, "int"),
        (None, "NoneType"),
    ],
)
def test_a_count_is_one_whole_number_for_each_token(answer: object, told: str) -> None:
    """One that broadcasts would route wrong and say nothing."""
    rule = Returns()
    object.__setattr__(rule, "answer", answer)
    with pytest.raises(InputError, match=rf"Returns\.count must return .* int64 \[2\], not .*{told}"):
        rule.route(torch.randn(2, 64), context(2))


def test_a_count_may_be_int32() -> None:
    rule = Returns()
    object.__setattr__(rule, "answer", torch.tensor([2, 5], dtype=torch.int32))
    routing = rule.route(torch.randn(2, 64), context(2))
    routing.check()
    assert routing.k_T.tolist() == [2, 5]
