"""Where words go: the text that was asked for to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 120  # columns where there is no terminal to ask


def write(text: str) -> None:
    """Text to stdout, at once: a stream that waits in a buffer is not a stream."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(document: Mapping[str, Any]) -> None:
    """The one document of --json, on one line, in ASCII so that no locale can spoil it."""
    write(json.dumps(document, allow_nan=False) + "\n")


def tell(content: RenderableType, style: str = "dim") -> None:
    """A line or a table to stderr; nothing in a text is taken for markup, and no line is broken."""
    from rich.text import Text

    shown = Text(content, style) if isinstance(content, str) else content
    on(sys.stderr).print(shown, soft_wrap=isinstance(content, str))


@contextmanager
def reading(what: str = "Reading weights") -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for files that are being read, shown by a terminal once there is something to tell."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = on(sys.stderr)
    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("")

    def read(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield read
    finally:
        bar.stop()


@contextmanager
def working(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr for steps of a long work, shown by a terminal; what to call after each, with what it was."""
    from rich.progress import Progress

    console = on(sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


def on(stream: TextIO) -> Console:
    """A rich console on a stream, wide enough for any table where the stream is not a terminal."""
    from rich.console import Console

    return Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH)
