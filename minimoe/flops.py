"""How much work a forward pass is: FLOPs from the real shapes and the real k, and bytes of weights read.

A FLOP is one multiplication or one addition: a product of [a, b] by [b, c] counts 2abc. Matrix products and
attention are counted; norms, RoPE, softmax, the rule itself and sampling are not (together under a percent at
OLMoE's size).

Shape letters: T tokens, D hidden, E experts, I expert intermediate, V vocabulary, P live (token, expert) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minimoe.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerFlops:
    """FLOPs of one layer in one pass."""

    attention: int
    gate: int
    experts: int


def layer_flops(config: ModelConfig, new: Sequence[int], past: Sequence[int], pairs: int) -> LayerFlops:
    """FLOPs of one layer.

    Args:
        new, past: for each sequence, its new tokens and the positions cached before them.
        pairs: P, live (token, expert) pairs of this layer: the sum of k.

    Formulas: projections 2 T D (2 D + 2 kv width); scores and values 4 D for every key that a token may see
    (itself and all before it); gate 2 T D E; experts 6 P D I (three matrices).
    """
    T, D = sum(new), config.hidden_size
    keys_seen = sum(n * p + n * (n + 1) // 2 for n, p in zip(new, past, strict=True))
    return LayerFlops(
        attention=2 * T * D * (2 * D + 2 * config.kv_width) + 4 * D * keys_seen,
        gate=2 * T * D * config.num_experts,
        experts=6 * pairs * D * config.intermediate_size,
    )


def head_flops(config: ModelConfig, rows: int) -> int:
    """FLOPs of the head for that many hidden states: 2 rows D V."""
    return 2 * rows * config.hidden_size * config.vocab_size


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of weights that one pass has to read at least once."""

    attention: int
    gate: int
    experts: int
    head: int

    @property
    def total(self) -> int:
        return self.attention + self.gate + self.experts + self.head


def expert_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one expert's three matrices."""
    return 3 * config.hidden_size * config.intermediate_size * itemsize


def pass_bytes(config: ModelConfig, experts_hit: int, itemsize: int, *, head: bool = True) -> WeightBytes:
    """Bytes of weights read by one pass over all layers; embedding rows (a few KiB) are left out.

    Args:
        experts_hit: distinct experts that had a token, summed over the layers. In a batch an expert that
            several tokens share is read once.
        itemsize: bytes of one weight.
        head: whether logits are computed.
    """
    D, L = config.hidden_size, config.num_layers
    norms = 3 * D + config.kv_width
    return WeightBytes(
        attention=L * (D * (2 * D + 2 * config.kv_width) + norms) * itemsize,
        gate=L * D * config.num_experts * itemsize,
        experts=experts_hit * expert_bytes(config, itemsize),
        head=(D + D * config.vocab_size) * itemsize if head else 0,
    )


def block_flops(config: ModelConfig, k: float) -> float:
    """FLOPs of a token in one MoE block at a mean k."""
    one, two = (layer_flops(config, [1], [0], pairs) for pairs in (0, 1))
    return one.gate + k * (two.experts - one.experts)


def paper_block_flops(config: ModelConfig, tokens: int, mean_k: float, *, elbow: bool) -> float:
    """The estimate that "Elbow-based MoE Routing" prints, for one MoE block; not what the block costs.

    router 2 N d E + softmax 5 N E + sort N E log2 E; experts 2 N k d m twice and N k m, with m = 4 d; the elbow
    adds N E log2 E + 6 N E. It takes two matrices of 4 d where OLMoE's experts have three of I, so its numbers
    are about 5.3 times too high at OLMoE's size; ratios barely change.
    """
    N, d, E = tokens, config.hidden_size, config.num_experts
    m = 4 * d
    sort = N * E * math.log2(E) if E > 1 else 0.0
    router = 2 * N * d * E + 5 * N * E + sort
    experts = 2 * (2 * N * mean_k * d * m) + N * mean_k * m
    return router + experts + (sort + 6 * N * E if elbow else 0.0)
