"""The geometry of a sorted curve: rank and angle of its elbow."""

from __future__ import annotations

import math

import pytest
import torch

from minimoe.curve import elbow
from minimoe.routers import rank


def test_angles_are_those_of_plane_geometry() -> None:
    sorted_TE, _ = rank(torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * 1.5)
    ranks, angles = elbow(sorted_TE)
    for p, found, angle in zip(sorted_TE.double().tolist(), ranks.tolist(), angles.tolist(), strict=True):
        y = [(p[0] - value) / (p[0] - p[-1]) for value in p]
        bend = max(range(64), key=lambda i: y[i] - i / 63)
        assert found == bend
        sides = math.dist((bend / 63, y[bend]), (0, 0)), math.dist((bend / 63, y[bend]), (1, 1))
        cosine = (sides[0] ** 2 + sides[1] ** 2 - 2) / (2 * sides[0] * sides[1])  # the law of cosines
        assert angle == pytest.approx(math.degrees(math.acos(cosine)), abs=1e-4)


def test_one_leading_expert_has_a_nearly_right_angle_and_level_or_lone_rows_none() -> None:
    ranks, angles = elbow(torch.tensor([[1.0, 0, 0, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.2]]))
    # The elbow (1/4, 1): down-left to the origin, right to (1, 1).
    assert ranks.tolist() == [1, 0]
    assert angles[0] == pytest.approx(180 - math.degrees(math.atan2(1, 0.25)))
    assert angles[1].isnan()
    for experts in (1, 2):
        assert elbow(torch.tensor([[1.0, 0.0][:experts]]))[1].isnan().all()
