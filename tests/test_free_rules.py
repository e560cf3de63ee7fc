"""Rules that draw, replay, or choose more freely than a prefix: each against a plain loop over tokens.

Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from curves import context, curves
from free_rules import FREE_RULES
from scipy import stats

import minimoe
from minimoe.curve import deviation
from minimoe.errors import InputError, NumericalError
from minimoe.recording import read_recording, write_recording
from minimoe.routers import ROUTERS, RouterContext, rank
from minimoe.routers.layer_k import LayerK
from minimoe.routers.mask import Mask
from minimoe.routers.mixed_k import MixedK
from minimoe.routers.random import Random
from minimoe.routers.random_head import RandomHead
from minimoe.routers.random_tail import RandomTail
from minimoe.routers.replay import Replay
from minimoe.routers.skip import Skip
from minimoe.routers.spec import parse_router
from minimoe.routers.top_any import TopAny
from minimoe.routers.top_k import TopK
from minimoe.routers.union import Union
from minimoe.routing import Routing

T = 10_000


def drawing(tokens: int, top_k: int = 8, seed: int = 0, **changes: Any) -> RouterContext:
    return replace(context(tokens, top_k), generator=torch.Generator().manual_seed(seed), **changes)


def chosen(routing: Routing) -> list[dict[int, float]]:
    """Each token's experts and their weights."""
    routing.check()
    rows = zip(routing.experts_TK.tolist(), routing.weights_TK.tolist(), routing.k_T.tolist(), strict=True)
    return [dict(zip(experts[:k], weights[:k], strict=True)) for experts, weights, k in rows]


def ranked(logits_TE: torch.Tensor) -> tuple[list[list[float]], list[list[int]]]:
    probs_TE, experts_TE = rank(logits_TE)
    return probs_TE.tolist(), experts_TE.tolist()


SPECS = [spec for spec in FREE_RULES.values() if spec]


@pytest.mark.parametrize("E", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "mask:forbid=1"])
def test_every_free_rule_keeps_the_promises_of_a_routing(spec: str, E: int) -> None:
    logits_TE = torch.cat([curves(E, 300), torch.zeros(1, E), torch.eye(E)[:1] * 200])
    spec = "mixed_k:k=1" if E == 1 and spec.startswith("mixed_k") else spec
    top_k = min(8, E)
    routing = parse_router(spec).route(logits_TE, drawing(302, top_k))
    routing.check()
    assert routing.num_tokens == 302
    assert int(routing.k_T.min()) >= 1
    empty = parse_router(spec).route(logits_TE[:0], drawing(0, top_k))
    empty.check()
    assert (empty.num_tokens, empty.num_experts) == (0, E)


@pytest.mark.parametrize("spec", SPECS)
def test_a_shift_changes_nothing_in_a_free_rule(spec: str) -> None:
    logits_TE = (curves(64, 600) * 1024).round() / 1024
    before = parse_router(spec).route(logits_TE, drawing(600))
    after = parse_router(spec).route(logits_TE - 17.5, drawing(600))
    assert torch.equal(before.experts_TK, after.experts_TK)
    assert torch.equal(before.weights_TK, after.weights_TK)


@pytest.mark.parametrize("spec", ["top_any:p=0.03", "union", "gap_ratio"])
def test_renaming_the_experts_of_a_rule_that_does_not_draw(spec: str) -> None:
    logits_TE = curves(64, 600)
    logits_TE = logits_TE[torch.arange(600) % 6 != 5]  # without the family of ties
    new_E = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    before = parse_router(spec).route(logits_TE, drawing(500))
    after = parse_router(spec).route(logits_TE[:, new_E], drawing(500))
    names = [*new_E.tolist(), 64]
    renamed = [{names[e]: w for e, w in row.items()} for row in chosen(after)]
    same = sum(set(a) == set(b) for a, b in zip(renamed, chosen(before), strict=True))
    assert same >= 499  # the softmax adds up in another order, which may tip one curve over


