"""Engines that take turns: each computes the same logits, a wrong one is noticed, and a dead one loses no figures."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from bench import comparison, limits
from bench.comparison import MAX_ERROR, Work, compare, distance
from bench.engines import ENGINES, BenchEngine, MiniMoe
from bench.report import Spread
from bench.worker import EngineFailed, Task, Times, open_worker, read_through
from minimoe.errors import InputError

WORKS = {"read": Work(1, 64), "write": Work(1, 8, 16), "write 2": Work(2, 8, 4)}


@pytest.fixture(autouse=True)
def no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read bandwidth is measured over memory of several times the processor's caches: gigabytes, for some."""
    monkeypatch.setattr(limits, "cache_bytes", lambda: 0)


def logits_of(engine: BenchEngine, variant: str, ids_BN: torch.Tensor, prompt: int) -> torch.Tensor:
    """[passes, B, V] of a prompt in one pass and then one token of each sequence after another."""
    with torch.inference_mode():
        engine.begin(variant, len(ids_BN), ids_BN.shape[1])
        rows = [engine.feed(ids_BN[:, :prompt].tolist())]
        rows += [engine.feed(ids_B1.tolist()) for ids_B1 in ids_BN[:, prompt:].split(1, dim=1)]
    return torch.stack(rows).float()


def test_every_variant_of_every_engine_computes_the_same_logits(bench_model: Path) -> None:
    ids_BN = torch.randint(512, (2, 24), generator=torch.Generator().manual_seed(0))
    logits: dict[str, torch.Tensor] = {}
    for name in ("minimoe", "transformers"):
        engine = ENGINES[name](bench_model, threads=1)
        for variant in engine.variants:
            logits[f"{name} {variant}"] = logits_of(engine, variant, ids_BN, prompt=16)
            alone = logits_of(engine, variant, ids_BN[1:], prompt=16)
            assert distance(alone[:, 0], logits[f"{name} {variant}"][:, 1]) < MAX_ERROR / 3
    assert len(logits) == len(MiniMoe.variants) + 3
    reference, *others = logits.values()
    for values in others:
        assert distance(values.flatten(0, 1), reference.flatten(0, 1)) < MAX_ERROR / 3


def test_llama_cpp_computes_the_same_logits(bench_model: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    ids_BN = torch.randint(512, (1, 24), generator=torch.Generator().manual_seed(0))
    got = logits_of(ENGINES["llama.cpp"](bench_model, threads=1), "BF16", ids_BN, prompt=16)
    expected = logits_of(MiniMoe(bench_model, threads=1), "bucketed", ids_BN, prompt=16)
    assert distance(got[:, 0], expected[:, 0]) < MAX_ERROR / 3


def test_an_engine_that_renormalises_is_noticed(bench_model: Path, tmp_path: Path) -> None:
    """The wrong engine is this one, told by an edited config that router weights sum to 1."""
    for path in bench_model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    raw = json.loads((bench_model / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**raw, "norm_topk_prob": True}))
    ids_BN = torch.randint(512, (1, 48), generator=torch.Generator().manual_seed(0))

    def logits_PV(folder: Path) -> torch.Tensor:
        return logits_of(MiniMoe(folder, threads=1), "bucketed", ids_BN, prompt=1)[:, 0]

    assert distance(logits_PV(tmp_path), logits_PV(bench_model)) > MAX_ERROR


