"""The counts of an analysis: a probe that adds every routing to arrays of a fixed size.

The letters after a name's underscore are its dimensions, as everywhere in minimoe; here they also make its shape:
G domains (one for each text), F phases (prefill, decode), L layers, E experts, V vocabulary, J numbers of experts
(0 to E), A half degrees (0 to 180), S bins of spread, Q quantities, M sums, H the phases and then both together, N the
layers and then all together. T tokens of one pass, K slots, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minimoe.curve import SHARP_DEGREES, elbow
from minimoe.probe import Phase, Probe
from minimoe.routers import rank
from minimoe.routing import Routing

Array = np.ndarray[Any, Any]

PHASES: tuple[Phase, ...] = ("prefill", "decode")
QUANTITIES = ("k", "elbow", "angle", "sharp")
SUMS = ("windows", "n", "x", "xx", "nx", "nn")
ANGLE_BINS = 360  # half a degree each
SPREAD_BINS, LEAST_SPREAD, MOST_SPREAD = 500, 1e-3, 1e2  # on a logarithmic scale: 2.3 % a bin

ARRAYS: dict[str, tuple[str, str]] = {
    "tokens_GF": ("int64", "tokens run"),
    "k_GFLJ": ("int64", "tokens by how many experts the rule gave them"),
    "load_GFLE": ("int64", "tokens that used each expert under the rule"),
    "topload_GFLE": ("int64", "tokens that would have used it under the model's own top-k, on the same router logits"),
    "outside_GFL": ("int64", "(token, expert) pairs of the rule that the model's own top-k would not have"),
    "elbow_GFLE": ("int64", "router curves by the rank of their elbow, from 0, before any clamp"),
    "angle_GFLA": ("int64", "router curves by the angle of their elbow, in half degrees; level curves have none"),
    "product_GFL": ("float64", "sum of elbow rank x angle in degrees over the curves that have an angle"),
    "square_GFLQ": ("float64", "sum over tokens of the square of each quantity (k, elbow rank, angle, sharp)"),
    "windows_GHNQM": (
        "float64",
        "each quantity (k, elbow rank, angle, sharp: the last three over the curves that have an angle) summed over a "
        "window's n tokens gives x; this holds the number of windows and the sums over windows of n, x, x^2, nx, n^2",
    ),
    "curve_GFLE": ("float64", "sum over tokens of the router probabilities in descending order"),
    "spread_GFLS": ("int64", "tokens by the standard deviation of their router logits, in logarithmic bins"),
    "together_GFLEE": ("int64", "tokens that used both experts; on the diagonal, those that used the one"),
    "adjacent_GFLEE": ("int64", "tokens in whose ranking the second expert came right after the first"),
    "words_LEV": ("int32", "times that a token id used each expert"),
    "seen_V": ("int64", "times that a token id was run"),
    "other_GFL": ("int64", "pairs of the other rule or checkpoint, where there is one"),
    "shared_GFL": ("int64", "pairs that both have"),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the dimensions are that depend on the model and the texts."""

    domains: int
    layers: int
    experts: int
    vocabulary: int

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one of ARRAYS, read from its letters."""
        letters = {
            "G": self.domains,
            "F": len(PHASES),
            "L": self.layers,
            "E": self.experts,
            "J": self.experts + 1,
            "V": self.vocabulary,
            "A": ANGLE_BINS,
            "S": SPREAD_BINS,
            "H": len(PHASES) + 1,
            "N": self.layers + 1,
            "Q": len(QUANTITIES),
            "M": len(SUMS),
        }
        return tuple(letters[letter] for letter in name.rpartition("_")[2])


def empty_arrays(sizes: Sizes) -> dict[str, Array]:
    """ARRAYS, all 0."""
    return {name: np.zeros(sizes.shape(name), dtype=kind) for name, (kind, _) in ARRAYS.items()}


class Tally(Probe):
    """Adds the passes it sees to arrays.

    Use: `begin` a group of windows, tell the ids of each pass with `reads`, and `end` the group.

    Args:
        arrays: what to add to, see ARRAYS.
        top_k: the model's own number of experts.
    """

    def __init__(self, arrays: Mapping[str, Array], top_k: int) -> None:
        self.arrays = arrays
        self.top_k = top_k
        # Of every pass and layer of the group, for another rule or checkpoint to be compared with.
        self.routings: list[Routing] = []
        self.domain = self._phase = 0
        self._ids_T = torch.empty(0, dtype=torch.int64)
        self._sequence_T = self._ids_T
        self._open: dict[int, Tensor] = {}

    def begin(self, domain: int) -> None:
        """Windows of this domain come next, each a sequence of the passes."""
        self.domain, self._open, self.routings = domain, {}, []

    def reads(self, ids_T: Tensor) -> None:
        """The token ids of the next pass."""
        self._ids_T = ids_T.cpu()

    def end(self) -> None:
        """The windows are over: their sums become part of the arrays."""
        # A window counts once in what takes phases or layers together: it is one draw, not several.
        both = {len(PHASES): torch.stack(list(self._open.values())).sum(0)} if self._open else {}
        for phase, sums_LQ2B in (self._open | both).items():
            sums_NQ2B = torch.cat([sums_LQ2B, sums_LQ2B.sum(0, keepdim=True)])
            x_NQB, n_NQB = sums_NQ2B[:, :, 0].numpy(), sums_NQ2B[:, :, 1].numpy()
            sums = (np.sign(n_NQB), n_NQB, x_NQB, x_NQB**2, n_NQB * x_NQB, n_NQB**2)
            self.arrays["windows_GHNQM"][self.domain, phase] += np.stack([part.sum(-1) for part in sums], axis=-1)
        self._open = {}

    def step(self, phase: Phase, new: Sequence[int], past: Sequence[int]) -> None:
        self._phase = PHASES.index(phase)
        self._sequence_T = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
        if self._phase not in self._open:
            layers = self.arrays["k_GFLJ"].shape[2]
            self._open[self._phase] = torch.zeros(layers, len(QUANTITIES), 2, len(new), dtype=torch.float64)
        self.arrays["tokens_GF"][self.domain, self._phase] += sum(new)
        self.arrays["seen_V"] += _histogram(self._ids_T, self.arrays["seen_V"].size)

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        probs_TE, experts_TE = (part.cpu() for part in rank(logits_TE))
        routing = routing.detach()
        self.routings.append(routing)
        rank_T, degrees_T = elbow(probs_TE)
        self._add_choice(layer, routing, experts_TE)
        self._add_curves(layer, probs_TE, logits_TE, rank_T, degrees_T)
        sharp_T = (degrees_T <= SHARP_DEGREES).double()
        values_QT = torch.stack([routing.k_T.double(), rank_T.double(), degrees_T, sharp_T])
        valid_QT = torch.ones_like(values_QT)
        valid_QT[1:, degrees_T.isnan()] = 0
        values_QT = values_QT.nan_to_num() * valid_QT
        place = self.place(layer)
        self.arrays["square_GFLQ"][place] += values_QT.square().sum(1).numpy()
        self.arrays["product_GFL"][place] += float(values_QT[1] @ values_QT[2])
        self._open[self._phase][layer, :, 0].index_add_(1, self._sequence_T, values_QT)
        self._open[self._phase][layer, :, 1].index_add_(1, self._sequence_T, valid_QT)

    def place(self, layer: int) -> tuple[int, int, int]:
        """Where the current domain, phase and a layer stand in the arrays."""
        return self.domain, self._phase, layer

    def _add_choice(self, layer: int, routing: Routing, experts_TE: Tensor) -> None:
        """Which experts: load, co-activation and words."""
        E, place = routing.num_experts, self.place(layer)
        top_TK = experts_TE[:, : self.top_k]
        used_TE = _members(routing.experts_TK, E)
        load_E = _histogram(routing.experts_TK, E + 1)[:E]
        self.arrays["k_GFLJ"][place] += _histogram(routing.k_T, E + 1)
        self.arrays["load_GFLE"][place] += load_E
        self.arrays["topload_GFLE"][place] += _histogram(top_TK, E)
        self.arrays["outside_GFL"][place] += int(load_E.sum() - (used_TE * _members(top_TK, E)).sum())
        # Whole numbers: float32 adds them exactly up to 2^24 tokens a pass.
        self.arrays["together_GFLEE"][place] += (used_TE.T @ used_TE).long().numpy()
        steps = routing.experts_TK[:, :-1] * (E + 1) + routing.experts_TK[:, 1:]
        self.arrays["adjacent_GFLEE"][place] += _histogram(steps, (E + 1) ** 2).reshape(E + 1, E + 1)[:E, :E]
        live_TK = routing.experts_TK < E
        vocabulary = self.arrays["seen_V"].size
        words_P = (routing.experts_TK * vocabulary + self._ids_T[:, None])[live_TK]
        cells = torch.from_numpy(self.arrays["words_LEV"][layer]).view(-1)
        cells.scatter_add_(0, words_P, torch.ones_like(words_P, dtype=torch.int32))

    def _add_curves(self, layer: int, probs_TE: Tensor, logits_TE: Tensor, rank_T: Tensor, degrees_T: Tensor) -> None:
        """What the sorted probabilities look like."""
        E, place = probs_TE.shape[1], self.place(layer)
        angled_T = degrees_T[~degrees_T.isnan()]
        self.arrays["elbow_GFLE"][place] += _histogram(rank_T, E)
        self.arrays["angle_GFLA"][place] += _histogram(
            (angled_T * (ANGLE_BINS / 180)).long().clamp(max=ANGLE_BINS - 1), ANGLE_BINS
        )
        self.arrays["curve_GFLE"][place] += probs_TE.sum(0, dtype=torch.float64).numpy()
        self.arrays["spread_GFLS"][place] += _histogram(spread_bins(logits_TE.cpu()), SPREAD_BINS)


class Overlap(Probe):
    """A second run over what a Tally saw: counts the pairs that it shares with the first.

    Args:
        tally: of the first run, still open.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._before = iter(tally.routings)
        self._phase = 0

    def step(self, phase: Phase, new: Sequence[int], past: Sequence[int]) -> None:
        self._phase = PHASES.index(phase)

    def routed(self, layer: int, routing: Routing, logits_TE: Tensor) -> None:
        first, second = next(self._before), routing.detach()
        E = first.num_experts
        place = (self.tally.domain, self._phase, layer)
        shared = _members(first.experts_TK, E) * _members(second.experts_TK, E)
        self.tally.arrays["other_GFL"][place] += int(second.k_T.sum())
        self.tally.arrays["shared_GFL"][place] += int(shared.sum())


