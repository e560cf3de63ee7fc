"""From logits to the next token.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minimoe.errors import InputError, NumericalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose a token. Applied in this order, as transformers does.

    Attributes:
        repetition_penalty: logits of tokens already there are divided (if positive) or multiplied by it; 1 is off.
        temperature: logits are divided by it; 0 takes the most probable token (greedy).
        top_k: keep the k most probable tokens; 0 is off.
        top_p: keep the smallest set of tokens that reaches this probability; 1 is off.
        min_p: drop tokens under this fraction of the best one's probability; 0 is off.
        seed: of the generator that draws.

    Raises:
        InputError: a value outside its range, or one that is not a number (True and False are none).
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature <= sys.float_info.max):
            raise InputError(f"temperature must be a number of at least 0, not {self.temperature!r}.")
        if not (_is_number(self.top_k, whole=True) and self.top_k >= 0):
            raise InputError(f"top-k must be a whole number of at least 0 (0 is off), not {self.top_k!r}.")
        if not (_is_number(self.top_p) and 0 <= self.top_p <= 1):
            raise InputError(f"top-p must be a number from 0 to 1, not {self.top_p!r}.")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise InputError(f"min-p must be a number from 0 to 1, not {self.min_p!r}.")
        if not (_is_number(self.repetition_penalty) and 0 < self.repetition_penalty <= sys.float_info.max):
            raise InputError(f"the repetition penalty must be a number above 0, not {self.repetition_penalty!r}.")
        if not (_is_number(self.seed, whole=True) and -(2**63) <= self.seed < 2**63):
            raise InputError(f"the seed must be a whole number that fits in 64 bits, not {self.seed!r}.")

    def reseeded(self, by: int) -> Sampling:
        """The same with the seed moved on; the largest seed is followed by the smallest."""
        return replace(self, seed=(self.seed + by + 2**63) % 2**64 - 2**63)


def _is_number(value: object, *, whole: bool = False) -> bool:
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The texts that end a continuation, from one or several.

    Raises:
        InputError: one that is empty, or no text.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(text, str) and text for text in stops):
        raise InputError("a stop text must be a text that is not empty.")
    return stops


class Sampler:
    """Chooses the tokens of one sequence, with randomness of its own: no other sequence changes its draws."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits_V: Tensor, history: Sequence[int], step: int) -> int:
        """The next token.

        Args:
            logits_V: any float dtype.
            history: prompt and generated tokens so far, for the repetition penalty.
            step: index of the new token, named if the logits are broken.

        Raises:
            NumericalError: logits that are not finite.
        """
        sampling = self.sampling
        logits_V = logits_V.float().cpu()
        if not all(map(math.isfinite, logits_V.aminmax())):  # a NaN is both the least and the largest of all
            raise NumericalError(f"the logits of new token {step} are not finite; the weights are broken.")
        if sampling.repetition_penalty != 1 and history:
            logits_V = penalise(logits_V, history, sampling.repetition_penalty)
        if sampling.temperature == 0:
            return int(logits_V.argmax())
        probs_V = probabilities(logits_V, sampling)
        return int(torch.multinomial(probs_V, 1, generator=self._generator))


def penalise(logits_V: Tensor, history: Sequence[int], penalty: float) -> Tensor:
    """Make tokens that are already there less likely (CTRL, Keskar et al. 2019, equation in section 4.1).

    Returns:
        logits [V], float64 and finite, whatever the penalty.
    """
    seen = torch.tensor(sorted(set(history)))
    values = logits_V.double()[seen]
    penalised = torch.where(values > 0, values / penalty, values * penalty)
    largest = torch.finfo(torch.float64).max
    return logits_V.double().index_copy(0, seen, penalised.clamp(-largest, largest))


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [V], float64, that a draw comes from; temperature must be above 0.

    The most probable token always survives every filter.
    """
    # The largest logit moves to 0 first, so that a tiny temperature sends the rest to -inf and never overflows.
    scaled_V = (logits_V.double() - logits_V.max()) / sampling.temperature
    if 0 < sampling.top_k < logits_V.numel():
        kth = scaled_V.topk(sampling.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < kth, -math.inf)
    probs_V = scaled_V.softmax(-1)
    if sampling.top_p < 1:
        sorted_V, order_V = probs_V.sort(descending=True, stable=True)
        reached_V = sorted_V.cumsum(-1) - sorted_V >= sampling.top_p  # without the token itself
        reached_V[0] = False
        probs_V = probs_V.index_fill(0, order_V[reached_V], 0.0)
    if sampling.min_p > 0:
        probs_V = probs_V.masked_fill(probs_V < sampling.min_p * probs_V.max(), 0.0)
    return probs_V / probs_V.sum()
