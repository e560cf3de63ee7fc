"""minimoe paper: the report says what its parts say, and its parts what other doors of the engine say."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from benchmark_files import write_benchmarks
from command_line import Cli, Run, assert_one_sentence

import minimoe
from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.evaluate.letters import LetterPrompt
from minimoe.evaluate.run import prepare
from minimoe.evaluate.tasks import TASKS, RequestSet
from minimoe.hub import resolve
from minimoe.items import cloze_items
from minimoe.journal import Journal
from minimoe.model import Batch
from minimoe.paper import benchmarks, estimate, measures, published, study
from minimoe.paper.benchmarks import own_items, six_benchmarks
from minimoe.paper.estimate import FIGURES, seconds
from minimoe.paper.measures import Masked, block_latency, padding, sample_curves, within_reach
from minimoe.paper.report import Section, write_report
from minimoe.paper.study import Progress, Study
from minimoe.paper.verdict import verdict
from minimoe.probe import Probe, RoutingRecorder
from minimoe.routers import rank
from minimoe.routers.elbow import Elbow
from minimoe.routers.top_k import TopK
from minimoe.routing import Routing
from minimoe.scoring import cut

Measured = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("top8_of_64", max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return minimoe.load(model)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "QUICK_ROUNDS", 2)
        patch.setattr(benchmarks, "QUICK_OWN", 1)
        patch.setattr(estimate, "ALONE", 0.0)
        patch.setattr(estimate, "TOGETHER", 100)
        yield


@pytest.fixture(scope="module")
def measured(engine: Engine, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A folder with all parts of a study, and what they hold."""
    folder = tmp_path_factory.mktemp("measured")
    return folder, measure(engine, data, folder)


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
    assert FIGURES - 2 <= len(figures) <= FIGURES  # those of accuracy are left out where no answer changes
    assert page.count("<svg") == page.count("<figcaption>") == page.count('role="img" aria-label="') == len(figures)
    assert not re.search(r"<img|src=|@import|<link|<script|url\((?!#)", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    assert all(f"](figures/{name}.svg)" in text for name in figures)
    assert {path.stem for path in (tmp_path / "out" / "data").glob("*.json")} == figures
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert len(headings) == page.count("<h2 ") == page.count("<li><a ") == 16
    whole = next(r for r in found["routers"]["records"] if r["domain"] == r["phase"] == r["layer"] == "all")
    assert f"{whole['k']:.3f}" in (tmp_path / "out" / "data" / "claims.csv").read_text()
    readings = dict(
        line.split(",", 1) for line in (tmp_path / "out" / "data" / "readings.csv").read_text().split("\n") if line
    )
    assert readings["printed"].startswith("1.00,100.0%")
    tables = {path.stem for path in (tmp_path / "out" / "data").glob("*.csv")}
    assert tables >= {"load", "accuracy-letters", "experts", "latency-groups", "variance", "padding", "parser", "edges"}
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
    return Study(engine, six_benchmarks(data, quick=True), out, quick=True, seed=seed).run(Progress())


def test_answers_are_those_of_the_evaluation(engine: Engine, measured: Measured) -> None:
    records = measured[1]["scores"]["records"]
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
    kill: int, engine: Engine, data: Path, measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {**measured[1], "latency": {}}  # the one part that no two runs agree on
    monkeypatch.setattr(Study, "_latency", lambda *_: {})
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


def test_times_are_measured_once(engine: Engine, data: Path, measured: Measured) -> None:
    folder, found = measured
    assert len(found["latency"]["records"]) == (len(TASKS) + 1) * 4 * 3
    assert measure(engine, data, folder) == found


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


def test_arms_take_turns_on_the_same_tokens(engine: Engine, tmp_path: Path) -> None:
    seen: list[tuple[str, str, tuple[int, ...]]] = []

    @dataclass(frozen=True, kw_only=True)
    class Watched(TopK):
        name: str

        def route(self, logits_TE: torch.Tensor, context: Any) -> Routing:
            if context.layer == 0:
                seen.append((self.name, context.phase, tuple(context.ids_T.tolist())))
            return super().route(logits_TE, context)

    arms = {"a": Watched(name="a"), "b": Watched(name="b"), "c": Masked()}
    prompts = {"x": [[5, 6, 7, 8, 9, 10], [11] * 7, [12] * 8], "y": [[1, 2, 3], [20] * 9]}
    path = tmp_path / "times.jsonl"
    found = block_latency(engine, arms, prompts, 2, 2, 0, Journal(path, "x"))
    records = {(r["group"], r["arm"], r["phase"]): r for r in found}
    assert set(records) == set(product(("x", "y", "all"), "abc", ("prefill", "decode", "all")))
    assert all(0 < r["low"] <= r["median"] <= r["high"] and r["mean_k"] == 8 for r in records.values())
    assert all(records[group, "a", "all"]["change"] == 0 for group in prompts)
    # Prompts side by side but for their last four tokens, which follow one by one.
    assert [ids for _, _, ids in seen[:5]] == [(5, 6, 11, 11, 11), (7, 11), (8, 11), (9, 11), (10, 11)]
    for name in "ab":
        rounds = [ids for other, phase, ids in seen if other == name and phase == "prefill"]
        first = (5, 6, 11, 11, 11)
        assert rounds == [first, first, (20,) * 5, (12,) * 4 + (5, 6), (20,) * 5]  # the first one does not count
    assert [name for name, phase, _ in seen if phase == "prefill"][2:] == ["a", "b", "a", "b", "b", "a", "b", "a"]
    calls = len(seen)
    assert block_latency(engine, arms, prompts, 2, 2, 0, Journal(path, "x")) == found  # taken from the file
    assert len(seen) == calls + 10  # but for the first one
    assert records["x", "a", "decode"]["tokens"] == 2
    assert records["y", "a", "decode"]["idle"] == (64 - 8) / 64  # one token, eight experts
    mixed = mean(records[group, "b", "prefill"]["median"] for group in prompts)
    assert records["all", "b", "prefill"]["low"] <= 2 * mixed


def test_sample_curves_are_the_first_of_each_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "CURVES", 6)
    logits: dict[int, torch.Tensor] = {}

    class Logits(Probe):
        def routed(self, layer: int, routing: Routing, logits_TE: torch.Tensor) -> None:
            logits[layer] = logits_TE

    ids = [9, 10, 11, 12, 13, 14, 15, 16, 17]
    with torch.inference_mode():
        engine.model.forward(Batch(torch.tensor(ids), [len(ids)]), TopK(), Logits())
    found = sample_curves(engine, ids)
    assert len(found) == engine.config.num_layers
    for layer, curves in enumerate(found):
        assert torch.equal(curves, rank(logits[layer])[0][:6])


