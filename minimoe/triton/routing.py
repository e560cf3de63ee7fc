"""Routing on the device, in two launches: torch's softmax, then ranking and the count of the rules that keep a prefix.

The kernel decides what the rule itself decides, ties included. The softmax is torch's because decisions can hang on its
last bit: gap_ratio among equal ratios, top_p at p = 1, elbow on a straight line. Rules that need a host (randomness,
recordings, calibration, a user's own Python) have no place here: `on_device` says so by returning None.

Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimoe.curve import EPSILON
from minimoe.routers import Elbow, GapRatio, MaxGap, MinP, PrefixRouter, Router, Threshold, TopK, TopP
from minimoe.routers.gap_ratio import EPSILON as RATIO_EPSILON
from minimoe.routing import Routing


@dataclass(frozen=True, slots=True)
class DeviceRule:
    """A rule as the kernel takes it.

    Attributes:
        count: how k is found: "all", "program" and "printed" (the elbow's readings), "max_gap", "gap_ratio", "top_p",
            "min_p" or "threshold".
        number: the rule's parameter, where it has one.
        floor, limit: the least and the most of k; `limit` is the width of the routing.
        mass: what the kept weights are made to sum to: "none" (left alone), "kept" (1) or "topk".
        top_k: the model's own number of experts, for that mass.
    """

    count: str
    number: float
    floor: int
    limit: int
    mass: str
    top_k: int

    def route(self, logits_TE: Tensor, into: Routing, broken_1: Tensor) -> None:
        """Choose experts and weights; the host does not wait.

        Args:
            logits_TE: contiguous, any float dtype.
            into: overwritten; T tokens and `limit` slots.
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
            K=self.limit,
            COUNT=self.count,
            NUMBER=self.number,
            EPSILON=RATIO_EPSILON if self.count == "gap_ratio" else EPSILON,
            FLOOR=self.floor,
            MASS=self.mass,
            TOP_K=self.top_k,
        )


_COUNTS: dict[type[Router], Callable[[Any, int], tuple[str, float]]] = {
    TopK: lambda rule, E: ("all", 0.0),
    Elbow: lambda rule, E: (rule.reading, 0.0),
    MaxGap: lambda rule, E: ("max_gap", 0.0),
    GapRatio: lambda rule, E: ("gap_ratio", 0.0),
    TopP: lambda rule, E: ("top_p", float(rule.p)),
    MinP: lambda rule, E: ("min_p", float(rule.p)),
    Threshold: lambda rule, E: ("threshold", 1 / E if rule.p is None else float(rule.p)),
}


def on_device(rule: Router, top_k: int, num_experts: int, norm_topk_prob: bool) -> DeviceRule | None:
    """The rule for the kernel, or None if it has to be asked on the host: the type decides, so subclasses have to."""
    if type(rule) not in _COUNTS or (isinstance(rule, Elbow) and rule.method != "argmax"):
        return None
    assert isinstance(rule, PrefixRouter)
    limit, mass = rule.settled(top_k, norm_topk_prob)
    if not rule.floor <= limit <= num_experts:
        return None  # which the rule itself refuses, with a sentence
    return DeviceRule(*_COUNTS[type(rule)](rule, num_experts), rule.floor, limit, mass, top_k)


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
    if COUNT == "all":
        k = tl.full((), K, tl.int32)
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
    else:
        k = tl.sum((real & (sorted_probs >= NUMBER)).to(tl.int32), axis=0)
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
