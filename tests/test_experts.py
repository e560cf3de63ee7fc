"""Every expert backend against `reference`, and `reference` against plain loops in double precision.

Shape letters: T tokens, D hidden, E experts, K slots, I expert intermediate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import RUNNABLE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minimoe.errors import InputError
from minimoe.experts import BACKENDS, Experts, ExpertWeights, find_backend
from minimoe.experts.bucketed import BucketedExperts
from minimoe.experts.reference import ReferenceExperts
from minimoe.routing import Routing

OTHERS = [backend for backend in RUNNABLE if backend.values != ("reference",)]


def random_weights(E: int, D: int, I: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def matrices(rows: int, columns: int) -> list[Tensor]:
        return [(torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype) for _ in range(E)]

    return ExpertWeights(matrices(I, D), matrices(I, D), matrices(D, I))


def random_inputs(
    k: Sequence[int], E: int, D: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Routing]:
    """Tokens, and a routing of k[t] random experts each; the widest row sets K."""
    generator = torch.Generator().manual_seed(seed)
    T, K = len(k), max(k, default=0)
    x_TD = torch.randn(T, D, generator=generator).to(dtype)
    weights_TE, experts_TE = torch.rand(T, E, generator=generator).sort(dim=1, descending=True)
    k_T = torch.tensor(k, dtype=torch.int64)
    return x_TD, Routing.from_ranking(experts_TE[:, :K], weights_TE[:, :K], k_T, E)


def in_double_precision(x_TD: Tensor, routing: Routing, weights: ExpertWeights) -> np.ndarray[Any, Any]:
    def array(tensor: Tensor) -> np.ndarray[Any, Any]:
        return tensor.detach().double().numpy()

    y_TD = np.zeros(x_TD.shape)
    for t, k in enumerate(routing.k_T.tolist()):
        x_D = array(x_TD[t])
        for e, weight in zip(routing.experts_TK[t, :k].tolist(), routing.weights_TK[t, :k].tolist(), strict=True):
            gate_I, up_I = array(weights.gate_EID[e]) @ x_D, array(weights.up_EID[e]) @ x_D
            y_TD[t] += weight * (array(weights.down_EDI[e]) @ (gate_I / (1 + np.exp(-gate_I)) * up_I))
    return y_TD


# k of every token, E, D, I.
CASES: dict[str, tuple[list[int], int, int, int]] = {
    "ragged": ([1, 4, 2, 0, 8, 3], 8, 16, 12),
    "k = (1, 4, 2) in four slots": ([1, 4, 2], 4, 8, 8),
    "most experts empty": ([1, 2], 64, 16, 8),
    "every expert of every token": ([5, 5, 5], 5, 8, 8),
    "no expert for any token": ([0, 0, 0], 4, 8, 8),
    "no expert for the only token": ([0], 4, 8, 8),
    "some tokens without experts": ([0, 2, 0, 1, 0], 4, 8, 8),
    "one token": ([3], 8, 16, 12),
    "one token and every expert": ([6], 6, 8, 8),
    "no tokens": ([], 4, 8, 8),
    "one expert": ([1, 1, 0, 1], 1, 8, 8),
    "odd sizes": ([2, 0, 3, 1], 3, 7, 5),
    "odd sizes and one token": ([3], 3, 7, 5),
    "sizes of one": ([1, 2, 2], 2, 1, 1),
    "enough rows for every product": ([2] * 40, 3, 24, 20),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_formula(case: str) -> None:
    k, E, D, I = CASES[case]
    weights = random_weights(E, D, I)
    x_TD, routing = random_inputs(k, E, D)
    y_TD = ReferenceExperts(weights).run(x_TD, routing)
    assert y_TD.dtype == x_TD.dtype
    np.testing.assert_allclose(y_TD, in_double_precision(x_TD, routing, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", OTHERS)
def test_every_backend_equals_the_reference(backend: str, case: str, dtype: torch.dtype, tolerance: float) -> None:
    k, E, D, I = CASES[case]
    weights = random_weights(E, D, I, dtype)
    x_TD, routing = random_inputs(k, E, D, dtype)
    y_TD = find_backend(backend)(weights).run(x_TD, routing)
    assert y_TD.dtype == dtype
    assert y_TD.shape == (len(k), D)
    torch.testing.assert_close(y_TD, ReferenceExperts(weights).run(x_TD, routing), rtol=tolerance, atol=tolerance)
    assert (y_TD[routing.k_T == 0] == 0).all()


@given(st.data())
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("backend", OTHERS)
def test_every_backend_equals_the_reference_on_any_shape(backend: str, data: st.DataObject) -> None:
    E, D, I = (data.draw(st.integers(1, 9)) for _ in range(3))
    k = data.draw(st.lists(st.integers(0, E), max_size=12))
    weights = random_weights(E, D, I, seed=data.draw(st.integers(0, 99)))
    x_TD, routing = random_inputs(k, E, D, seed=data.draw(st.integers(0, 99)))
    y_TD = find_backend(backend)(weights).run(x_TD, routing)
    torch.testing.assert_close(y_TD, ReferenceExperts(weights).run(x_TD, routing), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("k", [1, 3])
def test_all_tokens_on_the_same_experts(backend: str, k: int) -> None:
    weights = random_weights(8, 16, 12)
    x_TD, _ = random_inputs([k] * 9, 8, 16)
    routing = Routing(
        torch.tensor([[6, 2, 7][:k]] * 9), torch.tensor([[0.5, 0.25, 0.125][:k]] * 9), torch.full((9,), k), 8
    )
    y_TD = find_backend(backend)(weights).run(x_TD, routing)
    np.testing.assert_allclose(y_TD, in_double_precision(x_TD, routing, weights), rtol=1e-5, atol=1e-5)


class ProductRows(TorchDispatchMode):
    """Counts the rows that go through each of some matrices, below every Python function that could be called."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        super().__init__()
        self.index = {matrix.data_ptr(): e for e, matrix in enumerate(matrices)}
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [argument for argument in args if isinstance(argument, Tensor)]
        for tensor in tensors:
            # Whatever joins a matrix with another tensor is a product, one row of result for one of x.
            if len(tensors) > 1 and tensor.data_ptr() in self.index:
                self.rows[self.index[tensor.data_ptr()]] += result.shape[0]
        return result


