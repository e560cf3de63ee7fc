"""The statistics of an analysis as plain data: one record for each domain, phase and layer, and what experts are for.

Shape letters as in minimoe.analysis.tally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from minimoe.analysis import specialisation
from minimoe.analysis.balance import balance, shift
from minimoe.analysis.estimates import correlation, mean, variance
from minimoe.analysis.null import NullModel
from minimoe.analysis.run import Analysis
from minimoe.analysis.tally import PHASES, QUANTITIES, SUMS, Array, bin_spreads
from minimoe.analysis.texts import TOGETHER

ALL = TOGETHER  # as domain, phase or layer of a record
FAVOURITES = 8  # token ids named for each expert
PAIRS = 8  # pairs of experts named for each layer


def summarise(analysis: Analysis, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Everything that the counts say, ready for JSON (NaN becomes None).

    Args:
        decode: token ids to text, for the tables of experts.

    Returns:
        about: the analysis' own, without the meanings of its arrays.
        records: for each domain, phase and layer, and for "all" of each, see `_record`.
        variance: of k, elbow and angle between domains and between layers (eta2, F), tokens of all phases.
        domains: the bits that one use of an expert tells about the domain by layer, and each domain's favourite expert.
        layers: co-activation, vocabulary specialisation, and the favourite tokens of each expert.
    """
    about = {key: value for key, value in analysis.about.items() if key != "arrays"}
    cells = dict(_cells(analysis))
    wanted_S = analysis.arrays["spread_GFLS"].sum((0, 1, 2))
    null = NullModel(analysis.arrays["load_GFLE"].shape[-1], about["top_k"], wanted_S)
    document = {
        "about": about,
        "tokens": int(analysis.arrays["tokens_GF"].sum()),
        "curves": int(analysis.arrays["elbow_GFLE"].sum()),
        "records": [_record(cell, arrays, null) for cell, arrays in cells.items()],
        "variance": _variance(analysis),
        "domains": _domains(analysis),
        "layers": _layers(analysis, decode),
    }
    return _plain(document)


def _cells(analysis: Analysis) -> Iterator[tuple[tuple[str, str, int | str], dict[str, Array]]]:
    """Every (domain, phase, layer), and "all" of each, that has tokens, with its counts added up."""
    arrays = {name: array for name, array in analysis.arrays.items() if name.partition("_")[2].startswith("GFL")}
    tokens_GF = analysis.arrays["tokens_GF"]
    domains = analysis.about["domains"]
    domain_choices = [(ALL, slice(None)), *((name, slice(g, g + 1)) for g, name in enumerate(domains))]
    phase_choices = [(ALL, slice(None)), *((name, slice(f, f + 1)) for f, name in enumerate(PHASES))]
    layers = arrays["load_GFLE"].shape[2]
    layer_choices: list[tuple[int | str, slice]] = [(ALL, slice(None)), *((i, slice(i, i + 1)) for i in range(layers))]
    windows_GHNQM = analysis.arrays["windows_GHNQM"]
    for domain, g in domain_choices:
        for phase, f in phase_choices:
            if not tokens_GF[g, f].sum():
                continue
            for layer, i in layer_choices:
                cell = {name: array[g, f, i].sum((0, 1, 2)) for name, array in arrays.items()}
                h, n = (-1 if phase == ALL else f.start), (-1 if layer == ALL else i.start)
                yield (domain, phase, layer), cell | {"windows_QM": windows_GHNQM[g, h, n].sum(0)}


