"""calibrate: what it fits against plain loops over recorded probabilities, and against what the rule then does."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import SENTENCES
from torch import Tensor

import minimoe
from minimoe import fitting
from minimoe.cli import main
from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.items import Item, text_items
from minimoe.probe import Probe
from minimoe.routers.spec import parse_router
from minimoe.routing import Routing
from minimoe.snapshot import write_snapshot

TEXT = " ".join(SENTENCES)


class Logits(Probe):
    def __init__(self) -> None:
        self.probs: dict[int, list[list[float]]] = {}
        self.k: list[int] = []

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        self.probs.setdefault(layer, []).extend(logits_TE.float().softmax(-1).tolist())
        self.k += routing.k_T.tolist()


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    return minimoe.load(checkpoint("top8_of_64"))


@pytest.fixture(scope="module")
def items(engine: Engine) -> list[Item]:
    return text_items(engine, TEXT, 24)


def look(engine: Engine, items: list[Item], spec: str = "top_k") -> Logits:
    seen = Logits()
    engine.router = parse_router(spec)
    for item in items:
        # score leaves the last token out, which no window needs; here it is run as well
        engine.score([*item.contexts[0], *item.continuations[0]], [0], probe=seen)
    engine.router = parse_router("top_k")
    return seen


def test_beta_is_the_median_ratio_of_each_layer(engine: Engine, items: list[Item], tmp_path: Path) -> None:
    values = fitting.calibrate(engine, "skip", items, tmp_path / "skip.json")["values"]
    for layer, rows in look(engine, items).probs.items():
        tops = [sorted(row, reverse=True)[:8] for row in rows]
        assert values[layer] == pytest.approx(np.median([p / top[0] for top in tops for p in top[1:]]), rel=3e-2)
        kept = [p >= values[layer] * top[0] for top in tops for p in top[1:]]
        assert np.mean(kept) == pytest.approx(0.5, abs=0.01)


def test_thresholds_give_each_expert_its_share(engine: Engine, items: list[Item], tmp_path: Path) -> None:
    values = fitting.calibrate(engine, "top_any", items, tmp_path / "any.json", mean_k=6)["values"]
    for layer, rows in look(engine, items).probs.items():
        p = np.array(rows)
        load = np.bincount(np.argsort(-p, axis=1, kind="stable")[:, :8].ravel(), minlength=64)
        for expert in range(64):
            takes = (p[:, expert] >= values[layer][expert]).sum()
            assert takes >= 0.75 * load[expert] - 1e-9
            assert (p[:, expert] >= 1.006 * values[layer][expert]).sum() < max(1, 0.75 * load[expert])


@pytest.mark.parametrize("budget", [1, 1.5, 2, 3])
def test_numbers_for_the_layers_are_the_best_of_all(budget: float) -> None:
    mass = np.array([[90, 40, 10], [80, 50, 45], [99, 5, 4], [60, 30, 2]])
    best = max(
        (k for k in product((1, 2, 3), repeat=4) if sum(k) <= budget * 4),
        key=lambda k: sum(mass[layer, :n].sum() for layer, n in enumerate(k)),
    )
    assert fitting.fit_layer_k({"mass_LK": mass}, budget) == list(best)


@pytest.mark.parametrize("rule", fitting.FITTED)
def test_the_rule_reads_what_was_fitted(rule: str, engine: Engine, items: list[Item], tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    mean_k = None if rule == "skip" else 5.0
    document = fitting.calibrate(engine, rule, items, path, mean_k=mean_k)
    assert json.loads(path.read_text()) == document
    assert not list(tmp_path.glob("*.part*"))
    k = np.mean(look(engine, items, f"{rule}:file={path}").k)
    assert k == pytest.approx({"skip": 4.5, "top_any": 5, "layer_k": 5}[rule], rel=0.25)


@pytest.mark.parametrize("kill", [1, 2, 4, 5])
def test_killed_anywhere_it_ends_with_the_same_file(
    kill: int, engine: Engine, items: list[Item], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "SAVE_EVERY", 2)
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    fitting.calibrate(engine, "top_any", items, whole)
    runs = 0

    def ran() -> None:
        nonlocal runs
        runs += 1
        if runs == kill:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitting.calibrate(engine, "top_any", items, cut, ran=ran)
    assert not cut.exists()
    fitting.calibrate(engine, "top_any", items, cut, ran=ran)
    assert runs == len(items) + kill % 2  # what had been saved was not run again
    assert cut.read_bytes() == whole.read_bytes()


def test_a_state_of_other_work_or_a_broken_one_is_not_used(engine: Engine, items: list[Item], tmp_path: Path) -> None:
    path, part = tmp_path / "a.json", tmp_path / "a.json.part"
    expected = fitting.calibrate(engine, "skip", items, path)
    counts = fitting.Counts(3, 64, 8)
    counts.arrays["ratio_LB"] += 1
    write_snapshot(part, counts.arrays, "other work", 2)
    assert fitting.calibrate(engine, "skip", items, path) == expected
    part.write_bytes(b"PK\x03\x04 broken")
    assert fitting.calibrate(engine, "skip", items, path) == expected


@pytest.mark.parametrize(
    ("rule", "mean_k", "sentence"),
    [
        ("elbow", None, "nothing to calibrate in 'elbow'"),
        ("skip", 4.0, "takes the median"),
        ("layer_k", 9.0, "between 1 and the model's own 8"),
        ("top_any", 0.5, "between 1 and the model's own, not 0.5"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    rule: str, mean_k: float | None, sentence: str, engine: Engine, items: list[Item], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=sentence):
        fitting.calibrate(engine, rule, items, tmp_path / "x.json", mean_k=mean_k)


def test_the_verb_writes_a_file_that_generate_takes(
    capsys: pytest.CaptureFixture[str], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "fit.json"
    text.write_text(TEXT)

    def run(*words: Any) -> int:
        return main([str(word) for word in words])

    common = ("-m", checkpoint())
    assert run("calibrate", "skip", "--text", text, "--out", out, "--window", 50, *common) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert run("generate", "a fox", "-n", 2, "--router", f"skip:file={out}", *common) == 0
    assert run("calibrate", "skip", "--text", tmp_path / "absent", "--out", out, *common) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "told"), [(3, True), (900, False)])
def test_a_short_text_is_told_of(
    words: int, told: bool, capsys: pytest.CaptureFixture[str], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "fit.json"
    text.write_text("who " * words)
    command = ["calibrate", "skip", "--text", text, "--out", out, "--window", 100, "-m", checkpoint()]
    assert main([str(word) for word in command]) == 0
    assert ("what is fitted to so few" in capsys.readouterr().err) == told
