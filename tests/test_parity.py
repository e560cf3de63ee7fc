"""The model against transformers' own OLMoE: same logits, same experts, same texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import RUNNABLE, VARIANTS, reference_model
from torch import Tensor
from transformers import OlmoeForCausalLM

import minimoe
from minimoe.cache import KVCache
from minimoe.engine import Engine
from minimoe.linear import WIDEN_FROM_ROWS
from minimoe.model import Batch
from minimoe.probe import RoutingRecorder
from minimoe.routers import Router, RouterContext
from minimoe.routers.elbow import Elbow
from minimoe.routing import Routing

# Prompt lengths, and how each is cut into chunks of prefill and steps of decode.
PIECES: dict[int, list[list[int]]] = {
    1: [[1]],
    2: [[1, 1]],
    7: [[3, 4], [1] * 7],
    33: [[3, 4, 1, 25], [29, 1, 1, 1, 1]],
    64: [[3, 4, 1, 56], [32, 32], [60, 1, 1, 1, 1]],
}
Folders = Callable[..., Path]


def prompt(engine: Engine, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, engine.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def ours(engine: Engine, ids: Tensor, pieces: list[int] | None = None) -> tuple[Tensor, list[Routing]]:
    """Logits and routings of a prompt, in one pass, or over a cache in pieces of the given sizes."""
    model, recorder = engine.model, RoutingRecorder(engine.config.num_layers)
    with torch.inference_mode():
        if pieces is None:
            hidden = model.forward(Batch(ids, [len(ids)]), engine.router, recorder)
            return model.head(hidden), recorder.routings()
        cache = KVCache(engine.config, len(ids), model.dtype, model.device)
        parts = []
        for piece in ids.split(pieces):
            phase = "decode" if parts and len(piece) == 1 else "prefill"
            hidden = model.forward(Batch(piece, [len(piece)], [cache], phase), engine.router, recorder)
            parts.append(model.head(hidden))
    return torch.cat(parts), recorder.routings()


def theirs(reference: OlmoeForCausalLM, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """transformers' logits, and each layer's chosen experts as its own gate returns them."""
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
        for layer in reference.model.layers
    ]
    with torch.inference_mode():
        logits = reference(ids[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, chosen


@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_experts_equal_transformers(checkpoint: Folders, variant: str, backend: str) -> None:
    folder = checkpoint(variant)
    engine, reference = minimoe.load(folder, backend=backend), reference_model(folder)
    for length in PIECES:
        ids = prompt(engine, length)
        logits, chosen = theirs(reference, ids)
        assert logits.std() > 0.3, "a flat fixture would hide faults"
        for pieces in (None, *PIECES[length]):
            found, routings = ours(engine, ids, pieces)
            assert (found - logits).abs().max() <= 1e-4
            for routing, experts in zip(routings, chosen, strict=True):
                routing.check()
                assert torch.equal(routing.experts_TK.sort(dim=1).values, experts.sort(dim=1).values)


@pytest.mark.parametrize(
    "options", [{"form": "packed"}, {"shards": 3}, {"form": "packed", "shards": 3}], ids=["packed", "sharded", "both"]
)
def test_every_form_on_disk_gives_the_same_logits(checkpoint: Folders, options: dict[str, Any]) -> None:
    plain, other = minimoe.load(checkpoint("base")), minimoe.load(checkpoint("base", **options))
    ids = prompt(plain, 20)
    # Not bit for bit: products of mapped weights round by how the file happens to align them.
    assert torch.allclose(ours(plain, ids)[0], ours(other, ids)[0], atol=1e-5)


def test_norm_topk_prob_is_seen(checkpoint: Folders) -> None:
    """The fixture tells the switch's two states apart, and absent means false."""
    logits = {
        variant: ours(minimoe.load(checkpoint(variant)), torch.arange(20))[0]
        for variant in ("norm_topk_true", "norm_topk_absent", "base")
    }
    assert torch.equal(logits["norm_topk_absent"], logits["base"])
    assert (logits["norm_topk_true"] - logits["base"]).abs().max() > 0.1


@pytest.mark.parametrize("variant", ["base", "top8_of_64", "clip_qkv", "larger_vocabulary"])
def test_greedy_generation_equals_transformers(checkpoint: Folders, variant: str) -> None:
    folder = checkpoint(variant)
    engine, reference = minimoe.load(folder), reference_model(folder)
    for length in (1, 5, 40):
        ids = prompt(engine, length)
        ids[ids < 2] = 5  # an EOS or pad inside the prompt would make transformers mask it
        expected = reference.generate(ids[None], max_new_tokens=24, do_sample=False, pad_token_id=1)[0, length:]
        assert engine.generate(ids.tolist(), max_new_tokens=24, temperature=0).tokens == expected.tolist()


