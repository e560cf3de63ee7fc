"""What has been scored, item by item, in a file that survives being killed: a run goes on where the last one stopped.

JSON lines. The first says what the records depend on besides their prompts: model, numerics and seed. Each other is one
item by one router, with a digest of its prompts, so that changed data or shots are scored anew and never mixed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from minimoe.errors import InputError

Record = Mapping[str, Any]
KEYS = ("task", "router", "id", "digest")
START = b'{"settings": '


class Log:
    """Records by task, router, item and digest; kept in a file if there is a path. A context manager.

    Args:
        path: of the file, or None to keep them in memory.
        settings: what all records depend on.

    Raises:
        InputError: the file is of a run with other settings (names the first that differs), is no such log, or cannot
            be written.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path, self._settings = path, dict(settings)
        self._records: dict[tuple[str, ...], Record] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> Log:
        if self._path is not None:
            try:
                self._file = self._path.open("a+b")
                self._read()
            except OSError as error:
                raise InputError(f"{self._path} cannot be written: {error.strerror or error}.") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def find(self, *key: str) -> Record | None:
        """The record of a (task, router, id, digest), or None."""
        return self._records.get(key)

    def add(self, records: Iterable[Record]) -> None:
        """Keep records that each have the four keys; they are in the file when this returns."""
        lines = []
        for record in records:
            self._records[tuple(record[key] for key in KEYS)] = record
            lines.append(json.dumps(record))
        self._write(lines)

    def _write(self, lines: Iterable[str]) -> None:
        if self._file is not None:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()

    def _read(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        content = self._file.read()
        # A run that was killed may have left half a line; its item is scored again.
        whole = content[: content.rfind(b"\n") + 1]
        if not whole and not content.startswith(START[: len(content)]):
            raise self._broken(1)
        lines = whole.split(b"\n")[:-1]
        if lines:
            self._check(self._parse(lines[0], 1).get("settings"))
        for number, line in enumerate(lines[1:], 2):
            record = self._parse(line, number)
            if not all(isinstance(record.get(key), str) for key in KEYS) or not _has_outcome(record):
                raise self._broken(number)
            self._records[tuple(record[key] for key in KEYS)] = record
        self._file.truncate(len(whole))
        if not lines:
            self._write([json.dumps({"settings": self._settings})])

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise self._broken(number)
        return parsed

    def _broken(self, number: int) -> InputError:
        return InputError(f"line {number} of {self._path} is no record of an evaluation; choose another --out.")

    def _check(self, theirs: Any) -> None:
        if not isinstance(theirs, dict):
            raise self._broken(1)
        for key, value in self._settings.items():
            if theirs.get(key) != value:
                raise InputError(
                    f"{self._path} is of a run with {key} {theirs.get(key)!r}, and this one has {value!r}; "
                    "choose another --out."
                )


def _has_outcome(record: Record) -> bool:
    """Whether it says what came of the item: log-probabilities, a written answer, or why there is none."""
    if "invalid" in record or isinstance(record.get("output"), str):
        return True
    values = [record.get("logprobs"), record.get("unconditional", [])]
    return all(isinstance(part, list) and all(isinstance(value, float) for value in part) for part in values)
