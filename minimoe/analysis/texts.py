"""Texts of any size as windows of token ids: read piece by piece, never whole."""

from __future__ import annotations

import hashlib
import io
import itertools
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from minimoe.errors import InputError
from minimoe.tokenizer import Tokenizer

TOGETHER = "all"  # what all domains together are called
PIECE = 1 << 18  # characters read at once


@dataclass(frozen=True, slots=True)
class Text:
    """One domain of an analysis: a name, and a UTF-8 file, plain or packed with xz."""

    domain: str
    path: Path


def parse_texts(words: Sequence[str]) -> list[Text]:
    """Texts from FILE or DOMAIN=FILE; without a name, the file's own up to its first dot.

    Raises:
        InputError: no text, a file that is missing or empty or does not begin as a text, or two texts of one domain.
    """
    texts = [_parse(word) for word in words]
    if not texts:
        raise InputError("there is no text to analyse; name at least one file.")
    for index, text in enumerate(texts):
        if text.domain in {other.domain for other in texts[:index]}:
            raise InputError(f"two texts are called {text.domain}; name them as in DOMAIN=FILE.")
    return texts


def _parse(word: str) -> Text:
    name, equals, rest = word.partition("=")
    path = Path(rest if equals and not Path(word).is_file() else word)
    domain = name if equals and not Path(word).is_file() else path.name.partition(".")[0]
    if domain == TOGETHER:
        raise InputError(f"no domain can be called {TOGETHER!r}, which stands for all together; write NAME={path}.")
    if not domain:
        raise InputError(f"{word!r} names no domain; write DOMAIN=FILE.")
    if path.is_dir():
        raise InputError(f"{path} is a folder; name the files in it.")
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty; there is nothing to analyse in it.")
        text = Text(domain, path)
        next(_pieces(text, lambda count: None), None)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    return text


@dataclass(frozen=True, slots=True)
class Source:
    """What an analysis reads.

    Attributes:
        domains: their names.
        about: plain data on how the sequences were made, for people.
        digest: tells this work from other work.
        sequences: makes all (index of the domain, token ids), domain by domain; the same each time.
    """

    domains: list[str]
    about: dict[str, Any]
    digest: str
    sequences: Callable[[], Iterator[tuple[int, list[int]]]]


def text_source(
    texts: Sequence[Text],
    tokenizer: Tokenizer,
    window: int,
    limit: int | None = None,
    read: Callable[[int], None] = lambda count: None,
) -> Source:
    """Windows of texts that know nothing of each other.

    Args:
        window: tokens of each.
        limit: only the first windows of each text.
        read: called with the bytes of the files that were read since the last call.
    """

    def sequences() -> Iterator[tuple[int, list[int]]]:
        for domain, text in enumerate(texts):
            for ids in itertools.islice(windows(text, tokenizer, window, read), limit):
                yield domain, ids

    domains = [text.domain for text in texts]
    return Source(domains, {"window": window, "limit": limit}, _digest(texts), sequences)


def _digest(texts: Sequence[Text]) -> str:
    """A hash of the names and the files, to tell one piece of work from another."""
    total = hashlib.sha256()
    for text in texts:
        with open(text.path, "rb") as file:
            total.update(f"{text.domain}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def size(texts: Sequence[Text]) -> int:
    """Bytes of all files, as `read` of `windows` counts them."""
    return sum(text.path.stat().st_size for text in texts)


def windows(
    text: Text, tokenizer: Tokenizer, length: int, read: Callable[[int], None] = lambda count: None
) -> Iterator[list[int]]:
    """Windows of `length` token ids laid end to end, the last one shorter.

    A text is tokenised in pieces that end at a line's end (or, in a line that is longer than a piece, after a space
    where there is one), so that memory is bounded.

    Args:
        read: called with the number of bytes of the file that were read since the last call.

    Raises:
        InputError: not UTF-8, damaged, or nothing but white space.
    """
    held: list[int] = []
    empty = True
    for piece in _pieces(text, read):
        empty = empty and not piece.strip()
        held += tokenizer.encode(piece)
        whole = len(held) - len(held) % length
        yield from (held[start : start + length] for start in range(0, whole, length))
        held = held[whole:]
    if empty:
        raise InputError(f"{text.path} holds nothing but white space; there is nothing to analyse in it.")
    if held:
        yield held


def _pieces(text: Text, read: Callable[[int], None]) -> Iterator[str]:
    before, rest = 0, ""
    with _opened(text) as (raw, characters):
        while True:
            try:
                fresh = characters.read(PIECE)
            except UnicodeDecodeError:
                raise InputError(f"{text.path} is not UTF-8 text.") from None
            except (lzma.LZMAError, EOFError):
                raise InputError(f"{text.path} is no whole xz file.") from None
            read(raw.tell() - before)
            before = raw.tell()
            if not fresh:
                break
            rest += fresh
            cut = rest.rfind("\n") + 1
            if not cut and len(rest) >= 2 * PIECE:
                cut = rest.rfind(" ") + 1 or len(rest)
            if cut:
                yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


@contextmanager
def _opened(text: Text) -> Iterator[tuple[BinaryIO, io.TextIOWrapper]]:
    """The file itself, and its characters."""
    with open(text.path, "rb") as raw, ExitStack() as stack:
        plain = stack.enter_context(lzma.open(raw)) if text.path.suffix == ".xz" else raw
        yield raw, stack.enter_context(io.TextIOWrapper(plain, encoding="utf-8-sig", newline=""))