class PrunedGate:
    """A forward hook for transformers' gate: keeps the elbow's experts and gives pruned slots the index E.

    The rule is written out here once more, in plain Python and double precision.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, module: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, weights, experts = (tensor.clone() for tensor in output)
        for t, row in enumerate(torch.softmax(logits.float(), -1).tolist()):
            p = sorted(row, reverse=True)
            deviations = [(p[0] - v) / (p[0] - p[-1] + 1e-12) - i / (len(p) - 1) for i, v in enumerate(p)]
            k = min(deviations.index(max(deviations)) + 1, experts.shape[1])
            self.counts.append(k)
            experts[t, k:] = module.num_experts
            weights[t, k:] = 0
        return logits, weights, experts


@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("variant", ["top8_of_64", "clip_qkv"])
def test_pruned_logits_equal_transformers_with_sentinels(checkpoint: Folders, variant: str, backend: str) -> None:
    folder = checkpoint(variant, num_experts=64, num_experts_per_tok=8)
    engine, reference = minimoe.load(folder, router="elbow", backend=backend), reference_model(folder)
    gate = PrunedGate()
    for layer in reference.model.layers:
        layer.mlp.gate.register_forward_hook(gate)
        layer.mlp.experts._is_expert_parallel = True
    ids = prompt(engine, 64)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    found, routings = ours(engine, ids)
    assert [k for routing in routings for k in routing.k_T.tolist()] == gate.counts
    assert 1 < sum(gate.counts) / len(gate.counts) < engine.config.top_k, "the rule must prune here"
    assert (found - expected).abs().max() <= 1e-4


class FullElbow(Elbow):
    """The elbow rule with its count forced to the model's K."""

    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        return torch.full_like(super().count(sorted_probs_TE, context), context.top_k)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_elbow_forced_to_k_is_top_k_bit_for_bit(checkpoint: Folders, backend: str) -> None:
    def logits(router: str | Router) -> Tensor:
        engine = minimoe.load(checkpoint("top8_of_64"), router=router, backend=backend)
        return ours(engine, prompt(engine, 50))[0]

    assert torch.equal(logits(FullElbow()), logits("top_k"))
    assert not torch.equal(logits("elbow"), logits("top_k"))


def half_precision(folder: Path) -> tuple[OlmoeForCausalLM, OlmoeForCausalLM]:
    """transformers in bfloat16 with two of its expert implementations."""
    eager, grouped = (
        OlmoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation=name).eval()
        for name in ("eager", "grouped_mm")
    )
    return eager, grouped


@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("experts", [{"num_experts": 64, "num_experts_per_tok": 8}, {"num_experts_per_tok": 4}])
def test_bfloat16_is_as_close_as_transformers_to_itself(
    checkpoint: Folders, experts: dict[str, int], backend: str
) -> None:
    """The bar of a half-precision engine: twice what two of transformers' own expert implementations differ by.

    Once rounding makes two sides choose different experts, their logits have no reason to be close; rows from
    the first such token on are left out on all sides, and enough must remain.
    """
    folder = checkpoint("base", dtype=torch.bfloat16, **experts)
    eager, grouped = half_precision(folder)
    engine, gaps, kept = minimoe.load(folder, backend=backend), [], 0
    for seed in range(24):
        ids = prompt(engine, 1 + seed % 12, seed)
        expected, chosen = theirs(eager, ids)
        other, other_chosen = theirs(grouped, ids)
        found, routings = ours(engine, ids)
        assert found.dtype == torch.bfloat16
        alike = min(agreeing(chosen, other_chosen), agreeing(chosen, [r.experts_TK for r in routings]))
        gaps += [(expected - side)[:alike].float().abs().flatten() for side in (other, found)]
        kept += alike
    assert kept >= 48
    their_gap, our_gap = torch.cat(gaps[::2]).max(), torch.cat(gaps[1::2]).max()
    assert their_gap > 0
    assert our_gap <= 2 * their_gap


def agreeing(ones: list[Tensor], others: list[Tensor]) -> int:
    """Tokens before the first one for which some layer chose different experts."""
    pairs = zip(ones, others, strict=True)
    same_T = torch.stack([(a.sort(1).values == b.sort(1).values).all(1) for a, b in pairs]).all(0)
    return int(same_T.int().cumprod(0).sum())


@pytest.mark.parametrize("backend", RUNNABLE)
def test_bfloat16_with_two_experts_is_transformers_bit_for_bit(checkpoint: Folders, backend: str) -> None:
    """Two rounded terms have one sum, so transformers' implementations agree to the bit, and so must we.

    Prompts stay under the length from which `linear` may widen weights, which reorders sums.
    """
    folder = checkpoint("base", dtype=torch.bfloat16)
    eager, grouped = half_precision(folder)
    engine = minimoe.load(folder, backend=backend)
    for length in range(1, WIDEN_FROM_ROWS):
        ids = prompt(engine, length)
        assert torch.equal(theirs(eager, ids)[0], theirs(grouped, ids)[0])
        assert torch.equal(ours(engine, ids)[0], theirs(eager, ids)[0])
