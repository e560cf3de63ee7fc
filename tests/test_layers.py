"""Imports point one way: a module imports only from the rows below its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minimoe"

# The map of DESIGN.md, top to bottom. The profiler and its FLOP ledger are probes and need no engine.
ROWS = [
    {"__main__", "cli"},
    {"integrations", "paper"},
    {"analysis", "benchmark", "comparison", "evaluate", "fitting", "tuning"},
    {"items"},
    {"engine", "chat"},
    {"decoding", "generation", "packing", "scoring"},
    {"profiler", "flops", "model", "checkpoint", "hub", "tokenizer", "sampling"},
    {"weight_files", "read_ahead", "placing"},
    {"routers", "experts", "triton"},
    {"operations"},
    {"linear", "cache"},
    {"native"},
    {"recording", "journal", "snapshot"},
    {"routing", "prefix_rule", "probe", "config", "calibration", "curve"},
    {"errors", "intervals", "tables", "whole_file"},
]
ROW = {name: row for row, names in enumerate(ROWS) for name in names}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """The module or subpackage directly under minimoe that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The units that a file imports, also inside functions; imports for type checking alone do not count."""
    tree = ast.parse(path.read_text("utf-8"))
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module] if node.module != "minimoe" else [f"minimoe.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name and name.startswith("minimoe.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = unit(path)
    if own == "__init__":
        return
    for other in imported(path) - {own, "__version__"}:
        assert ROW[other] >= ROW[own], f"{own} (row {ROW[own]}) imports {other} (row {ROW[other]})"


def test_within_a_row_nothing_goes_round() -> None:
    """Neighbours in a row may use each other, but not in a circle."""
    graph = {unit(path): set() for path in modules()}
    for path in modules():
        graph[unit(path)] |= imported(path) - {unit(path), "__version__"}
    graph.pop("__init__", None)
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {name for name, needs in graph.items() if name not in done and needs <= done | {name}}
        assert ready, f"a circle among {sorted(set(graph) - done)}"
        done |= ready


@pytest.mark.parametrize("folder", ["experts", "routers"])
def test_plug_ins_know_only_their_base(folder: str) -> None:
    """Backends and rules never import each other."""
    for path in (PACKAGE / folder).glob("*.py"):
        if path.stem in ("__init__", "spec"):
            continue
        text = path.read_text("utf-8")
        siblings = {other.stem for other in path.parent.glob("*.py")} - {path.stem, "base", "random_slots", "__init__"}
        assert not any(f"minimoe.{folder}.{sibling} " in text for sibling in siblings), path


def test_importing_minimoe_is_light() -> None:
    """No torch, and nothing optional, until something is loaded."""
    code = "import sys, minimoe; print(sorted({'torch', 'transformers', 'triton', 'scipy'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
