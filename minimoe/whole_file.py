"""Files that a kill leaves as they were or as they should be, and never half of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minimoe.errors import InputError


def fresh_of(path: str | Path) -> Path:
    """Where a file is written until it is whole: a name that nobody else gives a file."""
    return Path(f"{path}.minimoe-new")


def not_ours(path: Path) -> InputError:
    """What is raised where unfinished work would go and somebody else's file lies."""
    return InputError(f"{path} is no unfinished work of minimoe, which would go there; move it away.")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """The place beside `path` to write to; what is there at the end takes the place of `path`."""
    fresh = fresh_of(path)
    yield fresh
    os.replace(fresh, path)


def write_whole(path: str | Path, text: str) -> None:
    """A text file, UTF-8."""
    with replacing(path) as fresh:
        fresh.write_text(text, "utf-8")
