"""Tokens bucketed by expert: one matrix product per expert that has tokens, none for what a rule pruned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minimoe.experts.base import Experts, weigh
from minimoe.linear import linear
from minimoe.routing import Routing


class BucketedExperts(Experts):
    """A lone token goes straight to its experts' rows; several are sorted into buckets first."""

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        return self._one(x_TD, routing) if x_TD.shape[0] == 1 else self._many(x_TD, routing)

    def _one(self, x_1D: Tensor, routing: Routing) -> Tensor:
        k = int(routing.k_T)
        if k == 0:
            return torch.zeros_like(x_1D)
        outputs = [self._expert(e, x_1D) for e in routing.experts_TK[0, :k].tolist()]
        weighted_KD = weigh(torch.cat(outputs), routing.weights_TK[0, :k, None])
        return weighted_KD.sum(dim=0, keepdim=True).to(x_1D.dtype)

    def _many(self, x_TD: Tensor, routing: Routing) -> Tensor:
        pairs = routing.pairs()
        # One gather for all pairs: under autograd a gather for each expert would each write a full gradient.
        buckets = x_TD[pairs.tokens_P].split(pairs.counts_E.tolist())
        outputs = [self._expert(e, x_ND) for e, x_ND in enumerate(buckets) if x_ND.shape[0]]
        y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        if not outputs:
            return y_TD.to(x_TD.dtype)
        weighted_PD = weigh(torch.cat(outputs), pairs.weights_P[:, None])
        return y_TD.index_add(0, pairs.tokens_P, weighted_PD).to(x_TD.dtype)

    def _expert(self, e: int, x_ND: Tensor) -> Tensor:
        w = self.weights
        return linear(F.silu(linear(x_ND, w.gate_EID[e])) * linear(x_ND, w.up_EID[e]), w.down_EDI[e])
