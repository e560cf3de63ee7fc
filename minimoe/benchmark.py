"""Tokens per second: rules and backends measured in turns, on the same tokens, none of them run before.

Two kinds of work, named as llama-bench names them:

- ppN: a prompt of N tokens, up to the logits of its last one;
- tgN: N tokens after a prompt of 16, one step each. The tokens are drawn at random instead of being the model's
  own, so that every rule runs the very same ones, and no time goes into sampling and text.

Either with several sequences side by side. Every run has new tokens and new caches.

Shape letters: B sequences side by side, N tokens of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.config import ModelConfig
from minimoe.errors import InputError, NumericalError
from minimoe.generation import PREFILL_TOKENS
from minimoe.model import Batch, Olmoe
from minimoe.probe import Phase, Probe
from minimoe.profiler import quartiles, synchronise, timed
from minimoe.routers import Router
from minimoe.routing import Routing

if TYPE_CHECKING:
    from minimoe.decoding import Decoder

TG_PROMPT = 16  # tokens already there when a tg begins


class Meter(Probe):
    """Notes the experts per token and when each phase began, and leaves all arithmetic for after the run."""

    def __init__(self) -> None:
        self.began: dict[Phase, float] = {}
        self._k: list[Tensor] = []

    def step(self, phase: Phase, new: Sequence[int], past: Sequence[int]) -> None:
        self.began.setdefault(phase, time.perf_counter())

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        self._k.append(routing.k_T)

    @property
    def mean_k(self) -> float | None:
        """Experts per token and layer so far; None before the first token."""
        tokens = sum(len(k_T) for k_T in self._k)
        return float(torch.cat(self._k).sum()) / tokens if tokens else None


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work: its kind, tokens of each sequence, and sequences side by side."""

    kind: Literal["pp", "tg"]
    tokens: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.tokens}"

    @property
    def length(self) -> int:
        """Positions that each sequence needs."""
        return self.tokens + (TG_PROMPT if self.kind == "tg" else 0)

    def check(self, config: ModelConfig) -> None:
        """Refuse what does not fit the model.

        Raises:
            InputError: names both sizes.
        """
        if self.length > config.max_positions:
            prompt = f" with its prompt of {TG_PROMPT}" if self.kind == "tg" else ""
            raise InputError(
                f"{self.name} needs {self.length} tokens{prompt}, but the model's context holds "
                f"{config.max_positions}; choose fewer."
            )


@dataclass(frozen=True, slots=True, eq=False)
class Arm:
    """One configuration under test: a rule and a model with a backend, what to call them, and its decode steps
    in one go, if it has some."""

    router: str
    backend: str
    rule: Router
    model: Olmoe
    decoder: Decoder | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What one arm did on one kind of work.

    Attributes:
        seconds: of each repetition.
        mean_k: experts per token and layer, over all repetitions; with a decoder, of the run that warms up.
    """

    arm: Arm
    work: Work
    seconds: list[float]
    mean_k: float | None

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each repetition, all sequences together."""
        return [self.work.batch * self.work.tokens / second for second in self.seconds]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile of tokens per second, linear between the values."""
        return quartiles(self.tokens_per_second)


@dataclass(slots=True)
class _Tally:
    seconds: list[float] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)


def measure(
    arms: Sequence[Arm],
    works: Sequence[Work],
    *,
    vocabulary: int,
    repetitions: int = 5,
    seed: int = 0,
    ran: Callable[[Arm, Work], None] = lambda arm, work: None,
) -> list[Result]:
    """Run every arm on every work, once to warm up and then `repetitions` times.

    The arms take turns: a machine that slows down slows all of them. Within a turn they run the same tokens.

    Args:
        vocabulary: token ids are drawn from 0 to vocabulary - 1.
        seed: of the tokens and of rules that draw.
        ran: called after each run, the warm-up included.

    Returns:
        One Result per arm and work, works outermost.

    Raises:
        InputError: a work that does not fit its model's context, or a rule that does not fit the model.
        NumericalError: router logits, or the last logits of a run that warms up, that are not finite.
    """
    for arm in arms:
        for work in works:
            work.check(arm.model.config)
    draws = torch.Generator().manual_seed(seed)
    tallies = {(work, arm): _Tally() for work in works for arm in arms}
    for turn in range(repetitions + 1):
        for work in works:
            ids_BN = torch.randint(vocabulary, (work.batch, work.length), generator=draws)
            for arm in arms:
                tally = tallies[work, arm]
                if turn:
                    _, seconds = _run(arm, work, ids_BN, Probe() if arm.decoder else tally.meter, seed)
                    tally.seconds.append(seconds)
                else:
                    _warm_up(arm, work, ids_BN, tally.meter, seed)
                ran(arm, work)
    return [Result(arm, work, tally.seconds, tally.meter.mean_k) for (work, arm), tally in tallies.items()]


def _warm_up(arm: Arm, work: Work, ids_BN: Tensor, meter: Meter, seed: int) -> None:
    """A run that does not count; two for a decoder, since its second step of a size is captured.

    A decoder tells its probe of a step by copies from the device, so that its k is taken here and not where that would
    be timed too.

    Raises:
        NumericalError: the last logits are not finite: a wrong engine is not fast.
    """
    logits_BV, _ = _run(arm, work, ids_BN, meter if arm.decoder else Probe(), seed)
    if not bool(logits_BV.isfinite().all()):
        raise NumericalError(f"{work.name}: the logits are not finite; the weights are broken.")
    if arm.decoder:
        _run(arm, work, ids_BN, Probe(), seed)


@torch.inference_mode()
def _run(arm: Arm, work: Work, ids_BN: Tensor, meter: Probe, seed: int) -> tuple[Tensor, float]:
    """The last logits [B, V] of one run, and its seconds."""
    model = arm.model
    ids_BN = ids_BN.to(model.device)
    caches = [KVCache(model.config, work.length, model.dtype, model.device) for _ in ids_BN]
    draws = torch.Generator().manual_seed(seed)

    def step(ids_BN: Tensor, caches: Sequence[KVCache], phase: Phase, probe: Probe) -> Tensor:
        batch = Batch(ids_BN.flatten(), [ids_BN.shape[1]] * len(ids_BN), caches, phase)
        return model.forward(batch, arm.rule, probe, draws)[batch.last_rows]

    def read(ids_BN: Tensor, probe: Probe) -> Tensor:
        """Prompts, in passes of at most PREFILL_TOKENS as when generating."""
        for columns in ids_BN.split(PREFILL_TOKENS, dim=1):
            rows = max(1, PREFILL_TOKENS // columns.shape[1])
            last = [
                step(columns[start : start + rows], caches[start : start + rows], "prefill", probe)
                for start in range(0, len(columns), rows)
            ]
        return model.head(torch.cat(last))

    def write(ids_BN: Tensor) -> Tensor:
        for ids_B1 in ids_BN.split(1, dim=1):
            if arm.decoder:
                logits_BV = arm.decoder.step(ids_B1[:, 0], caches, meter, draws)
            else:
                logits_BV = model.head(step(ids_B1, caches, "decode", meter))
            synchronise(model.device)  # the next token would be chosen from these logits
        return logits_BV

    if work.kind == "pp":
        return timed(lambda: read(ids_BN, meter), model.device)
    read(ids_BN[:, :TG_PROMPT], Probe())
    return timed(lambda: write(ids_BN[:, TG_PROMPT:]), model.device)
