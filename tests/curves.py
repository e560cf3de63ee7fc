"""Router logits and contexts to try a routing rule on.

Shape letters: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minimoe.routers import RouterContext


def context(T: int, top_k: int = 8, *, norm_topk_prob: bool = False) -> RouterContext:
    zeros_T = torch.zeros(T, dtype=torch.int64)
    return RouterContext(
        layer=0,
        phase="prefill",
        ids_T=zeros_T,
        positions_T=torch.arange(T),
        sequence_T=zeros_T,
        top_k=top_k,
        norm_topk_prob=norm_topk_prob,
    )


def curves(E: int, T: int = 10_000, seed: int = 0) -> Tensor:
    """Router logits: Gaussian of five widths, and one family in six full of ties."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(T, E, generator=generator)
    width_T1 = torch.tensor([0.1, 0.5, 1.0, 2.0, 6.0, 1.0]).repeat(T // 6 + 1)[:T, None]
    logits_TE = logits_TE * width_T1
    logits_TE[5::6] = logits_TE[5::6].round()
    return logits_TE
