"""What a training step is made of: losses, gradients and optimiser, against independent computations."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "weights" / "recipe"
CORPUS = ROOT.parent / "shared" / "data" / "corpus"
sys.path.insert(0, str(RECIPE))

import losses  # noqa: E402
import muon  # noqa: E402
from experts import TrainingExperts  # noqa: E402

from minimoe.experts import ExpertWeights, find_backend  # noqa: E402
from minimoe.routers import ROUTERS, RouterContext  # noqa: E402
from minimoe.routing import Routing  # noqa: E402


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_the_balance_loss_is_that_of_transformers(top_k: int) -> None:
    from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

    logits_TE = torch.randn(50, 8, generator=torch.Generator().manual_seed(top_k)) * 2
    collected = losses.RouterLosses()
    collected.routed(0, top_k_routing(logits_TE, top_k), logits_TE)
    expected = load_balancing_loss_func((logits_TE,), num_experts=8, top_k=top_k)
    torch.testing.assert_close(collected.balance, expected)


def test_router_losses_by_hand() -> None:
    # Two tokens, two experts, one choice each: both take expert 0, with probabilities 3/4 and 2/3.
    logits_TE = torch.tensor([[3.0, 1.0], [2.0, 1.0]]).log()
    collected = losses.RouterLosses()
    collected.routed(0, top_k_routing(logits_TE, 1), logits_TE)
    collected.routed(1, top_k_routing(logits_TE.flip(1), 1), logits_TE.flip(1))
    balance = 2 * (1.0 * (3 / 4 + 2 / 3) / 2)
    z = (math.log(4) ** 2 + math.log(3) ** 2) / 2
    assert collected.balance.item() == pytest.approx(balance)
    assert collected.z.item() == pytest.approx(z)
    assert collected.total().item() == pytest.approx(0.01 * balance + 0.001 * z)


def top_k_routing(logits_TE: torch.Tensor, top_k: int) -> Routing:
    none = torch.zeros(logits_TE.shape[0], dtype=torch.int64)
    context = RouterContext(0, "prefill", none, none, none, top_k, norm_topk_prob=False)
    return ROUTERS["top_k"]().route(logits_TE, context)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_chunked_head_loss_has_the_gradients_of_cross_entropy(chunk: int) -> None:
    generator = torch.Generator().manual_seed(chunk)
    hidden_TD = torch.randn(20, 6, generator=generator, requires_grad=True)
    head_VD = torch.randn(11, 6, generator=generator, requires_grad=True)
    targets_T = torch.randint(11, (20,), generator=generator)
    ours = losses.head_loss(hidden_TD, head_VD, targets_T, chunk)
    theirs = F.cross_entropy(hidden_TD @ head_VD.T, targets_T)
    torch.testing.assert_close(ours, theirs)
    for got, expected in zip(
        torch.autograd.grad(3 * ours, (hidden_TD, head_VD)),
        torch.autograd.grad(3 * theirs, (hidden_TD, head_VD)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_the_training_experts_have_the_gradients_of_the_reference(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(8, 5, 6), (8, 5, 6), (8, 6, 5), (tokens, 6), (tokens, 8)]
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    weighing_TD = torch.randn(tokens, 6, generator=generator)

    def result(backend: type) -> list[torch.Tensor]:
        gate, up, down, x_TD, logits_TE = leaves
        experts = backend(ExpertWeights(gate.unbind(0), up.unbind(0), down.unbind(0)))
        y_TD = experts.run(x_TD, top_k_routing(logits_TE, 3))
        return [y_TD, *torch.autograd.grad((y_TD * weighing_TD).sum(), leaves)]

    for got, expected in zip(result(TrainingExperts), result(find_backend("reference")), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_training_experts_refuse_a_pruned_routing() -> None:
    logits_TE = torch.randn(4, 3)
    full = top_k_routing(logits_TE, 2)
    pruned = Routing.from_ranking(full.experts_TK, full.weights_TK, torch.tensor([2, 1, 2, 2]), 3)
    w = torch.randn(3, 4, 4)
    experts = TrainingExperts(ExpertWeights(w.unbind(0), w.unbind(0), w.unbind(0)))
    with pytest.raises(ValueError, match="every slot"):
        experts.run(torch.randn(4, 4), pruned)


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 4, 16), (3, 16, 4)])
def test_muon_moves_along_the_orthogonal_factor(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    gradient = u @ torch.diag_embed(torch.linspace(0.5, 2.0, u.shape[-1]).expand(3, -1)) @ vh
    singular = torch.linalg.svdvals(muon.orthogonalise(gradient))
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    parameter = torch.zeros(shape, requires_grad=True)
    parameter.grad = gradient
    muon.Muon([parameter], lr=0.1).step()
    moved = -parameter.detach() / (0.1 * max(1.0, shape[1] / shape[2]) ** 0.5)
    # Within the tolerance of five Newton-Schulz steps, the move is U V^T.
    cosine = F.cosine_similarity(moved.flatten(1), (u @ vh).flatten(1))
    assert cosine.min() > 0.98
