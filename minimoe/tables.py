"""Markdown tables that can be read as they are."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table whose columns stand under each other; numbers are aligned to the right."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])

    def cell(column: int, text: str) -> str:
        return text.ljust(widths[column]) if column < text_columns else text.rjust(widths[column])

    return "".join(f"| {' | '.join(cell(i, text) for i, text in enumerate(line))} |\n" for line in lines)
