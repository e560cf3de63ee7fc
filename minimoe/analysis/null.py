"""What the elbow would do on routers that know nothing: independent Gaussian logits, as widely spread as the real ones.

The paper's rule keeps about 7.6 of 8 experts on such curves too, so that a mean k alone says little about a router.

Shape letters: S bins of spread, N drawn curves, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minimoe.analysis.tally import SPREAD_BINS, Array, bin_spreads
from minimoe.curve import SHARP_DEGREES, elbow

DRAWS = 2000  # curves of each bin of spread


@dataclass(frozen=True, slots=True)
class Null:
    """Means over the null curves.

    Attributes:
        curve_E: the sorted probabilities.
        k: what the elbow rule gives, rank + 1 clamped to the model's K.
        elbow: the rank of the elbow, from 0, not clamped.
        angle: of the elbow, in degrees; sharp: the share of curves where it is 135 degrees or less. NaN where no curve
            has an elbow.
    """

    curve_E: Array
    k: float
    elbow: float
    angle: float
    sharp: float


class NullModel:
    """Null curves for every bin of spread that is asked for; any mixture of bins is then an average.

    Args:
        experts: E.
        top_k: the model's K.
        wanted_S: which bins will be asked for.
    """

    def __init__(self, experts: int, top_k: int, wanted_S: Array) -> None:
        self.means_SJ = np.zeros((SPREAD_BINS, experts + 4))
        spread_S = bin_spreads()
        for place in np.flatnonzero(wanted_S):
            # A seed for each bin: its curves do not depend on which others are wanted.
            draws = torch.Generator().manual_seed(int(place))
            logits_NE = torch.randn(DRAWS, experts, generator=draws) * float(spread_S[place])
            probs_NE = logits_NE.softmax(-1).sort(-1, descending=True).values
            rank_N, degrees_N = elbow(probs_NE)
            rank_N = rank_N.double()
            sharp_N = (degrees_N <= SHARP_DEGREES).double().where(~degrees_N.isnan(), torch.nan)
            k_N = (rank_N + 1).clamp(max=top_k)
            figures = [k_N.mean(), rank_N.mean(), degrees_N.nanmean(), sharp_N.nanmean()]
            self.means_SJ[place] = torch.cat([probs_NE.double().mean(0), torch.stack(figures)]).numpy()

    def of(self, spread_S: Array) -> Null:
        """The means where spread_S tokens have each spread; NaN without tokens."""
        total = spread_S.sum()
        mean_J = spread_S @ self.means_SJ / total if total else np.full(self.means_SJ.shape[1], np.nan)
        k, rank, angle, sharp = (float(value) for value in mean_J[-4:])
        return Null(mean_J[:-4], k, rank, angle, sharp)
