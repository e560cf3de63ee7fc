"""The parameters of a training run, stacked as the optimiser likes them, and their names in a checkpoint.

Shape letters: D hidden, E experts, I expert intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minimoe.config import ModelConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def create(config: ModelConfig, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Fresh float32 parameters, drawn on the CPU so that the seed gives the same model on every device.

    Matrices that write into the residual stream (o_proj, down) and the head start at zero, so that every
    block begins as the identity and the first prediction is uniform.
    """
    if config.kv_width != config.hidden_size:
        raise ValueError("the recipe stacks the four attention matrices, so kv heads must equal heads")
    D, E, I, V = config.hidden_size, config.num_experts, config.intermediate_size, config.vocab_size
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    parameters = {"embed": normal(V, D, std=0.5), "norm": torch.ones(D), "head": torch.zeros(V, D)}
    for layer in range(config.num_layers):
        attention_4DD = normal(4, D, D, std=D**-0.5)
        attention_4DD[3] = 0.0
        parameters |= {
            f"{layer}.attention": attention_4DD,
            f"{layer}.expert_gate": normal(E, I, D, std=D**-0.5),
            f"{layer}.expert_up": normal(E, I, D, std=D**-0.5),
            f"{layer}.expert_down": torch.zeros(E, D, I),
            f"{layer}.gate": normal(E, D, std=0.5 * D**-0.5),
            f"{layer}.norms": torch.ones(4, D),
        }
    return {name: value.to(device).requires_grad_() for name, value in parameters.items()}


def is_matrix(name: str) -> bool:
    """Whether Muon trains this parameter: the matrices of attention and experts."""
    return name.endswith(("attention", "expert_gate", "expert_up", "expert_down"))


def checkpoint_weights(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of the stacked parameters under OLMoE's tensor names, differentiable: what `minimoe.model.Olmoe` reads."""
    weights = {
        "model.embed_tokens.weight": parameters["embed"],
        "model.norm.weight": parameters["norm"],
        "lm_head.weight": parameters["head"],
    }
    layers = sum(name.endswith(".attention") for name in parameters)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, weight in zip(ATTENTION, parameters[f"{layer}.attention"].unbind(0), strict=True):
            weights[f"{prefix}.self_attn.{name}.weight"] = weight
        norms = ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")
        for name, weight in zip(norms, parameters[f"{layer}.norms"].unbind(0), strict=True):
            weights[f"{prefix}.{name}.weight"] = weight
        weights[f"{prefix}.mlp.gate.weight"] = parameters[f"{layer}.gate"]
        for kind in ("gate", "up", "down"):
            for expert, weight in enumerate(parameters[f"{layer}.expert_{kind}"].unbind(0)):
                weights[f"{prefix}.mlp.experts.{expert}.{kind}_proj.weight"] = weight
    return weights
