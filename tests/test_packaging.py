"""What is installed: a wheel holds the package, the embedded model and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a wheel that is built from a copy of the sources."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("minimoe", "weights"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("work", "__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_the_embedded_model_is_in_the_wheel(wheel: list[str]) -> None:
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {f"minimoe/weights/tiny/{name}" for name in files} <= set(wheel)


def test_all_of_the_kernels_are_built_and_packed() -> None:
    """A source distribution holds what is listed; a header that is not would be missed without a word."""
    (kernels,) = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["ext-modules"]
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "minimoe" / "native").iterdir()}
    assert set(kernels["sources"]) == {name for name in files if name.endswith(".cpp")}
    assert set(kernels["depends"]) == {name for name in files if name.endswith((".h", ".inl"))}


def test_every_module_is_in_the_wheel(wheel: list[str]) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "minimoe").rglob("*.py")}
    assert {name for name in wheel if name.endswith(".py")} == modules
