"""The benchmarks' own parts: the synthetic checkpoint is a real one, a wrong engine is noticed, the sums are right."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import mmap
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmark_files import write_benchmarks
from fixtures import SMALL
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, OlmoeConfig

from bench import analysis, evaluation, limits, loading, peers, pruning, report, startup, step, synthetic
from bench.comparison import Comparison
from bench.loading import AnonymousPeak, resident_bytes
from bench.peers import ratios
from bench.report import Finding, Spread
from bench.startup import Command, CommandFailed, wall_seconds
from bench.synthetic import OLMOE_1B_7B, Recipe
from bench.worker import EngineFailed
from minimoe.analysis.texts import Text
from minimoe.checkpoint import read_checkpoint, tensor_shapes
from minimoe.config import ModelConfig
from minimoe.engine import load
from minimoe.errors import InputError
from minimoe.evaluate.run import prepare
from minimoe.evaluate.tasks import TASKS
from minimoe.flops import pass_bytes
from minimoe.model import Batch
from minimoe.probe import RoutingRecorder


def test_the_whole_model_has_the_published_shape() -> None:
    shapes = dict(tensor_shapes(ModelConfig.from_hf(OLMOE_1B_7B)))
    assert sum(math.prod(shape) for shape in shapes.values()) == 6_919_161_856
    assert Recipe().config == replace(ModelConfig.from_hf(OLMOE_1B_7B), num_layers=4)


def test_both_readers_find_one_complete_model_in_a_synthetic_checkpoint(bench_model: Path) -> None:
    ours = read_checkpoint(bench_model)
    theirs, info = AutoModelForCausalLM.from_pretrained(bench_model, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert sum(t.numel() for t in ours.tensors.values()) == sum(p.numel() for p in theirs.parameters())
    assert torch.equal(theirs.model.layers[1].mlp.gate.weight, ours.tensors["model.layers.1.mlp.gate.weight"])
    down = ours.tensors["model.layers.1.mlp.experts.63.down_proj.weight"]
    assert torch.equal(theirs.model.layers[1].mlp.experts.down_proj[63], down)

    config: OlmoeConfig = theirs.config
    assert (ours.config.num_layers, ours.config.num_experts, ours.config.top_k) == (
        config.num_hidden_layers,
        config.num_experts,
        config.num_experts_per_tok,
    )
    assert ours.config.rope_theta == config.rope_parameters["rope_theta"]
    assert ours.config.norm_topk_prob is config.norm_topk_prob is False


def test_its_tensors_all_differ_and_its_shards_are_indexed(bench_model: Path) -> None:
    tensors = read_checkpoint(bench_model).tensors
    digests = {hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).digest() for t in tensors.values()}
    assert len(digests) == len(tensors)
    index = json.loads((bench_model / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert len(set(index["weight_map"].values())) == len(list(bench_model.glob("*.safetensors"))) == 3


@pytest.mark.parametrize(("gate_scale", "mean_k"), [(0.5, 7.6), (2.65, 6.0), (6.1, 4.0)])
def test_the_gate_scale_sets_how_much_the_elbow_prunes(tmp_path: Path, gate_scale: float, mean_k: float) -> None:
    synthetic.write(tmp_path / "model", Recipe(gate_scale=gate_scale, changes=SMALL))
    engine = load(tmp_path / "model", router="elbow")
    recorder = RoutingRecorder(engine.config.num_layers)
    engine.model.forward(Batch(torch.arange(256), [256]), engine.router, recorder)
    k_LT = torch.stack([routing.k_T for routing in recorder.routings()])
    assert k_LT.double().mean().item() == pytest.approx(mean_k, abs=0.3)


def test_a_checkpoint_is_written_once_and_never_over_something_else(bench_model: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in bench_model.iterdir()}
    assert not synthetic.write(bench_model, Recipe(changes=SMALL))
    with pytest.raises(InputError, match="holds something else"):
        synthetic.write(bench_model, Recipe(changes=SMALL, seed=1))
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="holds something else"):
        synthetic.write(tmp_path / "mine", Recipe(changes=SMALL))
    with pytest.raises(InputError, match="num_hidden_layers"):
        synthetic.write(tmp_path / "none", Recipe(changes={"num_hidden_layers": 0}))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert {path.name: path.stat().st_mtime_ns for path in bench_model.iterdir()} == before


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * sum(math.prod(shape) for _, shape in tensor_shapes(Recipe(changes=SMALL).config))
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _: SimpleNamespace(free=size - 1))
    with pytest.raises(InputError, match="are free there"):
        synthetic.write(tmp_path / "model", Recipe(changes=SMALL))
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _: SimpleNamespace(free=size))
    monkeypatch.setattr(synthetic, "_write_tokenizer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        synthetic.write(tmp_path / "model", Recipe(changes=SMALL))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--work", "--engines"])
@pytest.mark.parametrize("names", ["", "decode 1,,", "walk"])
def test_work_and_engines_that_are_none_are_refused(
    option: str, names: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", option, names])
    with pytest.raises(SystemExit) as ended:
        peers.main()
    assert ended.value.code == 2
    assert f"{option} does not know" in capsys.readouterr().err


def test_the_seed_decides_the_bytes_and_an_interrupted_run_leaves_none(bench_model: Path, tmp_path: Path) -> None:
    (tmp_path / "again.partial").mkdir()
    (tmp_path / "again.partial" / "model-00007-of-00009.safetensors").write_bytes(b"left over")
    synthetic.write(tmp_path / "again", Recipe(changes=SMALL))
    synthetic.write(tmp_path / "other", Recipe(changes=SMALL, seed=1))
    first, again, other = (
        {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
        for folder in (bench_model, tmp_path / "again", tmp_path / "other")
    )
    assert first == again
    assert first != other
    assert not (tmp_path / "again.partial").exists()


def test_the_synthetic_tokenizer_reads_any_text_and_has_the_models_size(bench_model: Path, tmp_path: Path) -> None:
    tokenizer = load(bench_model).tokenizer
    assert tokenizer.vocab_size == SMALL["vocab_size"]
    text = "Once upon a time: é🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    synthetic._write_tokenizer(tmp_path / "tokenizer.json", OLMOE_1B_7B["vocab_size"])
    added = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    assert [(token["content"], token["id"]) for token in added] == [("<|endoftext|>", OLMOE_1B_7B["eos_token_id"])]


SPREADS = {
    name: Spread(median, 0, 0, 1)
    for name, median in {"minimoe native": 9.0, "minimoe bucketed": 6.0, "one a": 3.0, "one b": 4.0, "two c": 9}.items()
}


PACES = {name: replace(spread, median=6.0 if name == "two c" else spread.median) for name, spread in SPREADS.items()}


def test_the_ratio_is_to_the_fastest_variant_of_each_peer() -> None:
    assert ratios(SPREADS) == {
        "minimoe native": {"one": 2.25, "two": 1},
        "minimoe bucketed": {"one": 1.5, "two": 6 / 9},
    }
    assert ratios({"minimoe native": SPREADS["minimoe native"]}) == {"minimoe native": {}}


def test_bars_are_for_the_fastest_backend_and_the_whole_models_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BARS", {("decode 1", "one"): 2.5})
    config = Recipe(changes={"num_hidden_layers": 16}).config
    found = peers.findings({"decode 1": SPREADS}, {"decode 1": PACES}, config)
    by_name = {(f.engine.split()[1], f.against): (f.value, f.bar) for f in found}
    assert by_name["native", "one"] == (2.25, 2.5)
    assert by_name["bucketed", "one"] == (1.5, None)
    assert by_name["native", "two"] == (1.0, None)
    assert by_name["native", "two, per readable byte"] == (1.5, None)
    assert len(found) == 6
    tiny = peers.findings({"decode 1": SPREADS}, {"decode 1": PACES}, replace(config, hidden_size=256))
    assert {f.against for f in tiny} == {"one", "two"}


def test_a_bar_is_a_least_or_a_most() -> None:
    fast, slow, unknown = (Finding("decode", "native", "peer", value, 2.0) for value in (2.0, 1.99, math.nan))
    assert [finding.met for finding in (fast, slow, unknown)] == [True, False, False]
    heavy, light = (Finding("load", "native", "GB", value, 2.0, at_most=True) for value in (2.01, 2.0))
    assert [finding.met for finding in (heavy, light)] == [False, True]
    rows = [
        row.split(" | ")
        for row in report.bars_table([fast, heavy, Finding("decode", "bucketed", "peer", 1)]).split("\n")[2:]
    ]
    assert [[cell.strip(" |") for cell in row[3:]] for row in rows] == [
        ["2", "2", "met"],
        ["2.01", "at most 2", "missed"],
        ["1", "", ""],
    ]


def test_what_stands_beside_speeds_is_measured(bench_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ELBOW_ROUNDS", 4)
    monkeypatch.setattr(peers, "STEP_CONTEXT", 5)
    found = peers.elbow(bench_model, threads=1)
    assert [finding.work for finding in found] == [
        "decode 1",
        *(f"elbow, mean k {k}" for k in ("7.6", "6.0", "4.0")),
        "elbow rule",
        "all but products",
    ]
    assert [(finding.bar, finding.at_most) for finding in found] == [(0.9, False)] * 4 + [(0.02, True), (0.08, True)]
    slow = loading.Loading(load=1, first_token=9.0, baseline=1, peak=1, anonymous=7)
    fast = loading.Loading(load=0.1, first_token=0.75, baseline=1, peak=1, anonymous=1_250_000_000)
    monkeypatch.setattr(loading, "measure", lambda *_: ({"minimoe": [fast], "transformers": [slow]}, {}))
    assert [(finding.against, finding.value, finding.met) for finding in peers.first_token(bench_model, 1, 1, [])] == [
        ("seconds", 0.75, True),
        ("GB that are no file's", 1.25, True),
        ("transformers", 12.0, True),
    ]
    monkeypatch.setattr(loading, "measure", lambda *_: ({}, {"minimoe": "minimoe: no memory"}))
    with pytest.raises(EngineFailed, match="no memory"):
        peers.first_token(bench_model, 1, 1, [])


@pytest.mark.parametrize(("options", "goes_on"), [([], True), (["--work", "prefill 512"], False)])
def test_what_stands_beside_speeds_cannot_lose_them(
    options: list[str],
    goes_on: bool,
    bench_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object) -> list[Finding]:
        raise EngineFailed("out of luck")

    monkeypatch.setattr(peers, "default_folder", lambda *_: bench_model)
    monkeypatch.setattr(peers, "write", lambda *_: None)
    limit = Spread.of([1.0])
    monkeypatch.setattr(peers, "measure", lambda *_: limits.Limits(limit, limit, limit))
    monkeypatch.setattr(
        peers, "compare", lambda *_: Comparison({"prefill 512": SPREADS}, {}, {"minimoe native": 0.0}, {})
    )
    monkeypatch.setattr(peers, "elbow", lambda *_: [Finding("elbow", "native", "pruned pairs", 0.95, 0.9)])
    monkeypatch.setattr(peers, "first_token", fails)
    monkeypatch.setattr(peers, "embedded", fails)
    monkeypatch.setattr(sys, "argv", ["peers", *options])
    peers.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {finding["work"] for finding in result["findings"]} == {"prefill 512", *(["elbow"] if goes_on else [])}
    assert list(result["skipped"].values()) == goes_on * [
        "loading: EngineFailed: out of luck",
        "the embedded model: EngineFailed: out of luck",
    ]


def test_the_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cache_bytes", lambda: 1 << 18)
    limits.read_loop()(torch.ones(2**14 + 12, dtype=torch.int64), 1)
    limit = limits.measure(1, rounds=1, read_bytes=1 << 20, size=128)
    assert all(spread.median > 0 for spread in (limit.bandwidth, limit.float32, limit.bfloat16))


def test_what_is_read_is_not_in_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, size in enumerate(["48K", "64K", "2048K", "3M"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(limits, "CACHES", tmp_path)
    assert limits.cache_bytes() == 3 << 20
    read: list[int] = []
    monkeypatch.setattr(limits, "read_loop", lambda: lambda tensor, _: read.append(tensor.data_ptr()))
    reading = limits.Reading(1, 1 << 20)
    assert all(reading() > 0 for _ in range(25))
    # Twelve pieces of 1 MB, four times what the cache holds, are read before one is read again.
    assert len(set(read[:12])) == 12
    assert read[:12] == read[12:24]
    monkeypatch.setattr(limits, "CACHES", tmp_path / "nowhere")
    assert limits.cache_bytes() == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_quartiles_are_numpys(values: list[float]) -> None:
    spread = Spread.of(values)
    assert [spread.low, spread.median, spread.high] == pytest.approx(np.percentile(values, [25, 50, 75]).tolist())
    assert spread.count == len(values)


def test_a_report_ends_in_one_line_of_json_and_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    about = {"date": "2030-01-02", "cpu": "Some CPU @ 2 GHz", "load_average_before": 1.2}
    text = report.table(["engine", "speed"], [["a", Spread.of([1.0, 2.0, 3.0]).text(digits=1)], ["longer", "7"]])
    report.publish("peers", text, {"machine": about, "speed": Spread.of([1.0, 2.0, 3.0])}, save=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| engine |         speed |"
    assert lines[2] == "| a      | 2.0 (1.5–2.5) |"
    assert "do not keep these times" in "\n".join(lines)
    document = json.loads(lines[-1])
    assert document["speed"] == {"median": 2.0, "low": 1.5, "high": 2.5, "count": 3}
    assert json.loads((tmp_path / "2030-01-02-some-cpu-2-ghz-peers.json").read_text()) == document
    assert (tmp_path / "2030-01-02-some-cpu-2-ghz-peers.md").read_text("utf-8").startswith("| engine |")


def test_a_machine_is_described_for_json() -> None:
    about = report.machine(threads=1)
    assert json.loads(json.dumps(about)) == about
    assert about["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("listing", "name"),
    [
        (
            "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel\t\t: 17\n",
            "AMD EPYC, family 25 model 17",
        ),
        ("processor\t: 0\nmodel name\t: ARMv8 Processor \n", "ARMv8 Processor"),
        ("processor\t: 0\n", report.platform.processor() or report.platform.machine()),
    ],
)
def test_processors_of_one_name_are_told_apart(listing: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_: listing)
    assert report.cpu_name() == name


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "two", ""])
def test_counts_below_one_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        report.at_least_one(text)


def test_loading_in_a_child_measures_time_and_memory(bench_model: Path) -> None:
    loadings, skipped = loading.measure(bench_model, threads=1, repeats=1, engines=["minimoe", "absent"])
    (measured,) = loadings["minimoe"]
    assert 0 < measured.load < measured.first_token < 60
    assert 10e6 < measured.baseline <= measured.peak < 4e9
    assert 10e6 < measured.anonymous < measured.peak
    assert list(skipped) == ["absent"]
    assert list(loadings) == ["minimoe"]


def test_peak_memory_is_the_kernels_own_figure() -> None:
    ballast = torch.ones(50_000_000, dtype=torch.uint8)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    assert ballast.nbytes < resident <= resident_bytes("VmHWM") * 1.01
    # ru_maxrss also remembers the process that started this one, hence no equality.
    assert resident_bytes("VmHWM") <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 * 1.01


def test_the_anonymous_peak_outlives_what_made_it() -> None:
    before = resident_bytes("RssAnon")
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # Fresh pages: an allocator may hand out some that have been resident all along.
    with AnonymousPeak() as peak, mmap.mmap(-1, 50_000_000, flags=private) as ballast:
        ballast.write(bytes([1]) * len(ballast))
        time.sleep(0.1)
    assert before + 40_000_000 < peak.bytes < before + 200_000_000


def test_commands_are_timed_to_their_end_and_must_do_their_work(bench_model: Path) -> None:
    (seconds,) = startup.measure([Command(("--help",), 1.0)], repeats=1).values()
    assert 0 < seconds.low <= seconds.high < 60
    assert seconds.count == 1  # the first run is not counted
    generate = ("generate", "--model", str(bench_model), "--max-new-tokens", "3", "--threads", "1", "--json")
    with pytest.raises(CommandFailed, match=r"wrote [123] tokens"):
        wall_seconds(Command(generate, 1.0, new_tokens=4))
    with pytest.raises(CommandFailed, match="failed with code 2"):
        wall_seconds(Command(("no-such-verb",), 1.0))


def test_what_pruning_saves_is_set_against_what_it_promises() -> None:
    """Half of all tokens keep 2 of 4 experts and half keep all; each expert costs 1 and every block 1 besides."""
    parts = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.5])
    result = pruning.saving(parts, {k: 1.0 + k for k in range(1, 5)}, top_k=4)
    assert result == {"mean_k": 3.0, "promised": 0.25, "saved": pytest.approx(0.2), "kept": pytest.approx(0.8)}


def test_the_pruning_benchmark_measures_every_k_of_the_rule(bench_model: Path) -> None:
    engine = load(bench_model, router="elbow")
    with torch.inference_mode():
        blocks = pruning.block_seconds(engine, rounds=2)
        assert list(blocks) == list(range(1, engine.config.top_k + 1))
        assert all(spread.median > 0 and spread.count == 2 for spread in blocks.values())
        parts = pruning.elbow_counts(2.65, engine)
        assert float(parts.sum()) == pytest.approx(1.0)
        # The mean k that the benchmark's README gives for this spread.
        assert float((parts * torch.arange(len(parts))).sum()) == pytest.approx(6.0, abs=0.1)


def test_a_step_is_set_against_its_products_and_the_read_bandwidth(
    bench_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(bench_model)
    monkeypatch.setattr(limits, "cache_bytes", lambda: 0)
    monkeypatch.setattr(step, "Reading", lambda *_: lambda: 5e9)
    monkeypatch.setattr(step, "whole_step", lambda *_: 1e-3)
    config = engine.config
    D, I, V = config.hidden_size, config.intermediate_size, config.vocab_size
    # By hand: 4 matrices of attention, the gate, 8 experts and norms in each of two layers, and the head.
    weights = 2 * (4 * D * D + 4 * D + 64 * D + 8 * 3 * D * I) + D * V + D
    measured = step.measure(engine, rounds=2, context=5)
    assert measured["read_share"].median == pytest.approx(2 * weights / (1e-3 * 5e9))
    monkeypatch.undo()
    monkeypatch.setattr(limits, "cache_bytes", lambda: 0)
    measured = step.measure(engine, rounds=2, context=5)
    assert {spread.count for spread in measured.values()} == {2}
    assert all(0 < measured[f"{rule}_share"].median < 1 for rule in step.RULES)


def test_the_products_of_a_step_are_all_there_are(bench_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, read = load(bench_model, backend="bucketed"), []
    monkeypatch.setattr(engine.model.operations, "linears", lambda x_TA, weights: read.extend(map(id, weights)))
    with torch.inference_mode():
        step.products_alone(engine, step.random_routings(engine))
    matrices = {id(engine.model.head_VD)}
    for layer in engine.model.layers:
        of = layer.attention
        matrices |= {id(w) for w in (of.query_DD, of.key_GdD, of.value_GdD, of.out_DD, layer.gate.weight_ED)}
    assert len(read) == len(matrices) == 1 + 5 * engine.config.num_layers
    assert set(read) == matrices


@pytest.mark.parametrize("size", [1, 100, step.HUGE_PAGE // 8, 5 * step.HUGE_PAGE // 16 + 3])
def test_something_of_each_huge_page_is_read(size: int) -> None:
    numbers = torch.arange(size)
    read = {(numbers.data_ptr() + 8 * number) // step.HUGE_PAGE for number in step.of_each_page(numbers).tolist()}
    end = numbers.data_ptr() + numbers.nbytes - 1
    assert read == set(range(numbers.data_ptr() // step.HUGE_PAGE, end // step.HUGE_PAGE + 1))


def test_the_read_loop_reads_the_weights_of_a_step(bench_model: Path) -> None:
    engine, read = load(bench_model), []
    step.reading_alone(engine, step.random_routings(engine), lambda tensor, _: read.append(tensor))
    config = engine.config
    assert len({tensor.data_ptr() for tensor in read}) == 1 + config.num_layers * (5 + 3 * config.top_k)
    # All that a step reads but its row of the embedding and the norms.
    counted = pass_bytes(config, experts_hit=config.num_layers * config.top_k, itemsize=2).total
    assert 0.97 * counted < sum(tensor.nbytes for tensor in read) <= counted


# Analysis


def test_the_curves_and_the_text_of_the_analysis_are_counted(tmp_path: Path) -> None:
    assert analysis.curves(1600)["curves"] == 1600
    path = tmp_path / "text.txt"
    path.write_text("a small fox " * 40)
    engine = load("tiny")
    cost = analysis.overhead(engine, Text("text", path), 1)
    assert cost["tokens"] == len(engine.tokenizer.encode(path.read_text()))
    assert cost["plain"].median > 0
    assert cost["overhead"].median == pytest.approx(cost["analysis"].median / cost["plain"].median - 1)


def test_plain_prefill_runs_the_tokens_that_scoring_runs(tmp_path: Path) -> None:
    """eval counts its own tokens; the passes beside it are made from the items."""
    engine = load("tiny", threads=1)
    benchmark = prepare(TASKS["arc_easy"], write_benchmarks(tmp_path))
    found = evaluation.measured(engine, benchmark, rounds=1)
    assert found["tokens"] == found["plain_tokens"] > 0
    assert found["ratio"].median == pytest.approx(found["scoring"].median / found["prefill"].median)
    (one,) = evaluation.plain_passes(engine, benchmark)
    rows = sum(len(engine.score(*pair).tokens) for item in benchmark.items
               for pair in zip(item.contexts(), item.continuations, strict=True))  # fmt: skip
    assert one.rows == rows