@pytest.mark.parametrize("kind", ["gate_EID", "up_EID", "down_EDI"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["bucketed", "reference"])  # tests/test_native.py counts inside the kernels
def test_what_a_rule_prunes_is_not_computed(backend: str, case: str, kind: str) -> None:
    k, E, D, I = CASES[case]
    weights = random_weights(E, D, I)
    x_TD, routing = random_inputs(k, E, D)
    used = Counter(e for row, live in zip(routing.experts_TK.tolist(), k, strict=True) for e in row[:live])
    with torch.inference_mode(), ProductRows(getattr(weights, kind)) as products:
        find_backend(backend)(weights).run(x_TD, routing)
    assert dict(products.rows) == dict(used)  # as dicts, so that a product of no rows counts too
    assert products.rows.total() == sum(k)


@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("k", [[2, 0, 3, 1], [2], [0], [0, 0]])
def test_broken_weights_of_experts_that_nobody_uses_do_not_leak(backend: str, k: list[int]) -> None:
    weights = random_weights(16, 8, 8)
    x_TD, routing = random_inputs(k, 16, 8)
    used = {e for row, live in zip(routing.experts_TK.tolist(), k, strict=True) for e in row[:live]}
    for matrices in (weights.gate_EID, weights.up_EID, weights.down_EDI):
        for e in set(range(16)) - used:
            matrices[e].fill_(math.nan)
    x_TD[torch.tensor(k) == 0] = math.nan  # nor does a token that uses no expert
    y_TD = find_backend(backend)(weights).run(x_TD, routing)
    assert y_TD.isfinite().all()
    assert (y_TD[torch.tensor(k) == 0] == 0).all()


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_weighted_sum_is_accumulated_in_float32(backend: str, tokens: int) -> None:
    """256 + 1 is 256 in bfloat16: one expert gives 256 and eight give 1, which makes 264 only in float32."""
    dtype = torch.bfloat16
    gate, up = torch.full((1, 1), 64.0, dtype=dtype), torch.full((1, 1), 1 / 64, dtype=dtype)  # silu(64) / 64 is 1
    down = [torch.full((1, 1), value, dtype=dtype) for value in [256.0] + [1.0] * 8]
    routing = Routing(torch.arange(9).repeat(tokens, 1), torch.ones(tokens, 9), torch.full((tokens,), 9), 9)
    experts = find_backend(backend)(ExpertWeights([gate] * 9, [up] * 9, down))
    y_TD = experts.run(torch.ones(tokens, 1, dtype=dtype), routing)
    assert y_TD.dtype == dtype
    assert y_TD.tolist() == [[264.0]] * tokens


@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_token_does_not_see_its_neighbours(backend: str) -> None:
    k = [3, 0, 1, 8, 2, 2, 5]
    experts = find_backend(backend)(random_weights(8, 16, 12))
    x_TD, routing = random_inputs(k, 8, 16)
    together = experts.run(x_TD, routing)
    alone = torch.cat([experts.run(x_TD[t : t + 1], routing.rows(slice(t, t + 1))) for t in range(len(k))])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert torch.equal(together, experts.run(x_TD, routing))  # and two identical runs agree to the bit


def gradients(experts: type[Experts], k: list[int]) -> list[Tensor]:
    """Of a random function of the output, by x, by the routing weights and by every expert matrix."""
    weights = random_weights(4, 7, 5)
    x_TD, routing = random_inputs(k, 4, 7)
    matrices = [*weights.gate_EID, *weights.up_EID, *weights.down_EDI]
    parameters = [x_TD, routing.weights_TK, *matrices]
    for parameter in parameters:
        parameter.requires_grad_()
    direction_TD = torch.randn(x_TD.shape, generator=torch.Generator().manual_seed(9))
    (experts(weights).run(x_TD, routing) * direction_TD).sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


@pytest.mark.parametrize("k", [[2, 0, 3, 1, 1], [3], [1, 1]])
def test_training_through_bucketed_gives_the_gradients_of_the_reference(k: list[int]) -> None:
    for ours, expected in zip(gradients(BucketedExperts, k), gradients(ReferenceExperts, k), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert gradients(ReferenceExperts, k)[0].abs().sum() > 0


def test_an_unknown_backend_is_refused_with_the_names_there_are() -> None:
    assert find_backend("reference") is ReferenceExperts
    with pytest.raises(InputError, match=f"unknown backend 'cuda'; choose one of {', '.join(BACKENDS)}"):
        find_backend("cuda")
