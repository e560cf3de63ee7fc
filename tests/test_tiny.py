"""The embedded model as it is shipped: its files, its card, its golden text.

`python weights/recipe/evaluate.py weights/tiny` refreshes all of what is compared here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TINY = ROOT / "weights" / "tiny"
sys.path.insert(0, str(ROOT / "weights" / "recipe"))

import card  # noqa: E402
import evaluate  # noqa: E402

import minimoe  # noqa: E402

pytestmark = pytest.mark.skipif(not (TINY / "measured.json").exists(), reason="the embedded model is not measured yet")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return json.loads((TINY / "measured.json").read_text("utf-8"))


def test_the_shipped_files_are_the_measured_ones(measured: dict[str, Any]) -> None:
    assert evaluate.file_hashes(TINY) == measured["files"]
    assert sum(path.stat().st_size for path in TINY.rglob("*")) < 50_000_000


def test_the_card_says_what_was_measured(measured: dict[str, Any]) -> None:
    assert (TINY / "README.md").read_text("utf-8") == card.render(card.PROSE.read_text("utf-8"), measured)


@pytest.mark.parametrize("rule", ["top_k", "elbow"])
def test_golden_text(measured: dict[str, Any], rule: str) -> None:
    engine = minimoe.load(TINY, router=rule, dtype="float32")
    for golden in measured["golden"]:
        text = engine.generate(golden["prompt"], max_new_tokens=measured["golden_tokens"], temperature=0).text
        assert text == golden[rule]
        assert text.strip()


def test_every_domain_has_cloze_items_in_the_schema_of_hellaswag(measured: dict[str, Any]) -> None:
    assert {path.stem for path in (TINY / "cloze").iterdir()} == set(measured["domains"])
    for domain, facts in measured["rules"]["top_k"]["domains"].items():
        lines = (TINY / "cloze" / f"{domain}.jsonl").read_text("utf-8").splitlines()
        items = [json.loads(line) for line in lines]
        assert len(items) == facts["items"] >= 30
        for number, item in enumerate(items):
            assert item["ind"] == number
            assert item["ctx"] == item["ctx_a"] + item["ctx_b"]
            assert len(set(item["endings"])) == 4
            assert item["label"] in range(4)
