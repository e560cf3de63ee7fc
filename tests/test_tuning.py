"""calibrate with a key: the mean k that a rule then has, read from recorded routings; and journals of work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Cli, assert_one_sentence
from fixtures import SENTENCES

import minimoe
from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.items import Item, text_items
from minimoe.journal import Journal
from minimoe.probe import RoutingRecorder
from minimoe.routers.spec import parse_router
from minimoe.tuning import key_of, tune

TEXT = " ".join(SENTENCES)

OWN = """
import torch
from minimoe.routers import PrefixRouter

class Falls(PrefixRouter):
    def __init__(self, steep: float = 1.0, cap: int = 8):
        super().__init__(cap=cap)
        object.__setattr__(self, "steep", steep)

    def count(self, sorted_probs_TE, context):
        return (sorted_probs_TE >= self.steep / 10).sum(1) if self.steep >= 1e-4 else 1 / 0

class Waves(Falls):
    def count(self, sorted_probs_TE, context):
        return torch.full((len(sorted_probs_TE),), 2 + int(abs(self.steep) in (0.25, 4.0)))

class Untold(Falls):
    def __init__(self, steep=1.0):
        super().__init__()
"""


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    return minimoe.load(checkpoint("top8_of_64"))


@pytest.fixture(scope="module")
def items(engine: Engine) -> list[Item]:
    return text_items(engine, TEXT, 24)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def mean_k(engine: Engine, items: list[Item], spec: str) -> float:
    recorder = RoutingRecorder(engine.config.num_layers)
    engine.router = parse_router(spec)
    for item in items:
        # score leaves the last token out, which no window needs; here it is run as well
        engine.score([*item.contexts[0], *item.continuations[0]], [0], probe=recorder)
    engine.router = parse_router("top_k")
    return float(np.mean([routing.k_T.numpy() for routing in recorder.routings()]))


@pytest.mark.parametrize(
    ("spec", "key", "wanted"),
    [
        ("top_p", "p", 3.0),
        ("top-p: cap=16,", "p", 12.0),
        ("min_p", "p", 5.0),
        ("threshold:renorm=kept", "p", 1.5),
        ("entropy", "scale", 4.0),
        ("skip", "beta", 6.0),
        ("top_any", "p", 20.0),
        ("mixed_k", "k", 2.5),
    ],
)
def test_the_mean_k_is_that_of_the_rule_that_is_named(
    spec: str, key: str, wanted: float, engine: Engine, items: list[Item], tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    document = tune(engine, spec, key_of(spec, key), wanted, items, path)
    assert json.loads(path.read_text()) == document
    assert document["mean_k"] == pytest.approx(wanted, rel=0.01)
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]
    if spec != "mixed_k":  # which draws
        assert mean_k(engine, items, document["router"]) == pytest.approx(document["mean_k"], abs=1e-9)


def test_a_users_own_rule_is_fitted_as_well(engine: Engine, items: list[Item], own: Path, cli: Cli) -> None:
    document = tune(engine, f"{own}:Falls:cap=5", "steep", 2.0, items, read=_guarded)
    assert document["router"].startswith(f"{own}:Falls:cap=5,steep=")
    assert mean_k(engine, items, document["router"]) == pytest.approx(2, rel=0.01)


def _guarded(spec: str) -> Any:
    from minimoe.cli.own_rule import read_router

    return read_router(spec)


def test_a_mean_k_that_cannot_be_had_is_refused_with_what_can(engine: Engine, items: list[Item], own: Path) -> None:
    with pytest.raises(InputError, match=r"mean k of threshold on this text is from 1 to 8; 8.5 cannot be reached"):
        tune(engine, "threshold", "p", 8.5, items)
    with pytest.raises(InputError, match=r"whatever sensitivity is; 5 cannot be reached"):
        tune(engine, "elbow", "sensitivity", 5.0, items)
    with pytest.raises(InputError, match=r"goes up and down with steep \(2.000 at -16, 3.000 at -4\)"):
        tune(engine, f"{own}:Waves", "steep", 2.5, items)


@pytest.mark.parametrize("kill", [1, 2, 8, 14])
def test_killed_anywhere_it_ends_with_the_same_file(
    kill: int, engine: Engine, items: list[Item], tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    counted: list[int] = []
    tune(engine, "top_p", "p", 4.0, items, whole, ran=lambda: counted.append(1))
    assert len(counted) > 14
    passes = 0

    def forward(*arguments: Any, **options: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == kill:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    original = engine.model.forward
    engine.model.forward = forward  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            tune(engine, "top_p", "p", 4.0, items, cut)
        assert not cut.exists()
        tune(engine, "top_p", "p", 4.0, items, cut)
    finally:
        engine.model.forward = original  # type: ignore[method-assign]
    assert passes == len(counted) + 1  # what was kept was not run again
    assert cut.read_bytes() == whole.read_bytes()


def test_a_journal_keeps_whole_lines_of_its_own_work_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    done: list[int] = []

    def piece(number: int) -> list[Any]:
        done.append(number)
        return [number, 0.1 + number, "é\u2028\n"]

    first = Journal(path, "mine")
    results = [first.once(lambda n=n: piece(n)) for n in range(3)]
    path.write_bytes(path.read_bytes()[:-4])  # a kill within the third line
    again = Journal(path, "mine")
    assert [again.once(lambda n=n: piece(n)) for n in range(4)][:3] == results
    assert done == [0, 1, 2, 2, 3]
    other = Journal(path, "other")
    assert other.once(lambda: "new") == "new"
    assert Journal(path, "other").once(lambda: "never") == "new"
    for theirs in (b"\xff no text", b"mine\n", b'{"a": 1}\n', b"[1, 2]\n"):
        path.write_bytes(theirs)
        with pytest.raises(InputError, match="move it away"):
            Journal(path, "other")
        assert path.read_bytes() == theirs
    assert Journal(None, "x").once(lambda: 5) == 5


def test_the_verb_prints_the_spec_to_use(cli: Cli, folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(TEXT)
    words = ("calibrate", "min-p", "--mean-k", 3, "--text", text, "-m", folder, "--window", 50)
    run = cli(*words, "--out", out)
    assert run.code == 0
    assert run.out.startswith("min_p:p=0.")
    assert json.loads(out.read_text())["router"] == run.out.strip()
    document = cli(*words, "--json").document
    assert document == json.loads(out.read_text())
    assert cli("generate", "a fox", "-n", 1, "-m", folder, "--router", run.out.strip()).code == 0


REFUSED: dict[str, tuple[str, str]] = {
    "no mean k": ("top_p", "say with --mean-k"),
    "no number": ("top_p --mean-k nan", "a number above 0"),
    "none": ("top_p --mean-k 0", "a number above 0"),
    "no key": ("max_gap --mean-k 3", "max_gap has no key that takes any number, so it cannot be fitted"),
    "whole numbers": ("top_k --key k --mean-k 3", "k of router top_k cannot be fitted"),
    "unknown key": ("top_p --key tau --mean-k 3", "no key 'tau'; those that take any number are p"),
    "unknown rule": ("elbw --mean-k 3", "unknown router 'elbw'"),
    "given twice": ("top_p:p=0.3 --mean-k 3", "p is given twice"),
    "bad keys": ("top_p:cap=0 --mean-k 3", "cap must be"),
    "without hints": ("{own}:Untold --mean-k 3", "has no key that takes any number, so it cannot be fitted"),
    "nowhere to go": ("layer_k --mean-k 3", "say with --out FILE"),
    "beta by layer": ("skip --mean-k 3 --out {out}", "give --key beta"),
    "below one": ("layer_k --mean-k 0.5 --out {out}", "between 1 and"),
    "empty": ("top_p --mean-k 3 --text {empty}", "the text is empty"),
    "no folder": ("top_p --mean-k 3 --out {out}/no/file", "there is no folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_a_model_is_loaded(
    case: str, cli: Cli, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("minimoe.cli.options.load_engine", load)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "empty.txt").write_text(" \n")
    line, sentence = REFUSED[case]
    words = line.format(own=own, out=tmp_path / "out.json", empty=tmp_path / "empty.txt").split()
    run = cli("calibrate", *words, *([] if "--text" in words else ["--text", tmp_path / "text.txt"]))
    assert_one_sentence(run)
    assert sentence in run.err
