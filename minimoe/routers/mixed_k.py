"""mixed_k: top-k at a k that is no whole number. The control beside every rule that prunes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minimoe.errors import InputError
from minimoe.routers.base import PrefixRouter, RouterContext, check_positive, draw, split_mean


@dataclass(frozen=True, kw_only=True)
class MixedK(PrefixRouter):
    """Every token uses one of two neighbouring numbers of experts, mixed so that their mean is k.

    Formula: k = floor(k) or floor(k) + 1; in a pass of T tokens, T times the fractional part get the larger one,
    drawn without looking at the logits. What a rule gains over this control, it gains by choosing which tokens
    get more. Source: minimoe's own control.

    Attributes:
        k: the mean number of experts per token, 7.5 by default.
        cap: the most experts a token may use; by default k rounded up.
        floor: the fewest, 0 by default: a mean k under 1 leaves some tokens without an expert.
    """

    k: float = 7.5
    floor: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("k", self.k)
        # Either would move the mean away from k.
        if self.cap is not None and self.k > self.cap:
            raise InputError(f"k {self.k:g} is above cap {self.cap}.")
        if self.floor > self.k // 1:
            raise InputError(f"floor {self.floor} is above k {self.k:g} rounded down.")

    def limit(self, context: RouterContext) -> int:
        return max(1, -int(-self.k // 1)) if self.cap is None else self.cap

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        tokens = len(sorted_probs_TE)
        return split_mean(self.k, tokens, draw(tokens + 1, context)).to(sorted_probs_TE.device)
