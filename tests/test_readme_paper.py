"""The section of README.md that holds a report's key figures."""

from __future__ import annotations

from pathlib import Path

from bench.readme_paper import END, PICTURE, START, filled, key_figures

ROOT = Path(__file__).parents[1]
REPORT = (
    "# Title\n\nModel tiny, quick.\n\n## Claims\n\n- One holds.\n- Two does not.\n\n| a |\n| --- |\n| 1 |\n\nMore.\n\n"
    "## Next\n\n- Three.\n\n| b |\n"
)


def test_the_first_section_becomes_a_paragraph_and_a_table() -> None:
    assert key_figures(REPORT) == "Model tiny, quick.\n\nOne holds. Two does not.\n\n| a |\n| --- |\n| 1 |\n"


def test_filling_changes_nothing_else() -> None:
    page = f"before\n{START}old{END}after\n"
    once = filled(page, "figures\n")
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once
    assert filled(once, "figures\n") == once


def test_the_readme_has_it() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    section = page.partition(START)[2].partition(END)[0]
    assert "| mean k under elbow" in section
    assert all(len(line) <= 120 for line in section.splitlines())
    assert (ROOT / PICTURE).is_file()
