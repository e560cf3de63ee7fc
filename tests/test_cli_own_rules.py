"""A user's own routing rule at the command line: it may fail, print and lie, and is told of."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from command_line import Cli, assert_one_sentence

import minimoe
from minimoe.routing import Routing
from tests.native_sets import needs_kernels

# A user's own rules.

HEAD = "import torch\nfrom minimoe.routers import Router, TopK\nfrom minimoe.routing import Routing\n"


OWN_RULES = {
    "raises at import": ("1 / 0\nclass Mine(TopK): pass", "ZeroDivisionError"),
    "exits at import": ("import sys; sys.exit(3)", "SystemExit"),
    "does not parse": ("class Mine(TopK) pass", "SyntaxError"),
    "raises when built": (
        "class Mine(Router):\n def __init__(self): raise KeyError('lost')\n route = None",
        "KeyError",
    ),
    "raises in route": ("class Mine(TopK):\n def route(self, x, context):\n  return 1 / 0", "line 6 of"),
    "exits in route": ("class Mine(TopK):\n def route(self, x, context): raise SystemExit(3)", "SystemExit"),
    "raises in count": ("class Mine(TopK):\n def count(self, p, context): return p.nonsense", "AttributeError"),
    "raises what is no Exception": (
        "class Mine(TopK):\n def route(self, x, context): raise GeneratorExit",
        "failed in line 5 of",
    ),
    "raises without a word": (
        "class Mine(TopK):\n def route(self, x, context): raise StopIteration",
        ": StopIteration.",
    ),
    "returns nothing": ("class Mine(TopK):\n def route(self, x, context): pass", "NoneType"),
    "routes too few tokens": (
        "class Mine(TopK):\n def route(self, x, context): return super().route(x, context).rows(slice(0, 1))",
        "was given logits",
    ),
    "names an expert that is not there": (
        "class Mine(TopK):\n"
        " def route(self, x, context):\n"
        "  r = super().route(x, context)\n"
        "  return Routing(r.experts_TK + 64, r.weights_TK, r.k_T, 64)",
        "broken Routing",
    ),
}


@pytest.mark.parametrize(("code", "named"), OWN_RULES.values(), ids=OWN_RULES)
def test_a_rule_that_fails_is_named_with_its_error(
    cli: Cli, folder: Path, tmp_path: Path, code: str, named: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + code)
    for verb in (("generate", "-n", 2), ("bench", "-p", 4, "-n", 0)):
        run = cli(*verb, "-m", folder, "--json", "--router", f"{file}:Mine")
        assert_one_sentence(run)
        assert str(file) in run.err
        assert named in run.err


LATER = {
    "nothing": ("None", "must return a Routing, not NoneType"),
    "other dtypes": (
        "Routing(r.experts_TK, r.weights_TK.double(), r.k_T, 64)",
        "broken Routing: a Routing holds int64",
    ),
    "other shapes": ("Routing(r.experts_TK, r.weights_TK, r.k_T[:0], 64)", "broken Routing: a Routing for"),
    "too few tokens": ("r.rows(slice(0, 0))", "was given logits"),
    "a k that is too large": ("Routing(r.experts_TK, r.weights_TK, r.k_T + 9, 64)", "the rule's Routing is broken"),
}


@pytest.mark.parametrize(("wrong", "named"), LATER.values(), ids=LATER)
@needs_kernels
def test_a_rule_that_breaks_when_it_has_been_tested_is_named_too(
    cli: Cli, folder: Path, tmp_path: Path, wrong: str, named: str
) -> None:
    file = tmp_path / "mine.py"
    code = "class Mine(TopK):\n calls = 0\n def route(self, x, context):\n  r = super().route(x, context)\n"
    code += f"  Mine.calls += 1\n  return r if Mine.calls < 60 else {wrong}"
    file.write_text(HEAD + code)
    run = cli("bench", "-m", folder, "-p", 0, "-n", 16, "-r", 2, "--backends", "native", "--router", f"{file}:Mine")
    assert_one_sentence(run)
    assert named in run.err


def test_how_often_an_own_rule_is_tested(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + "class Mine(TopK): pass")
    tested: list[Routing] = []
    monkeypatch.setattr(Routing, "check", lambda routing: tested.append(routing))
    layers, own = 3, ("-m", folder, "--router", f"{file}:Mine")
    cli("generate", "-n", 5, *own)
    assert len(tested) == layers * 5
    tested.clear()
    cli("bench", "-p", 4, "-n", 4, "-r", 2, *own)
    assert len(tested) == layers * 2


@pytest.mark.parametrize(
    "code",
    [
        "def count(self, p, context):\n  k = super().count(p, context)\n  p.zero_()\n  return k",
        "def count(self, p, context):\n  k = super().count(p, context)\n  p.resize_(0)\n  return k",
        "def route(self, x, context):\n  routing = super().route(x, context)\n  x.zero_()\n  return routing",
    ],
)
def test_what_a_rule_writes_into_what_it_is_given_changes_nothing(
    cli: Cli, folder: Path, tmp_path: Path, code: str
) -> None:
    file, words = tmp_path / "mine.py", ("generate", "The fox", "-n", 4, "-m", folder, "--routing", "--json")
    file.write_text(HEAD + f"class Mine(TopK):\n {code}")
    ours, theirs = (cli(*words, "-r", rule).document for rule in ("top_k", f"{file}:Mine"))
    assert (ours["tokens"], ours["routing"]) == (theirs["tokens"], theirs["routing"])
    spec = importlib.util.spec_from_file_location("mine_that_writes", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine = minimoe.load(folder, router=module.Mine())  # as in a program of one's own
    assert engine.generate("The fox", max_new_tokens=4).tokens == ours["tokens"]


def test_a_rule_that_works(cli: Cli, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + "class Mine(TopK):\n def limit(self, context): return 3")
    own = ("-m", folder, "-r", f"{file}:Mine")
    assert cli("generate", *own, "-n", 4, "--json").document["mean_k"] == 3
    words = ("-p", 4, "-n", 0, "-r", 1, "-o", "json", "--router", f"{file}:Mine")
    (row,) = cli("bench", "-m", folder, *words).document["rows"]
    assert (row["mean_k"], row["router"]) == (3, f"{file}:Mine")
    assert cli("routers", f"{file}:Mine", "--json").document["examples"][0]["k"] == 3


RULES = """
from minimoe.routers import PrefixRouter, Router
import minimoe
from minimoe.routing import Routing

