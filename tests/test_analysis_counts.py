"""analyze counts: every array against plain loops over the logits and routings that another probe saw."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import SENTENCES
from torch import Tensor

import minimoe
from minimoe.analysis import run as run_module
from minimoe.analysis.run import Analysis, Versus, read_analysis
from minimoe.analysis.tally import ARRAYS, bin_spreads
from minimoe.analysis.texts import Text, text_source
from minimoe.cache import KVCache
from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.model import Batch
from minimoe.probe import Phase, Probe
from minimoe.routers.spec import parse_router
from minimoe.routing import Routing
from minimoe.snapshot import write_snapshot

WINDOW, NEW = 24, 3
TEXTS = {"tales": " ".join(SENTENCES[:3]), "talk": " ".join(SENTENCES[3:])}
RULES = ["elbow", "top_p:p=0.9,floor=9,cap=12", "random:k=2.5"]


class Rows(Probe):
    """Every token's router row and choice: (phase, layer, logits, experts in rank order)."""

    def __init__(self) -> None:
        self.rows: list[tuple[Phase, int, list[float], list[int]]] = []
        self.phase: Phase = "prefill"

    def step(self, phase: Phase, new: object, past: object) -> None:
        self.phase = phase

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        for logits, experts, k in zip(
            logits_TE.tolist(), routing.experts_TK.tolist(), routing.k_T.tolist(), strict=True
        ):
            self.rows.append((self.phase, layer, logits, experts[:k]))


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    return minimoe.load(checkpoint("top8_of_64"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Text]:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text, "utf-8")
    return [Text(name, folder / f"{name}.txt") for name in TEXTS]


def analyze(
    engine: Engine, rule: tuple[str, Any], texts: list[Text], path: Path, *, window: int = WINDOW, **options: Any
) -> Analysis:
    return run_module.analyze(engine, rule, text_source(texts, engine.tokenizer, window), path, **options)


@pytest.fixture(scope="module", params=RULES)
def counted(
    request: pytest.FixtureRequest, engine: Engine, texts: list[Text], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Analysis]:
    path = tmp_path_factory.mktemp("analysis") / "a.npz"
    rule = request.param
    return rule, analyze(engine, (rule, parse_router(rule)), texts, path, window=WINDOW, new_tokens=NEW)


def look(engine: Engine, rule: str) -> dict[str, list[tuple[list[int], list[int], Rows]]]:
    """Each domain's windows with the tokens written after them and what was routed; all windows of a domain are run
    together, as the analysis does, so that a rule that draws draws alike."""
    found = {}
    with torch.inference_mode():
        for index, (name, text) in enumerate(TEXTS.items()):
            ids = engine.tokenizer.encode(text)
            parts = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
            router, draws, rows = parse_router(rule), torch.Generator().manual_seed(index), Rows()
            caches = [KVCache(engine.config, len(p) + NEW, torch.float32, torch.device("cpu")) for p in parts]
            batch = Batch(torch.tensor([i for p in parts for i in p]), [len(p) for p in parts], caches)
            hidden = engine.model.forward(batch, router, rows, draws)[batch.last_rows]
            written = []
            for _ in range(NEW):
                written.append(engine.model.head(hidden).argmax(-1))
                batch = Batch(written[-1], [1] * len(parts), caches, "decode")
                hidden = engine.model.forward(batch, router, rows, draws)
            found[name] = [(parts, torch.stack(written).T.tolist(), rows)]
    return found


