"""minimoe paper: the report says what its parts say, and its parts what other doors of the engine say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_files import write_benchmarks
from command_line import Cli, Run, assert_one_sentence

import minimoe
from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.evaluate.tasks import TASKS
from minimoe.model import Batch
from minimoe.paper import measures, published, study
from minimoe.paper.measures import Masked, block_latency, sample_curves
from minimoe.paper.report import Section, write_report
from minimoe.paper.study import Progress, Study
from minimoe.probe import Probe, RoutingRecorder
from minimoe.routers import rank
from minimoe.routers.elbow import Elbow
from minimoe.routers.top_k import TopK
from minimoe.routing import Routing

FIGURES = 10


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("top8_of_64", max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return minimoe.load(model)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "QUICK_ROUNDS", 2)
    monkeypatch.setattr(measures, "PROMPT", 8)
    monkeypatch.setattr(measures, "STEPS", 2)


def paper(cli: Cli, model: Path, data: Path, out: Path, *words: str) -> Run:
    return cli("paper", "-m", str(model), "--data", str(data), "--out", str(out), "--quick", *words)


def test_the_report_is_whole_and_says_what_was_measured(cli: Cli, model: Path, data: Path, tmp_path: Path) -> None:
    run = paper(cli, model, data, tmp_path / "out", "--json")
    assert run.code == 0
    assert "this will take about" in run.err
    found = run.document
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    text = (tmp_path / "out" / "report.md").read_text("utf-8")
    figures = {path.stem for path in (tmp_path / "out" / "figures").glob("*.svg")}
    assert len(figures) == FIGURES
    assert page.count("<svg") == FIGURES
    assert not re.search(r"<img|src=|@import|<link|<script", page)
    assert all(f"](figures/{name}.svg)" in text for name in figures)
    assert {path.stem for path in (tmp_path / "out" / "data").glob("*.json")} == figures
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert len(headings) == len(re.findall(r"<h2 ", page)) == len(re.findall('<a href="#s', page)) == 12
    whole = next(r for r in found["routers"]["records"] if r["domain"] == r["phase"] == r["layer"] == "all")
    assert f"{whole['k']:.3f}" in (tmp_path / "out" / "data" / "claims.csv").read_text()
    readings = dict(
        line.split(",", 1) for line in (tmp_path / "out" / "data" / "readings.csv").read_text().split("\n") if line
    )
    assert readings["printed"].startswith("1.00,100.0%")
    assert all(r["within_bounds"] for r in found["routers"]["records"] if r["layer"] != "all")
    assert {r["domain"] for r in found["routers"]["records"]} == {"all", *TASKS}
    assert {r["domain"] for r in found["subjects"]["records"]} == {"all", "animal_stories", "astronomy"}
    rules = {(r["router"], r["task"]) for r in found["scores"]["records"]}
    assert rules == {(rule, task) for rule in ("top_k", "elbow", "mixed_k") for task in TASKS} | {
        ("random_tail", "mmlu"),
        ("random_head", "mmlu"),
    }
    # A second run finds everything done.
    again = paper(cli, model, data, tmp_path / "out")
    assert again.out == f"{tmp_path / 'out' / 'report.html'}\n"
    assert (tmp_path / "out" / "report.html").read_text("utf-8") == page


def measure(engine: Engine, data: Path, out: Path, seed: int = 0) -> dict[str, Any]:
    """The parts without the report."""
    return Study(engine, data, out, quick=True, seed=seed).run(Progress())


def test_answers_are_those_of_the_evaluation(engine: Engine, data: Path, tmp_path: Path) -> None:
    records = measure(engine, data, tmp_path)["scores"]["records"]
    (result,) = [r for r in records if (r["task"], r["protocol"], r["router"]) == ("piqa", "cloze", "elbow")]
    engine.router = Elbow()
    correct = 0
    for goal, first, second, label in [
        ("cross the river", "take the boat", "take the sky", 0),
        ("find the owl", "walk into the sea", "look into the tree", 1),
    ]:
        context = f"Goal: {goal}\nAnswer:"
        scores = [engine.score(context, f" {text}").logprob / len(text) for text in (first, second)]
        correct += scores.index(max(scores)) == label
    engine.router = TopK()
    assert (result["items"], result["correct"]) == (2, correct)


@pytest.mark.parametrize("kill", [1, 5, 9, 30, 60])
def test_killed_anywhere_it_ends_with_the_same_parts(
    kill: int, engine: Engine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "block_latency", lambda *_: [])  # the one part that no two runs agree on
    whole = measure(engine, data, tmp_path / "whole")
    forwards, forward = 0, engine.model.forward

    def counting(*words: Any) -> torch.Tensor:
        nonlocal forwards
        forwards += 1
        if forwards == kill:
            raise KeyboardInterrupt
        return forward(*words)

    monkeypatch.setattr(engine.model, "forward", counting)
    with pytest.raises(KeyboardInterrupt):
        measure(engine, data, tmp_path / "cut")
    assert measure(engine, data, tmp_path / "cut") == whole
    done = forwards
    assert done > kill
    assert measure(engine, data, tmp_path / "cut") == whole
    assert forwards == done


def test_times_are_measured_once(engine: Engine, data: Path, tmp_path: Path) -> None:
    first = measure(engine, data, tmp_path)
    assert len(first["latency"]["records"]) == 8
    assert measure(engine, data, tmp_path) == first


# What is measured


def test_masking_gives_the_same_text_and_computes_everything(engine: Engine) -> None:
    ids_T = torch.randint(300, (40,), generator=torch.Generator().manual_seed(0))
    hidden, k = {}, {}
    for name, router in (("masked", Masked()), ("skipped", Elbow()), ("top-k", TopK())):
        recorder = RoutingRecorder(engine.config.num_layers)
        with torch.inference_mode():
            hidden[name] = engine.model.forward(Batch(ids_T, [40]), router, recorder)
        k[name] = [routing.k_T for routing in recorder.routings()]
        for routing in recorder.routings():
            routing.check()
    torch.testing.assert_close(hidden["masked"], hidden["skipped"], rtol=1e-5, atol=1e-5)
    assert (hidden["masked"] - hidden["top-k"]).abs().max() > 1e-3
    assert all(bool((k_T == 8).all()) for k_T in k["masked"])
    assert any(bool((k_T < 8).any()) for k_T in k["skipped"])


def test_arms_take_turns_on_the_same_tokens(engine: Engine) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    class Watched(TopK):
        def route(self, logits_TE: torch.Tensor, context: Any) -> Routing:
            seen.append((context.phase, tuple(context.ids_T.tolist())))
            return super().route(logits_TE, context)

    records = block_latency(engine, {"a": Watched(), "b": Masked()}, 3, seed=0)
    assert [(r["arm"], r["phase"]) for r in records] == [(a, p) for a in "ab" for p in ("prefill", "decode")]
    assert all(0 < r["low"] <= r["median"] <= r["high"] and r["mean_k"] == 8 for r in records)
    prompts = {ids for phase, ids in seen if phase == "prefill"}
    assert len(prompts) == 4  # the first round warms up
    assert all(len(ids) == 8 for ids in prompts)


def test_sample_curves_are_the_first_of_each_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "CURVES", 10)
    logits: dict[int, list[torch.Tensor]] = {}

    class Logits(Probe):
        def routed(self, layer: int, routing: Routing, logits_TE: torch.Tensor) -> None:
            logits.setdefault(layer, []).append(logits_TE)

    sequences = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17]]
    with torch.inference_mode():
        for ids in sequences:
            engine.model.forward(Batch(torch.tensor(ids), [len(ids)]), TopK(), Logits())
    for layer, curves in enumerate(sample_curves(engine, sequences)):
        assert torch.equal(curves, rank(torch.cat(logits[layer]))[0][:10])


def test_the_papers_columns_fit_its_means() -> None:
    rows = published.TABLE_2.values()
    assert set(published.TABLE_2) == set(TASKS)
    assert sum(row.mean_k for row in rows) / 6 == pytest.approx(published.MEAN_K, abs=5e-4)
    changes = [row.latency[1] / row.latency[0] - 1 for row in rows]
    assert sum(changes) / 6 == pytest.approx(published.LATENCY_CHANGE, abs=2e-3)


# The report


def test_a_report_holds_everything_in_one_file(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    section = Section("A <title> & more")
    section.say("some\n  text")
    section.table("t", ["a", "b"], [["x, y", "1"]])
    figure = Figure()
    figure.subplots().plot([1, 2])
    section.figure("f", figure, 'A "caption"', {"x": [1, 2]})
    page = write_report(tmp_path, "T", "lead", [section]).read_text("utf-8")
    assert "<h2 id=" in page
    assert "A &lt;title&gt; &amp; more" in page
    assert page.count("<svg") == page.count("<figcaption>") == 1
    assert "some text" in page
    assert "<td>x, y</td>" in page.replace(' style="text-align:right"', "")
    assert (tmp_path / "data" / "t.csv").read_text() == 'a,b\n"x, y",1\n'
    assert json.loads((tmp_path / "data" / "f.json").read_text()) == {"x": [1, 2]}


# Bad input


def test_bad_input_is_one_sentence(
    cli: Cli, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = paper(cli, model, tmp_path / "absent", tmp_path / "out")
    assert_one_sentence(run)
    assert "absent is no folder" in run.err
    half = write_benchmarks(tmp_path / "half")
    (half / "piqa" / "valid.jsonl").unlink()
    run = paper(cli, model, half, tmp_path / "out")
    assert_one_sentence(run)
    assert "PIQA is not there" in run.err
    (tmp_path / "file").touch()
    assert_one_sentence(paper(cli, model, data, tmp_path / "file"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = paper(cli, model, data, tmp_path / "out")
    assert_one_sentence(run)
    assert "pip install 'minimoe[plot]'" in run.err


def test_another_study_is_not_overwritten(engine: Engine, data: Path, tmp_path: Path) -> None:
    measure(engine, data, tmp_path)
    before = (tmp_path / "parts" / "routers.json").read_bytes()
    with pytest.raises(InputError, match="is of another study"):
        measure(engine, data, tmp_path, seed=1)
    assert (tmp_path / "parts" / "routers.json").read_bytes() == before