def _record(cell: tuple[str, str, int | str], arrays: dict[str, Array], null: NullModel) -> dict[str, Any]:
    """One cell in numbers.

    Means have 95 % intervals over windows, as NAME_low and NAME_high. What is about the load of experts is told for
    single layers only, as experts of different layers have nothing in common but their numbers.

    curves: tokens times layers. k: experts a token. elbow: rank from 0, before any clamp; angle: degrees; sharp: share
    of curves whose angle is 135 degrees or less; level: curves that have no elbow. null_*: the same of Gaussian logits
    of the same spread (null_k: of the elbow rule). spread: mean standard deviation of a token's router logits. r: the
    correlation of elbow rank and angle. load_* and top_load_*: balance under the rule and under top-k on the same
    logits; see Balance. The rest: see Shift (none where the rule adds experts to those of top-k) and Saturation.
    """
    domain, phase, layer = cell
    sums_QM = dict(zip(QUANTITIES, arrays["windows_QM"], strict=True))
    squares = dict(zip(QUANTITIES, arrays["square_GFLQ"], strict=True))
    curves, spread_S = int(arrays["k_GFLJ"].sum()), arrays["spread_GFLS"]
    likely = null.of(spread_S)
    record: dict[str, Any] = {"domain": domain, "phase": phase, "layer": layer, "curves": curves}
    for name, sums_M in sums_QM.items():
        estimate = mean(sums_M)
        record |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    n, x, y = (float(value) for value in (*sums_QM["elbow"][1:3], sums_QM["angle"][2]))
    r = correlation(n, x, y, squares["elbow"], squares["angle"], float(arrays["product_GFL"]))
    record |= {
        "level": curves - int(n),
        "null_k": likely.k,
        "null_elbow": likely.elbow,
        "null_angle": likely.angle,
        "null_sharp": likely.sharp,
        "spread": float(spread_S @ bin_spreads() / curves),
        "r": r.value,
        "r_low": r.low,
        "r_high": r.high,
    }
    alike = specialisation.saturation(
        int(arrays["load_GFLE"].sum()), int(arrays["other_GFL"]), int(arrays["shared_GFL"])
    )
    if alike is not None:
        record |= {"saturation": alike.share, "jaccard": alike.jaccard}
    if layer != ALL:
        for prefix, name in (("load", "load_GFLE"), ("top_load", "topload_GFLE")):
            record |= {f"{prefix}_{key}": value for key, value in asdict(balance(arrays[name])).items()}
        record["outside"] = int(arrays["outside_GFL"])
        moved = shift(arrays["load_GFLE"], arrays["topload_GFLE"]) if not record["outside"] else None
        if moved is not None:
            record |= asdict(moved) | {"within_bounds": moved.within}
    return record


def _variance(analysis: Analysis) -> dict[str, Any]:
    """Shares of variance between domains and between layers, of k, elbow rank and angle."""
    sums_GLQM = analysis.arrays["windows_GHNQM"][:, -1, :-1]
    squares_GLQ = analysis.arrays["square_GFLQ"].sum(1)
    found: dict[str, Any] = {}
    for q, name in enumerate(QUANTITIES[:3]):
        for groups, axis in (("domains", 1), ("layers", 0)):
            n_C, x_C = (sums_GLQM[:, :, q, SUMS.index(sum_)].sum(axis) for sum_ in ("n", "x"))
            found.setdefault(name, {})[groups] = asdict(variance(n_C, x_C, squares_GLQ[:, :, q].sum(axis)))
    return found


def _domains(analysis: Analysis) -> list[dict[str, Any]]:
    load_GLE, tokens_G = analysis.arrays["load_GFLE"].sum(1), analysis.arrays["tokens_GF"].sum(1)
    found = []
    for layer in range(load_GLE.shape[1]):
        shares_GE = specialisation.domain_shares(load_GLE[:, layer], tokens_G)
        average_E = shares_GE.mean(0)
        times_GE = np.divide(shares_GE, average_E, out=np.zeros_like(shares_GE), where=average_E > 0)
        best_G = times_GE.argmax(1)
        found.append(
            {
                "layer": layer,
                "information": specialisation.domain_information(load_GLE[:, layer]),
                "favourite": {
                    name: {"expert": int(e), "share": float(shares_GE[g, e]), "times_average": float(times_GE[g, e])}
                    for g, (name, e) in enumerate(zip(analysis.about["domains"], best_G, strict=True))
                },
            }
        )
    return found


def _layers(analysis: Analysis, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    arrays = analysis.arrays
    together_LEE, adjacent_LEE = arrays["together_GFLEE"].sum((0, 1)), arrays["adjacent_GFLEE"].sum((0, 1))
    load_LE, seen_V = arrays["load_GFLE"].sum((0, 1)), arrays["seen_V"]
    found = []
    for layer, load_E in enumerate(load_LE):
        vocabulary = specialisation.vocabulary(arrays["words_LEV"][layer], seen_V)
        experts = []
        for e, ids in enumerate(specialisation.favourites(vocabulary.share_EV, seen_V, FAVOURITES)):
            words = [
                {"id": i, "text": decode([i]), "share": float(vocabulary.share_EV[e, i]), "seen": int(seen_V[i])}
                for i in ids
            ]
            experts.append({"expert": e, "uses": int(load_E[e]), "tokens": words})
        found.append(
            {
                "layer": layer,
                "coactivation": _pairs(specialisation.coactivation(together_LEE[layer], load_E)),
                "coactivation_adjacent": _pairs(specialisation.coactivation(adjacent_LEE[layer], load_E)),
                "vocabulary": vocabulary.largest,
                "experts": experts,
            }
        )
    return found


def _pairs(shares_EE: Array) -> list[dict[str, Any]]:
    """The pairs with the largest shares."""
    order = np.argsort(-shares_EE, axis=None, kind="stable")[:PAIRS]
    places = zip(*np.unravel_index(order, shares_EE.shape), strict=True)
    return [{"expert": int(i), "with": int(j), "share": float(shares_EE[i, j])} for i, j in places if shares_EE[i, j]]


def _plain(value: Any) -> Any:
    """Plain data without NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