def spread_bins(logits_TE: Tensor) -> Tensor:
    """The bin of each token's spread, the standard deviation of its E router logits (divided by E - 1), int64 [T]."""
    if logits_TE.shape[1] < 2:
        return torch.zeros(logits_TE.shape[0], dtype=torch.int64)
    spread_T = logits_TE.float().std(dim=1).double().clamp(LEAST_SPREAD, MOST_SPREAD)
    place_T = (spread_T / LEAST_SPREAD).log() / np.log(MOST_SPREAD / LEAST_SPREAD) * SPREAD_BINS
    return place_T.long().clamp(max=SPREAD_BINS - 1)


def bin_spreads() -> Array:
    """The spread at the middle of each bin, [S]."""
    return np.asarray(LEAST_SPREAD * (MOST_SPREAD / LEAST_SPREAD) ** ((np.arange(SPREAD_BINS) + 0.5) / SPREAD_BINS))


def _members(experts_TK: Tensor, experts: int) -> Tensor:
    """1 where a token uses an expert, else 0; float32 [T, E]."""
    ones_TJ = torch.zeros(experts_TK.shape[0], experts + 1)
    return ones_TJ.scatter_(1, experts_TK, 1.0)[:, :experts]


def _histogram(places: Tensor, size: int) -> Array:
    return places.flatten().bincount(minlength=size).numpy()
