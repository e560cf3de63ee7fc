"""Evaluation: records against a plain loop, whatever the order, the chunks and the interruptions; the statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_files import write_benchmarks
from fixtures import WITHOUT_KERNELS
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import minimoe
from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.evaluate.letters import LetterPrompt, read, read_as_published
from minimoe.evaluate.log import Log
from minimoe.evaluate.results import choose, results
from minimoe.evaluate.run import Benchmark, decides_alone, evaluate, left, prepare, settings
from minimoe.evaluate.tasks import TASKS, RequestSet
from minimoe.intervals import mean_interval, wilson
from minimoe.routers import Router
from minimoe.routers.spec import parse_router

RULES: dict[str, Router] = {spec: parse_router(spec) for spec in ("top_k", "elbow")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    return minimoe.load(checkpoint("top8_of_64", max_position_embeddings=512))


@pytest.fixture(scope="module")
def narrow(checkpoint: Callable[..., Path]) -> Engine:
    folder = checkpoint("top8_of_64", max_position_embeddings=512, dtype=torch.bfloat16)
    return minimoe.load(folder, backend="native")


def run(engine: Engine, benchmarks: Sequence[Benchmark], rules: dict[str, Router] = RULES, **options: Any) -> Log:
    with Log(None, settings(engine, 0)) as log:
        evaluate(engine, benchmarks, rules, log, **options)
    return log


def record(log: Log, benchmark: Benchmark, rule: str, item: Any) -> dict[str, Any]:
    found = log.find(benchmark.task.name, rule, item.id, item.digest())
    assert found is not None
    return dict(found)


@pytest.mark.parametrize("protocol", ["cloze", "choice"])
@pytest.mark.parametrize("name", TASKS)
def test_scores_are_those_of_a_plain_loop(engine: Engine, data: Path, name: str, protocol: Any) -> None:
    benchmark = prepare(TASKS[name], data, protocol=protocol)
    log = run(engine, [benchmark])
    right: dict[str, int] = {}
    for rule in RULES:
        engine.router = RULES[rule]
        for item in benchmark.items:
            assert isinstance(item, RequestSet)
            pairs = zip(item.contexts(), item.continuations, strict=True)
            plain = [engine.score(*pair).logprob for pair in pairs]
            assert record(log, benchmark, rule, item)["logprobs"] == pytest.approx(plain, abs=1e-4)
            sizes = item.sizes if benchmark.normaliser == "characters" else [1] * item.choices
            values = [value / size for value, size in zip(plain, sizes, strict=True)]
            right[rule] = right.get(rule, 0) + (int(np.argmax(values)) == item.gold)
    engine.router = RULES["top_k"]
    found = results([benchmark], list(RULES), log, engine.config.num_layers)
    assert [result["correct"] for result in found] == list(right.values())
    assert found[0]["mean_k"] == 8
    assert 1 < found[1]["mean_k"] < 8


@WITHOUT_KERNELS
@pytest.mark.parametrize("protocol", ["cloze", "choice", "letters"])
def test_order_and_chunks_change_no_bit(narrow: Engine, data: Path, protocol: Any) -> None:
    benchmarks = [prepare(TASKS[name], data, protocol=protocol) for name in ("arc_easy", "piqa", "winogrande")]
    log = run(narrow, benchmarks)
    for chunk in (1, 150):
        turned = [replace(b, items=list(reversed(b.items))) for b in reversed(benchmarks)]
        other = run(narrow, turned, chunk=chunk)
        for benchmark in benchmarks:
            for rule in RULES:
                for item in benchmark.items:
                    assert record(log, benchmark, rule, item) == record(other, benchmark, rule, item)


@pytest.mark.parametrize("spec", ["random:k=3", "union:k0=2"])
def test_rules_that_draw_or_look_around_do_not_depend_on_the_order_either(
    engine: Engine, data: Path, spec: str
) -> None:
    rules = {spec: parse_router(spec)}
    assert not decides_alone(engine, rules[spec])
    benchmark = prepare(TASKS["arc_easy"], data)
    log = run(engine, [benchmark], rules)
    other = run(engine, [replace(benchmark, items=list(reversed(benchmark.items)))], rules, chunk=1)
    for item in benchmark.items:
        assert record(log, benchmark, spec, item) == record(other, benchmark, spec, item)
    assert decides_alone(engine, RULES["elbow"])


class Killed(Exception):
    pass


@pytest.mark.parametrize("protocol", ["cloze", "letters"])
def test_killed_anywhere_it_goes_on_and_ends_the_same(
    engine: Engine, data: Path, tmp_path: Path, protocol: Any
) -> None:
    benchmarks = [prepare(TASKS[name], data, protocol=protocol) for name in ("arc_easy", "piqa")]
    layers = engine.config.num_layers
    whole = results(benchmarks, list(RULES), run(engine, benchmarks, chunk=1), layers)
    path, turns = tmp_path / "items.jsonl", []

    def killed_after(count: int) -> Callable[[Benchmark, str, int], None]:
        def ran(benchmark: Benchmark, rule: str, characters: int) -> None:
            turns.append((benchmark.task.name, rule, characters))
            if len(turns) == count:
                raise Killed

        return ran

    for count in (1, 2, 5, 9):
        with pytest.raises(Killed), Log(path, settings(engine, 0)) as log:
            evaluate(engine, benchmarks, RULES, log, chunk=1, ran=killed_after(count))
        path.write_bytes(path.read_bytes() + b'{"task": "arc_ea')  # killed while it wrote
    with Log(path, settings(engine, 0)) as log:
        rest = left(benchmarks, RULES, log)
        evaluate(engine, benchmarks, RULES, log, chunk=1, ran=lambda b, r, n: turns.append((b.task.name, r, n)))
        assert results(benchmarks, list(RULES), log, layers) == whole
        assert left(benchmarks, RULES, log) == 0
    assert len(turns) == 2 * sum(len(benchmark.items) for benchmark in benchmarks)  # nothing twice
    assert rest == sum(characters for *_, characters in turns[9:])


def test_a_log_of_other_settings_or_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    one = {"task": "t", "router": "r", "id": "i", "digest": "d", "logprobs": [0.1, -math.pi]}
    with Log(path, {"seed": 0}) as log:
        log.add([one])
    with Log(path, {"seed": 0}) as log:
        assert log.find("t", "r", "i", "d") == one
        assert log.find("t", "r", "i", "e") is None
    with pytest.raises(InputError, match=r"seed 0, and this one has 1.*another --out"), Log(path, {"seed": 1}):
        pass
    for line in ("[]", "{}", '{"task": 1}', "not JSON"):
        broken = tmp_path / "broken.jsonl"
        broken.write_bytes(path.read_bytes() + f"{line}\n".encode())
        with pytest.raises(InputError, match=r"line 3 of .*broken"), Log(broken, {"seed": 0}):
            pass
    for text in ("something else\n", "something else"):
        broken.write_text(text)
        with pytest.raises(InputError, match="line 1"), Log(broken, {"seed": 0}):
            pass
        assert broken.read_text() == text
    broken.write_text('{"settings": {"se')  # killed in its first line
    with Log(broken, {"seed": 0}) as log:
        log.add([one])
    with Log(broken, {"seed": 0}) as log:
        assert log.find("t", "r", "i", "d") == one
    with pytest.raises(InputError, match="cannot be written"), Log(tmp_path, {}):
        pass


def test_what_is_too_long_loses_worked_examples_then_its_beginning_then_is_invalid(
    checkpoint: Callable[..., Path], data: Path
) -> None:
    """In a context of 128 tokens; the tokenizer makes one of nearly every character."""
    engine = minimoe.load(checkpoint("top8_of_64"))
    item = RequestSet("x", "", 0, "", ("q a\n\n" * 30, "w b\n\n"), ("Where?",) * 2, (" here", " there"), (4, 5), None)
    long = replace(item, id="y", shots=(), queries=("x" * 140 + "yz",) * 2)
    hopeless = replace(item, id="z", continuations=(" " + "z" * 130, " there"))
    benchmark = replace(prepare(TASKS["piqa"], data), items=[item, long, hopeless])
    log = run(engine, [benchmark])
    dropped, cut, invalid = (record(log, benchmark, "top_k", i) for i in benchmark.items)
    kept = [engine.score("w b\n\nWhere?", text).logprob for text in item.continuations]
    assert dropped["logprobs"] == pytest.approx(kept, abs=1e-4)
    assert (dropped["shots_dropped"], dropped["tokens_cut"]) == (1, 0)
    parts = [engine.tokenizer.encode(long.queries[0] + text) for text in long.continuations]
    excess = max(map(len, parts)) - 128
    counts = [len(ids) - len(engine.tokenizer.encode(long.queries[0])) for ids in parts]
    kept = [engine.score(ids[excess:-n], ids[-n:]).logprob for ids, n in zip(parts, counts, strict=True)]
    assert cut["logprobs"] == pytest.approx(kept, abs=1e-4)
    assert cut["tokens_cut"] == excess > 0
    assert "too long" in invalid["invalid"]
    found = results([benchmark], ["top_k"], log, engine.config.num_layers)[0]
    assert (found["invalid"], found["cut"], found["shots_dropped"], found["items"]) == (1, 1, 1, 3)


def test_pmi_takes_the_choices_own_probability_away(engine: Engine, data: Path) -> None:
    benchmark = prepare(TASKS["arc_easy"], data, normaliser="pmi")
    log = run(engine, [benchmark])
    right = 0
    for item in benchmark.items:
        assert isinstance(item, RequestSet)
        values = [
            engine.score(context, text).logprob - engine.score("Answer:", text).logprob
            for context, text in zip(item.contexts(), item.continuations, strict=True)
        ]
        right += int(np.argmax(values)) == item.gold
    found = results([benchmark], ["top_k"], log, engine.config.num_layers)[0]
    assert found["correct"] == right
    assert set(found["by_normaliser"]) == {"none", "characters", "pmi"}
    with pytest.raises(InputError, match="WinoGrande"):
        prepare(TASKS["winogrande"], data, normaliser="pmi")
    with pytest.raises(InputError, match="letter protocol"):
        prepare(TASKS["arc_easy"], data, protocol="letters", shots=1)


def item_of(gold: int, sizes: tuple[int, ...]) -> RequestSet:
    texts = tuple(" " + "x" * size for size in sizes)
    return RequestSet("x", "", gold, "", (), ("q",) * len(sizes), texts, sizes, None)


def test_the_first_of_the_best_is_chosen_and_ties_are_counted() -> None:
    item = item_of(1, (4, 2, 2))
    assert choose(item, {"logprobs": [-4.0, -3.0, -5.0]}, "none").correct
    assert not choose(item, {"logprobs": [-4.0, -3.0, -5.0]}, "characters").correct
    first = choose(item, {"logprobs": [-9.0, -3.0, -3.0]}, "none")
    second = choose(replace(item, gold=2), {"logprobs": [-9.0, -3.0, -3.0]}, "none")
    assert (first.correct, first.tied, second.correct, second.tied) == (True, True, False, True)
    assert not choose(item, {"logprobs": [-9.0, -3.0, -4.0]}, "none").tied


@given(count=st.integers(1, 3000), share=st.floats(0, 1))
def test_wilson_is_scipys(count: int, share: float) -> None:
    correct = round(share * count)
    theirs = stats.binomtest(correct, count).proportion_ci(0.95, "wilson")
    assert wilson(correct, count) == pytest.approx([theirs.low, theirs.high], abs=1e-9)


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=2, max_size=40))
def test_the_interval_of_a_mean_is_scipys(values: list[float]) -> None:
    error = stats.sem(values)
    low, high = stats.norm.interval(0.95, np.mean(values), error) if error else [np.mean(values)] * 2
    assert mean_interval(values) == pytest.approx([low, high], abs=1e-12)


def test_mmlu_is_averaged_over_items_and_over_subjects(engine: Engine, data: Path) -> None:
    benchmark = prepare(TASKS["mmlu"], data)
    log = Log(None, {})
    for item, best in zip(benchmark.items, (3, 1, 0), strict=True):  # right, wrong; right
        values = [-1000.0 * (i != best) - 1 for i in range(4)]
        log.add([{"task": "mmlu", "router": "r", "id": item.id, "digest": item.digest(), "logprobs": values}])
    (found,) = results([benchmark], ["r"], log, 1)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["subject_mean"] == pytest.approx(0.75)
    assert found["subjects"] == {
        "animal_stories": {"items": 2, "accuracy": 0.5},
        "astronomy": {"items": 1, "accuracy": 1.0},
    }
    half = stats.norm.ppf(0.975) * math.sqrt(0.5 * 0.5 / 2) / 2
    assert found["subject_mean_interval"] == pytest.approx([0.75 - half, 0.75 + half])
    assert found["chance"] == 0.25
    assert len(prepare(TASKS["mmlu"], data, limit=1).items) == 2


def test_letters_are_what_generation_writes(engine: Engine, data: Path) -> None:
    benchmark = prepare(TASKS["arc_easy"], data, protocol="letters")
    assert [item.prompt for item in benchmark.items if isinstance(item, LetterPrompt)][1:3] == [
        "Question: What colour is the sky?\nChoices:\n1. blue\n2. small\n3. three\n4. upon\nAnswer:",
        "Question: Who were friends?\nChoices:\nA. the sea\nB. the fox and the owl\nC. the boat\nAnswer:",
    ]
    log = run(engine, [benchmark])
    for item in benchmark.items:
        assert isinstance(item, LetterPrompt)
        expected = engine.generate(item.prompt, max_new_tokens=2, temperature=0)
        found = record(log, benchmark, "top_k", item)
        assert found["output"] == expected.text
        assert found["tokens"] == len(expected.prompt_tokens) + len(expected.tokens) - 1
        assert found["pairs"] == sum(int(layer.k_T.sum()) for layer in expected.routing)


@pytest.mark.parametrize(
    ("labels", "stem", "output", "ours", "theirs"),
    [
        ("ABCD", "Why?", " B.", 1, "B"),
        ("ABCD", "Why?", "\n(C) it", 2, "C"),
        ("ABCD", "Why?", " a dog", None, "A"),  # an article is no answer
        ("ABCD", "Why?", " Because", None, None),
        ("ABCD", "Why?", " E", None, None),
        ("ABCDE", "Why?", " E", 4, None),  # never read
        ("1234", "Why?", " 3", 2, None),  # never read
        ("1234", "Why?", " B", None, "B"),  # and never right
        ("ABCD", "Answer: D or not?", " B", 1, "D"),  # read from the question
        ("ABCD", "Why?", "", None, None),
    ],
)
def test_what_each_parser_reads(labels: str, stem: str, output: str, ours: int | None, theirs: str | None) -> None:
    item = LetterPrompt("x", "", 0, tuple(labels), f"Question: {stem}\nChoices:\n1. x\nAnswer:")
    assert read(item, output) == ours
    assert read_as_published(item, output) == theirs


def test_the_published_parser_is_a_result_of_its_own(engine: Engine, data: Path) -> None:
    benchmark = prepare(TASKS["arc_easy"], data, protocol="letters")
    log = Log(None, {})
    for item in benchmark.items:
        assert isinstance(item, LetterPrompt)
        output = f" {item.labels[item.gold]}"
        log.add([{"task": "arc_easy", "router": "r", "id": item.id, "digest": item.digest(), "output": output}])
    ours, theirs = results([benchmark], ["r"], log, 1, published_parser=True)
    assert (ours["parser"], theirs["parser"]) == ("own", "published")
    assert (ours["correct"], theirs["correct"]) == (4, 2)  # 1 and E are lost
    assert (ours["invalid"], theirs["invalid"], theirs["change"]) == (0, 2, -0.5)


def test_a_result_can_be_written_as_json(engine: Engine, data: Path) -> None:
    benchmark = prepare(TASKS["hellaswag"], data)
    (found,) = results([benchmark], ["top_k"], run(engine, [benchmark]), engine.config.num_layers)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [found[key] for key in ("protocol", "shots", "normaliser", "mean", "split")] == [
        "cloze", 0, "characters", "over items", "validation",
    ]  # fmt: skip
