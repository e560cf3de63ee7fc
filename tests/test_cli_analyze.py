"""minimoe analyze: what it writes and says, and what it refuses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Cli, assert_one_sentence
from fixtures import SENTENCES

import minimoe
import minimoe.engine
from minimoe.analysis.run import read_analysis
from minimoe.analysis.summary import FAVOURITES

FIGURES = {"k", "curves", "angles", "load", "coactivation", "specialisation", "bounds", "domains", "saturation"}


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    (tmp_path / "tales.txt").write_text(" ".join(SENTENCES[:3]) * 3, "utf-8")
    (tmp_path / "other.txt").write_text(" ".join(SENTENCES[3:]) * 3, "utf-8")
    return [f"{tmp_path}/tales.txt", f"talk={tmp_path}/other.txt"]


def test_everything_is_written_and_told(cli: Cli, folder: Path, texts: list[str], tmp_path: Path) -> None:
    words = ["analyze", *texts, "-m", folder, "-o", tmp_path / "out", "--window", "20", "--new-tokens", "2"]
    words += ["--versus", "top_k"]
    run = cli(*words)
    assert run.code == 0
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == FIGURES
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "out").glob("*.png"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    analysis = read_analysis(tmp_path / "out" / "analysis.npz")
    check(summary, analysis.arrays)
    for heading in ("elbow on", "## Load", "## Domains and phases", "## What experts are for"):
        assert heading in run.out
    assert "written to" in run.err
    # The same command again reads what is there, and --json is the summary.
    again = cli(*words, "--json", "--no-figures")
    assert again.document == summary


def check(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Figures of the summary against the arrays, by other ways than its own."""
    records = {(r["domain"], r["phase"], r["layer"]): r for r in summary["records"]}
    assert len(records) == len(summary["records"]) == 3 * 3 * 4
    for (domain, phase, layer), r in records.items():
        g = [0, 1] if domain == "all" else [["tales", "talk"].index(domain)]
        f = [0, 1] if phase == "all" else [["prefill", "decode"].index(phase)]
        i = [0, 1, 2] if layer == "all" else [layer]
        cell = {name: array[np.ix_(g, f, i)].sum((0, 1, 2)) for name, array in arrays.items() if "_GFL" in name}
        tokens = arrays["tokens_GF"][np.ix_(g, f)].sum()
        assert r["curves"] == tokens * len(i)
        assert r["k"] == pytest.approx(cell["load_GFLE"].sum() / r["curves"])
        assert r["k"] == pytest.approx((cell["k_GFLJ"] * np.arange(65)).sum() / r["curves"])
        assert r["elbow"] == pytest.approx((cell["elbow_GFLE"] * np.arange(64)).sum() / r["curves"])
        assert r["sharp"] == pytest.approx(cell["angle_GFLA"][:270].sum() / r["curves"], abs=0.02)
        assert r["k_low"] <= r["k"] <= r["k_high"]
        assert r["saturation"] == pytest.approx(cell["shared_GFL"] / cell["other_GFL"])
        assert r["level"] == 0
        assert 1 <= r["null_k"] <= 8
        if layer != "all":
            assert r["within_bounds"]
            assert r["delta"] == pytest.approx(1 - r["k"] / 8)
            assert r["load_dead"] == (cell["load_GFLE"] == 0).sum()
    assert [layer["layer"] for layer in summary["layers"]] == [0, 1, 2]
    for layer in summary["layers"]:
        assert [expert["expert"] for expert in layer["experts"]] == list(range(64))
        for expert in layer["experts"]:
            assert len(expert["tokens"]) <= FAVOURITES
            assert expert["uses"] == arrays["load_GFLE"][:, :, layer["layer"], expert["expert"]].sum()
            for word in expert["tokens"]:
                used = arrays["words_LEV"][layer["layer"], expert["expert"], word["id"]]
                assert word["share"] == pytest.approx(used / arrays["seen_V"][word["id"]])
    for layer in summary["domains"]:
        assert set(layer["favourite"]) == {"tales", "talk"}
        assert 0 <= layer["information"] <= 1


def test_the_bounds_hold_on_every_layer_of_the_embedded_model(cli: Cli, texts: list[str], tmp_path: Path) -> None:
    run = cli("analyze", *texts, "-o", tmp_path / "out", "--window", "32", "--json", "--no-figures")
    layers = [r for r in run.document["records"] if r["layer"] != "all"]
    assert len(layers) == minimoe.load("tiny").config.num_layers * 3 * 2
    assert all(r["within_bounds"] and r["l1"] <= r["l1_bound"] for r in layers)


def test_rules_that_add_experts_have_no_bounds(cli: Cli, folder: Path, texts: list[str], tmp_path: Path) -> None:
    words = ["analyze", texts[0], "-m", folder, "-o", tmp_path / "out", "--window", "32", "-r", "random", "--json"]
    run = cli(*words)
    layers = [r for r in run.document["records"] if r["layer"] != "all"]
    assert all("l1" not in r and r["outside"] > 0 for r in layers)
    assert "bounds" not in {path.stem for path in (tmp_path / "out").glob("*.png")}


def test_adjacent_pairs_are_shown_on_request(cli: Cli, folder: Path, texts: list[str], tmp_path: Path) -> None:
    words = ["analyze", texts[0], "-m", folder, "-o", tmp_path / "out", "--window", "32", "--no-figures"]
    layer = json.loads(cli(*words, "--json").out)["layers"][0]
    for option, key in (("--no-adjacent", "coactivation"), ("--adjacent", "coactivation_adjacent")):
        pair = layer[key][0]
        assert f"{pair['expert']} with {pair['with']}: {pair['share']:.0%}" in cli(*words, option).out


