"""The benchmarks' own parts: the synthetic checkpoint is a real one, a wrong engine is noticed, the sums are right."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, OlmoeConfig

from bench import loading, peers, report, startup, synthetic
from bench.engines import ENGINES, MiniMoe
from bench.loading import peak_resident_bytes
from bench.peers import MAX_ERROR, Speeds, Work, compare, distance, ratios
from bench.report import Spread
from bench.startup import Command, CommandFailed, wall_seconds
from bench.synthetic import OLMOE_1B_7B, Recipe
from bench.worker import EngineFailed, Task, Times, open_worker
from minimoe.checkpoint import read_checkpoint, tensor_shapes
from minimoe.config import ModelConfig
from minimoe.engine import load
from minimoe.errors import InputError
from minimoe.model import Batch
from minimoe.probe import RoutingRecorder

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
WORK = Work(prefill=64, prompt=8, new=16)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Engines set the number of threads of their process, which here is everybody's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "small"
    assert synthetic.write(folder, Recipe(changes=SMALL))
    return folder


def test_the_whole_model_has_the_published_shape() -> None:
    shapes = dict(tensor_shapes(ModelConfig.from_hf(OLMOE_1B_7B)))
    assert sum(math.prod(shape) for shape in shapes.values()) == 6_919_161_856
    assert Recipe().config == replace(ModelConfig.from_hf(OLMOE_1B_7B), num_layers=4)


def test_both_readers_find_one_complete_model_in_a_synthetic_checkpoint(small: Path) -> None:
    ours = read_checkpoint(small)
    theirs, info = AutoModelForCausalLM.from_pretrained(small, output_loading_info=True)
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


def test_its_tensors_all_differ_and_its_shards_are_indexed(small: Path) -> None:
    tensors = read_checkpoint(small).tensors
    digests = {hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).digest() for t in tensors.values()}
    assert len(digests) == len(tensors)
    index = json.loads((small / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert len(set(index["weight_map"].values())) == len(list(small.glob("*.safetensors"))) == 3


@pytest.mark.parametrize(("gate_scale", "mean_k"), [(0.5, 7.6), (2.65, 6.0), (6.1, 4.0)])
def test_the_gate_scale_sets_how_much_the_elbow_prunes(tmp_path: Path, gate_scale: float, mean_k: float) -> None:
    synthetic.write(tmp_path / "model", Recipe(gate_scale=gate_scale, changes=SMALL))
    engine = load(tmp_path / "model", router="elbow")
    recorder = RoutingRecorder(engine.config.num_layers)
    engine.model.forward(Batch(torch.arange(256), [256]), engine.router, recorder)
    k_LT = torch.stack([routing.k_T for routing in recorder.routings()])
    assert k_LT.double().mean().item() == pytest.approx(mean_k, abs=0.3)


def test_a_checkpoint_is_written_once_and_never_over_something_else(small: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in small.iterdir()}
    assert not synthetic.write(small, Recipe(changes=SMALL))
    with pytest.raises(InputError, match="holds something else"):
        synthetic.write(small, Recipe(changes=SMALL, seed=1))
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="holds something else"):
        synthetic.write(tmp_path / "mine", Recipe(changes=SMALL))
    with pytest.raises(InputError, match="num_hidden_layers"):
        synthetic.write(tmp_path / "none", Recipe(changes={"num_hidden_layers": 0}))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert {path.name: path.stat().st_mtime_ns for path in small.iterdir()} == before


def test_the_seed_decides_the_bytes_and_an_interrupted_run_leaves_none(small: Path, tmp_path: Path) -> None:
    (tmp_path / "again.partial").mkdir()
    (tmp_path / "again.partial" / "model-00007-of-00009.safetensors").write_bytes(b"left over")
    synthetic.write(tmp_path / "again", Recipe(changes=SMALL))
    synthetic.write(tmp_path / "other", Recipe(changes=SMALL, seed=1))
    first, again, other = (
        {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
        for folder in (small, tmp_path / "again", tmp_path / "other")
    )
    assert first == again
    assert first != other
    assert not (tmp_path / "again.partial").exists()


def test_the_synthetic_tokenizer_reads_any_text_and_has_the_models_size(small: Path, tmp_path: Path) -> None:
    tokenizer = load(small).tokenizer
    assert tokenizer.vocab_size == SMALL["vocab_size"]
    text = "Once upon a time: é🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    synthetic._write_tokenizer(tmp_path / "tokenizer.json", OLMOE_1B_7B["vocab_size"])
    added = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    assert [(token["content"], token["id"]) for token in added] == [("<|endoftext|>", OLMOE_1B_7B["eos_token_id"])]


def test_every_variant_of_every_engine_computes_the_same_logits(small: Path) -> None:
    ids = torch.randint(512, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    logits: dict[str, torch.Tensor] = {}
    for name, engine_class in ENGINES.items():
        engine = engine_class(small, threads=1)
        for variant in engine.variants:
            with torch.inference_mode():
                engine.begin(variant, len(ids))
                rows = [engine.feed(ids[:16]), *(engine.feed([i]) for i in ids[16:])]
            logits[f"{name} {variant}"] = torch.stack(rows).float()
    assert len(logits) == 4
    for values_PV in logits.values():
        assert distance(values_PV, logits["minimoe bucketed"]) < MAX_ERROR / 3


def test_an_engine_that_renormalises_is_noticed(small: Path, tmp_path: Path) -> None:
    """The wrong engine is this one, told by an edited config that router weights sum to 1."""
    for path in small.iterdir():
        (tmp_path / path.name).symlink_to(path)
    raw = json.loads((small / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**raw, "norm_topk_prob": True}))
    ids = torch.randint(512, (48,), generator=torch.Generator().manual_seed(0)).tolist()

    def logits_PV(folder: Path) -> torch.Tensor:
        engine = MiniMoe(folder, threads=1)
        engine.begin("bucketed", len(ids))
        with torch.inference_mode():
            return torch.stack([engine.feed([i]) for i in ids]).float()

    assert distance(logits_PV(tmp_path), logits_PV(small)) > MAX_ERROR


@dataclass
class FakeWorker:
    """Stands for a process: keeps the tasks it is given, and answers with known times and logits."""

    engine: str
    off: float = 0.0  # what is added to its logits
    variants: Sequence[str] = ("fast", "slow")
    decode_only: Sequence[str] = ("slow",)
    tasks: list[Task] = field(default_factory=list)

    def run(self, task: Task) -> Times:
        self.tasks.append(task)
        if task.logits_file:
            torch.save(torch.ones(1 + len(task.ids), 4) + self.off, task.logits_file)
        return Times(prefill=2.0, decode=0.5 if task.variant == "fast" else 4.0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    """The workers that were opened, in order; engines called "absent" cannot be, and "wrong" ones compute nonsense."""
    workers: list[FakeWorker] = []

    @contextmanager
    def open_fake(engine: str, folder: Path, threads: int) -> Iterator[FakeWorker]:
        if engine == "absent":
            raise EngineFailed("absent: not installed")
        workers.append(FakeWorker(engine, off=math.nan if engine == "wrong" else 0.0))
        yield workers[-1]

    monkeypatch.setattr(peers, "open_worker", open_fake)
    return workers


def test_engines_take_turns_on_the_same_fresh_tokens(small: Path, opened: list[FakeWorker]) -> None:
    speeds, skipped = compare(small, threads=1, rounds=3, work=WORK, engines=("minimoe", "absent", "other"))
    assert skipped == {"absent": "absent: not installed"}
    assert [worker.engine for worker in opened] == ["minimoe", "other"]
    assert speeds["other fast"] == Speeds(0.0, Spread.of([WORK.new / 0.5] * 3), Spread.of([WORK.prefill / 2.0] * 3))
    assert speeds["minimoe slow"] == Speeds(0.0, Spread.of([WORK.new / 4.0] * 3), None)

    ours, others = ([task for task in worker.tasks if task.logits_file is None] for worker in opened)
    assert ours == others
    timed = [task for task in ours if task.variant == "fast" and len(task.ids) != 2]  # two ids: the warm-up
    assert [(len(task.prompt), len(task.ids)) for task in timed] == [(WORK.prompt, WORK.new), (WORK.prefill, 0)] * 3
    assert len({tuple(task.prompt) for task in timed}) == 6
    assert all(len(task.prompt) == WORK.prompt for task in ours if task.variant == "slow")


def test_models_that_do_not_fit_together_are_loaded_one_at_a_time(
    small: Path, opened: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_fits_together", lambda folder, models: False)
    compare(small, threads=1, rounds=2, work=WORK, engines=("minimoe", "other"))
    # First to compare logits, then a turn in each round; the second round begins with the other.
    assert [worker.engine for worker in opened] == ["minimoe", "other", "minimoe", "other", "other", "minimoe"]
    assert all(len(worker.tasks[0].prompt) == WORK.prefill for worker in opened)  # each is warmed up


def test_nothing_is_timed_when_logits_differ(small: Path, opened: list[FakeWorker]) -> None:
    with pytest.raises(EngineFailed, match=r"nothing was timed: wrong fast by nan, wrong slow by nan"):
        compare(small, threads=1, rounds=1, work=WORK, engines=("minimoe", "wrong"))
    assert all(task.logits_file or len(task.ids) == 2 for worker in opened for task in worker.tasks)


def test_this_engine_must_run(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "OURS", "absent")
    with pytest.raises(EngineFailed, match="absent: KeyError"):
        compare(small, threads=1, rounds=1, work=WORK, engines=("absent",))
    with pytest.raises(InputError, match=r"not a model folder"):
        compare(tmp_path, threads=1, rounds=1)


def test_a_worker_computes_what_its_engine_computes(small: Path, tmp_path: Path) -> None:
    engine = MiniMoe(small, threads=1)
    engine.begin("bucketed", 5)
    with torch.inference_mode():
        expected_PV = torch.stack([engine.feed([7, 8, 9]), engine.feed([10]), engine.feed([11])]).float()
    with open_worker("minimoe", small, threads=1) as worker:
        times = worker.run(Task("bucketed", [7, 8, 9], [10, 11], str(tmp_path / "logits.pt")))
        assert 0 < times.prefill < 60
        assert 0 < times.decode < 60
        with pytest.raises(EngineFailed, match="ended with code 1"):
            worker.run(Task("no such variant", [7], []))
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected_PV)


def test_the_ratio_is_to_the_fastest_peer() -> None:
    speeds = {
        name: Spread(median, 0, 0, 1)
        for name, median in {"minimoe bucketed": 6.0, "minimoe native": 9.0, "one a": 3.0, "one b": 4.0}.items()
    }
    assert ratios(speeds) == {"minimoe bucketed": 1.5, "minimoe native": 2.25}
    assert ratios({"minimoe bucketed": speeds["minimoe bucketed"]}) == {}


def test_the_distance_is_relative_and_a_median() -> None:
    b_PV = torch.tensor([[3.0, 4.0], [0.0, 2.0], [6.0, 8.0]])
    a_PV = torch.tensor([[3.0, 4.5], [0.0, 2.0], [6.0, 88.0]])
    assert distance(a_PV, b_PV) == pytest.approx(0.1)


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


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "two", ""])
def test_counts_below_one_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        report.at_least_one(text)


def test_loading_in_a_child_measures_time_and_memory(small: Path) -> None:
    loadings, skipped = loading.measure(small, threads=1, repeats=1, engines=["minimoe", "absent"])
    (measured,) = loadings["minimoe"]
    assert 0 < measured.load < measured.first_token < 60
    assert 10e6 < measured.baseline <= measured.peak < 4e9
    assert list(skipped) == ["absent"]


def test_peak_memory_is_the_kernels_own_figure() -> None:
    ballast = torch.ones(50_000_000, dtype=torch.uint8)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    assert ballast.nbytes < resident <= peak_resident_bytes() * 1.01
    # ru_maxrss also remembers the process that started this one, hence no equality.
    assert peak_resident_bytes() <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 * 1.01


def test_commands_are_timed_to_their_end_and_must_do_their_work(small: Path) -> None:
    (seconds,) = startup.measure([Command(("--help",), 1.0)], repeats=1).values()
    assert 0 < seconds.low <= seconds.high < 60
    assert seconds.count == 1  # the first run is not counted
    generate = ("generate", "--model", str(small), "--max-new-tokens", "3", "--threads", "1", "--json")
    with pytest.raises(CommandFailed, match=r"wrote [123] tokens"):
        wall_seconds(Command(generate, 1.0, new_tokens=4))
    with pytest.raises(CommandFailed, match="failed with code 2"):
        wall_seconds(Command(("no-such-verb",), 1.0))
