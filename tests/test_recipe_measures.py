"""What the card of the embedded model is made from: cloze items, their scores, router health, tables."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "weights" / "recipe"))

import accuracy  # noqa: E402
import card  # noqa: E402
import cloze  # noqa: E402
import router_health  # noqa: E402

import minimoe  # noqa: E402
from minimoe.probe import Probe  # noqa: E402
from minimoe.routers import ROUTERS, RouterContext  # noqa: E402


def context(tokens: int, top_k: int = 8, layer: int = 0) -> RouterContext:
    none = torch.zeros(tokens, dtype=torch.int64)
    draws = torch.Generator().manual_seed(1)
    return RouterContext(layer, "prefill", none, none, none, top_k, norm_topk_prob=False, generator=draws)


def logits(tokens: int, experts: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 1.5


# Cloze items


def story(seed: int) -> str:
    chance = random.Random(seed)
    words = ["fox", "hare", "river", "house", "little", "ran", "slept", "under", "golden", f"name{seed}"]
    sentences = (" ".join(chance.choices(words, k=chance.randint(6, 14))).capitalize() + "." for _ in range(60))
    return " ".join(sentences)


def test_items_are_held_out_passages_with_their_own_ending_and_three_of_other_documents() -> None:
    documents = [story(seed) for seed in range(12)]
    made = cloze.items("stories", documents, 40)
    assert len(made) == 40
    assert [item["ind"] for item in made] == list(range(40))
    for item in made:
        true = cloze.continuation(item, item["endings"][item["label"]])
        home = [document for document in documents if item["ctx"] + true in document]
        assert len(home) == 1
        assert len(set(item["endings"])) == 4
        lengths = [len(ending) for ending in item["endings"]]
        assert all(abs(length - lengths[item["label"]]) <= 0.2 * lengths[item["label"]] for length in lengths)
        for place, ending in enumerate(item["endings"]):
            assert place == item["label"] or any(ending in other for other in documents if other not in home)
    assert cloze.items("stories", documents, 40) == made
    # The label says nothing: about ten of forty at each place.
    assert min(np.bincount([item["label"] for item in made], minlength=4)) >= 3


def test_a_line_follows_its_line_break_and_a_sentence_its_space() -> None:
    assert cloze.continuation({"ctx": "def f():\n"}, "    return 1") == "    return 1"
    assert cloze.continuation({"ctx": "He ran."}, "She slept.") == " She slept."


# Scores


@pytest.mark.parametrize("rule", ["top_k", "elbow"])
def test_the_choice_is_that_of_the_engine_scoring_each_ending_alone(
    checkpoint: Callable[..., Path], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "ITEMS_A_PASS", 3)
    folder = checkpoint()
    engine = minimoe.load(folder, router=rule, dtype="float32")
    passages = ["The fox ran over the hill.", "Once upon a time\n", "A small hare", "The river was wide.", "He said"]
    endings = ["The hare slept.", "and then it rained for days", "a", "Nothing.", "to the old house near the river"]
    items = [
        {"ctx": passage, "endings": [*endings[i:], *endings[:i]][:4], "label": 0} for i, passage in enumerate(passages)
    ]

    def alone(item: dict[str, object], ending: str) -> float:
        return engine.score(str(item["ctx"]), cloze.continuation(item, ending)).logprob / len(ending.encode())

    expected = [max(range(4), key=lambda e: alone(item, item["endings"][e])) for item in items]
    got = accuracy.choices(engine.model, engine.tokenizer, items, ROUTERS[rule](), Probe())
    assert got == expected


# Router health


def test_load_and_k_are_counted() -> None:
    logits_TE = torch.tensor([[9.0, 0, 0, 0], [9.0, 0, 0, 0], [0, 9.0, 0, 0], [0, 0, 9.0, 0], [0, 0, 0, 9.0]])
    health = router_health.RouterHealth(2, 4)
    health.routed(1, ROUTERS["top_k"](k=1).route(logits_TE, context(5)), logits_TE)
    health.routed(1, ROUTERS["top_k"](k=4).route(logits_TE, context(5)), logits_TE)
    # Loads 2 + 5, 1 + 5, 1 + 5, 1 + 5; a fair share is 6.25.
    assert health.shares()[1].tolist() == pytest.approx([7 / 6.25, 6 / 6.25, 6 / 6.25, 6 / 6.25])
    assert health.variation()[1] == pytest.approx(np.std([7, 6, 6, 6]) / 6.25)
    assert health.k_LE1[1].tolist() == [0, 5, 0, 0, 5]
    assert health.mean_k()[1] == pytest.approx(2.5)


# The card


def test_a_table_takes_its_place_in_the_prose() -> None:
    measured = {"files": {"config.json": "abc"}}
    made = card.render("Before.\n\n<!-- measured: files -->\n\nAfter.\n", measured)
    assert made == "Before.\n\n| file | SHA-256 |\n| --- | --- |\n| `config.json` | `abc` |\n\nAfter.\n"


def test_the_prose_names_each_table_once_and_no_other() -> None:
    assert sorted(card.PLACE.findall(card.PROSE.read_text("utf-8"))) == sorted(card.SECTIONS)


def test_a_sample_cannot_break_the_card() -> None:
    measured = {"samples": [{"prompt": "a *b*\n", "text": "_c_\n\n<d>"}]}
    assert card.samples(measured) == "> **a \\*b\\***  \n> \\_c\\_  \n>   \n> \\<d>\n"


def test_the_loss_curve_is_drawn_the_same_every_time(tmp_path: Path) -> None:
    measured = {"training": {"curve": [[1000, 8.0], [2000, 5.0], [3000, 4.0]]}}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        card.draw_loss(measured, tmp_path / name / "loss.svg")
    first = (tmp_path / "a" / "loss.svg").read_text()
    assert first.startswith("<?xml")
    assert 'id="line2d' in first
    assert first == (tmp_path / "b" / "loss.svg").read_text()
