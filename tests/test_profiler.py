"""FLOPs against a hand count and torch's own counter; bytes, phases k against a recount; times against the clock."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import minimoe
from minimoe.cache import KVCache
from minimoe.config import ModelConfig
from minimoe.engine import Engine
from minimoe.flops import expert_bytes, head_flops, layer_flops, paper_block_flops, pass_bytes
from minimoe.model import Batch
from minimoe.probe import Probe, Probes
from minimoe.profiler import ALL_LAYERS, Profiler, timed

OLMOE = ModelConfig.from_hf(
    {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_experts": 64,
    }
)


@pytest.fixture
def engine(checkpoint: Callable[..., Path]) -> Engine:
    return minimoe.load(checkpoint("top8_of_64"), router="elbow", backend="reference")


def test_one_token_of_olmoe_by_hand() -> None:
    """FACTS: experts 6 k D I, gate 2 D E, projections 8 D^2, scores and values 4 context D."""
    flops = layer_flops(OLMOE, new=[1], past=[99], pairs=8)
    assert flops.experts == 6 * 8 * 2048 * 1024 == 100_663_296
    assert flops.gate == 2 * 2048 * 64 == 262_144
    assert flops.attention == 8 * 2048**2 + 4 * 100 * 2048 == 34_373_632
    assert head_flops(OLMOE, 1) == 2 * 2048 * 50304


def test_a_chunk_sees_the_keys_that_causality_allows() -> None:
    """Three new tokens after five cached ones see 6, 7 and 8 keys; a second sequence of two sees 1 and 2."""
    D = OLMOE.hidden_size
    scores = layer_flops(OLMOE, [3, 2], [5, 0], 0).attention - 5 * 8 * D**2
    assert scores == 4 * D * (6 + 7 + 8 + 1 + 2)


def test_bytes_of_a_decode_step_of_olmoe() -> None:
    """At k = 8 in bfloat16: experts 1.61 GB, attention 0.54, head 0.21, together 2.36."""
    read = pass_bytes(OLMOE, experts_hit=16 * 8, itemsize=2)
    assert expert_bytes(OLMOE, 2) == 3 * 2048 * 1024 * 2
    assert round(read.experts / 1e9, 2) == 1.61
    assert round(read.attention / 1e9, 2) == 0.54
    assert round(read.head / 1e9, 2) == 0.21
    assert round(read.total / 1e9, 2) == 2.36
    assert pass_bytes(OLMOE, 0, 2, head=False).head == 0


def test_weight_bytes_of_a_pass_that_reads_everything(checkpoint: Callable[..., Path]) -> None:
    """With every expert hit, the ledger's bytes are all weights but the embedding table."""
    for variant in ("base", "kv_heads_equal"):
        engine = minimoe.load(checkpoint(variant))
        config = engine.config
        read = pass_bytes(config, config.num_layers * config.num_experts, 4)
        assert read.total == engine.weight_bytes - engine.model.embed_VD.nbytes


def test_the_papers_estimate() -> None:
    """5.37e8 per token and layer at k = 8, which is 5.3 times what the real experts cost."""
    estimate = paper_block_flops(OLMOE, tokens=1, mean_k=8, elbow=False)
    assert round(estimate / 1e8, 2) == 5.37
    assert round(4 * 8 * 2048 * 4 * 2048 / layer_flops(OLMOE, [1], [0], 8).experts, 1) == 5.3
    extra = paper_block_flops(OLMOE, 1, 8, elbow=True) - estimate
    assert extra == 64 * math.log2(64) + 6 * 64


@pytest.mark.parametrize("length", [1, 9])
def test_flops_equal_torchs_counter(engine: Engine, length: int) -> None:
    """torch counts the products that really run. On the CPU it counts nothing for fused attention, so scores and
    values are left out on both sides."""
    profiler = Profiler(engine.config, engine.model.dtype, engine.model.device)
    ids = torch.arange(2, 2 + length)
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), counter:
        hidden = engine.model.forward(Batch(ids, [length]), engine.router, profiler)
        engine.model.head(hidden[-1:], profiler)
    counted = counter.get_total_flops()
    by_kind = counter.get_flop_counts()["Global"]
    counted -= sum(value for kind, value in by_kind.items() if "attention" in str(kind))
    work = profiler.report(unprobed_seconds=0, probed_seconds=0, generation=engine.generate([5], max_new_tokens=0))
    keys_seen = length * (length + 1) // 2
    scores = engine.config.num_layers * 4 * engine.config.hidden_size * keys_seen
    assert sum(work.phases[0].flops.values()) - scores == counted
    assert 1 < work.phases[0].mean_k < 8, "the rule must prune, or pruning goes untested"


