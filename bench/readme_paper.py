"""Put the key figures of a report of `minimoe paper` into README.md: what of the paper holds, and the claims' table.

Run: python -m bench.readme_paper runs/paper, after the command that stands in the README's section has made it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
START, END = "<!-- paper: by python -m bench.readme_paper -->\n", "<!-- end of paper -->\n"
PICTURE = "bench/results/paper.svg"
FIGURE = "latency.svg"


def key_figures(report: str) -> str:
    """Of a report in Markdown: its first lines, the sentences on what holds as a paragraph, and the claims' table."""
    lead, first = report.split("\n\n")[1], report.partition("\n## ")[2].partition("\n## ")[0]
    blocks = first.split("\n\n")
    sentences = next(block for block in blocks if block.startswith("- "))
    table = next(block for block in blocks if block.startswith("| "))
    paragraph = " ".join(line.removeprefix("- ") for line in sentences.splitlines())
    return f"{_wrapped(lead)}\n\n{_wrapped(paragraph)}\n\n{table.rstrip()}\n"


def filled(page: str, figures: str) -> str:
    """The page with new key figures between the marks."""
    if START not in page or END not in page.partition(START)[2]:
        raise SystemExit(f"the page lacks {START} or, after it, {END}; nothing was written.")
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    picture = f"![Time of a MoE block by what is done with pruned experts]({PICTURE})"
    return f"{before}{START}\n{figures}\n{picture}\n\n{END}{after}"


def _wrapped(text: str) -> str:
    """Lines of at most 120 characters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= 120:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "report.md").is_file():
        sys.exit("usage: python -m bench.readme_paper FOLDER, where 'minimoe paper --out FOLDER' has written a report.")
    folder, readme = Path(sys.argv[1]), ROOT / "README.md"
    readme.write_text(
        filled(readme.read_text("utf-8"), key_figures((folder / "report.md").read_text("utf-8"))), "utf-8"
    )
    (ROOT / PICTURE).write_text((folder / "figures" / FIGURE).read_text("utf-8"), "utf-8")


if __name__ == "__main__":
    main()
