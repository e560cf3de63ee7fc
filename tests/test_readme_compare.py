"""The section of README.md that one command fills."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.readme_compare import filled, main, split, words_of

ROOT = Path(__file__).parents[1]


def test_filling_the_section_changes_nothing_else() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    before, command, after = split(page)
    assert command.startswith("minimoe compare ")
    again = filled(filled(page, "| a |\n", "x.svg"), "| b |\n", "y.svg")
    assert split(again) == (before, command, after)
    assert "| b |" in again
    assert "| a |" not in again


def test_the_readme_shows_every_rule_of_its_command_and_its_picture() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    words = words_of(split(page)[1])
    names = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")]
    assert set(words[words.index("--routers") + 1].split(",")) <= set(names)
    assert (ROOT / words[words.index("--plot") + 1]).is_file()


def test_arguments_are_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["readme_compare", "--foo"])
    with pytest.raises(SystemExit, match="2"):
        main()