print("imported")

class Talks(PrefixRouter):
    def count(self, sorted_probs_TE, context):
        print("routing")
        return sorted_probs_TE.argmax(1) + 1

class Lists(Router):
    def route(self, logits_TE, context):
        return Routing([[0]], None, None, logits_TE.shape[1])

class Quits(PrefixRouter):
    def __init__(self):
        raise SystemExit(3)

    def count(self, sorted_probs_TE, context):
        return sorted_probs_TE.argmax(1) + 1

class Odd(PrefixRouter):
    def __init__(self, far=float("inf"), kind=print):
        super().__init__()

    def count(self, sorted_probs_TE, context):
        return sorted_probs_TE.argmax(1) + 1
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    return path


def test_what_a_rule_prints_does_not_reach_stdout(cli: Cli, folder: Path, rules: Path) -> None:
    run = cli("generate", "Once", "-m", folder, "-r", f"{rules}:Talks", "-n", "2", "--json")
    assert run.code == 0
    assert len(json.loads(run.out)["tokens"]) == 2
    assert "routing" in run.err


@pytest.mark.parametrize(("name", "says"), [("Lists", "three tensors"), ("Quits", "SystemExit")])
def test_a_rule_that_misbehaves_is_told_in_a_sentence(
    cli: Cli, folder: Path, rules: Path, name: str, says: str
) -> None:
    run = cli("generate", "Once", "-m", folder, "-r", f"{rules}:{name}", "-n", "2")
    assert run.code == 2
    assert says in run.err
    assert "Traceback" not in run.err


def test_defaults_that_json_cannot_hold_are_shown_as_text(cli: Cli, rules: Path) -> None:
    run = cli("routers", f"{rules}:Odd", "--json")
    defaults = {key["name"]: key["default"] for key in json.loads(run.out)["keys"]}
    assert defaults["far"] == "inf"
    assert "print" in defaults["kind"]
