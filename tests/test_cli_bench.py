"""`minimoe bench`: its rows and its lists."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from command_line import Cli
from hypothesis import given, settings
from hypothesis import strategies as st

from minimoe.cli.bench import split_specs, whole_numbers
from minimoe.cli.options import count
from minimoe.errors import InputError
from minimoe.routers import ROUTERS
from tests.native_sets import needs_kernels

# bench.


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--routers", "top_k,union", "-n", 1), True),
        (("--routers", "top_k,min_p", "-n", 1), False),
        (("--routers", "union,mixed_k", "-n", 1), False),
        (("--routers", "top_k,union", "-n", 0), False),
        (("--routers", "top_k,union", "-n", 1, "--backends", "bucketed"), False),
    ],
)
@needs_kernels
def test_steps_that_ask_python_are_told_of_where_others_do_not(
    cli: Cli, folder: Path, words: tuple[object, ...], told: bool
) -> None:
    backend = () if "--backends" in words else ("--backends", "native")
    run = cli("bench", "-m", folder, "-p", 2, "-r", 1, *words, *backend, "--json")
    assert run.document["rows"]
    assert ("Python is asked about union" in run.err) == told


def test_bench_json(cli: Cli, folder: Path) -> None:
    words = ("-p", "2,4", "-n", "1", "-b", "1,2", "-r", 3, "--routers", "top_k,elbow:cap=4", "--seed", 7)
    document = cli("bench", "-m", folder, *words, "--backends", "bucketed,reference", "--json").document
    rows = document["rows"]
    assert [(row["test"], row["batch"], row["backend"], row["router"]) for row in rows] == [
        (test, batch, backend, router)
        for batch, test in [(1, "pp2"), (1, "pp4"), (2, "pp2"), (2, "pp4"), (1, "tg1"), (2, "tg1")]
        for backend in ("bucketed", "reference")
        for router in ("top_k", "elbow:cap=4")
    ]
    for row in rows:
        tokens = int(row["test"][2:]) * row["batch"]
        speeds = sorted(tokens / second for second in row["seconds"])
        assert len(speeds) == 3
        assert row["tokens_per_second"] == pytest.approx(speeds[1])
        assert row["low"] == pytest.approx((speeds[0] + speeds[1]) / 2)
        assert row["high"] == pytest.approx((speeds[1] + speeds[2]) / 2)
        assert row["mean_k"] == 8 if row["router"] == "top_k" else 1 <= row["mean_k"] <= 4
        assert (row["dtype"], row["model"]) == ("float32", str(folder))
    assert (document["repetitions"], document["seed"]) == (3, 7)


def test_bench_tables_hold_the_same_rows(cli: Cli, folder: Path) -> None:
    words = ("bench", "-m", folder, "-p", 4, "-n", 2, "-r", 1, "--router", "top_k", "--router", "top_p:p=0.5,cap=9")
    words += ("--backends", "bucketed")
    rows = list(csv.DictReader(io.StringIO(cli(*words, "-o", "csv").out)))
    shown = cli(*words)
    lines = shown.out.splitlines()
    assert shown.err == ""  # no bar
    assert len(rows) == 4
    assert len(lines) == 2 + 4
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) <= set("|-: ")
    assert [cell.strip() for cell in lines[0].strip("|").split("|")][4:9] == [
        "router",
        "threads",
        "test",
        "batch",
        "mean k",
    ]
    for row, line in zip(rows, lines[2:], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:1] + cells[2:8] == [
            row[key] for key in ("model", "dtype", "backend", "router", "threads", "test", "batch")
        ]
        assert cells[1] == count(int(row["parameters"]))
        assert cells[8] == f"{float(row['mean_k']):.2f}"
    assert [row["router"] for row in rows] == ["top_k", "top_p:p=0.5,cap=9"] * 2


NAMES = st.sampled_from([*ROUTERS, "./my_rule.py:Mine", "package.rules:Mine"])


KEYS = st.lists(st.builds("{}={}".format, st.sampled_from(["cap", "floor", "p"]), st.sampled_from(["0", "1", "0.5"])))


SPECS = st.builds(lambda name, keys: f"{name}:{','.join(keys)}" if keys else name, NAMES, KEYS)


@settings(deadline=None, max_examples=50)
@given(st.lists(SPECS, min_size=1, unique=True), st.sampled_from([",", ", "]))
def test_specs_split_where_they_were_joined(specs: list[str], comma: str) -> None:
    assert split_specs([comma.join(specs)]) == specs
    assert split_specs(specs) == specs


def test_whole_numbers() -> None:
    assert whole_numbers("-p", "128, 512,128", least=0) == [128, 512]
    for text in ("", "1,,2", "-1", "x", "1e3", "70000", "9" * 5000):
        with pytest.raises(InputError, match="-p takes whole numbers from 0"):
            whole_numbers("-p", text, least=0)
