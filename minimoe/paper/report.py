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
from minimoe.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --page: #fff; --line: #8885; --soft: #8881; --quiet: #667; }
@media (prefers-color-scheme: dark) { :root { --text: #dfe1e5; --page: #17191c; --quiet: #9aa; } }
* { box-sizing: border-box; }
body { font: 17px/1.6 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 0 auto;
  max-width: 66rem; padding: 2rem 1.2rem 5rem; overflow-wrap: break-word; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 1rem 0; } h1 + p { color: var(--quiet); }
h2 { font-size: 1.4rem; line-height: 1.3; margin: 3.5rem 0 1rem; }
h2 { padding-top: .6rem; border-top: 1px solid var(--line); }
h2 a { color: inherit; text-decoration: none; } p, nav { max-width: 46rem; } a { color: #2f7fc4; }
nav ol { columns: 19rem; padding-left: 1.6rem; font-size: .95rem; } nav li { break-inside: avoid; padding-right: 1rem; }
.table { overflow-x: auto; margin: 1.2rem 0; }
table { border-collapse: collapse; font-size: .85rem; line-height: 1.35; }
th, td { padding: .38rem .65rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: bottom; }
th { min-width: 4rem; max-width: 9rem; background: var(--soft); }
td { white-space: nowrap; font-variant-numeric: tabular-nums; }
td:first-child { white-space: normal; min-width: 9rem; } tbody tr:hover { background: var(--soft); }
figure { margin: 1.6rem 0; } figure svg { display: block; max-width: 100%; height: auto; border-radius: 6px; }
figcaption { font-size: .9rem; color: var(--quiet); margin-top: .4rem; }
@media (prefers-color-scheme: dark) { figure svg { filter: invert(.92) hue-rotate(180deg); } }
@media (max-width: 40rem) { body { font-size: 16px; padding-top: 1rem; } h1 { font-size: 1.6rem; }
  h2 { font-size: 1.2rem; } figure { overflow-x: auto; } figure svg { min-width: 32rem; } }
@media print { .table { overflow: visible; } figure, tr { break-inside: avoid; } }
"""

MINUS = re.compile(r"(?<![^\s(])-(?=\d)")  # a sign, and not the dash of a range or a name


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
        self.blocks.append(MINUS.sub("−", " ".join(text.split())))

    def points(self, texts: Sequence[str]) -> None:
        """A list."""
        self.blocks.append("\n".join(f"- {MINUS.sub('−', text)}" for text in texts))

    def table(self, name: str, heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> None:
        """A table, which is kept as CSV too; columns that have nothing in them are left out."""
        full = [column for column in range(len(heads)) if any(row[column] for row in rows)]
        heads, rows = [heads[column] for column in full], [[row[column] for column in full] for row in rows]
        lines = markdown(heads, [[MINUS.sub("−", cell) for cell in row] for row in rows], text_columns).splitlines()
        marks = ["---" if column < text_columns else "---:" for column in range(len(heads))]
        self.blocks.append("\n".join([lines[0], f"| {' | '.join(marks)} |", *lines[2:]]))
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
            pictures[name] = svg(figure)
            write_whole(folder / "figures" / f"{name}.svg", pictures[name])
            write_whole(folder / "data" / f"{name}.json", json.dumps(data, allow_nan=False) + "\n")
        for name, lines in section.tables.items():
            buffer = io.StringIO()
            csv.writer(buffer, lineterminator="\n").writerows(lines)
            write_whole(folder / "data" / f"{name}.csv", buffer.getvalue())
    body = "\n\n".join(f"## {section.title}\n\n" + "\n\n".join(section.blocks) for section in sections)
    text = f"# {title}\n\n{lead}\n\n{body}\n"
    write_whole(folder / "report.md", text)
    page = folder / "report.html"
    write_whole(page, _html(title, text, pictures))
    return page


def svg(figure: Figure) -> str:
    """A figure as SVG text, its words as words, without what changes from run to run."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "minimoe", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _html(title: str, text: str, pictures: dict[str, str]) -> str:
    """The page: Markdown rendered, a table of contents, and every picture in its place."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    links = []

    def heading(found: re.Match[str]) -> str:
        anchor = re.sub(r"[^a-z0-9]+", "-", re.sub("&[a-z]+;", "", found[1].lower())).strip("-")
        links.append(f'<li><a href="#{anchor}">{found[1]}</a></li>')
        return f'<h2 id="{anchor}"><a href="#{anchor}">{found[1]}</a></h2>'

    def picture(found: re.Match[str]) -> str:
        name, caption = found["name"], found["caption"]
        drawn = pictures[name][pictures[name].index("<svg") :]
        # Ids are of one document now, not of one file each.
        drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawn)
        drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)
        return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>"

    body = re.sub("<h2>(.*?)</h2>", heading, body)
    contents = f'<nav aria-label="Contents"><ol>{"".join(links)}</ol></nav>\n'
    first = body.find("<h2 ")
    body = body[:first] + contents + body[first:]
    body = body.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")
    body = re.sub(r'<p><img src="figures/(?P<name>[^"]+)\.svg" alt="(?P<caption>[^"]*)" /></p>', picture, body)
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>{html.escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n'