def test_every_count_is_that_of_plain_loops(engine: Engine, counted: tuple[str, Analysis]) -> None:
    rule, analysis = counted
    arrays, L, E, K = analysis.arrays, engine.config.num_layers, 64, 8
    expected = {name: np.zeros(array.shape) for name, array in arrays.items()}
    for g, seen in enumerate(look(engine, rule).values()):
        parts, written, rows = seen[0]
        tokens = {"prefill": [i for p in parts for i in p], "decode": [w[s] for s in range(NEW) for w in written]}
        window_of = {
            "prefill": [w for w, p in enumerate(parts) for _ in p],
            "decode": [w for _ in range(NEW) for w in range(len(parts))],
        }
        sums: dict[tuple[int, int, int, int], list[float]] = {}
        place: Counter[tuple[Phase, int]] = Counter()
        for phase in tokens:
            expected["tokens_GF"][g, ["prefill", "decode"].index(phase)] = len(tokens[phase])
            for i in tokens[phase]:
                expected["seen_V"][i] += 1
        for phase, layer, logits, experts in rows.rows:
            f, t = ["prefill", "decode"].index(phase), place[phase, layer]
            place[phase, layer] += 1
            token, window = tokens[phase][t], window_of[phase][t]
            p = torch.tensor(logits).softmax(-1).tolist()
            order = sorted(range(E), key=lambda e: (-p[e], e))
            curve = [p[e] for e in order]
            y = [(curve[0] - value) / (curve[0] - curve[-1] + 1e-12) for value in curve]
            bend = max(range(E), key=lambda i: (y[i] - i / (E - 1), -i))
            x, h = bend / (E - 1), y[bend]
            degrees = math.degrees(math.atan2(1 - h, 1 - x)) + 180 - math.degrees(math.atan2(h, x))
            degrees = degrees if degrees <= 180 else 360 - degrees
            expected["k_GFLJ"][g, f, layer, len(experts)] += 1
            expected["load_GFLE"][g, f, layer, experts] += 1
            expected["topload_GFLE"][g, f, layer, order[:K]] += 1
            expected["outside_GFL"][g, f, layer] += len(set(experts) - set(order[:K]))
            expected["elbow_GFLE"][g, f, layer, bend] += 1
            expected["product_GFL"][g, f, layer] += bend * degrees
            expected["square_GFLQ"][g, f, layer] += [len(experts) ** 2, bend**2, degrees**2, degrees <= 135]
            expected["curve_GFLE"][g, f, layer] += curve
            for a in experts:
                expected["words_LEV"][layer, a, token] += 1
                for b in experts:
                    expected["together_GFLEE"][g, f, layer, a, b] += 1
            for a, b in itertools.pairwise(experts):
                expected["adjacent_GFLEE"][g, f, layer, a, b] += 1
            for q, value in enumerate((len(experts), bend, degrees, degrees <= 135)):
                sums.setdefault((f, layer, q, window), []).append(value)
        together: dict[tuple[int, int, int, int], list[float]] = {}
        for (f, layer, q, window), values in sums.items():
            for h, n in itertools.product((f, 2), (layer, L)):
                together.setdefault((h, n, q, window), []).extend(values)
        for (h, n, q, _), values in together.items():
            count, x = len(values), sum(values)
            expected["windows_GHNQM"][g, h, n, q] += [1, count, x, x * x, count * x, count * count]
    for name in set(ARRAYS) - {"spread_GFLS", "angle_GFLA", "other_GFL", "shared_GFL"}:
        if ARRAYS[name][0].startswith("int"):
            np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)
        else:
            np.testing.assert_allclose(arrays[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert arrays["load_GFLE"].sum() > 0
    assert (arrays["outside_GFL"].sum() > 0) == (rule != "elbow")
    # Bins: each token in one, near its own value.
    for f in range(2):
        assert (arrays["angle_GFLA"][:, f].sum(-1) == arrays["tokens_GF"][:, f, None]).all()
        assert (arrays["spread_GFLS"][:, f].sum(-1) == arrays["tokens_GF"][:, f, None]).all()
    degrees_A = (np.arange(360) + 0.5) / 2
    binned = (arrays["angle_GFLA"] * degrees_A).sum((0, 1, 3))
    assert binned / arrays["angle_GFLA"].sum((0, 1, 3)) == pytest.approx(
        arrays["windows_GHNQM"][:, 2, :-1, 2, 2].sum(0) / arrays["windows_GHNQM"][:, 2, :-1, 2, 1].sum(0), abs=0.25
    )
    spreads = [np.std(logits, ddof=1) for seen in look(engine, rule).values() for _, _, logits, _ in seen[0][2].rows]
    mean = (arrays["spread_GFLS"].sum((0, 1, 2)) * bin_spreads()).sum() / arrays["spread_GFLS"].sum()
    assert mean == pytest.approx(np.mean(spreads), rel=0.02)
    assert arrays["tokens_GF"].sum() * L == len(spreads)


def test_without_new_tokens_there_is_no_decode(engine: Engine, texts: list[Text], tmp_path: Path) -> None:
    analysis = analyze(engine, ("elbow", parse_router("elbow")), texts, tmp_path / "a.npz", window=WINDOW)
    assert analysis.arrays["tokens_GF"][:, 0].all()
    assert not analysis.arrays["tokens_GF"][:, 1].any()
    assert read_analysis(tmp_path / "a.npz").about == analysis.about
    assert set(analysis.about["arrays"]) == set(ARRAYS)


# Against another rule or checkpoint


def test_what_is_chosen_alike_is_counted(engine: Engine, texts: list[Text], tmp_path: Path) -> None:
    versus = Versus(engine, "top_k:k=3", parse_router("top_k:k=3"))
    options = {"window": WINDOW, "new_tokens": NEW}
    elbow_rule = ("elbow", parse_router("elbow"))
    analysis = analyze(engine, elbow_rule, texts, tmp_path / "a.npz", versus=versus, **options)
    shared, other = np.zeros((2, 2, 3)), np.zeros((2, 2, 3))
    for g, name in enumerate(TEXTS):
        ((parts, written, rows),) = look(engine, "elbow")[name]
        again = Rows()
        # The other rule reads the tokens that the first one wrote.
        with torch.inference_mode():
            caches = [KVCache(engine.config, len(p) + NEW, torch.float32, torch.device("cpu")) for p in parts]
            batches = [Batch(torch.tensor([i for p in parts for i in p]), [len(p) for p in parts], caches)]
            batches += [
                Batch(torch.tensor([w[s] for w in written]), [1] * len(parts), caches, "decode") for s in range(NEW)
            ]
            for batch in batches:
                engine.model.forward(batch, versus.router, again)
        for (phase, layer, _, mine), (_, _, _, theirs) in zip(rows.rows, again.rows, strict=True):
            f = ["prefill", "decode"].index(phase)
            shared[g, f, layer] += len(set(mine) & set(theirs))
            other[g, f, layer] += len(theirs)
    np.testing.assert_array_equal(analysis.arrays["shared_GFL"], shared)
    np.testing.assert_array_equal(analysis.arrays["other_GFL"], other)


def test_a_router_agrees_wholly_with_itself(engine: Engine, texts: list[Text], tmp_path: Path) -> None:
    rule = ("elbow", parse_router("elbow"))
    same = Versus(engine, *rule)
    arrays = analyze(engine, rule, texts, tmp_path / "a.npz", window=WINDOW, new_tokens=2, versus=same).arrays
    load = arrays["load_GFLE"].sum(-1)
    np.testing.assert_array_equal(arrays["shared_GFL"], load)
    np.testing.assert_array_equal(arrays["other_GFL"], load)


def test_another_shape_is_refused(
    engine: Engine, checkpoint: Callable[..., Path], texts: list[Text], tmp_path: Path
) -> None:
    other = minimoe.load(checkpoint("top2_of_4"))
    rule = ("elbow", parse_router("elbow"))
    with pytest.raises(InputError, match=r"3 layers of 4 experts.* 3 of 64"):
        analyze(engine, rule, texts, tmp_path / "a.npz", window=9, versus=Versus(other, *rule))


# Resumption


@pytest.mark.parametrize("kill", [1, 3, 4, 5])
def test_killed_anywhere_it_ends_with_the_same_file(
    kill: int, engine: Engine, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "SAVE_EVERY", 2)
    monkeypatch.setattr(run_module, "PASS_TOKENS", WINDOW)
    rule = ("elbow", parse_router("elbow"))
    options = {"window": WINDOW, "new_tokens": 1, "versus": Versus(engine, "top_k", parse_router("top_k"))}
    whole, cut = tmp_path / "whole.npz", tmp_path / "cut.npz"
    analyze(engine, rule, texts, whole, **options)
    forwards = 0
    forward = engine.model.forward

    def counting(batch: Batch, *rest: object) -> Tensor:
        nonlocal forwards
        forwards += batch.phase == "prefill"
        if forwards == 2 * kill:  # in the middle of a group, between the two rules
            forwards += 1
            raise KeyboardInterrupt
        return forward(batch, *rest)

    monkeypatch.setattr(engine.model, "forward", counting)
    with pytest.raises(KeyboardInterrupt):
        analyze(engine, rule, texts, cut, **options)
    assert not cut.exists()
    analyze(engine, rule, texts, cut, **options)
    assert cut.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.npz", "whole.npz"]
    # What had been saved was not run again.
    groups = sum(-(-len(engine.tokenizer.encode(text)) // WINDOW) for text in TEXTS.values())
    saved = (kill - 1) // 2 * 2
    assert forwards == 2 * kill + 1 + 2 * (groups - saved)


def test_a_state_of_other_work_or_a_broken_one_is_not_used(engine: Engine, texts: list[Text], tmp_path: Path) -> None:
    rule = ("elbow", parse_router("elbow"))
    expected = analyze(engine, rule, texts, tmp_path / "a.npz", window=WINDOW)
    for name, make in {
        "b": lambda part: write_snapshot(part, expected.arrays, "x", 1),
        "c": lambda part: part.write_bytes(b"PK\x03\x04 broken"),
    }.items():
        make(tmp_path / f"{name}.npz.part")
        analyze(engine, rule, texts, tmp_path / f"{name}.npz", window=WINDOW)
        assert (tmp_path / f"{name}.npz").read_bytes() == (tmp_path / "a.npz").read_bytes()


def test_finished_work_is_read_and_other_work_not_overwritten(
    engine: Engine, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, path = ("elbow", parse_router("elbow")), tmp_path / "a.npz"
    first = analyze(engine, rule, texts, path, window=WINDOW)
    before = path.read_bytes()
    with pytest.raises(InputError, match="another analysis"):
        analyze(engine, rule, texts, path, window=WINDOW - 1)
    assert path.read_bytes() == before
    monkeypatch.setattr(engine.model, "forward", None)
    again = analyze(engine, rule, texts, path, window=WINDOW)
    assert again.about == first.about
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(InputError, match="is no analysis"):
        analyze(engine, rule, texts, path, window=WINDOW)
