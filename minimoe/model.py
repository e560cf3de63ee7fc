"""OLMoE, from token ids to logits, top to bottom.

Weights are a plain mapping from checkpoint names to tensors, so the same code runs on a mapped file and,
with gradients, on the parameters of a training step. Nothing here knows which rule routes or which backend
runs the experts.

Shape letters: T tokens of all sequences laid end to end (no padding), D hidden, H heads, G kv heads, d head
size, V vocabulary, E experts; N new tokens of one sequence, S all its positions so far.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.config import ModelConfig
from minimoe.errors import router_error
from minimoe.experts import Backend, ExpertWeights
from minimoe.operations import Attention, Gate
from minimoe.probe import Phase, Probe
from minimoe.routers import Router, decide
from minimoe.routers.base import layer_contexts
from minimoe.routing import Routing


@dataclass(frozen=True, slots=True)
class Batch:
    """New tokens of one or more sequences, laid end to end.

    Attributes:
        ids_T: int64 token ids.
        new: how many of them belong to each sequence, each at least 1.
        caches: what each sequence has computed before, or None to attend to the new tokens alone.
        phase: "prefill" for tokens of a prompt, "decode" for tokens the model wrote itself.
    """

    ids_T: Tensor
    new: Sequence[int]
    caches: Sequence[KVCache] | None = None
    phase: Phase = "prefill"

    @property
    def past(self) -> list[int]:
        """Cached positions of each sequence."""
        return [cache.length for cache in self.caches] if self.caches is not None else [0] * len(self.new)

    @property
    def positions_T(self) -> Tensor:
        """int64, where in its sequence each token stands."""
        spans = [range(p, p + n) for p, n in zip(self.past, self.new, strict=True)]
        return torch.tensor([p for span in spans for p in span], device=self.ids_T.device)

    @property
    def last_rows(self) -> list[int]:
        """The row of each sequence's last new token."""
        return [end - 1 for end in accumulate(self.new)]


class Pass(ABC):
    """What one run through the layers does with its tokens wherever it is no matter of weights.

    There are two: `Olmoe.forward` has one with the host in the loop, for sequences of any lengths and every rule, and
    minimoe.decoding.graphs one for decode steps in which the device decides everything.

    Attributes:
        ids_T: int64 token ids.
    """

    ids_T: Tensor

    @abstractmethod
    def attend(self, of: Attention, x_TD: Tensor) -> Tensor:
        """x_TD plus what attention adds to it, see Operations.attention."""

    @abstractmethod
    def check(self, layer: int, logits_TE: Tensor) -> None:
        """Refuse router logits that are not finite, now or when the run is over."""

    @abstractmethod
    def route(self, layer: int, logits_TE: Tensor) -> Routing:
        """What the rule decides."""


