"""`minimoe routers`: what every rule says of itself, and its picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import Cli

import minimoe
import minimoe.engine
from minimoe.cli import pictures
from minimoe.routers import ROUTERS, PrefixRouter
from minimoe.routers.spec import parameters

# routers and download.


def test_routers_lists_every_rule_with_its_keys(cli: Cli) -> None:
    rules = cli("routers", "--json").document["routers"]
    assert [rule["name"] for rule in rules] == list(ROUTERS)
    text = cli("routers").out
    for rule in rules:
        known = parameters(ROUTERS[rule["name"]])
        defaults = {k: None if p.default is p.empty else p.default for k, p in known.items()}
        assert {key["name"]: key["default"] for key in rule["keys"]} == defaults
        assert rule["summary"].endswith(".")
        assert rule["formula"].startswith("k = ")
        assert rule["source"]
        assert all(key["help"] for key in rule["keys"])
        assert rule["name"] in text
        assert rule["summary"] in text
        assert rule["formula"] in text
        assert rule["sees"] == ROUTERS[rule["name"]].sees
        assert rule["needs"] == ROUTERS[rule["name"]].needs
    assert "p=0.5" in text


PREFIX = [name for name, rule in ROUTERS.items() if issubclass(rule, PrefixRouter)]


@pytest.mark.parametrize("spec", [*PREFIX, "elbow:cap=64", "top_p:p=0.9,cap=64", "top_k:k=64", "min-p"])
def test_one_rule_is_drawn_with_what_it_keeps(cli: Cli, spec: str) -> None:
    examples = cli("routers", spec, "--json").document["examples"]
    run = cli("routers", spec)
    assert (run.code, run.err) == (0, "")
    drawn = [line.strip() for line in run.out.splitlines() if re.search(r"-\| k = ", line)]
    bases = [line[6:] for line in run.out.splitlines() if re.fullmatch(r" {6}#[#.]{63}", line)]
    assert len(drawn) == len(bases) == len(examples) == 2
    for example, cut, base in zip(examples, drawn, bases, strict=True):
        k = example["k"]
        assert example["probabilities"] == sorted(example["probabilities"], reverse=True)
        assert sum(example["probabilities"]) == pytest.approx(1)
        assert example["kept"] == list(range(k))
        assert example["mass"] == pytest.approx(sum(example["probabilities"][:k]))
        assert base == "#" * k + "." * (64 - k)
        assert cut == "-" * k + f"| k = {k} of 64"


def test_routers_md_is_what_the_rules_say_of_themselves(cli: Cli) -> None:
    written = (Path(minimoe.__file__).parents[1] / "ROUTERS.md").read_text("utf-8")
    assert cli("routers", "--markdown").out == written, "run: python -m minimoe routers --markdown > ROUTERS.md"
    assert [line.removeprefix("## ") for line in written.splitlines() if line.startswith("## ")] == list(ROUTERS)
    assert cli("routers", "elbow", "--markdown").code == 2


@pytest.mark.parametrize("name", [name for name in ROUTERS if name not in PREFIX])
def test_a_rule_that_keeps_no_prefix_is_drawn_too(cli: Cli, name: str) -> None:
    run, document = cli("routers", name), cli("routers", name, "--json").document
    assert run.code == 0
    assert len(document["examples"]) == (0 if name == "replay" else 2)
    bases = [line[6:] for line in run.out.splitlines() if re.fullmatch(r" {6}[#.]{64}", line)]
    for example in document["examples"]:
        assert len(example["kept"]) == example["k"]
        assert example["mass"] == pytest.approx(sum(example["probabilities"][i] for i in example["kept"]))
    if name != "replay":
        assert [i for i, mark in enumerate(bases[-1]) if mark == "#"] == document["examples"][-1]["kept"]


def test_the_examples_show_the_rules_apart(cli: Cli) -> None:
    def k(spec: str) -> list[int]:
        return [example["k"] for example in cli("routers", spec, "--json").document["examples"]]

    assert k("top_k") == [8, 8]
    doubt, sure = k("elbow:cap=64")
    assert sure < 8 < doubt
    assert k("elbow") == [8, sure]


def test_bars_are_as_high_as_their_probability() -> None:
    rows = pictures.curve([0.5, 0.25, 0.2, 0.05], kept=[0, 1]).plain.splitlines()
    columns = ["".join(row[6 + rank : 7 + rank] for row in rows[:-1]).strip() for rank in range(4)]
    assert columns == ["#" * 10, "#" * 5, "." * 4, "."]
    assert rows[0].startswith("0.500 ")
    assert rows[-1] == "      --| k = 2 of 4"
