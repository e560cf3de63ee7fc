"""What all tests share: checkpoints that are written once a session, and the command line in this process."""

from __future__ import annotations

import inspect
import io
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import accelerator  # noqa: F401  (comes before whatever may import triton)
import pytest
import torch
from command_line import Cli, Run
from fixtures import SMALL, edit_json, write_checkpoint
from hypothesis import HealthCheck, settings

from minimoe.cli import main

# The shapes are tiny: a second thread would only wait for the first.
torch.set_num_threads(1)
# A busy machine is no fault of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a variant (and options of write_checkpoint) to the folder of its checkpoint."""

    @cache
    def folder(variant: str = "base", **options: Any) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp(variant), variant, **options)

    return folder


@pytest.fixture(scope="session")
def bench_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint as the benchmarks write it."""
    from bench.synthetic import Recipe, write  # here, for the kernels' tests run without the benchmarks as well

    folder = tmp_path_factory.mktemp("synthetic") / "small"
    assert write(folder, Recipe(changes=SMALL))
    return folder


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Engines set the number of threads of their process, which here is everybody's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter in half the time: it looks through all of triton.language whenever one kernel function calls
    another, and here only once."""
    import triton.language as tl
    from triton.runtime import interpreter

    builtins: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            builtins[package] = [item for item in inspect.getmembers(package) if tl.core.is_builtin(item[1])]
        for name, member in builtins[package]:
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs the command line in this process, with bytes on its stdin."""

    def run(*words: str, stdin: bytes = b"") -> Run:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("top8_of_64")


@pytest.fixture(scope="session")
def chatty(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template and a context of 128 tokens."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(checkpoint("base"), folder)
    edit_json(folder / "tokenizer_config.json", {"chat_template": TEMPLATE})
    return folder