@dataclass
class FakeWorker:
    """Stands for a process: keeps the tasks it is given, and answers with known times and logits."""

    engine: str
    off: float = 0.0  # what is added to its logits
    lasts: int = 1 << 20  # tasks
    variants: Sequence[str] = ("fast", "slow")
    most_tokens: Mapping[str, int] = field(default_factory=lambda: {"slow": 8})
    most_sequences: int = 2
    tasks: list[Task] = field(default_factory=list)

    def run(self, task: Task) -> Times:
        self.tasks.append(task)
        if len(self.tasks) > self.lasts:
            raise EngineFailed(f"{self.engine}: it ended with code -9")
        if task.logits_file:
            torch.save(torch.ones(1 + len(task.steps), 1, 4) + self.off, task.logits_file)
        return Times(prefill=2.0, decode=0.5 if task.variant == "fast" else 4.0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    """The workers that were opened, in order; engines called "absent" cannot be, and "wrong" ones compute nonsense."""
    workers: list[FakeWorker] = []

    @contextmanager
    def open_fake(engine: str, folder: Path, threads: int) -> Iterator[FakeWorker]:
        if engine == "absent":
            raise EngineFailed("absent: not installed")
        lasts = 12 if engine == "frail" else 1 << 20
        workers.append(FakeWorker(engine, off=math.nan if engine == "wrong" else 0.0, lasts=lasts))
        yield workers[-1]

    monkeypatch.setattr(comparison, "open_worker", open_fake)
    return workers


def test_engines_take_turns_on_the_same_fresh_tokens(bench_model: Path, opened: list[FakeWorker]) -> None:
    speeds, paces, errors, skipped = compare(
        bench_model, 1, rounds=3, works=WORKS, engines=("minimoe", "absent", "other")
    )
    assert skipped == {"absent": "absent: not installed"}
    assert set(errors.values()) == {0.0}
    assert [worker.engine for worker in opened] == ["minimoe", "other"]
    assert speeds["read"] == {f"{who} fast": Spread.of([64 / 2.0] * 3) for who in ("minimoe", "other")}
    assert {work: list(by) for work, by in paces.items()} == {work: list(by) for work, by in speeds.items()}
    # Between a tenth and a thousand GB/s.
    assert all(
        1e8 < speeds[work][who].median / pace.median < 1e12 for work, by in paces.items() for who, pace in by.items()
    )
    assert speeds["write"]["other fast"] == Spread.of([16 / 0.5] * 3)
    assert speeds["write"]["minimoe slow"] == Spread.of([16 / 4.0] * 3)
    assert speeds["write 2"] == {f"{who} fast": Spread.of([2 * 4 / 0.5] * 3) for who in ("minimoe", "other")}

    ours, others = ([task for task in worker.tasks if task.logits_file is None] for worker in opened)
    assert ours == others
    timed = [task for task in ours if task.variant == "fast" and len(task.steps) != 2]  # two steps: the warm-up
    shapes = [(len(task.prompts), len(task.prompts[0]), len(task.steps)) for task in timed]
    assert shapes == [(1, 64, 0), (1, 8, 16), (2, 8, 4)] * 3
    assert len({str(task.prompts) for task in timed}) == 9
    assert all(len(given) == len(task.prompts) for task in timed for given in task.steps)
    # "slow" takes 8 tokens in a pass at most.
    assert all(len(task.prompts) * len(task.prompts[0]) <= 8 for task in ours if task.variant == "slow")


def test_short_work_comes_several_times_in_a_turn(bench_model: Path, opened: list[FakeWorker]) -> None:
    works = {"write": Work(1, 8, 16, times=3), "read": Work(1, 64)}
    speeds, paces, *_ = compare(bench_model, 1, rounds=2, works=works, engines=("minimoe",))
    assert [figures["write"]["minimoe fast"].count for figures in (speeds, paces)] == [6, 6]
    assert speeds["read"]["minimoe fast"].count == 2
    timed = [len(task.steps) for task in opened[0].tasks if task.variant == "fast" and not task.logits_file][1:]
    assert timed == [16, 0, 16, 16] * 2  # spread over the turn


def test_models_that_do_not_fit_together_are_loaded_one_at_a_time(
    bench_model: Path, opened: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_fits_together", lambda folder, models: False)
    compare(bench_model, threads=1, rounds=2, works=WORKS, engines=("minimoe", "other"))
    # First to compare logits, then a turn in each round; the second round begins with the other.
    assert [worker.engine for worker in opened] == ["minimoe", "other", "minimoe", "other", "other", "minimoe"]
    assert all(len(worker.tasks[0].prompts[0]) == comparison.WARM_TOKENS for worker in opened)  # each is warmed up


def test_a_peer_that_dies_takes_no_figures_with_it(
    bench_model: Path, opened: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds, _, _, skipped = compare(bench_model, 1, rounds=4, works=WORKS, engines=("minimoe", "frail"))
    assert list(skipped) == ["frail"]
    assert "code -9, from round 3 on" in skipped["frail"]
    assert speeds["read"]["minimoe fast"].count == 4
    assert speeds["read"]["frail fast"].count == 2
    monkeypatch.setattr(comparison, "OURS", "frail")
    with pytest.raises(EngineFailed, match="frail: it ended"):
        compare(bench_model, 1, rounds=4, works=WORKS, engines=("frail",))


def test_nothing_is_timed_when_logits_differ(bench_model: Path, opened: list[FakeWorker]) -> None:
    with pytest.raises(EngineFailed, match=r"nothing was timed: wrong fast by nan, wrong slow by nan"):
        compare(bench_model, threads=1, rounds=1, works=WORKS, engines=("minimoe", "wrong"))
    assert all(task.logits_file or len(task.steps) == 2 for worker in opened for task in worker.tasks)


def test_this_engine_must_run(bench_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "OURS", "absent")
    with pytest.raises(EngineFailed, match="absent: KeyError"):
        compare(bench_model, threads=1, rounds=1, works=WORKS, engines=("absent",))
    with pytest.raises(InputError, match=r"not a model folder"):
        compare(tmp_path, threads=1, rounds=1, works=WORKS)


def test_a_worker_computes_what_its_engine_computes(bench_model: Path, tmp_path: Path) -> None:
    ids_BN = torch.tensor([[7, 8, 9, 10, 11], [1, 2, 3, 4, 5]])
    expected = logits_of(MiniMoe(bench_model, threads=1), "bucketed", ids_BN, prompt=3)
    with open_worker("minimoe", bench_model, threads=1) as worker:
        assert worker.variants == list(MiniMoe.variants)
        prompts, steps = ids_BN[:, :3].tolist(), ids_BN[:, 3:].T.tolist()
        times = worker.run(Task("bucketed", prompts, steps, str(tmp_path / "logits.pt")))
        assert 0 < times.prefill < 60
        assert 0 < times.decode < 60
        with pytest.raises(EngineFailed, match="ended with code 1"):
            worker.run(Task("no such variant", [[7]], []))
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_the_distance_is_relative_and_a_median() -> None:
    b_PV = torch.tensor([[3.0, 4.0], [0.0, 2.0], [6.0, 8.0]])
    a_PV = torch.tensor([[3.0, 4.5], [0.0, 2.0], [6.0, 88.0]])
    assert distance(a_PV, b_PV) == pytest.approx(0.1)


def test_files_that_are_read_anew_are_in_memory_and_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 4096)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read_through([path], anew=True)
    with path.open("rb") as file:
        # Only what lies in memory is given to whoever will not wait.
        assert os.preadv(file.fileno(), [bytearray(1 << 20)], 0, os.RWF_NOWAIT) == 1 << 20
    assert path.read_bytes() == bytes(range(256)) * 4096
