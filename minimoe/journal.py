"""What a long work has done so far, on disk, so that a run that was cut off goes on where it was.

The file holds JSON, one line each: first what tells this work from any other, then the result of each piece of it, in
order, each with a checksum. A line is written when its piece is done; half a line, which a kill may leave, is dropped,
and so is everything from a line on that is not as it was written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from minimoe.whole_file import not_ours, write_whole


class Journal:
    """Does pieces of work in a fixed order, or takes their results from the file.

    Args:
        path: the file; it is begun anew where it is of other work or none. None keeps nothing.
        identity: tells this work from any other.

    Raises:
        InputError: the file is somebody else's, no journal.
    """

    def __init__(self, path: Path | None, identity: str) -> None:
        self._file: TextIO | None = None
        self._kept: list[Any] = []
        if path is None:
            return
        lines = _read(path)
        if not lines and path.exists() and path.stat().st_size:
            raise not_ours(path)
        self._kept = lines[1:] if lines[:1] == [identity] else []
        write_whole(path, "".join(_line(value) for value in (identity, *self._kept)))  # without half a line
        self._file = path.open("a", encoding="utf-8")

    def once(self, work: Callable[[], Any]) -> Any:
        """The result of the next piece, of JSON's types: as it was kept, or by doing it now and keeping it."""
        if self._kept:
            return self._kept.pop(0)
        result = work()
        if self._file is not None:
            self._file.write(_line(result))
            self._file.flush()
        return result

    def close(self) -> None:
        """No more pieces are to come. The file stays, until whoever gave its name has put the results in safety."""
        if self._file is not None:
            self._file.close()


def _line(value: Any) -> str:
    return json.dumps([_checksum(value), value]) + "\n"


def _checksum(value: Any) -> int:
    return zlib.crc32(json.dumps(value).encode())


def _read(path: Path) -> list[Any]:
    """The values of a file up to the first line that is broken; none where there is no such file."""
    values = []
    try:
        for line in path.read_text("utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            checksum, value = json.loads(line)
            if checksum != _checksum(value):
                break
            values.append(value)
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    return values
