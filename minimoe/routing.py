"""Which experts each token uses, at what weight: plain data between a routing rule and an expert backend.

Shape letters: T tokens (flat, no padding), E experts, K slots (the widest row), P live (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """The live (token, expert) pairs, sorted by expert, within an expert by token.

    Attributes:
        tokens_P: int64, the row of x that the pair reads and adds to.
        weights_P: float32, what the expert's output is multiplied by.
        slots_P: int64, the pair's place in the flattened [T*K] slots.
        counts_E: int64, pairs of each expert.
        offsets_E: int64 of E+1 entries; the pairs of expert e are offsets[e]:offsets[e+1].
    """

    tokens_P: Tensor
    weights_P: Tensor
    slots_P: Tensor
    counts_E: Tensor
    offsets_E: Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """The decision of a routing rule for T tokens of one layer.

    The shape is static and the work ragged: token t uses the first k_T[t] of its K slots, in
    descending rank; the slots after them are dead, hold the sentinel id E and weight 0.

    Attributes:
        experts_TK: int64 expert ids, 0 to E-1, or E in a dead slot.
        weights_TK: float32 weights, 0 in a dead slot.
        k_T: int64, live slots of each token, 0 to K.
        num_experts: E.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    k_T: Tensor
    num_experts: int

    @classmethod
    def from_ranking(cls, experts_TK: Tensor, weights_TK: Tensor, k_T: Tensor, num_experts: int) -> Routing:
        """Keep the first k_T of each row's ranked experts, and make the other slots dead."""
        dead_TK = torch.arange(experts_TK.shape[1], device=k_T.device) >= k_T[:, None]
        return cls(
            experts_TK=experts_TK.masked_fill(dead_TK, num_experts),
            weights_TK=weights_TK.masked_fill(dead_TK, 0.0),
            k_T=k_T,
            num_experts=num_experts,
        )

    @classmethod
    def empty(cls, num_experts: int) -> Routing:
        """The routing of no tokens."""
        return cls(
            experts_TK=torch.empty(0, 0, dtype=torch.int64),
            weights_TK=torch.empty(0, 0),
            k_T=torch.empty(0, dtype=torch.int64),
            num_experts=num_experts,
        )

    @property
    def num_tokens(self) -> int:
        return self.experts_TK.shape[0]

    @property
    def width(self) -> int:
        """K, the number of slots of every row."""
        return self.experts_TK.shape[1]

    def pairs(self) -> Pairs:
        """The P = k_T.sum() live pairs, sorted by expert. Dead slots never become pairs."""
        flat_S = self.experts_TK.reshape(-1)
        # A stable sort keeps tokens in order within an expert; sentinels sort to the end and are cut off.
        order_S = torch.argsort(flat_S, stable=True)
        counts_E = torch.bincount(flat_S, minlength=self.num_experts + 1)[: self.num_experts]
        offsets_E = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=flat_S.device)
        torch.cumsum(counts_E, 0, out=offsets_E[1:])
        slots_P = order_S[: int(offsets_E[-1])]
        return Pairs(
            tokens_P=torch.div(slots_P, max(self.width, 1), rounding_mode="floor"),
            weights_P=self.weights_TK.reshape(-1)[slots_P],
            slots_P=slots_P,
            counts_E=counts_E,
            offsets_E=offsets_E,
        )

    def rows(self, index: slice | Tensor) -> Routing:
        """The routing of some of the tokens."""
        return Routing(self.experts_TK[index], self.weights_TK[index], self.k_T[index], self.num_experts)

    def detach(self) -> Routing:
        """The same decision without gradients, on the CPU: what a recorder keeps."""
        return Routing(
            self.experts_TK.detach().cpu(), self.weights_TK.detach().cpu(), self.k_T.detach().cpu(), self.num_experts
        )

    @staticmethod
    def cat(parts: Sequence[Routing]) -> Routing:
        """Lay the tokens of several routings end to end; narrower ones get dead slots.

        Raises:
            ValueError: no parts, or parts of models with different numbers of experts.
        """
        if len({part.num_experts for part in parts}) != 1:
            raise ValueError("Routing.cat needs at least one part, all with the same number of experts.")
        num_experts = parts[0].num_experts
        width = max(part.width for part in parts)

        def widen(values_TK: Tensor, fill: float) -> Tensor:
            return torch.nn.functional.pad(values_TK, (0, width - values_TK.shape[1]), value=fill)

        return Routing(
            experts_TK=torch.cat([widen(part.experts_TK, num_experts) for part in parts]),
            weights_TK=torch.cat([widen(part.weights_TK, 0.0) for part in parts]),
            k_T=torch.cat([part.k_T for part in parts]),
            num_experts=num_experts,
        )

    def check_parts(self) -> None:
        """Test types and shapes, which costs next to nothing.

        Raises:
            ValueError: says what is wrong.
        """
        if not all(isinstance(part, Tensor) for part in (self.experts_TK, self.weights_TK, self.k_T)):
            raise ValueError("a Routing holds three tensors: experts, weights and k")
        if self.experts_TK.dim() != 2:
            raise ValueError(f"experts are [tokens, slots], not {list(self.experts_TK.shape)}")
        T, K = self.experts_TK.shape
        if self.weights_TK.shape != (T, K) or self.k_T.shape != (T,):
            raise ValueError(
                f"a Routing for {T} tokens and {K} slots has weights {tuple(self.weights_TK.shape)} "
                f"and k {tuple(self.k_T.shape)}"
            )
        if (self.experts_TK.dtype, self.weights_TK.dtype, self.k_T.dtype) != (torch.int64, torch.float32, torch.int64):
            raise ValueError("a Routing holds int64 experts, float32 weights and int64 k")

    def check(self) -> None:
        """Test every promise above; for rules under development and for replayed routings.

        Raises:
            ValueError: says which promise is broken.
        """
        self.check_parts()
        T, K = self.experts_TK.shape
        if T == 0:
            return
        if int(self.k_T.min()) < 0 or int(self.k_T.max()) > K:
            raise ValueError(f"k must lie between 0 and the {K} slots")
        live_TK = torch.arange(K, device=self.k_T.device) < self.k_T[:, None]
        if not torch.equal(live_TK, (self.experts_TK >= 0) & (self.experts_TK < self.num_experts)):
            raise ValueError("live slots come first and hold ids 0 to E-1; dead slots hold the sentinel E")
        if not bool((self.experts_TK[~live_TK] == self.num_experts).all()):
            raise ValueError("a dead slot holds the sentinel id E")
        if not bool((self.weights_TK[~live_TK] == 0).all()) or not bool(self.weights_TK.isfinite().all()):
            raise ValueError("weights must be finite, and 0 in a dead slot")
        ranked_TK = self.experts_TK.sort(dim=1).values
        if bool(((ranked_TK[:, 1:] == ranked_TK[:, :-1]) & (ranked_TK[:, 1:] < self.num_experts)).any()):
            raise ValueError("a token uses each expert at most once")
