"""Native attention of many tokens, every instruction set that this processor has, against torch in double precision.

Shape letters: N new tokens, S positions, H heads, G kv heads, d head size, C room of a cache.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minimoe.native import Kernels
from minimoe.operations import attend
from tests.native_sets import SETS, each_dtype, each_set, needs_kernels, threads

pytestmark = needs_kernels
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def drawn(N: int, S: int, H: int, G: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(N + 31 * S + d)
    shapes = ((N, H, d), (G, S, d), (G, S, d))
    return tuple(torch.randn(shape, generator=draws).to(dtype) for shape in shapes)  # type: ignore[return-value]


def check(kernels: Kernels, q_NHd: Tensor, k_GSd: Tensor, v_GSd: Tensor) -> Tensor:
    y_NHd = kernels.attend(q_NHd, k_GSd, v_GSd)
    exact = attend(q_NHd.double(), k_GSd.double(), v_GSd.double())
    assert y_NHd.dtype == q_NHd.dtype
    tolerance = TOLERANCE[q_NHd.dtype]
    torch.testing.assert_close(y_NHd.double(), exact, rtol=tolerance, atol=tolerance)
    return y_NHd


# Around the blocks of queries (16 and 32) and of positions (64 and 128).
@each_set
@each_dtype
@pytest.mark.parametrize(
    ("N", "S"), [(1, 1), (1, 70), (2, 2), (15, 64), (16, 65), (33, 33), (64, 200), (130, 130), (128, 256), (300, 310)]
)
@pytest.mark.parametrize(("H", "G", "d"), [(2, 2, 16), (4, 2, 10), (3, 1, 7), (2, 2, 32), (2, 1, 128)])
def test_it_is_right(kernels: Kernels, dtype: torch.dtype, N: int, S: int, H: int, G: int, d: int) -> None:
    check(kernels, *drawn(N, S, H, G, d, dtype))


@each_set
@each_dtype
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_it_is_right_for_any_size(kernels: Kernels, dtype: torch.dtype, data: st.DataObject) -> None:
    N, earlier, G, group, d = (data.draw(st.integers(*most)) for most in ((1, 70), (0, 90), (1, 3), (1, 3), (1, 40)))
    check(kernels, *drawn(N, N + earlier, G * group, G, d, dtype))


@each_set
@each_dtype
def test_bits_do_not_depend_on_the_pass_or_the_threads(kernels: Kernels, dtype: torch.dtype) -> None:
    q_NHd, k_GSd, v_GSd = drawn(150, 170, 4, 2, 24, dtype)
    with threads(2):
        together = kernels.attend(q_NHd, k_GSd, v_GSd)
    with threads(1):
        for first, last in ((0, 1), (0, 7), (7, 90), (90, 150), (149, 150)):
            seen = 20 + last
            part = kernels.attend(q_NHd[first:last], k_GSd[:, :seen], v_GSd[:, :seen])
            assert torch.equal(part, together[first:last])


@each_set
@each_dtype
def test_it_reads_caches_and_projections_as_they_lie(kernels: Kernels, dtype: torch.dtype) -> None:
    """A cache has room that is not filled, and projections hold all heads of a position side by side."""
    q_NHd, k_GSd, v_GSd = drawn(40, 50, 4, 2, 16, dtype)
    plain = kernels.attend(q_NHd, k_GSd, v_GSd)
    caches = [torch.full((2, 64, 16), torch.nan, dtype=dtype) for _ in range(2)]
    for cache, filled in zip(caches, (k_GSd, v_GSd), strict=True):
        cache[:, :50] = filled
    assert torch.equal(kernels.attend(q_NHd, caches[0][:, :50], caches[1][:, :50]), plain)
    sides = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (k_GSd, v_GSd)]
    assert torch.equal(kernels.attend(q_NHd, *sides), plain)
    assert torch.equal(kernels.attend(q_NHd, sides[0], v_GSd), plain)


@each_set
def test_large_scores_and_later_positions_do_no_harm(kernels: Kernels) -> None:
    q_NHd, k_GSd, v_GSd = drawn(70, 70, 1, 1, 8, torch.float32)
    check(kernels, 40 * q_NHd, 40 * k_GSd, v_GSd)
    plain = kernels.attend(q_NHd, k_GSd, v_GSd)
    for last in (50, 70):  # seen by a part of a block of queries
        keys, values = k_GSd.clone(), v_GSd.clone()
        keys[:, last - 1 :], values[:, last - 1 :] = torch.nan, 1e30
        spoilt = kernels.attend(q_NHd, keys, values)
        assert torch.equal(spoilt[: last - 1], plain[: last - 1])
        assert spoilt[last - 1 :].isnan().all()


@each_set
@each_dtype
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 3e38])
def test_a_broken_query_breaks_no_other(kernels: Kernels, dtype: torch.dtype, broken: float) -> None:
    """Neither those before it nor those of another head, the first of which is computed right after it."""
    for positions in (51, 75, 200):
        q_NHd, k_GSd, v_GSd = drawn(50, positions, 3, 1, 20, dtype)
        spoilt = q_NHd.clone()
        spoilt[49, 2] = broken
        with threads(1):
            plain, found = (kernels.attend(q, k_GSd, v_GSd) for q in (q_NHd, spoilt))
        plain[49, 2] = found[49, 2] = 0
        assert torch.equal(found, plain)


@each_set
def test_scores_of_minus_infinity_count_for_nothing(kernels: Kernels) -> None:
    """A whole block of positions of them, and then others."""
    q_NHd, k_GSd, v_GSd = drawn(3, 100, 1, 1, 4, torch.float32)
    keys = k_GSd.clone()
    keys[:, :70] = -torch.inf
    seen = kernels.attend(q_NHd.abs(), k_GSd[:, 70:], v_GSd[:, 70:])
    torch.testing.assert_close(kernels.attend(q_NHd.abs(), keys, v_GSd), seen)


def test_what_does_not_fit_together_is_refused() -> None:
    q_NHd, k_GSd, v_GSd = drawn(3, 4, 2, 2, 8, torch.float32)
    for q, k, v in (
        (q_NHd, k_GSd[:, :2], v_GSd[:, :2]),  # more queries than positions
        (q_NHd, k_GSd[:, :, :4], v_GSd[:, :, :4]),
        (q_NHd, k_GSd, v_GSd[:, :3]),
        (torch.cat([q_NHd, q_NHd[:, :1]], dim=1), k_GSd, v_GSd),  # 3 heads for 2
        (q_NHd.half(), k_GSd.half(), v_GSd.half()),
        (q_NHd, k_GSd.bfloat16(), v_GSd.bfloat16()),
    ):
        with pytest.raises(ValueError, match="fit together"):
            SETS[0].attend(q, k, v)
