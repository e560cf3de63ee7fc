"""Fit what a rule reads from a text: betas for skip, thresholds for top_any, numbers for layer_k.

One pass over the text under top-k. All that is kept are counts, whole numbers in arrays of a fixed size, so that memory
is bounded, and a run that was killed goes on where it last saved and ends with the same file, bit for bit.

Shape letters: L layers, E experts, B bins, T tokens, K slots.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.items import Item
from minimoe.model import Batch
from minimoe.probe import Probe
from minimoe.routers import rank
from minimoe.routers.top_k import TopK
from minimoe.routing import Routing
from minimoe.snapshot import read_snapshot, write_snapshot
from minimoe.whole_file import write_whole

BINS = 10_000  # from LEAST to 1 on a logarithmic scale, so that what is fitted is exact to 0.3 %
LEAST = 1e-12
SAVE_EVERY = 32  # windows
FITTED = ("skip", "top_any", "layer_k")


class Counts(Probe):
    """What the fits need to know.

    Attributes:
        ratio_LB: p_i / p_1 over the ranks 2 to K, by bin.
        expert_LEB: every expert's probability, by bin.
        load_LE: tokens that have the expert among their top K.
        mass_LK: the sum of p_i at each rank, in millionths.
    """

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self.arrays: dict[str, np.ndarray[Any, Any]] = {
            "ratio_LB": np.zeros((layers, BINS), dtype=np.int64),
            "expert_LEB": np.zeros((layers, experts, BINS), dtype=np.int32),
            "load_LE": np.zeros((layers, experts), dtype=np.int64),
            "mass_LK": np.zeros((layers, top_k), dtype=np.int64),
        }

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        arrays, experts = self.arrays, routing.num_experts
        probs_TE, experts_TE = (part.cpu() for part in rank(logits_TE))
        top_TK = probs_TE[:, : arrays["mass_LK"].shape[1]]
        arrays["ratio_LB"][layer] += _histogram(_bins(top_TK[:, 1:] / top_TK[:, :1]), BINS)
        cells = _histogram(experts_TE * BINS + _bins(probs_TE), experts * BINS)
        arrays["expert_LEB"][layer] += cells.reshape(experts, BINS).astype(np.int32)
        arrays["load_LE"][layer] += _histogram(routing.experts_TK.cpu(), experts + 1)[:experts]
        arrays["mass_LK"][layer] += (top_TK.double() * 1e6).round().long().sum(0).numpy()


def _bins(values: Tensor) -> Tensor:
    scaled = (1 - values.double().clamp(min=LEAST).log() / math.log(LEAST)) * BINS
    return scaled.long().clamp(0, BINS - 1)


def _histogram(places: Tensor, size: int) -> np.ndarray[Any, Any]:
    return places.flatten().bincount(minlength=size).numpy()


def fit_skip(arrays: dict[str, Any]) -> list[float]:
    """Each layer's median of p_i / p_1 over the ranks 2 to K. Source: NAEE (Lu et al. 2024)."""
    return [_at_least(counts_B, counts_B.sum() / 2) for counts_B in arrays["ratio_LB"]]


def fit_top_any(arrays: dict[str, Any], share: float) -> list[list[float]]:
    """Thresholds at which each expert takes about `share` of the tokens that it takes under top-k."""
    return [
        [_at_least(counts_B, share * load) for counts_B, load in zip(cells_EB, load_E, strict=True)]
        for cells_EB, load_E in zip(arrays["expert_LEB"], arrays["load_LE"], strict=True)
    ]


def fit_layer_k(arrays: dict[str, Any], mean_k: float) -> list[int]:
    """Numbers whose mean is at most mean_k, at least 1 each, that keep the most probability mass.

    The next expert goes where the next rank holds most; as the ranks of a layer fall, that is the optimum. (LExI
    weighs layers by how much their output changes instead.)
    """
    mass_LK = arrays["mass_LK"]
    layers, width = mass_LK.shape
    gains = sorted(
        ((-int(mass_LK[layer, i]), i, layer) for layer in range(layers) for i in range(1, width)),
    )
    k = [1] * layers
    for _, _, layer in gains[: max(0, int(mean_k * layers + 1e-9) - layers)]:
        k[layer] += 1
    return k


def _at_least(counts_B: np.ndarray[Any, Any], wanted: float) -> float:
    """The highest lower edge of a bin that at least `wanted` of the values reach; 1 where none is wanted."""
    if wanted <= 0:
        return 1.0
    reached_B = np.cumsum(counts_B[::-1])
    place = BINS - 1 - int(np.searchsorted(reached_B, wanted))
    return LEAST ** (1 - place / BINS)


def check(rule: str, mean_k: float | None) -> None:
    """Refuse what no model could be fitted with, see calibrate.

    Raises:
        InputError: an unknown rule, or a mean k that the rule cannot have.
    """
    if rule not in FITTED:
        raise InputError(f"there is nothing to calibrate in {rule!r}; choose one of {', '.join(FITTED)}.")
    if rule == "skip" and mean_k is not None:
        raise InputError("skip takes the median of its text; to fit one beta to a mean k, give --key beta.")
    if mean_k is not None and not 1 <= mean_k < math.inf:
        raise InputError(f"the mean k must lie between 1 and the model's own, not {mean_k:g}.")


def calibrate(
    engine: Engine,
    rule: str,
    items: Sequence[Item],
    path: str | Path,
    *,
    mean_k: float | None = None,
    ran: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Fit a rule and write its file; what is done so far is kept beside it in PATH.part until then.

    Args:
        rule: one of FITTED.
        mean_k: the wanted mean number of experts, for top_any and layer_k; the model's own by default.
        ran: called after each window.

    Returns:
        What was written.

    Raises:
        InputError: an unknown rule, or a mean_k that the rule cannot have.
    """
    check(rule, mean_k)
    top_k = engine.config.top_k
    wanted = float(top_k if mean_k is None else mean_k)
    if wanted > top_k:
        raise InputError(f"the mean k must lie between 1 and the model's own {top_k}, not {wanted:g}.")
    counts = Counts(engine.config.num_layers, engine.config.num_experts, top_k)
    work = [[*item.contexts[0], *item.continuations[0]] for item in items]
    identity = hashlib.sha256(json.dumps([engine.model.fingerprint(), work]).encode()).hexdigest()[:16]
    part = Path(f"{path}.part")
    done = read_snapshot(part, counts.arrays, identity)
    with torch.inference_mode():
        for index in range(done, len(work)):
            ids_T = torch.tensor(work[index], device=engine.model.device)
            engine.model.forward(Batch(ids_T, [len(ids_T)]), TopK(), counts)
            if (index + 1) % SAVE_EVERY == 0:
                write_snapshot(part, counts.arrays, identity, index + 1)
            ran()
    arrays = counts.arrays
    values: list[Any] = (
        fit_skip(arrays)
        if rule == "skip"
        else fit_top_any(arrays, wanted / top_k)
        if rule == "top_any"
        else fit_layer_k(arrays, wanted)
    )
    document = {
        "rule": rule,
        "model": engine.name,
        "checkpoint": engine.model.fingerprint(),
        "tokens": sum(map(len, work)),
        "text": identity,
        "mean_k": None if rule == "skip" else wanted,
        "values": values,
    }
    write_whole(path, json.dumps(document) + "\n")
    part.unlink(missing_ok=True)
    return document
