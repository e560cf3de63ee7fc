"""Where words go: the text that was asked for to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

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
def counting() -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """A bar on stderr for work in several parts, shown by a terminal: one call names a part, the other counts in it."""
    with _steps() as bar:
        task = bar.add_task("", total=None)

        def told(what: str) -> None:
            bar.reset(task, total=None, description=what)

        def ran(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield told, ran


@contextmanager
def working(total: int) -> Iterator[Callable[..., None]]:
    """A bar on stderr for one long work, shown by a terminal; what to call after each piece: its name and steps."""
    with _steps() as bar:
        task = bar.add_task("", total=total)

        def ran(what: str, steps: int = 1) -> None:
            bar.update(task, advance=steps, description=what)

        yield ran


def _steps() -> Progress:
    """Rich's bar with a name, a share and the time that is left."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = on(sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def on(stream: TextIO) -> Console:
    """A rich console on a stream, wide enough for any table where the stream is not a terminal."""
    from rich.console import Console

    return Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH)
