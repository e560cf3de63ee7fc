"""What the README quotes from a measurement is what was measured."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUOTED = re.compile(r"<!-- from (bench/results/\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


def test_quoted_measurements_stand_in_their_files() -> None:
    quotes = QUOTED.findall((ROOT / "README.md").read_text("utf-8"))
    assert quotes
    for name, text in quotes:
        lines = (ROOT / name).read_text("utf-8").splitlines()
        wanted = [line for line in text.splitlines() if line.strip()]
        assert wanted
        assert [line for line in wanted if line not in lines] == []


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