class Olmoe:
    """A model: a config, weights by checkpoint name, and the backend that runs its experts and products.

    Args:
        config: see ModelConfig.
        weights: every tensor of the checkpoint, per-expert form, all in one dtype on one device.
        backend: see minimoe.experts.find_backend.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], backend: Backend) -> None:
        self.config = config
        self.operations = backend.operations
        self.embed_VD = weights["model.embed_tokens.weight"]
        self.layers = [Layer(config, weights, layer, backend) for layer in range(config.num_layers)]
        self.norm_D = weights["model.norm.weight"]
        self.head_VD = weights["lm_head.weight"]
        self.dtype = self.embed_VD.dtype
        self.device = self.embed_VD.device
        exponents_d2 = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.inverse_d2 = (1.0 / config.rope_theta**exponents_d2).to(self.device)
        self._fingerprint: str | None = None

    def forward(
        self, batch: Batch, router: Router, probe: Probe | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Run all layers over the new tokens and extend the caches.

        Args:
            batch: the tokens. Their positions follow each cache's length.
            router: the rule for every layer.
            probe: sees spans and routings.
            generator: randomness for rules that draw.

        Returns:
            hidden_TD after the final norm; `head` turns rows of it into logits.

        Raises:
            NumericalError: router logits that are not finite; names the layer.
        """
        probe = probe or Probe()
        probe.step(batch.phase, batch.new, batch.past)
        hidden_TD = self.run(_HostPass(self, batch, router, generator), probe)
        for cache, count in zip(batch.caches or (), batch.new, strict=False):
            cache.advance(count)
        return hidden_TD

    def run(self, tokens: Pass, probe: Probe) -> Tensor:
        """All layers over the tokens of a pass; hidden_TD after the final norm."""
        with probe.span("embed"):
            x_TD = F.embedding(tokens.ids_T, self.embed_VD)
        for layer in self.layers:
            x_TD = layer.forward(x_TD, tokens, probe)
        with probe.span("norm"):
            return self.operations.norm(x_TD, self.norm_D, self.config.rms_norm_eps)

    def rotation(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, d] of the angles at these positions, in the model's dtype."""
        # Angles in float32, whatever the model's dtype: position x base^(-2i/d), twice for the half-split pairs.
        angles_T1d = (positions_T.float()[:, None] * self.inverse_d2).repeat(1, 2)[:, None]
        return angles_T1d.cos().to(self.dtype), angles_T1d.sin().to(self.dtype)

    def asking(
        self, batch: Batch, positions_T: Tensor, router: Router, generator: torch.Generator | None
    ) -> Callable[[int, Tensor], Routing]:
        """What asks a rule about the tokens of a pass: given a layer and its router logits [T, E], their routing.

        Args:
            positions_T: those of the batch.
            generator: randomness for rules that draw.
        """
        sequence_T = torch.tensor([b for b, n in enumerate(batch.new) for _ in range(n)], device=self.device)
        # All before the first layer: between products that stream weights the same lines cost ten times as much.
        contexts = layer_contexts(
            self.config,
            batch.phase,
            batch.ids_T,
            positions_T,
            sequence_T,
            generator=generator,
            checkpoint=self.fingerprint,
        )
        return lambda layer, logits_TE: decide(router, logits_TE, contexts[layer])

    def fingerprint(self) -> str:
        """What tells this checkpoint from others, the same in every dtype and place.

        A hash of all router weights and norms and of some rows of every other kind of matrix: all of them would take
        as long as reading the model.
        """
        if self._fingerprint is None:
            parts = [self.embed_VD[:16], self.head_VD[:16], self.norm_D]
            for layer in self.layers:
                attention, gate = layer.attention, layer.gate
                parts += [gate.weight_ED, attention.norm_D, gate.norm_D, attention.query_DD[:1], attention.out_DD[:1]]
                weights = layer.experts.weights
                parts += [matrices[-1][:1] for matrices in (weights.gate_EID, weights.up_EID, weights.down_EDI)]
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part.detach().to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes())
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def head(self, hidden_TD: Tensor, probe: Probe | None = None) -> Tensor:
        """Logits [T, V] of hidden states, in the model's dtype."""
        probe = probe or Probe()
        probe.headed(hidden_TD.shape[0])
        with probe.span("head"):
            return self.operations.linear(hidden_TD, self.head_VD)


class Layer:
    """One pre-norm block: attention, then the sparse mixture of experts."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], index: int, backend: Backend) -> None:
        def weight(name: str) -> Tensor:
            return weights[f"model.layers.{index}.{name}.weight"]

        def each_expert(name: str) -> list[Tensor]:
            return [weight(f"mlp.experts.{e}.{name}") for e in range(config.num_experts)]

        self.index = index
        self.attention = Attention(
            layer=index,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            norm_D=weight("input_layernorm"),
            query_DD=weight("self_attn.q_proj"),
            key_GdD=weight("self_attn.k_proj"),
            value_GdD=weight("self_attn.v_proj"),
            query_norm_D=weight("self_attn.q_norm"),
            key_norm_Gd=weight("self_attn.k_norm"),
            out_DD=weight("self_attn.o_proj"),
            eps=config.rms_norm_eps,
            clip=config.clip_qkv,
        )
        self.gate = Gate(weight("post_attention_layernorm"), weight("mlp.gate"), config.rms_norm_eps)
        self.operations = backend.operations
        self.experts = backend(
            ExpertWeights(each_expert("gate_proj"), each_expert("up_proj"), each_expert("down_proj"))
        )

    def forward(self, x_TD: Tensor, tokens: Pass, probe: Probe) -> Tensor:
        with probe.span("attention", self.index):
            x_TD = tokens.attend(self.attention, x_TD)
        with probe.span("gate", self.index):
            normed_TD, logits_TE = self.operations.gate(self.gate, x_TD)
            tokens.check(self.index, logits_TE)
        with probe.span("rule", self.index):
            routing = tokens.route(self.index, logits_TE)
        probe.routed(self.index, routing, logits_TE)
        with probe.span("experts", self.index):
            return x_TD + self.experts.run(normed_TD, routing)


class _HostPass(Pass):
    """A batch of sequences under a rule that is asked on the host."""

    def __init__(self, model: Olmoe, batch: Batch, router: Router, generator: torch.Generator | None) -> None:
        positions_T = batch.positions_T
        self.ids_T = batch.ids_T
        self._operations, self._ask = model.operations, model.asking(batch, positions_T, router, generator)
        self._sequences = model.operations.sequences(batch.new, batch.caches, model.rotation(positions_T))

    def attend(self, of: Attention, x_TD: Tensor) -> Tensor:
        return self._operations.attention(of, x_TD, self._sequences)

    def check(self, layer: int, logits_TE: Tensor) -> None:
        if not self._operations.finite(logits_TE):
            raise router_error(layer)

    def route(self, layer: int, logits_TE: Tensor) -> Routing:
        return self._ask(layer, logits_TE)
