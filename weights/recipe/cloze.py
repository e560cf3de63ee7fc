"""Cloze items from the held-out documents: which of four endings follows this passage?

Run: python weights/recipe/cloze.py --out weights/tiny/cloze

One `<domain>.jsonl` a domain, in the schema of HellaSwag: `ctx` is the passage (`ctx_a`, with an empty `ctx_b`),
`endings` the four ways to go on, `label` the true one, `source_id` the hash of the document. An ending follows its
passage after a space, or directly where the passage ends with a line break. The three false endings are taken from
other held-out documents of the same domain and are of similar length.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data import SHARES, read_documents, split

PASSAGE = range(150, 301)  # bytes
ENDING = range(30, 101)  # bytes
ALIKE = 0.2  # how far a false ending's length may be from the true one's, as a part of it
BOUNDARY = re.compile(r"""[.!?]["')]*\s+|\n+""")  # the end of a sentence or of a line


def cuts(document: str) -> Iterator[tuple[str, str]]:
    """Passages of a document and their true endings, both whole sentences or lines, none overlapping another."""
    bounds = [0, *(match.end() for match in BOUNDARY.finditer(document)), len(document)]
    free = 0  # nothing before this place may be used again
    for start in bounds:
        if start < free:
            continue
        middle = next((b for b in bounds if b > start and len(document[start:b].encode()) in PASSAGE), None)
        if middle is None:
            continue
        end = next((b for b in bounds if b > middle and len(document[middle:b].strip().encode()) in ENDING), None)
        if end is None:
            continue
        passage, ending = document[start:middle].rstrip(" "), document[middle:end].rstrip()
        if passage.strip() and "\n\n" not in ending:
            yield passage, ending
            free = end


def items(domain: str, documents: Sequence[str], count: int) -> list[dict[str, Any]]:
    """At most `count` items, spread over the documents, the same ones on every call."""
    chance = random.Random(domain)
    found = [
        (passage, ending, hashlib.sha256(document.encode()).hexdigest()[:12])
        for document in documents
        for passage, ending in cuts(document)
    ]
    made = []
    for passage, ending, source in chance.sample(found, len(found)):
        length = len(ending.encode())
        others = sorted(
            {e for _, e, s in found if s != source and e != ending and abs(len(e.encode()) - length) <= ALIKE * length}
        )
        if len(others) < 3:
            continue
        endings = [*chance.sample(others, 3), ending]
        chance.shuffle(endings)
        made.append(
            {
                "ind": len(made),
                "activity_label": domain,
                "ctx_a": passage,
                "ctx_b": "",
                "ctx": passage,
                "endings": endings,
                "label": endings.index(ending),
                "split": "val",
                "source_id": source,
            }
        )
        if len(made) == count:
            break
    return made


def continuation(item: Mapping[str, Any], ending: str) -> str:
    """An ending with the space that stands before it, if any."""
    return ending if item["ctx"].endswith("\n") else f" {ending}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=200, help="of each domain, if its text has so many")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for domain in SHARES:
        _, held_out = split(read_documents(options.corpus / f"{domain}.txt.xz"))
        lines = [json.dumps(item, ensure_ascii=False) for item in items(domain, held_out, options.items)]
        (options.out / f"{domain}.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
        print(f"{domain}: {len(lines)} items")


if __name__ == "__main__":
    main()