@pytest.mark.parametrize("E", [1, 2, 3, 64])
@pytest.mark.parametrize("cap", [None, 1, 4])
def test_top_any_is_a_loop_over_experts(E: int, cap: int | None) -> None:
    logits_TE = curves(E, T)
    probs, experts = ranked(logits_TE)
    expected = []
    for p, names in zip(probs, experts, strict=True):
        wanted = [i for i in range(E) if i == 0 or p[i] >= 0.03125][:cap]
        expected.append({names[i]: p[i] for i in wanted})
    assert chosen(TopAny(p=0.03125, cap=cap).route(logits_TE, context(T))) == expected


def test_top_any_reads_a_threshold_for_each_expert(tmp_path: Path) -> None:
    thresholds = [[0.5, 0.0, 0.25, 1.0], [1.0] * 4]
    file = calibration(tmp_path, "top_any", thresholds)
    logits_TE = curves(4, 2000)
    probs = logits_TE.softmax(-1).tolist()
    for layer, bounds in enumerate(thresholds):
        got = chosen(TopAny(file=file).route(logits_TE, replace(context(2000, 2), layer=layer)))
        for row, p in zip(got, probs, strict=True):
            expected = {e for e in range(4) if p[e] >= bounds[e]} | {p.index(max(p))}
            assert set(row) == expected
    with pytest.raises(InputError, match="does not hold 8 thresholds"):
        TopAny(file=file).route(torch.zeros(1, 8), context(1))


