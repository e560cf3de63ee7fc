"""What experts are for: which work together, for which domains and which tokens, and whether another router agrees.

Shape letters: G domains, E experts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minimoe.analysis.tally import Array

LEAST_SEEN = 8  # a token id that was run less often says nothing


def coactivation(together_EE: Array, load_E: Array) -> Array:
    """Of the tokens that use expert i, the share that uses j too, [E, E]; 0 for an expert without tokens.

    Source: OLMoE (Muennighoff et al. 2024), section 5.2; its repository counts only experts that are next to each other
    in a token's ranking, which is what together_EE holds if it is given adjacent pairs.
    """
    shares_EE = together_EE / np.maximum(load_E, 1)[:, None]
    np.fill_diagonal(shares_EE, 0)
    return np.asarray(shares_EE)


def domain_shares(load_GE: Array, tokens_G: Array) -> Array:
    """The share of each domain's tokens that use each expert, [G, E]; an even router gives mean k / E everywhere.

    Source: OLMoE (Muennighoff et al. 2024), section 5.3.
    """
    return np.asarray(load_GE / np.maximum(tokens_G, 1)[:, None])


def domain_information(load_GE: Array) -> float:
    """Bits that one use of an expert tells about the domain, all domains weighing the same; from 0 to log2 G.

    The Jensen-Shannon divergence of the domains' loads. Domains without tokens are left out.
    """
    load_GE = load_GE[load_GE.sum(axis=1) > 0]
    if len(load_GE) == 0:
        return float("nan")
    share_GE = load_GE / load_GE.sum(axis=1, keepdims=True)
    mean_E = share_GE.mean(axis=0)
    ratio_GE = np.divide(share_GE, mean_E, out=np.ones_like(share_GE), where=share_GE > 0)
    return float((share_GE * np.log2(ratio_GE)).sum(axis=1).mean())


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How much token ids decide about experts in a layer.

    Attributes:
        share_EV: of the times that an id was run, the share that used the expert; 0 for ids run under LEAST_SEEN times.
            Source: OLMoE (Muennighoff et al. 2024), section 5.4.
        largest: the mean over those ids of their largest share; 1 if the id alone decides, and by chance about the
            load of the most used expert.
    """

    share_EV: Array
    largest: float


def vocabulary(words_EV: Array, seen_V: Array) -> Vocabulary:
    """The vocabulary specialisation of a layer."""
    often_V = seen_V >= LEAST_SEEN
    share_EV = np.where(often_V, words_EV / np.maximum(seen_V, 1), 0.0)
    return Vocabulary(share_EV, float(share_EV[:, often_V].max(axis=0).mean()) if often_V.any() else float("nan"))


def favourites(share_EV: Array, seen_V: Array, count: int) -> list[list[int]]:
    """Each expert's token ids with the largest share, more frequent ones first among equals; at most `count`, no 0."""
    found = []
    for share_V in share_EV:
        ids = np.flatnonzero(share_V)
        order = np.lexsort((ids, -seen_V[ids], -share_V[ids]))[:count]
        found.append(ids[order].tolist())
    return found


@dataclass(frozen=True, slots=True)
class Saturation:
    """How far two routers agree on the same tokens.

    Attributes:
        share: of the other's (token, expert) pairs, those that this one has too. Source: router saturation in OLMoE
            (Muennighoff et al. 2024), section 5.1, where the other is the finished checkpoint.
        jaccard: pairs of both over pairs of either.
    """

    share: float
    jaccard: float


def saturation(own: int, other: int, shared: int) -> Saturation | None:
    """From numbers of pairs; None where nothing was compared."""
    if other == 0:
        return None
    return Saturation(shared / other, shared / (own + other - shared))
