"""What training minimises: cross entropy, and the two router losses of OLMoE.

Shape letters: T tokens, D hidden, V vocabulary, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minimoe.probe import Probe
from minimoe.routing import Routing

BALANCE_WEIGHT = 0.01
Z_WEIGHT = 0.001


class RouterLosses(Probe):
    """Collects the load-balancing loss and the router z-loss of each layer during a forward pass.

    Formulas, per layer, then averaged over layers:
        balance = E * sum_e f_e * p_e, with f_e the routed pairs of expert e per token (all k choices count, so a
            perfectly even load gives k) and p_e the mean router probability. Source: Fedus et al. 2021,
            equations 4 to 6, as OLMoE's transformers code counts it.
        z = mean over tokens of logsumexp(logits)^2. Source: Zoph et al. 2022, equation 5.
    """

    def __init__(self) -> None:
        self._balance: list[Tensor] = []
        self._z: list[Tensor] = []

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        E = routing.num_experts
        counts_E = torch.bincount(routing.experts_TK.reshape(-1), minlength=E + 1)[:E]
        fraction_E = counts_E.to(torch.float32) / max(routing.num_tokens, 1)
        logits_TE = logits_TE.float()
        self._balance.append(E * (fraction_E * logits_TE.softmax(dim=-1).mean(dim=0)).sum())
        self._z.append(logits_TE.logsumexp(dim=-1).square().mean())

    @property
    def balance(self) -> Tensor:
        return torch.stack(self._balance).mean()

    @property
    def z(self) -> Tensor:
        return torch.stack(self._z).mean()

    def total(self) -> Tensor:
        """Both losses with OLMoE's weights."""
        return BALANCE_WEIGHT * self.balance + Z_WEIGHT * self.z


class _HeadLoss(torch.autograd.Function):
    """Mean cross entropy of a linear head, whose gradients are made chunk by chunk in the forward pass.

    The [T, V] logits are the largest tensor of a step; a chunk of them stays in the processor's cache.
    """

    @staticmethod
    def forward(ctx, hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, chunk: int) -> Tensor:  # type: ignore[no-untyped-def]
        grad_hidden_TD, grad_head_VD = torch.empty_like(hidden_TD), torch.zeros_like(head_VD)
        tokens = hidden_TD.shape[0]
        total = hidden_TD.new_zeros(())
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            logprobs = (hidden_TD[part] @ head_VD.T).log_softmax(dim=-1)
            rows = torch.arange(logprobs.shape[0], device=logprobs.device)
            total -= logprobs[rows, targets_T[part]].sum()
            grad = logprobs.exp_()
            grad[rows, targets_T[part]] -= 1
            torch.mm(grad, head_VD, out=grad_hidden_TD[part])
            grad_head_VD.addmm_(grad.T, hidden_TD[part])
        ctx.save_for_backward(grad_hidden_TD.div_(tokens), grad_head_VD.div_(tokens))
        return total / tokens

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        grad_hidden_TD, grad_head_VD = ctx.saved_tensors
        return grad_hidden_TD * grad, grad_head_VD * grad, None, None


def head_loss(hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, chunk: int = 256) -> Tensor:
    """Mean cross entropy in nats of predicting targets_T (int64) from hidden states; a scalar with gradients."""
    return _HeadLoss.apply(hidden_TD, head_VD, targets_T, chunk)
