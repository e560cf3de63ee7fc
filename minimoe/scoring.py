"""How likely a model finds a continuation: where to cut the text, and the log-probability of what follows the cut.

Shape letters: T tokens, D hidden, N tokens of the continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minimoe.errors import NumericalError
from minimoe.model import Batch, Olmoe
from minimoe.probe import Probe
from minimoe.routers import Router
from minimoe.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a model finds a continuation.

    Attributes:
        logprob: sum over the continuation's tokens, natural logarithm (nats).
        logprobs: one value a token.
        tokens: the continuation's token ids.
        greedy: whether every token was the model's most probable one.
    """

    logprob: float
    logprobs: list[float]
    tokens: list[int]
    greedy: bool


def cut(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and its continuation, which are tokenised together.

    White space at the end of the context belongs to the continuation, as byte-level tokens have their space in front;
    a token that spans the join belongs to it too, so that the two parts always make up the whole text.
    """
    stripped = context.rstrip()
    whole = tokenizer.encode(context + continuation)
    context_ids = tokenizer.encode(stripped)
    shared = 0
    for alone, together in zip(context_ids, whole, strict=False):
        if alone != together:
            break
        shared += 1
    return whole[:shared], whole[shared:]


def score(
    model: Olmoe, router: Router, context: Sequence[int], ids: Sequence[int], probe: Probe | None, seed: int
) -> Score:
    """The log-probability of `ids` after `context`, both at least one token and together within the model's context.

    Raises:
        NumericalError: logits that are not finite; names the token.
    """
    draws = torch.Generator().manual_seed(seed)
    fed = [*context, *ids][:-1]
    with torch.inference_mode():
        hidden_TD = model.forward(Batch(torch.tensor(fed, device=model.device), [len(fed)]), router, probe, draws)
        logits_NV = model.head(hidden_TD[-len(ids) :], probe).double()
    broken = (~torch.isfinite(logits_NV).all(dim=1)).nonzero()
    if len(broken):
        raise NumericalError(f"the logits of token {int(broken[0])} to score are not finite; the weights are broken.")
    chosen_N1 = torch.tensor(ids, device=model.device)[:, None]
    logprobs_N = logits_NV.log_softmax(-1).gather(1, chosen_N1)[:, 0].tolist()
    return Score(
        logprob=sum(logprobs_N),
        logprobs=logprobs_N,
        tokens=list(ids),
        greedy=logits_NV.argmax(-1).tolist() == list(ids),
    )
