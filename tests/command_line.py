"""Runs the command line in tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document; anything else on stdout fails here."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Cli = Callable[..., Run]


def process(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """The command line in a process of its own, with stdout buffered as it is by default."""
    command = [sys.executable, "-m", "minimoe", *words]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=environment, **streams)


def assert_one_sentence(run: Run, code: int = 2) -> None:
    assert run.code == code
    assert run.out == ""
    assert "Traceback" not in run.err
    (sentence,) = [line for line in run.err.splitlines() if line.startswith("error: ")]
    assert run.err.splitlines()[-1] == sentence
    assert sentence.endswith((".", "?"))
