"""Routing on the device, in two launches: torch's softmax, then ranking and the count of the rules that keep a prefix.

The kernel decides what the rule itself decides, ties included. The softmax is torch's because decisions can hang on its
last bit: gap_ratio among equal ratios, top_p at p = 1, elbow on a straight line. Rules that need a host (randomness,
recordings, a user's own Python) have no place here.

Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimoe.curve import EPSILON
from minimoe.prefix_rule import PrefixRule
from minimoe.routers.gap_ratio import EPSILON as RATIO_EPSILON
from minimoe.routing import Routing


def route(rule: PrefixRule, logits_TE: Tensor, into: Routing, broken_1: Tensor) -> None:
    """Choose experts and weights as a rule says; the host does not wait.

    Args:
        logits_TE: contiguous, any float dtype.
        into: overwritten; T tokens and `rule.limit` slots.
        broken_1: int32; set to 1 if any logit is not finite. The routing of such a token is valid, and nonsense.
    """
    T, E = logits_TE.shape
    _route_kernel[(T,)](
        logits_TE,
        torch.softmax(logits_TE, dim=-1, dtype=torch.float32),
        into.experts_TK,
        into.weights_TK,
        into.k_T,
        broken_1,
        E=E,
        E_PADDED=triton.next_power_of_2(E),
        K=rule.limit,
        COUNT=rule.count,
        NUMBER=float(rule.number),
        EPSILON=RATIO_EPSILON if rule.count == "gap_ratio" else EPSILON,
        FLOOR=rule.floor,
        MASS=rule.mass,
        TOP_K=rule.top_k,
    )


@triton.jit
def _route_kernel(
    logits_TE,
    probs_TE,
    experts_TK,
    weights_TK,
    k_T,
    broken_1,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    NUMBER: tl.constexpr,
    EPSILON: tl.constexpr,
    FLOOR: tl.constexpr,
    MASS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Program (token). `ids` stands for experts and, once they are sorted, for ranks."""
    token = tl.program_id(0)
    ids = tl.arange(0, E_PADDED)
    real = ids < E
    logits = tl.load(logits_TE + token * E + ids, mask=real, other=0.0).to(tl.float32)
    broken = tl.sum((tl.abs(logits) < float("inf")).to(tl.int32), axis=0) < E_PADDED
    tl.store(broken_1, 1, mask=broken)
    # Ids made of NaN could lie outside the experts, where the next kernel would read.
    probs = tl.where(broken, 0.0, tl.load(probs_TE + token * E + ids, mask=real, other=0.0))
    probs = tl.where(real, probs, -1.0)
    # An expert's rank is the number of those ahead of it: ties go to the lowest id.
    ahead = (probs[None, :] > probs[:, None]) | ((probs[None, :] == probs[:, None]) & (ids[None, :] < ids[:, None]))
    ranks = tl.sum(ahead.to(tl.int32), axis=1)
    # Sums of one value and zeros, which are exact.
    placed = ranks[:, None] == ids[None, :]
    sorted_probs = tl.sum(tl.where(placed, probs[:, None], 0.0), axis=0)
    sorted_ids = tl.sum(tl.where(placed, ids[:, None], 0), axis=0)
    first = tl.sum(tl.where(ids == 0, sorted_probs, 0.0), axis=0)
    p = sorted_probs.to(tl.float64)
    epsilon = tl.full((), EPSILON, tl.float64)
    lowest = tl.full((E_PADDED,), float("-inf"), tl.float64)
    if COUNT == "number":
        k = tl.full((), NUMBER, tl.float32).to(tl.int32)
    elif COUNT == "program" or COUNT == "printed":
        last = tl.sum(tl.where(ids == E - 1, p, 0.0), axis=0)
        top = tl.sum(tl.where(ids == 0, p, 0.0), axis=0)
        height = top - p if COUNT == "program" else p - last
        deviation = height / (top - last + epsilon) - ids.to(tl.float64) / (E - 1 if E > 1 else 1)
        k = tl.argmax(tl.where(real, deviation, lowest), axis=0) + 1
    elif COUNT == "max_gap" or COUNT == "gap_ratio":
        following = tl.sum(tl.where(ranks[:, None] == ids[None, :] + 1, probs[:, None], 0.0), axis=0).to(tl.float64)
        if E == 1:
            k = tl.full((), 1, tl.int32)
        elif COUNT == "max_gap":
            k = tl.argmax(tl.where(ids < E - 1, p - following, lowest), axis=0) + 1
        else:
            looked_at = (ids < E - 1) & (ids < K)
            k = tl.argmax(tl.where(looked_at, p / (following + epsilon), lowest), axis=0) + 1
    elif COUNT == "top_p":
        reached = tl.cumsum(tl.where(real, p, 0.0), axis=0) >= tl.full((), NUMBER, tl.float64)
        k = 1 + tl.sum(((ids < E - 1) & (reached == 0)).to(tl.int32), axis=0)
    elif COUNT == "min_p":
        k = tl.sum((real & (sorted_probs >= first * NUMBER)).to(tl.int32), axis=0)
    elif COUNT == "threshold":
        k = tl.sum((real & (sorted_probs >= NUMBER)).to(tl.int32), axis=0)
    else:
        entropy = -tl.sum(tl.where(p > 0, p * tl.log(tl.where(p > 0, p, 1.0)), 0.0), axis=0)
        wanted = tl.floor(tl.full((), NUMBER, tl.float64) * tl.exp(entropy) + 0.5)
        k = tl.where(wanted < E, wanted, E).to(tl.int32)
    k = tl.minimum(tl.maximum(k, FLOOR), K)
    live = ids < k
    weights = tl.where(live, sorted_probs, 0.0)
    if MASS != "none":
        kept = tl.sum(weights, axis=0)
        wanted = tl.sum(tl.where(ids < TOP_K, sorted_probs, 0.0), axis=0) if MASS == "topk" else 1.0
        # A token without experts has no mass to share out.
        weights = weights * tl.where(kept > 0, wanted / tl.where(kept > 0, kept, 1.0), 1.0)
    tl.store(experts_TK + token * K + ids, tl.where(live, sorted_ids, E).to(tl.int64), mask=ids < K)
    tl.store(weights_TK + token * K + ids, weights, mask=ids < K)
    tl.store(k_T + token, k.to(tl.int64))
