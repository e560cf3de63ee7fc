"""Run the compare command that stands in README.md, and put its table and picture below it.

Run: python -m bench.readme_compare, after the embedded model or a rule has changed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
START, END = "<!-- compare: by python -m bench.readme_compare -->\n", "<!-- end of compare -->\n"


def split(page: str) -> tuple[str, str, str]:
    """The page before the section, the command that stands in it, and the page after it."""
    before, _, rest = page.partition(START)
    section, _, after = rest.partition(END)
    command = section.partition("```\n")[2].partition("\n```")[0]
    return before, command, after


def words_of(command: str) -> list[str]:
    """A command as a shell reads it, over several lines."""
    return shlex.split(command.replace("\\\n", " "))


def filled(page: str, table: str, picture: str) -> str:
    """The page with a new section: the command as it stood, the table, and the picture's file."""
    before, command, after = split(page)
    section = f"\n```\n{command}\n```\n\n{table}\n![Bits a byte against FLOPs a token]({picture})\n\n"
    return f"{before}{START}{section}{END}{after}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()
    path = ROOT / "README.md"
    page = path.read_text("utf-8")
    words = words_of(split(page)[1])[1:]
    run = subprocess.run([sys.executable, "-m", "minimoe", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    table = "".join(line for line in run.stdout.decode().splitlines(keepends=True) if line.startswith("|"))
    path.write_text(filled(page, table, words[words.index("--plot") + 1]), "utf-8")


if __name__ == "__main__":
    main()