class Recount(Probe):
    """Counts k and distinct experts once more, in plain Python."""

    def __init__(self) -> None:
        self.phase = ""
        self.ks: dict[str, list[list[int]]] = {"prefill": [], "decode": []}
        self.hit = {"prefill": 0, "decode": 0}

    def step(self, phase, new, past) -> None:  # type: ignore[no-untyped-def]
        self.phase = phase

    def routed(self, layer, routing, logits_TE) -> None:  # type: ignore[no-untyped-def]
        self.ks[self.phase].append(routing.k_T.tolist())
        rows = zip(routing.experts_TK.tolist(), routing.k_T.tolist(), strict=True)
        self.hit[self.phase] += len({expert for row, k in rows for expert in row[:k]})


def test_phases_k_and_bytes(engine: Engine) -> None:
    profiler, recount = Profiler(engine.config, torch.float32, engine.model.device), Recount()
    result = engine.generate("The fox and the owl", max_new_tokens=5, temperature=0, probe=Probes(profiler, recount))
    profile = profiler.report(unprobed_seconds=1, probed_seconds=2, generation=result)
    prefill, decode = profile.phases
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert (prefill.passes, prefill.tokens) == (1, len(result.prompt_tokens))
    assert (decode.passes, decode.tokens) == (4, 4)
    for work in (prefill, decode):
        ks = [k for part in recount.ks[work.phase] for k in part]
        assert work.mean_k == pytest.approx(sum(ks) / len(ks))
        assert work.mean_k == pytest.approx(sum(work.mean_k_by_layer) / engine.config.num_layers)
        assert work.flops["experts"] == 6 * sum(ks) * engine.config.hidden_size * engine.config.intermediate_size
        assert work.bytes_read["experts"] == recount.hit[work.phase] * expert_bytes(engine.config, 4)
        assert work.flops["head"] == work.passes * head_flops(engine.config, 1)
    assert profile.new_tokens == 5


def test_timings_are_consistent(engine: Engine) -> None:
    profile = engine.profile("The fox and the owl", max_new_tokens=6, temperature=0)
    for work in profile.phases:
        rows = profile.by_operation(work.phase)
        assert [row.operation for row in rows] == ["embed", "attention", "gate", "rule", "experts", "norm", "head"]
        assert sum(row.share for row in rows) == pytest.approx(1)
        assert sum(row.total for row in rows) == pytest.approx(work.seconds)
        for row in rows:
            assert 0 < row.low <= row.median <= row.high
            same = [t for t in profile.timings if (t.phase, t.operation) == (row.phase, row.operation)]
            parts = [t for t in same if t is not row]
            if row.operation in ("attention", "gate", "rule", "experts"):
                assert row.count == engine.config.num_layers * work.passes == sum(t.count for t in parts)
                assert sorted(t.layer for t in parts) == list(range(engine.config.num_layers))
                assert sum(t.total for t in parts) == pytest.approx(row.total)
    assert 0 < sum(work.seconds for work in profile.phases) <= profile.probed_seconds
    assert profile.unprobed_seconds > 0
    assert ALL_LAYERS not in range(engine.config.num_layers)
    assert json.loads(json.dumps(profile.to_dict()))["new_tokens"] == 6


def test_a_span_measures_its_own_time(engine: Engine) -> None:
    profiler = Profiler(engine.config, torch.float32, torch.device("cpu"))
    profiler.step("prefill", [1], [0])
    with profiler.span("rule", 2):
        time.sleep(0.05)
    (seconds,) = profiler._seconds["prefill", 2, "rule"]
    assert 0.05 <= seconds < 0.5


def test_timed_returns_result_and_seconds() -> None:
    result, seconds = timed(lambda: time.sleep(0.03) or "done", torch.device("cpu"))
    assert result == "done"
    assert 0.03 <= seconds < 0.5


def test_a_profiled_pass_computes_the_same(engine: Engine) -> None:
    """Measuring changes nothing, and cached decode is told apart from a one-token prefill by its cache only."""
    profiler = Profiler(engine.config, torch.float32, torch.device("cpu"))
    cache = KVCache(engine.config, 4, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        plain = engine.model.forward(Batch(torch.tensor([5]), [1]), engine.router)
        measured = engine.model.forward(Batch(torch.tensor([5]), [1], [cache], "decode"), engine.router, profiler)
    assert torch.equal(plain, measured)
    assert {key[0] for key in profiler._seconds} == {"decode"}