@pytest.mark.parametrize("E", [1, 2, 3, 64])
@pytest.mark.parametrize("within", ["batch", "sequence"])
def test_union_is_a_loop_over_tokens(E: int, within: Any) -> None:
    k0, top_k = min(2, E), min(8, E)
    logits_TE = curves(E, T)
    sequence_T = torch.arange(T) // 7
    probs, experts = ranked(logits_TE)
    loaded: dict[int, set[int]] = {}
    for t in range(T):
        loaded.setdefault(t // 7 if within == "sequence" else 0, set()).update(experts[t][:k0])
    expected = []
    for t in range(T):
        open_ones = loaded[t // 7 if within == "sequence" else 0]
        ranks = [i for i in range(top_k) if i < k0 or experts[t][i] in open_ones]
        expected.append({experts[t][i]: probs[t][i] for i in ranks})
    routing = Union(k0=k0, within=within).route(logits_TE, replace(context(T, top_k), sequence_T=sequence_T))
    assert chosen(routing) == expected


def test_a_rule_that_looks_ahead_refuses_to_decode(checkpoint: Callable[..., Path]) -> None:
    engine = minimoe.load(checkpoint(), router="union:within=sequence")
    assert engine.score("The sky", " is blue").logprob < 0
    with pytest.raises(InputError, match="looks ahead"):
        engine.generate("The sky", max_new_tokens=3)
    assert ROUTERS["union"].sees == "other tokens, also later ones"


def test_mask_is_a_sort_by_hand() -> None:
    logits_TE = curves(16, T)
    probs, experts = ranked(logits_TE)
    expected = []
    for p, names in zip(probs, experts, strict=True):
        of = dict(zip(names, p, strict=True))
        free = [e for e in names if e not in (3, 5, 11)]
        expected.append({e: of[e] for e in [11, *free[:3]]})
    rule = Mask(forbid="3/5", force="11", layer="0/2", k=4)
    assert chosen(rule.route(logits_TE, context(T))) == expected
    elsewhere = rule.route(logits_TE, replace(context(T), layer=1))
    assert torch.equal(elsewhere.experts_TK, TopK(k=4).route(logits_TE, context(T)).experts_TK)


MASKS = {
    "forbid=16": "no expert 16",
    "force=99": "no expert 99",
    "layer=4,forbid=1": "no layer 4",
    "force=1/2/3,k=2": "3 experts are forced",
    "k=17": "17 experts a token",
    "forbid=0/1/2,k=14": "only 13 of 16 experts are allowed, but a token uses 14",
    "forbid=0/1/2/3/4/5/6/7/8/9/10/11/12/13/14/15": "all 16 experts are forbidden",
}


@pytest.mark.parametrize("keys", MASKS)
def test_a_mask_names_what_the_model_does_not_have(keys: str) -> None:
    with pytest.raises(InputError, match=MASKS[keys]):
        parse_router(f"mask:{keys}").route(torch.zeros(1, 16), replace(context(1), num_layers=4))


@pytest.mark.parametrize(
    "keys", ["forbid=1,force=1", "forbid=a", "forbid=-1", "force=1//2", "k=0", "layer=0", f"forbid={'9' * 5000}"]
)
def test_a_mask_that_makes_no_sense_is_refused(keys: str) -> None:
    with pytest.raises(InputError):
        parse_router(f"mask:{keys}")


CONTRADICTIONS = {
    "mixed_k:k=5.5,cap=5": "k 5.5 is above cap 5",
    "mixed_k:k=2.5,floor=3": "floor 3 is above k 2.5 rounded down",
    "union:k0=3,k=2": "k0 3 is above k, 2",
}


@pytest.mark.parametrize("spec", CONTRADICTIONS)
def test_keys_that_contradict_each_other_are_refused(spec: str) -> None:
    with pytest.raises(InputError, match=CONTRADICTIONS[spec]):
        parse_router(spec)
    with pytest.raises(InputError, match="k0 9 is above k, 8"):
        Union(k0=9).route(torch.zeros(1, 16), context(1))


@pytest.mark.parametrize("k", [1.0, 1.3, 4.75, 7.615])
@pytest.mark.parametrize("tokens", [1, 3, 1000])
@pytest.mark.parametrize("rule", [MixedK, Random])
def test_the_controls_meet_a_mean_k_to_one_percent(rule: Any, tokens: int, k: float) -> None:
    passes = 3000 // tokens
    shared = drawing(tokens)
    logits_TE = curves(64, tokens)
    counts = torch.cat([rule(k=k).route(logits_TE, shared).k_T for _ in range(passes)])
    assert counts.double().mean().item() == pytest.approx(k, rel=0.01)
    assert set(counts.tolist()) <= {int(k), int(k) + 1}


@pytest.mark.parametrize("rule", [MixedK, Random])
def test_a_mean_k_under_one_leaves_tokens_without_an_expert(rule: Any) -> None:
    routing = rule(k=0.2).route(curves(64, T), drawing(T))
    routing.check()
    assert routing.k_T.bincount().tolist() == pytest.approx([0.8 * T, 0.2 * T], abs=1)


def test_random_draws_every_expert_alike_and_keeps_the_slots_weights() -> None:
    logits_TE = curves(16, T)
    routing = Random(k=4).route(logits_TE, drawing(T, 4))
    routing.check()
    assert torch.equal(routing.weights_TK, rank(logits_TE)[0][:, :4])
    assert stats.chisquare(routing.experts_TK.flatten().bincount(minlength=16).numpy()).pvalue > 0.001
    own = chosen(Random(k=3.5, weights="own").route(logits_TE, drawing(T, 4)))
    probs = logits_TE.softmax(-1).tolist()
    for row, p in zip(own, probs, strict=True):
        assert list(row.values()) == pytest.approx(sorted((p[e] for e in row), reverse=True), rel=1e-6)
    again = Random(k=4).route(logits_TE, drawing(T, 4))
    other = Random(k=4).route(logits_TE, drawing(T, 4, seed=1))
    assert torch.equal(again.experts_TK, routing.experts_TK)
    assert not torch.equal(other.experts_TK, routing.experts_TK)


@pytest.mark.parametrize("keep", [None, 0, 3, 8])
@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("rule", [RandomTail, RandomHead])
def test_replaced_slots_hold_only_what_may_be_drawn(rule: Any, duplicates: bool, keep: int | None) -> None:
    logits_TE = curves(64, T)
    probs_TE, experts_TE = rank(logits_TE)
    cuts = deviation(probs_TE).argmax(1).add(1).clamp(max=8).tolist() if keep is None else [keep] * T
    got = chosen(rule(keep=keep, duplicates=duplicates).route(logits_TE, drawing(T)))
    probs, experts = probs_TE.tolist(), experts_TE.tolist()
    drawn = []
    for row, p, names, cut in zip(got, probs, experts, cuts, strict=True):
        tail = rule is RandomTail
        kept = names[:cut] if tail else names[cut:8]
        pool = set(names[cut:]) if tail else set(names[:cut]) | set(names[8:])
        assert set(kept) <= set(row)
        assert set(row) - set(kept) <= pool
        assert sum(row.values()) == pytest.approx(sum(p[:8]), rel=1e-5)
        for slot, name in enumerate(names[:8]):
            if name in kept:
                assert row[name] == p[slot]
        assert len(row) == 8 or duplicates
        drawn += [names.index(e) for e in row if e not in kept] if len(pool) >= 56 else []
    if keep == 3 and not duplicates:
        first, width = (3, 61) if rule is RandomTail else (0, 59)
        ranks = [r for r in drawn if r < 3 or r >= 8] if rule is RandomHead else drawn
        counts = np.bincount(ranks, minlength=64)
        counts = counts[first:] if rule is RandomTail else np.delete(counts, range(3, 8))
        assert len(counts) == width
        assert stats.chisquare(counts).pvalue > 0.001
    if duplicates and keep in (0, 3) and rule is RandomTail:
        assert any(len(row) < 8 for row in got)


def calibration(folder: Path, rule: str, values: list[Any], checkpoint: str = "any") -> str:
    path = folder / f"{rule}.json"
    path.write_text(json.dumps({"rule": rule, "checkpoint": checkpoint, "values": values}), "utf-8")
    return str(path)


def test_skip_and_layer_k_read_a_value_for_each_layer(tmp_path: Path) -> None:
    logits_TE = curves(16, 2000)
    skip = Skip(file=calibration(tmp_path, "skip", [0.125, 0.5]))
    layer_k = LayerK(file=calibration(tmp_path, "layer_k", [3, 5]))
    for layer, (beta, k) in enumerate([(0.125, 3), (0.5, 5)]):
        at_layer = replace(context(2000), layer=layer)
        fixed = Skip(beta=beta).route(logits_TE, at_layer)
        assert torch.equal(skip.route(logits_TE, at_layer).k_T, fixed.k_T)
        assert layer_k.route(logits_TE, at_layer).k_T.unique().tolist() == [k]
        assert LayerK(k="3/5").route(logits_TE, at_layer).k_T.unique().tolist() == [k]
    with pytest.raises(InputError, match="2 layers, but the model has 3"):
        LayerK(k="3/5").route(logits_TE, replace(context(2000), num_layers=3))


@pytest.mark.parametrize("rule", ["skip", "top_any", "layer_k"])
def test_a_rule_that_needs_a_calibration_says_so(rule: str, tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="minimoe calibrate"):
        parse_router(rule)
    with pytest.raises(InputError, match="cannot be read"):
        parse_router(f"{rule}:file={tmp_path}/absent.json")
    for content in ("not json", "[" * 100_000, f'{{"values": [{"9" * 5000}]}}'):
        (tmp_path / "text.json").write_text(content)
        with pytest.raises(InputError, match="no calibration file"):
            parse_router(f"{rule}:file={tmp_path}/text.json")
    value = {"skip": 0.5, "top_any": [0.1] * 8, "layer_k": 1}[rule]
    file = calibration(tmp_path, rule, [value] * 3, checkpoint="another")
    engine = minimoe.load(checkpoint(), router=f"{rule}:file={file}")
    with pytest.raises(InputError, match="another checkpoint"):
        engine.generate("a fox", max_new_tokens=1)
    for layers in (2, 4):
        file = calibration(tmp_path, rule, [value] * layers, checkpoint=engine.model.fingerprint())
        with pytest.raises(InputError, match=f"holds values for {layers} layers, but the model has 3"):
            minimoe.load(checkpoint(), router=f"{rule}:file={file}").generate("a fox", max_new_tokens=1)
    for wild in ([10**400] * 3, [[[[[]]]]] * 3):
        file = calibration(tmp_path, rule, wild, checkpoint=engine.model.fingerprint())
        with pytest.raises(InputError) as caught:
            minimoe.load(checkpoint(), router=f"{rule}:file={file}").generate("a fox", max_new_tokens=1)
        assert len(str(caught.value)) < 400
    own = calibration(tmp_path, rule, [value] * 3, checkpoint=engine.model.fingerprint())
    assert minimoe.load(checkpoint(), router=f"{rule}:file={own}").generate("a fox", max_new_tokens=2).tokens
    with pytest.raises(InputError, match=f"for the rule {rule}"):
        parse_router(f"{'skip' if rule != 'skip' else 'layer_k'}:file={own}")


def test_the_fingerprint_tells_checkpoints_apart_and_dtypes_not(checkpoint: Callable[..., Path]) -> None:
    first = minimoe.load(checkpoint()).model.fingerprint()
    assert minimoe.load(checkpoint(), dtype="bfloat16").model.fingerprint() == first
    assert minimoe.load(checkpoint(seed=1)).model.fingerprint() != first


def test_replay_gives_the_same_text_and_refuses_any_other(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    engine = minimoe.load(checkpoint(), router="random:k=1.5")
    result = engine.generate("The fox", max_new_tokens=6, temperature=0, seed=3)
    ids = [*result.prompt_tokens, *result.tokens][:-1]
    path = tmp_path / "run.npz"
    write_recording(path, ids, result.routing)
    stored = read_recording(path)
    assert stored.ids_T.tolist() == ids
    again = minimoe.load(checkpoint(), router=f"replay:file={path}")
    replayed = again.generate("The fox", max_new_tokens=len(result.tokens), temperature=0)
    assert replayed.tokens == result.tokens
    for old, new in zip(result.routing, replayed.routing, strict=True):
        assert chosen(old) == chosen(new)
    with pytest.raises(InputError, match=f"holds {len(ids)} tokens"):
        again.generate("The fox", max_new_tokens=20, temperature=0)
    with pytest.raises(InputError, match="another text"):
        again.generate("She", max_new_tokens=1)
    with pytest.raises(InputError, match="several"):
        again.generate(["The fox", "The fox"], max_new_tokens=1)
    with pytest.raises(InputError, match="recorded on a model of 3 layers with 8 experts"):
        minimoe.load(checkpoint("top2_of_4"), router=Replay(file=str(path))).generate("The fox", max_new_tokens=1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="no recording"):
        parse_router(f"replay:file={path}")


@pytest.mark.parametrize("name", [name for name, rule in ROUTERS.items() if rule.needs != "a recording"])
def test_nan_is_an_error_that_names_the_layer_under_every_rule(name: str, checkpoint: Callable[..., Path]) -> None:
    keys = ROUTERS[name].example
    keys = "" if name == "mask" else keys
    engine = minimoe.load(checkpoint(), router=f"{name}:{'k=1.5' if name == 'mixed_k' else keys}")
    engine.model.layers[1].gate.weight_ED.fill_(math.nan)  # a private mapping: the file stays as it is
    with pytest.raises(NumericalError, match="layer 1"):
        engine.generate("a fox", max_new_tokens=1)
