"""union: after its first experts, a token only uses experts that are loaded anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from minimoe.errors import InputError, shown
from minimoe.routers.base import Router, RouterContext, Sees, check_choice, check_count, check_width, rank
from minimoe.routing import Routing

Within = Literal["batch", "sequence"]


@dataclass(frozen=True, kw_only=True)
class Union(Router):
    """Every token's first k0 experts are its own choice; more it may use only where others chose them as theirs.

    Formula: k = #{i : i <= k0, or expert i is among the first k0 of some token}, ranks i from 1 to K; weights are
    the raw softmax probabilities. Source: opportunistic expert activation (Oncescu et al. 2025), which spares
    expert weights in batched decoding, where each expert that any token uses has to be read once.

    In a prefill the other tokens include later ones of the same sequence.

    Attributes:
        k0: experts that a token may bring in, 1 by default.
        within: whose first choices count: "batch" (default), all tokens of the pass; "sequence", those of the
            token's own sequence, which a single step of decoding does not have and is refused.
        k: the most experts a token may use; by default the model's own number.
    """

    sees: ClassVar[Sees] = "other tokens, also later ones"

    k0: int = 1
    within: Within = "batch"
    k: int | None = None

    def __post_init__(self) -> None:
        check_count("k0", self.k0, 1)
        check_choice("within", self.within, Within)
        if self.k is not None:
            check_count("k", self.k, 1)
            self._check_first(self.k)

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        """Collect every token's first choices, then choose among them.

        Raises:
            InputError: a decode step with within=sequence, more experts than the model has, or k0 above k.
        """
        if self.within == "sequence" and context.phase == "decode":
            raise InputError(
                "union:within=sequence looks ahead in its sequence, so it can score a text but not write one; "
                "use within=batch to generate."
            )
        tokens, num_experts = logits_TE.shape
        width = context.top_k if self.k is None else self.k
        check_width(width, num_experts)
        self._check_first(width)
        probs_TE, experts_TE = rank(logits_TE)
        group_T = torch.zeros_like(context.sequence_T) if self.within == "batch" else context.sequence_T
        first_TE = torch.zeros(tokens, num_experts, dtype=torch.bool, device=logits_TE.device)
        first_TE.scatter_(1, experts_TE[:, : self.k0], True)
        groups = int(group_T.max()) + 1 if tokens else 0
        chosen_GE = torch.zeros(groups, num_experts, dtype=torch.int64, device=logits_TE.device)
        chosen_GE.index_add_(0, group_T.to(logits_TE.device), first_TE.long())
        usable_TE = (chosen_GE > 0)[group_T].gather(1, experts_TE)[:, :width]
        usable_TE[:, : self.k0] = True
        front_TK = (~usable_TE).to(torch.int8).sort(dim=1, stable=True).indices
        return Routing.from_ranking(
            experts_TE.gather(1, front_TK), probs_TE.gather(1, front_TK), usable_TE.sum(dim=1), num_experts
        )

    def _check_first(self, width: int) -> None:
        if self.k0 > width:
            raise InputError(f"k0 {shown(self.k0)} is above k, {width}: a token's own first experts are among its k.")
