"""compare: each figure against a plain computation through other doors of the engine."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import SENTENCES
from scipy import stats

import minimoe
from minimoe.cli import main
from minimoe.comparison import Outcome, Seen, changes, compare, frontier, interval, resamples
from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.items import cloze_items, text_items
from minimoe.model import Batch
from minimoe.probe import RoutingRecorder
from minimoe.routers import PrefixRouter, RouterContext
from minimoe.routers.spec import parse_router

TEXT = " ".join(SENTENCES) + " a🙂é한"
CLOZE = [
    {"ctx": "The fox and the owl", "endings": ["were friends.", "is blue too.", "river"], "label": 0},
    {"ctx": "She said that the sky", "endings": ["stayed on the shore.", "is blue."], "label": 1},
    {"ctx": "There were two of them\n", "endings": ["in the boat.", "answer?", "What is", "fox"], "label": 0},
]


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    return minimoe.load(checkpoint("top8_of_64"), backend="reference")


@pytest.fixture(scope="module")
def outcomes(engine: Engine) -> list[Outcome]:
    rules = [(spec, parse_router(spec)) for spec in ("elbow", "top_k:k=3", "top_k")]
    return compare(engine, rules, text_items(engine, TEXT, 32))


def cloze_file(folder: Path, items: list[dict[str, Any]] | None = None) -> Path:
    path = folder / "cloze.jsonl"
    path.write_text("\n".join(json.dumps(item) for item in (CLOZE if items is None else items)), "utf-8")
    return path


@pytest.mark.parametrize("window", [1, 7, 32, 120])
def test_the_windows_of_a_text_are_all_of_it(engine: Engine, window: int) -> None:
    items = text_items(engine, TEXT, window)
    assert [i for item in items for i in item.continuations[0]] == engine.tokenizer.encode(TEXT)
    if window >= 7:
        assert sum(item.sizes[0] for item in items) == len(TEXT.encode())


def test_the_arms_are_top_k_the_rules_and_two_controls_for_each_that_prunes(outcomes: list[Outcome]) -> None:
    names = [(o.arm.name.partition(":k=")[0], o.arm.control_of) for o in outcomes]
    assert names == [("top_k", None), ("elbow", None), ("mixed_k", "elbow"), ("random", "elbow"), ("top_k", None)]
    elbow, mixed, random = outcomes[1:4]
    assert mixed.summary["mean_k"] == pytest.approx(elbow.summary["mean_k"], rel=0.01)
    assert random.summary["mean_k"] == pytest.approx(elbow.summary["mean_k"], rel=0.01)
    assert elbow.summary["mean_k"] < 8


def test_bits_and_work_are_those_of_scores_and_of_recorded_routings(engine: Engine, outcomes: list[Outcome]) -> None:
    config = engine.config
    for outcome, spec in zip([outcomes[0], outcomes[1], outcomes[4]], ["top_k", "elbow", "top_k:k=3"], strict=True):
        engine.router = parse_router(spec)
        bits = pairs = hit = flops = tokens = 0
        for item in text_items(engine, TEXT, 32):
            (context,), (ids,) = item.contexts, item.continuations
            recorder = RoutingRecorder(config.num_layers)
            bits -= engine.score(context, ids, probe=recorder).logprob / math.log(2)
            T, D = len(ids), config.hidden_size
            for routing in recorder.routings():
                live = [routing.experts_TK[t, : int(k)].tolist() for t, k in enumerate(routing.k_T)]
                used = [e for row in live for e in row]
                pairs, hit = pairs + len(used), hit + len(set(used))
                flops += 6 * len(used) * D * config.intermediate_size + 2 * T * D * config.num_experts
                flops += 2 * T * D * (2 * D + 2 * config.kv_width) + 4 * D * T * (T + 1) // 2
            flops += 2 * T * D * config.vocab_size
            tokens += T
        s = outcome.summary
        assert s["bits_per_byte"] == pytest.approx(bits / len(TEXT.encode()), rel=1e-5)
        assert s["perplexity"] == pytest.approx(2 ** (bits / tokens), rel=1e-5)
        assert s["mean_k"] == pytest.approx(pairs / tokens / config.num_layers)
        assert s["flops"] == pytest.approx(flops / tokens)
        assert s["expert_bytes"] == pytest.approx(hit * 3 * D * config.intermediate_size * 4 / tokens)
    engine.router = parse_router("top_k")


def test_agreement_and_divergence_are_those_of_whole_distributions(engine: Engine, outcomes: list[Outcome]) -> None:
    agree, divergence, count = 0, 0.0, 0
    for item in text_items(engine, TEXT, 32):
        ids_T = torch.tensor([*item.contexts[0], *item.continuations[0]][:-1])
        p, q = (
            engine.model.head(engine.model.forward(Batch(ids_T, [len(ids_T)]), parse_router(spec)))
            .double()
            .softmax(-1)
            .numpy()
            for spec in ("top_k", "elbow")
        )
        agree += int((p.argmax(1) == q.argmax(1)).sum())
        divergence += float(stats.entropy(p, q, axis=1).sum())
        count += len(ids_T)
    assert outcomes[1].summary["agreement"] == agree / count
    assert outcomes[1].summary["kl"] == pytest.approx(divergence / count, rel=1e-6)
    assert (outcomes[0].summary["agreement"], outcomes[0].summary["kl"]) == (1, 0)
    assert outcomes[0].summary["bits_per_byte_change_interval"] == [0, 0]


def test_cloze_chooses_the_ending_that_is_likeliest_a_byte(engine: Engine, tmp_path: Path) -> None:
    items = cloze_items(engine, cloze_file(tmp_path))
    seen = compare(engine, [], items)[0]
    right = []
    for item in CLOZE:
        gap = "" if item["ctx"].endswith("\n") else " "
        scores = [engine.score(item["ctx"], gap + e).logprob / len(e.encode()) for e in item["endings"]]
        right.append(scores.index(max(scores)) == item["label"])
    assert [row.correct for row in seen.seen] == right
    assert seen.summary["accuracy"] == pytest.approx(sum(right) / len(right))
    assert len(cloze_items(engine, cloze_file(tmp_path), limit=2)) == 2


def test_the_paired_interval_is_scipys_bootstrap() -> None:
    rng = np.random.default_rng(5)
    change, size = rng.normal(0.4, 1, 60), rng.integers(50, 150, 60).astype(float)
    weights_RN = resamples(60, seed=0, count=20_000)
    assert (weights_RN.sum(1) == 60).all()
    ours = interval(weights_RN @ change / (weights_RN @ size))
    theirs = stats.bootstrap(
        (change, size), lambda c, s, axis: c.sum(axis) / s.sum(axis), paired=True, vectorized=True,
        method="percentile", n_resamples=20_000, rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    assert ours == pytest.approx([theirs.low, theirs.high], abs=0.02 * (theirs.high - theirs.low))


def test_a_rule_against_its_control_is_scipys_paired_bootstrap(outcomes: list[Outcome]) -> None:
    elbow = outcomes[1]
    for control in outcomes[2:4]:
        pairs = list(zip(elbow.seen, control.seen, strict=True))
        change = np.array([rule.bits - other.bits for rule, other in pairs])
        size = np.array([float(rule.size) for rule, _ in pairs])
        theirs = stats.bootstrap(
            (change, size), lambda c, s, axis: c.sum(axis) / s.sum(axis), paired=True, vectorized=True,
            method="percentile", n_resamples=20_000, rng=np.random.default_rng(1),
        ).confidence_interval  # fmt: skip
        ours = changes(elbow.seen, control.seen, resamples(len(pairs), seed=0, count=20_000))
        assert ours["bits_per_byte_change"] == change.sum() / size.sum()
        wide = theirs.high - theirs.low
        assert ours["bits_per_byte_change_interval"] == pytest.approx([theirs.low, theirs.high], abs=0.03 * wide)
        few = changes(elbow.seen, control.seen, resamples(len(pairs), seed=0))
        assert {f"rule_{name}": value for name, value in few.items()}.items() <= control.summary.items()
        difference = elbow.summary["bits_per_byte"] - control.summary["bits_per_byte"]
        assert control.summary["rule_bits_per_byte_change"] == pytest.approx(difference)
    assert not any("rule_bits_per_byte_change" in outcome.summary for outcome in (*outcomes[:2], outcomes[4]))


def test_accuracy_against_a_control_is_counted_by_hand() -> None:
    def seen(correct: bool) -> Seen:
        return Seen(1.0, 1, 1, correct, 1, 0.0, 1, 1, 1, 1, 1, 1.0)

    rule, control = [seen(c) for c in (True, True, False, True)], [seen(c) for c in (True, False, False, False)]
    found = changes(rule, control, np.array([[1, 1, 1, 1], [0, 4, 0, 0], [0, 0, 4, 0]]))
    assert found["accuracy_change"] == 0.5
    assert found["accuracy_change_interval"] == pytest.approx(np.percentile([0.5, 1, 0], [2.5, 97.5]).tolist())
    assert found["bits_per_byte_change_interval"] == [0, 0]


def test_a_rule_that_often_uses_no_expert_has_controls_that_do_not_either(engine: Engine) -> None:
    class Nothing(PrefixRouter):
        def count(self, sorted_probs_TE: torch.Tensor, context: RouterContext) -> torch.Tensor:
            return torch.zeros(len(sorted_probs_TE), dtype=torch.int64)

    rules = [("often", parse_router("threshold:p=0.4,floor=0")), ("always", Nothing(floor=0))]
    found = compare(engine, rules, text_items(engine, TEXT, 32))
    rule, mixed, random, none = found[1:]
    assert 0 < rule.summary["mean_k"] < 1
    assert mixed.summary["mean_k"] == pytest.approx(rule.summary["mean_k"], rel=0.05)
    assert random.summary["mean_k"] == pytest.approx(rule.summary["mean_k"], rel=0.05)
    assert none.summary["mean_k"] == 0  # and nothing to control


@pytest.mark.parametrize("share", [0, 0.4, 0.6, 0.99])
def test_killed_anywhere_a_comparison_ends_with_the_same_results(share: float, engine: Engine, tmp_path: Path) -> None:
    rules, items = [("elbow", parse_router("elbow"))], text_items(engine, TEXT, 32)
    kill = 1 + int(share * 2 * len(items))
    part = tmp_path / "part"
    runs = 0

    def ran(what: str) -> None:
        nonlocal runs
        runs += 1
        if runs == kill:
            raise KeyboardInterrupt

    def results(outcomes: list[Outcome]) -> list[Any]:
        names = [outcome.arm.name for outcome in outcomes]
        rows = [[replace(row, seconds=0.0) for row in outcome.seen] for outcome in outcomes]
        return [names, rows, [{**outcome.summary, "seconds": 0} for outcome in outcomes]]

    whole = results(compare(engine, rules, items))
    with pytest.raises(KeyboardInterrupt):
        compare(engine, rules, items, part=part, ran=ran)
    before = len(part.read_text().splitlines())
    assert before == 1 + kill
    assert results(compare(engine, rules, items, part=part)) == whole
    assert len(part.read_text().splitlines()) == 1 + 2 * len(items)
    compare(engine, rules, items, part=part, seed=1, controls=False)  # other work, begun anew
    assert len(part.read_text().splitlines()) == 1 + len(items)


def test_the_frontier_is_what_nothing_beats() -> None:
    rng = np.random.default_rng(0)
    points = [(float(x), float(y)) for x, y in rng.integers(1, 9, (12, 2))]
    points = list(dict.fromkeys(points))
    expected = {
        i for i, (x, y) in enumerate(points) if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    }
    assert set(frontier(points)) == expected
    assert frontier([(1000.0, 1.0), (1000.1, 0.5), (999.9, 2.0)]) == [1]
    assert all(points[a] < points[b] for a, b in itertools.pairwise(frontier(points)))


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_verb_writes_a_table_a_document_and_a_picture(
    capsys: pytest.CaptureFixture[str], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"
    words = ["compare", "-m", checkpoint(), "--cloze", cloze_file(tmp_path), "--router", "top_k:k=1,min_p:p=0.9"]
    written = tmp_path / "compare.json"
    code, out, _ = run(capsys, *words, "--plot", picture, "--out", written)
    assert code == 0
    assert not list(tmp_path.glob("*.part"))
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert len({len(line) for line in table}) == 1
    names = [line.split("|")[1].strip() for line in table[2:]]
    assert names[:3] == ["top_k", "top_k:k=1", "min_p:p=0.9"]
    assert [name[:8] for name in names[3:]] == ["· mixed_", "· random"]
    assert "<svg" in picture.read_text("utf-8")
    code, out, _ = run(capsys, *words, "--json")
    document = json.loads(out)
    for arms in zip(document["arms"], json.loads(written.read_text("utf-8"))["arms"], strict=True):
        assert arms[0]["bits_per_byte"] == arms[1]["bits_per_byte"]
    assert [arm["control_of"] for arm in document["arms"]] == [None, None, None, "min_p:p=0.9", "min_p:p=0.9"]
    assert f"{document['arms'][1]['bits_per_byte']:.4f}" == table[3].split("|")[3].strip()
    assert len(document["arms"][0]["per_item"]) == document["items"] == 3


BAD: dict[str, tuple[list[str], str]] = {
    "nothing to measure on": ([], "either --text FILE or --cloze FILE"),
    "both": (["--text", "x", "--cloze", "y"], "either --text FILE or --cloze FILE"),
    "no file": (["--text", "absent.txt"], "absent.txt cannot be read"),
    "empty text": (["--text", "empty.txt"], "the text is empty"),
    "one window": (["--text", "short.txt"], "at least two items"),
    "window too long": (["--text", "short.txt", "--window", "128"], "1 to 127 tokens"),
    "no cloze": (["--cloze", "empty.txt"], "has no items"),
    "not cloze": (["--cloze", "short.txt"], "line 1 of short.txt is no cloze item"),
    "label": (["--cloze", "label.jsonl"], "line 1 of label.jsonl is no cloze item"),
    "picture": (["--text", "short.txt", "--plot", "x.pdf"], ".png or .svg"),
    "picture's place": (["--text", "short.txt", "--plot", "absent/x.png"], "there is no folder absent"),
    "document's place": (["--text", "short.txt", "--out", "."], "--out needs the name of a file"),
    "rule": (["--text", "short.txt", "--router", "nonsense"], "unknown router"),
    "one item": (["--cloze", "one.jsonl"], "at least two items"),
}
ONLY_BY_THE_MODEL = ("one window", "window too long")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_to_compare_is_one_sentence(
    case: str,
    capsys: pytest.CaptureFixture[str],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("a fox")
    (tmp_path / "one.jsonl").write_text(json.dumps(CLOZE[0]))
    if case not in ONLY_BY_THE_MODEL:
        monkeypatch.setattr("minimoe.cli.options.load_engine", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "label.jsonl").write_text(json.dumps({**CLOZE[0], "label": 3}))
    words, sentence = BAD[case]
    window = [] if "--window" in words else ["--window", "100"]
    code, out, err = run(capsys, "compare", "-m", checkpoint(), *words, *window)
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err


def test_limits_and_long_items_are_refused_by_name(engine: Engine, tmp_path: Path) -> None:
    long = cloze_file(tmp_path, [{"ctx": "a " * 300, "endings": ["b"], "label": 0}])
    with pytest.raises(InputError, match=r"line 1 .* tokens, but the model's context holds 128"):
        cloze_items(engine, long)


def test_a_recorded_generation_can_be_replayed(
    capsys: pytest.CaptureFixture[str], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    words = ["generate", "a fox", "-m", checkpoint(), "-n", "5", "--temperature", "0", "--json"]
    file = tmp_path / "run.npz"
    _, first, _ = run(capsys, *words, "--router", "random:k=1.5", "--record", file)
    code, again, _ = run(capsys, *words, "--router", f"replay:file={file}")
    assert code == 0
    assert json.loads(again)["tokens"] == json.loads(first)["tokens"]