def test_padding_is_counted_in_batches_of_twenty() -> None:
    assert padding([3, 5]) == {"tokens": 8, "pads": 2}
    assert padding([3] * 20 + [1, 9]) == {"tokens": 70, "pads": 8}
    assert padding([7]) == {"tokens": 7, "pads": 0}


def test_what_the_papers_parser_can_read(data: Path) -> None:
    """Of the hand-made ARC items, those with the keys 1 and E are out of its reach."""
    letters = prepare(TASKS["arc_easy"], data, protocol="letters").items
    items = [item for item in letters if isinstance(item, LetterPrompt)]
    assert within_reach(items) == {"items": 4, "right": 2, "quoted": 0}
    quoting = replace(items[0], prompt=f"Question: Answer: C or not?{items[0].prompt}")
    assert within_reach([quoting]) == {"items": 1, "right": 0, "quoted": 1}


def test_own_items_stand_in_for_the_benchmarks(cli: Cli, model: Path, tmp_path: Path) -> None:
    run = cli("paper", "-m", str(model), "--out", str(tmp_path), "--quick")
    assert run.code == 0
    assert "without --data the embedded model's own cloze items stand in" in run.err
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "own cloze items, which stand in for the six benchmarks" in page
    assert "| stories " in page


def test_own_items_are_what_compare_scores(engine: Engine) -> None:
    """The same passages, endings and white space between them as minimoe.items, which reads the files by itself."""
    made = own_items(quick=False)
    (letters,), (cloze,) = made.letters, made.cloze
    place = 0
    for path in sorted((resolve("tiny") / "cloze").glob("*.jsonl")):
        for item in cloze_items(engine, path, limit=3):
            ours = cloze.items[place]
            assert isinstance(ours, RequestSet)
            pairs = [cut(engine.tokenizer, *pair) for pair in zip(ours.contexts(), ours.continuations, strict=True)]
            assert [context for context, _ in pairs] == item.contexts
            assert [ids for _, ids in pairs] == item.continuations
            assert ours.gold == item.label
            place += 1
        place += len(made.groups[path.stem]) - 3
    assert place == len(cloze.items) == len(letters.items)


def test_the_estimate_falls_as_parts_are_done(engine: Engine, data: Path, measured: Measured, tmp_path: Path) -> None:
    one = Study(engine, six_benchmarks(data, quick=True), tmp_path, quick=True)
    before = seconds(one)
    shutil.copytree(measured[0] / "parts", tmp_path / "parts")
    assert seconds(one) == 0 < before
    for name in ("scores.json", "latency.json"):
        (tmp_path / "parts" / name).unlink()
    assert 0 < seconds(one) < before  # all answers are in the log: what is left is the latency


def test_the_verdict_says_what_the_numbers_say(measured: Measured) -> None:
    found = copy.deepcopy(measured[1])
    of = {(r["protocol"], r["parser"], r["router"], r["task"]): r for r in found["scores"]["records"]}
    tail, head = (of["cloze", None, rule, "mmlu"] for rule in ("random_tail", "random_head"))
    tail |= {"change": -0.011, "change_interval": [-0.02, 0.001]}
    head |= {"change": -0.05, "change_interval": [-0.06, -0.04]}
    told = " ".join(verdict(found))
    assert "after the elbow do not change accuracy on MMLU (-1.1%, 95 % -2.0% to +0.1%)" in told
    assert "before it lower it (-5.0%, 95 % -6.0% to -4.0%)" in told
    whole = next(r for r in found["routers"]["records"] if r["domain"] == r["phase"] == r["layer"] == "all")
    whole |= {"k": 7.0, "k_low": 6.9, "k_high": 7.1, "null_k": 7.5}
    assert "The mean k is 7.00, below the 7.50" in " ".join(verdict(found))


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
    assert '<svg role="img" aria-label="A &quot;caption&quot;"' in page
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


def test_another_study_is_not_overwritten(engine: Engine, data: Path, measured: Measured) -> None:
    kept = measured[0] / "parts" / "routers.json"
    before = kept.read_bytes()
    with pytest.raises(InputError, match="is of another study"):
        measure(engine, data, measured[0], seed=1)
    assert kept.read_bytes() == before
