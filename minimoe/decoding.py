"""A decode step in which the host decides nothing: one token of each of B sequences, from ids to logits.

Every shape is fixed, lengths and routing stay on the device, and inputs and outputs lie at fixed places, so that a CUDA
graph can replay the whole step. The same code runs without a graph, on any device that the backend runs on.

Shape letters: B sequences, L layers, D hidden, H heads, G kv heads, d head size, C room of the cache, E experts,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.errors import InputError, NumericalError
from minimoe.model import Layer, Olmoe
from minimoe.operations import rotate
from minimoe.routers import Router
from minimoe.routing import Routing
from minimoe.triton.routing import on_device


class DecodeStep:
    """Steps of a fixed number of sequences. On a GPU the first one is captured, and all are replayed.

    Args:
        model: with the triton backend: others ask the host how many tokens an expert has.
        router: a rule that the routing kernel knows, see minimoe.triton.routing.
        sequences: B.
        capacity: C, the most tokens a sequence can have.

    Attributes:
        routings: of the last step, one a layer; a replay overwrites them.

    Raises:
        InputError: the rule has to be asked on the host; such rules decode by Olmoe.forward.
    """

    def __init__(self, model: Olmoe, router: Router, sequences: int, capacity: int) -> None:
        config = model.config
        rule = on_device(router, config.top_k, config.num_experts, config.norm_topk_prob)
        if rule is None:
            raise InputError(
                f"the rule {type(router).__name__} has to be asked on the host, so its decode steps cannot be captured."
            )
        self._model, self._rule = model, rule
        shape = (config.num_layers, sequences, config.num_kv_heads, capacity, config.head_dim)
        # Zeros, because attention multiplies what it masks by 0, which would not make a NaN go away.
        self._keys_LBGCd = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._values_LBGCd = torch.zeros_like(self._keys_LBGCd)
        self._ids_B = torch.zeros(sequences, dtype=torch.int64, device=model.device)
        self._lengths_B = torch.zeros_like(self._ids_B)
        self._rows_B = torch.arange(sequences, device=model.device)
        self._places_C = torch.arange(capacity, device=model.device)
        self._broken_L = torch.zeros(config.num_layers, dtype=torch.int32, device=model.device)
        self._logits_BV = torch.empty(sequences, config.vocab_size, dtype=model.dtype, device=model.device)
        self._longest = 0
        self.routings: list[Routing] = []
        with torch.cuda.device_of(self._ids_B):
            self._graph = self._capture() if model.device.type == "cuda" else None

    @property
    def capacity(self) -> int:
        return len(self._places_C)

    def begin(self, caches: Sequence[KVCache]) -> None:
        """Take over what B sequences have computed so far, each at least one token.

        Raises:
            ValueError: another number of sequences.
            IndexError: one is longer than the room there is.
        """
        if len(caches) != len(self._rows_B):
            raise ValueError(f"this step is for {len(self._rows_B)} sequences, not for {len(caches)}")
        self._longest = max(cache.length for cache in caches)
        if self._longest > self.capacity:
            raise IndexError(f"a cache of {self.capacity} positions cannot hold {self._longest}")
        for row, cache in enumerate(caches):
            self._keys_LBGCd[:, row, :, : cache.length] = cache.keys_LHCd[:, :, : cache.length]
            self._values_LBGCd[:, row, :, : cache.length] = cache.values_LHCd[:, :, : cache.length]
        self._lengths_B.copy_(torch.tensor([cache.length for cache in caches]))
        self._broken_L.zero_()

    def step(self, ids_B: Tensor) -> Tensor:
        """Run one token of each sequence; the logits [B, V] that follow it, overwritten by the next step.

        Args:
            ids_B: int64; on the device it costs no wait.

        Raises:
            IndexError: the longest sequence has no room for another token.
        """
        if self._longest == self.capacity:
            raise IndexError(f"a cache of {self.capacity} positions cannot hold {self._longest + 1}")
        self._ids_B.copy_(ids_B)
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        self._longest += 1
        return self._logits_BV

    def check(self) -> None:
        """Wait for the device, and refuse what it computed if router logits were not finite in any step since `begin`.

        Raises:
            NumericalError: names the layer.
        """
        broken = self._broken_L.nonzero().flatten().tolist()
        if broken:
            raise NumericalError(
                f"layer {broken[0]}: the router logits are not finite; the weights or the inputs are broken."
            )

    def _capture(self) -> torch.cuda.CUDAGraph:
        here, aside = torch.cuda.current_stream(self._model.device), torch.cuda.Stream(self._model.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            self._run()  # compiles the kernels, and lets the libraries allocate what they keep
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return graph

    def _run(self) -> None:
        """What is captured: nothing here may look at a value."""
        model, ops, eps = self._model, self._model.operations, self._model.config.rms_norm_eps
        angles_B1d = (self._lengths_B.float()[:, None] * model.inverse_d2).repeat(1, 2)[:, None]
        rotation = angles_B1d.cos().to(model.dtype), angles_B1d.sin().to(model.dtype)
        seen_B11C = (self._places_C <= self._lengths_B[:, None])[:, None, None]
        x_BD = F.embedding(self._ids_B, model.embed_VD)
        self.routings = []
        for layer in model.layers:
            x_BD = x_BD + self._attention(layer, x_BD, rotation, seen_B11C)
            normed_BD, logits_BE = ops.gate(layer.gate, x_BD)
            routing = self._rule.route(logits_BE, self._broken_L[layer.index : layer.index + 1])
            self.routings.append(routing)
            x_BD = x_BD + layer.experts.run(normed_BD, routing)
        self._logits_BV.copy_(ops.linear(ops.norm(x_BD, model.norm_D, eps), model.head_VD))
        self._lengths_B += 1

    def _attention(self, layer: Layer, x_BD: Tensor, rotation: tuple[Tensor, Tensor], seen_B11C: Tensor) -> Tensor:
        """As Operations.attention, but over all the room there is, with what is not yet filled masked."""
        ops, of = self._model.operations, layer.attention
        normed_BD = ops.norm(x_BD, of.norm_D, of.eps)
        q_BD, k_BGd, v_BGd = ops.linears(normed_BD, (of.query_DD, of.key_GdD, of.value_GdD))
        q_BD, k_BGd = ops.norm(q_BD, of.query_norm_D, of.eps), ops.norm(k_BGd, of.key_norm_Gd, of.eps)
        if of.clip is not None:
            q_BD, k_BGd, v_BGd = (part.clamp(-of.clip, of.clip) for part in (q_BD, k_BGd, v_BGd))
        keys_BGCd, values_BGCd = self._keys_LBGCd[layer.index], self._values_LBGCd[layer.index]
        keys_BGCd[self._rows_B, :, self._lengths_B] = rotate(k_BGd.unflatten(-1, (of.kv_heads, -1)), *rotation)
        values_BGCd[self._rows_B, :, self._lengths_B] = v_BGd.unflatten(-1, (of.kv_heads, -1))
        queries_BHd = rotate(q_BD.unflatten(-1, (of.heads, -1)), *rotation)
        mixed_BH1d = F.scaled_dot_product_attention(
            queries_BHd[:, :, None],
            keys_BGCd,
            values_BGCd,
            attn_mask=seen_B11C,
            enable_gqa=of.heads != of.kv_heads,
        )
        return ops.linear(mixed_BH1d.flatten(1), of.out_DD)
