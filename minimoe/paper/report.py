"""A report of sections: Markdown with pictures beside it, and one HTML file that holds everything."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimoe.tables import markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --link: #1f77b4; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .9rem; display: block; overflow-x: auto; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td { font-variant-numeric: tabular-nums; } thead th { background: var(--soft); }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; background: white; border-radius: 4px; }
figcaption { font-size: .9rem; opacity: .8; } nav { columns: 2; font-size: .95rem; } a { color: var(--link); }
"""


@dataclass
class Section:
    """One question of the report: text, tables and figures in order.

    Attributes:
        title: its heading.
        blocks: Markdown.
        tables: by name, heads and rows.
        figures: by name, each with the data that it shows, ready for JSON.
    """

    title: str
    blocks: list[str] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    figures: dict[str, tuple[Figure, Any]] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """A paragraph."""
        self.blocks.append(" ".join(text.split()))

    def table(self, name: str, heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> None:
        """A table, which is kept as CSV too."""
        self.blocks.append(markdown(heads, rows, text_columns).rstrip())
        self.tables[name] = [list(heads), *map(list, rows)]

    def figure(self, name: str, figure: Figure, caption: str, data: Any) -> None:
        """A figure, with the data that it shows."""
        self.blocks.append(f"![{caption}](figures/{name}.svg)")
        self.figures[name] = figure, data


def write_report(folder: Path, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Write report.html, report.md, figures/*.svg, and data/*.csv or *.json; returns the HTML file's path."""
    for name in ("figures", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    pictures = {}
    for section in sections:
        for name, (figure, data) in section.figures.items():
            pictures[name] = _svg(figure)
            (folder / "figures" / f"{name}.svg").write_text(pictures[name], "utf-8")
            (folder / "data" / f"{name}.json").write_text(json.dumps(data, allow_nan=False) + "\n", "utf-8")
        for name, lines in section.tables.items():
            buffer = io.StringIO()
            csv.writer(buffer, lineterminator="\n").writerows(lines)
            (folder / "data" / f"{name}.csv").write_text(buffer.getvalue(), "utf-8")
    body = "\n\n".join(f"## {section.title}\n\n" + "\n\n".join(section.blocks) for section in sections)
    text = f"# {title}\n\n{lead}\n\n{body}\n"
    (folder / "report.md").write_text(text, "utf-8")
    page = folder / "report.html"
    page.write_text(_html(title, text, pictures), "utf-8")
    return page


def _svg(figure: Figure) -> str:
    """A figure as SVG text without what changes from run to run."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "minimoe"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _html(title: str, text: str, pictures: dict[str, str]) -> str:
    """The page: Markdown rendered, a table of contents, and every picture in its place."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    headings = re.findall(r"<h2>(.*?)</h2>", body)
    anchors = {heading: f"s{number}" for number, heading in enumerate(headings, 1)}
    body = re.sub(r"<h2>(.*?)</h2>", lambda found: f'<h2 id="{anchors[found[1]]}">{found[1]}</h2>', body)
    links = "".join(f'<a href="#{anchor}">{heading}</a><br>' for heading, anchor in anchors.items())
    body = body.replace("</h1>", f"</h1>\n<nav>{links}</nav>", 1)

    def picture(found: re.Match[str]) -> str:
        svg = pictures[found["name"]]
        caption = found["caption"]
        return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{caption}</figcaption></figure>"

    body = re.sub(r'<p><img src="figures/(?P<name>[^"]+)\.svg" alt="(?P<caption>[^"]*)" /></p>', picture, body)
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return f"<!doctype html>\n<html lang=en><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