def test_without_matplotlib_the_analysis_is_kept(
    cli: Cli, folder: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = cli("analyze", texts[0], "-m", folder, "-o", tmp_path / "out", "--window", "32")
    assert run.code == 0
    assert "pip install 'minimoe[plot]'" in run.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"analysis.npz", "summary.json"}


def test_one_expert_has_no_elbow(cli: Cli, checkpoint: Any, texts: list[str], tmp_path: Path) -> None:
    run = cli("analyze", texts[0], "-m", checkpoint("one_expert"), "-o", tmp_path / "out", "--window", "32", "--json")
    assert run.code == 0
    record = run.document["records"][0]
    assert record["k"] == 1
    assert record["level"] == record["curves"]
    assert record["angle"] is None
    assert not math.isnan(record["null_k"])


BAD = {
    "no text": (["--window", "8"], "TEXT"),
    "missing": (["absent.txt", "--window", "8"], "absent.txt cannot be read"),
    "empty": (["empty.txt"], "empty.txt is empty"),
    "blank": (["blank.txt", "--window", "8"], "nothing but white space"),
    "twice": (["a.txt", "a=b.txt"], "two texts are called a"),
    "window": (["a.txt", "--window", "4000"], "do not fit the model's context of 128"),
    "new tokens": (["a.txt", "--window", "100", "--new-tokens", "50"], "do not fit the model's context of 128"),
    "too many new tokens": (
        ["a.txt", "--new-tokens", "128"],
        "leave no room for a window in the model's context of 128",
    ),
    "rule": (["a.txt", "--router", "elbo"], "elbow"),
    "other rule": (["a.txt", "--versus", "nothing"], "nothing"),
    "calibration": (["a.txt", "--router", "skip"], "calibrat"),
    "other model": (["a.txt", "--versus-model", "absent/model/x"], "absent/model/x"),
    "out": (["a.txt", "--out", "a.txt"], "needs the name of a folder"),
    "domain": (["all=a.txt"], "no domain can be called 'all'"),
    "limit": (["a.txt", "--limit", "99999999999999999999"], "limit"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(
    case: str, cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"a.txt": "a fox", "b.txt": "an owl", "empty.txt": "", "blank.txt": " \n"}.items():
        Path(name).write_text(text)
    words, part = BAD[case]
    out = [] if "--out" in words else ["--out", "out"]
    run = cli("analyze", *words, "-m", folder, *out)
    if case == "no text":
        assert (run.code, run.out) == (2, "")
        assert "Traceback" not in run.err
        return
    assert_one_sentence(run)
    assert part in run.err
    assert not (tmp_path / "out" / "analysis.npz").exists()


def test_a_window_counts_once_in_what_takes_layers_together(
    cli: Cli, folder: Path, texts: list[str], tmp_path: Path
) -> None:
    words = ["analyze", texts[0], "-m", folder, "-o", tmp_path / "out", "--window", "32", "--no-figures", "--json"]
    records = {r["layer"]: r for r in cli(*words, "--limit", "1").document["records"] if r["phase"] == "all"}
    assert all(records[layer]["k_low"] is None for layer in ("all", 0, 1, 2))


def test_an_edited_rule_is_counted_anew(cli: Cli, folder: Path, texts: list[str], tmp_path: Path) -> None:
    rule = tmp_path / "rule.py"
    words = ["analyze", texts[0], "-m", folder, "-o", tmp_path / "out", "--window", "32", "--no-figures"]
    for k in (2, 5):
        rule.write_text(
            "from minimoe.routers import PrefixRouter\n"
            f"class R(PrefixRouter):\n    def count(self, p, c):\n        return (p[:, 0] * 0).long() + {k}\n"
        )
        run = cli(*words, "-r", f"{rule}:R")
    assert_one_sentence(run)
    assert "is another analysis" in run.err


@pytest.mark.parametrize("name", ["summary.json", "analysis.npz.part", "analysis.npz"])
def test_places_that_cannot_be_written_are_found_before_the_work(
    name: str, cli: Cli, folder: Path, texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    assert_one_sentence(cli("analyze", texts[0], "-m", folder, "-o", tmp_path / "out", "--window", "32"))


def test_a_damaged_analysis_is_named(cli: Cli, folder: Path, texts: list[str], tmp_path: Path) -> None:
    words = ["analyze", texts[0], "-m", folder, "-o", tmp_path / "out", "--window", "32", "--no-figures"]
    cli(*words)
    path = tmp_path / "out" / "analysis.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :: 997] = b"\0" * len(content[len(content) // 2 :: 997])
    path.write_bytes(content)
    run = cli(*words)
    assert_one_sentence(run)
    assert "analysis.npz is no analysis" in run.err


def test_other_work_is_kept(cli: Cli, folder: Path, texts: list[str], tmp_path: Path) -> None:
    words = ["analyze", "-m", folder, "-o", tmp_path / "out", "--window", "32", "--no-figures"]
    cli(*words, texts[0])
    before = (tmp_path / "out" / "analysis.npz").read_bytes()
    run = cli(*words, texts[1])
    assert_one_sentence(run)
    assert "is another analysis" in run.err
    assert (tmp_path / "out" / "analysis.npz").read_bytes() == before


@pytest.mark.parametrize(("name", "content"), [("a.txt", b"a fox \xff"), ("a.xz", b"a fox")])
def test_what_is_no_text_is_refused_before_anything_is_made(
    name: str, content: bytes, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minimoe.engine, "load", None)
    (tmp_path / name).write_bytes(content)
    assert_one_sentence(cli("analyze", tmp_path / name, "-o", tmp_path / "out"))
    assert not (tmp_path / "out").exists()
