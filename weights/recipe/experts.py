"""The bucketed backend with its gradients written by hand: what a training step spends most of its time in.

It computes what `minimoe.experts.bucketed` computes, and a test compares the two. Automatic differentiation would
keep and rewrite several [P, D] tensors a layer; here rows are gathered twice instead, one expert at a time, while
they fit the processor's cache.

Shape letters: T tokens, D hidden, E experts, I expert intermediate, K slots, P = T * K pairs sorted by expert,
N pairs of one expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minimoe.experts import Experts, ExpertWeights
from minimoe.routing import Routing


class TrainingExperts(Experts):
    """For rules that give every token the same number of experts, as the model's own top-k does."""

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__(weights)
        gate_EID, up_EID = torch.stack(list(weights.gate_EID)), torch.stack(list(weights.up_EID))
        self.into_EJD = torch.cat([gate_EID, up_EID], dim=1)  # J = 2 I: gate and up in one product
        self.down_EDI = torch.stack(list(weights.down_EDI))

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        pairs = routing.pairs()
        if pairs.slots_P.numel() != routing.experts_TK.numel():
            raise ValueError("TrainingExperts needs a rule that fills every slot")
        place_TK = torch.empty_like(pairs.slots_P)
        place_TK[pairs.slots_P] = torch.arange(pairs.slots_P.numel(), device=x_TD.device)
        place_TK = place_TK.view_as(routing.experts_TK)
        counts = pairs.counts_E.tolist()
        return _Experts.apply(x_TD, routing.weights_TK, self.into_EJD, self.down_EDI, pairs.tokens_P, place_TK, counts)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x_TD: Tensor,
        weights_TK: Tensor,
        into_EJD: Tensor,
        down_EDI: Tensor,
        tokens_P: Tensor,
        place_TK: Tensor,
        counts: list[int],
    ) -> Tensor:
        pre_PJ = x_TD.new_empty(tokens_P.numel(), into_EJD.shape[1])
        y_PD = x_TD.new_empty(tokens_P.numel(), x_TD.shape[1])
        buckets = zip(tokens_P.split(counts), pre_PJ.split(counts), y_PD.split(counts), strict=True)
        for e, (tokens_N, pre_NJ, y_ND) in enumerate(buckets):
            torch.mm(x_TD.index_select(0, tokens_N), into_EJD[e].T, out=pre_NJ)
            gate_NI, up_NI = pre_NJ.chunk(2, dim=1)
            torch.mm(F.silu(gate_NI) * up_NI, down_EDI[e].T, out=y_ND)
        ctx.save_for_backward(x_TD, weights_TK, into_EJD, down_EDI, tokens_P, place_TK, pre_PJ)
        ctx.counts = counts
        return F.embedding_bag(place_TK, y_PD, per_sample_weights=weights_TK, mode="sum")

    @staticmethod
    def backward(ctx, grad_TD: Tensor):  # type: ignore[no-untyped-def]
        x_TD, weights_TK, into_EJD, down_EDI, tokens_P, place_TK, pre_PJ = ctx.saved_tensors
        weights_P = torch.empty_like(weights_TK).view(-1)
        weights_P[place_TK.view(-1)] = weights_TK.reshape(-1)
        grad_weights_P = torch.empty_like(weights_P)
        grad_into_EJD, grad_down_EDI = torch.empty_like(into_EJD), torch.empty_like(down_EDI)
        grad_x_PD = grad_TD.new_empty(tokens_P.numel(), x_TD.shape[1])
        per_pair = (tokens_P, pre_PJ, weights_P, grad_weights_P, grad_x_PD)
        buckets = zip(*(t.split(ctx.counts) for t in per_pair), strict=True)
        for e, (tokens_N, pre_NJ, weights_N, grad_weights_N, grad_x_ND) in enumerate(buckets):
            gate_NI, up_NI = pre_NJ.chunk(2, dim=1)
            silu_NI = F.silu(gate_NI)
            hidden_NI = silu_NI * up_NI
            grad_y_ND = grad_TD.index_select(0, tokens_N)
            grad_hidden_NI = grad_y_ND @ down_EDI[e]
            torch.sum(grad_hidden_NI * hidden_NI, dim=1, out=grad_weights_N)
            grad_hidden_NI *= weights_N[:, None]
            torch.mm(grad_y_ND.T, hidden_NI.mul_(weights_N[:, None]), out=grad_down_EDI[e])
            grad_pre_NJ = torch.empty_like(pre_NJ)
            grad_gate_NI, grad_up_NI = grad_pre_NJ.chunk(2, dim=1)
            torch.mul(grad_hidden_NI, silu_NI, out=grad_up_NI)
            torch.ops.aten.silu_backward.grad_input(grad_hidden_NI.mul_(up_NI), gate_NI, grad_input=grad_gate_NI)
            torch.mm(grad_pre_NJ.T, x_TD.index_select(0, tokens_N), out=grad_into_EJD[e])
            torch.mm(grad_pre_NJ, into_EJD[e], out=grad_x_ND)
        grad_x_TD = F.embedding_bag(place_TK, grad_x_PD, mode="sum")
        grad_weights_TK = grad_weights_P[place_TK.view(-1)].view_as(weights_TK)
        return grad_x_TD, grad_weights_TK, grad_into_EJD, grad_down_EDI, None, None, None
