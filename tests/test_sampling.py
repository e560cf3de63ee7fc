"""Sampling against transformers' own logits processors, in the order in which its generate applies them.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minimoe.errors import InputError, NumericalError
from minimoe.sampling import Sampler, Sampling, penalise, probabilities


def random_logits(V: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * spread


def one_hot(index: int, V: int) -> Tensor:
    return torch.zeros(V, dtype=torch.float64).index_fill_(0, torch.tensor(index), 1.0)


def by_transformers(logits_V: Tensor, sampling: Sampling, history: list[int]) -> Tensor:
    """The distribution that transformers would draw from, in double precision."""
    steps: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if history and sampling.repetition_penalty != 1:
        steps.insert(0, RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    steps.append(MinPLogitsWarper(sampling.min_p))
    scores_1V = logits_V[None].double()
    for step in steps:
        scores_1V = step(torch.tensor([history]), scores_1V)
    return scores_1V[0].softmax(-1)


@given(
    V=st.integers(2, 30),
    seed=st.integers(0, 2**16),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0.05, 5),
        top_k=st.integers(0, 33),
        top_p=st.sampled_from([0.0, 1e-9, 1.0]) | st.floats(0.01, 0.99),
        min_p=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
        repetition_penalty=st.sampled_from([1.0]) | st.floats(0.5, 2),
    ),
    data=st.data(),
)
@settings(deadline=None, max_examples=120)
def test_the_distribution_is_that_of_transformers(V: int, seed: int, sampling: Sampling, data: st.DataObject) -> None:
    logits_V = random_logits(V, seed)
    history = data.draw(st.lists(st.integers(0, V - 1), max_size=6))
    penalised_V = penalise(logits_V, history, sampling.repetition_penalty) if history else logits_V
    probs_V = probabilities(penalised_V, sampling)
    torch.testing.assert_close(probs_V, by_transformers(logits_V, sampling, history), rtol=1e-6, atol=1e-12)
    assert probs_V.dtype == torch.float64
    assert probs_V.sum().item() == pytest.approx(1, abs=1e-12)
    assert probs_V[penalised_V.argmax()] > 0  # the best token survives every filter


def test_the_penalty_counts_a_token_once_and_changes_no_other() -> None:
    logits_V = torch.tensor([2.0, -2.0, 0.0, 4.0, -4.0])
    before = logits_V.clone()
    assert penalise(logits_V, [1, 0, 1, 2, 0], 2.0).tolist() == [1.0, -4.0, 0.0, 4.0, -4.0]
    assert torch.equal(logits_V, before)


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-45, 1e39, 1e300, sys.float_info.max])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_absurd_penalty_still_leaves_a_distribution(penalty: float, sign: float) -> None:
    logits_V = sign * torch.tensor([1.0, 2.0, 3.0])
    sampler = Sampler(Sampling(repetition_penalty=penalty, temperature=1.0))
    assert penalise(logits_V, [0, 1, 2], penalty).isfinite().all()
    assert sampler.choose(logits_V, [0, 1, 2], step=0) in (0, 1, 2)


@pytest.mark.parametrize("seed", range(5))
def test_temperature_0_takes_the_most_probable_token(seed: int) -> None:
    logits_V = random_logits(50, seed)
    best = int(logits_V.argmax())
    greedy = Sampler(Sampling(temperature=0, seed=seed))
    assert [greedy.choose(logits_V, [], step) for step in range(20)] == [best] * 20
    penalised = Sampler(Sampling(temperature=0, repetition_penalty=1e6))
    assert penalised.choose(logits_V, [best], 0) == int(logits_V.index_fill(0, torch.tensor(best), -99.0).argmax())
    assert greedy.choose(torch.tensor([0.0, 7.0, 7.0]), [], 0) == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_tiny_temperature_is_stable_and_greedy(temperature: float) -> None:
    logits_V = random_logits(50)
    best = int(logits_V.argmax())
    assert torch.equal(probabilities(logits_V, Sampling(temperature=temperature)), one_hot(best, 50))
    tied = probabilities(torch.tensor([1.0, 5.0, 5.0]), Sampling(temperature=temperature))
    assert tied.tolist() == [0.0, 0.5, 0.5]


def test_a_huge_temperature_is_uniform() -> None:
    probs_V = probabilities(random_logits(40), Sampling(temperature=sys.float_info.max))
    assert probs_V.tolist() == pytest.approx([1 / 40] * 40)


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1e-300])
def test_a_tiny_top_p_keeps_the_best_token_alone(top_p: float) -> None:
    logits_V = random_logits(40)
    assert torch.equal(
        probabilities(logits_V, Sampling(temperature=1, top_p=top_p)), one_hot(int(logits_V.argmax()), 40)
    )


@pytest.mark.parametrize("options", [{"top_p": 1}, {"top_k": 0}, {"top_k": 40}, {"top_k": 41}, {"min_p": 0}])
def test_filters_that_are_off_change_no_bit(options: dict[str, Any]) -> None:
    logits_V = random_logits(40)
    probs_V = probabilities(logits_V, Sampling(temperature=1, **options))
    softmax_V = (logits_V.double() - logits_V.max()).softmax(-1)
    assert torch.equal(probs_V, softmax_V / softmax_V.sum())
    assert probs_V.min() > 0


def test_top_k_keeps_k_tokens_and_those_that_tie_with_the_last() -> None:
    logits_V = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0])
    kept = {k: probabilities(logits_V, Sampling(temperature=1, top_k=k)).nonzero()[:, 0].tolist() for k in range(1, 6)}
    assert kept == {1: [0], 2: [0, 2, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3], 5: [0, 1, 2, 3, 4]}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits_V = torch.tensor([0.5, 0.25, 0.125, 0.125]).double().log()
    kept = {
        p: probabilities(logits_V, Sampling(temperature=1, top_p=p)).count_nonzero().item() for p in (0.4, 0.6, 0.8)
    }
    assert kept == {0.4: 1, 0.6: 2, 0.8: 3}


@pytest.mark.parametrize("top_k", [0, 3])
def test_draws_come_as_often_as_the_distribution_says(top_k: int) -> None:
    sampling = Sampling(temperature=1.5, top_k=top_k, seed=11)
    logits_V = random_logits(6, spread=1.0)
    sampler = Sampler(sampling)
    counts_V = torch.bincount(torch.tensor([sampler.choose(logits_V, [], 0) for _ in range(2000)]), minlength=6)
    probs_V = probabilities(logits_V, sampling)
    live_V = probs_V > 0
    assert counts_V[~live_V].sum() == 0
    assert chisquare(counts_V[live_V].numpy(), 2000 * probs_V[live_V].numpy()).pvalue > 0.001


def test_a_seed_gives_the_same_tokens_whatever_else_draws() -> None:
    def draw(seed: int, *, disturbed: bool = False) -> list[int]:
        sampler, other = Sampler(Sampling(seed=seed)), Sampler(Sampling(seed=99))
        tokens: list[int] = []
        for step in range(30):
            tokens.append(sampler.choose(random_logits(100, step), tokens, step))
            if disturbed:
                other.choose(random_logits(100, step), [], step)
                torch.rand(3)
        return tokens

    state = torch.get_rng_state()
    assert draw(1) == draw(1, disturbed=False)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was taken from the global generator
    assert draw(1) == draw(1, disturbed=True)
    assert draw(1) != draw(2)
    assert draw(-(2**63)) != draw(2**63 - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logits_of_any_float_dtype_are_sampled_alike(dtype: torch.dtype) -> None:
    logits_V = random_logits(30).bfloat16().to(dtype)
    expected = [Sampler(Sampling(seed=s)).choose(logits_V.float(), [3, 4], 0) for s in range(10)]
    assert [Sampler(Sampling(seed=s)).choose(logits_V, [3, 4], 0) for s in range(10)] == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logits_that_are_not_finite_are_an_error_that_names_the_step(value: float, temperature: float) -> None:
    logits_V = random_logits(20)
    logits_V[7] = value
    with pytest.raises(NumericalError, match="the logits of new token 12 are not finite"):
        Sampler(Sampling(temperature=temperature)).choose(logits_V, [], step=12)


REFUSED: list[tuple[str, list[Any], str]] = [
    (
        "temperature",
        [-1, -1e-9, math.inf, -math.inf, math.nan, 10**400, "0.8", None, True],
        "temperature must be a num",
    ),
    ("top_k", [-1, 1.0, math.nan, "5", None, True], "top-k must be a whole number of at least 0"),
    ("top_p", [-0.1, 1.1, math.inf, math.nan, "0.5", None, True], "top-p must be a number from 0 to 1"),
    ("min_p", [-0.1, 1.1, math.nan, "0.5", None, False], "min-p must be a number from 0 to 1"),
    ("repetition_penalty", [0, -1, math.inf, math.nan, 10**400, "1.1", None, True], "the repetition penalty must be a"),
    ("seed", [1.5, 2**63, -(2**63) - 1, math.nan, "1", None, True], "the seed must be a whole number"),
]


@pytest.mark.parametrize(
    ("key", "value", "sentence"), [(key, value, sentence) for key, values, sentence in REFUSED for value in values]
)
def test_impossible_values_are_refused_in_one_sentence(key: str, value: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        Sampling(**{key: value})
    assert str(caught.value).endswith(f"not {value!r}.")
