"""The specification: a loop over tokens and their experts that anyone can read. The oracle of every other backend."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minimoe.experts.base import Experts, weigh
from minimoe.routing import Routing


class ReferenceExperts(Experts):
    """One token, one expert at a time."""

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        w = self.weights
        rows = []
        for t, k in enumerate(routing.k_T.tolist()):
            x_1D = x_TD[t : t + 1]
            y_1D = torch.zeros_like(x_1D, dtype=torch.float32)
            for j in range(k):
                e = int(routing.experts_TK[t, j])
                h_1I = F.silu(F.linear(x_1D, w.gate_EID[e])) * F.linear(x_1D, w.up_EID[e])
                y_1D = y_1D + weigh(F.linear(h_1I, w.down_EDI[e]), routing.weights_TK[t, j])
            rows.append(y_1D)
        return torch.cat(rows).to(x_TD.dtype) if rows else torch.zeros_like(x_TD)
