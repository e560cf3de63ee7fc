"""What rules are compared on: windows of a text, or cloze items, as token ids and byte counts.

A cloze file holds one JSON object a line in HellaSwag's schema: `ctx`, `endings`, and `label`, the true one's index.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.scoring import cut


@dataclass(frozen=True, slots=True)
class Item:
    """Sequences that are run side by side in one pass.

    Attributes:
        contexts, continuations: token ids, at least one each; the continuations are scored.
        sizes: bytes (UTF-8) of each continuation.
        label: which of the continuations is the true one; 0 where there is only one.
    """

    contexts: list[list[int]]
    continuations: list[list[int]]
    sizes: list[int]
    label: int = 0


def text_items(engine: Engine, text: str, window: int) -> list[Item]:
    """Windows of `window` tokens laid end to end, each scored whole, as if a document began there.

    Raises:
        InputError: no text, or a window that the model's context does not hold.
    """
    if not text.strip():
        raise InputError("the text is empty; give a text to compare the rules on.")
    if not 1 <= window < engine.config.max_positions:
        raise InputError(f"a window must have from 1 to {engine.config.max_positions - 1} tokens, not {window}.")
    ids = engine.tokenizer.encode(text)
    start = engine.encode_prompt([])
    items, before = [], ""
    for first in range(0, len(ids), window):
        part = ids[first : first + window]
        # Together with the window before, so that a character split over both is counted once.
        shared = ids[max(0, first - window) : first]
        size = len(engine.tokenizer.decode([*shared, *part]).encode()) - len(before.encode())
        before = engine.tokenizer.decode(part)
        items.append(Item([start], [part], [size]))
    return items


def cloze_items(engine: Engine, path: str | Path, limit: int | None = None) -> list[Item]:
    """The items of a cloze file. An ending follows its passage after a space, or at once after a line break or space.

    Raises:
        InputError: as read_cloze does, or an item (its line is named) that is too long for the model.
    """
    return [_tokenised(engine, cloze) for cloze in read_cloze(path, limit)]


@dataclass(frozen=True, slots=True)
class Cloze:
    """An item as its file has it, and which line that is."""

    place: str
    passage: str
    endings: list[str]
    label: int


def read_cloze(path: str | Path, limit: int | None = None) -> list[Cloze]:
    """Read a cloze file.

    Raises:
        InputError: a file that is missing, empty, or one of whose lines (named) is no item.
    """
    try:
        lines = Path(path).read_text("utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text.") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
    if not numbered:
        raise InputError(f"{path} has no items.")
    return [_parsed(line, f"line {number} of {path}") for number, line in numbered]


def _parsed(line: str, place: str) -> Cloze:
    try:
        fields = json.loads(line)
        passage, endings, label = fields["ctx"], fields["endings"], fields["label"]
        label = int(label) if isinstance(label, str) else label  # HellaSwag's own files quote it
        sound = isinstance(passage, str) and isinstance(endings, list) and type(label) is int
        sound = sound and 0 <= label < len(endings)
        sound = sound and all(isinstance(ending, str) and ending.strip() for ending in endings)
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise InputError(f"{place} is no cloze item; it needs ctx, endings and label, as HellaSwag has them.")
    return Cloze(place, passage, endings, label)


def _tokenised(engine: Engine, cloze: Cloze) -> Item:
    gap = "" if not cloze.passage or cloze.passage[-1].isspace() else " "
    parts = [cut(engine.tokenizer, cloze.passage, gap + ending) for ending in cloze.endings]
    contexts = [context or engine.encode_prompt([]) for context, _ in parts]
    longest = max(len(context) + len(ids) for context, (_, ids) in zip(contexts, parts, strict=True))
    holds = engine.config.max_positions
    if longest > holds:
        raise InputError(f"{cloze.place} has {longest} tokens, but the model's context holds {holds}.")
    return Item(contexts, [ids for _, ids in parts], [len(ending.encode()) for ending in cloze.endings], cloze.label)
