"""replay: route a sequence as it was routed before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from minimoe.errors import InputError
from minimoe.recording import Recording, read_recording
from minimoe.routers.base import Needs, Router, RouterContext
from minimoe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Replay(Router):
    """Every token uses the experts and the weights that a recording has for its layer and position.

    Formula: k = that of the recording; the logits are not looked at. Source: routing replay, as in reinforcement
    learning on MoE models (Ma et al. 2025), to tell a change of routing from a change of anything else.

    Attributes:
        file: what 'minimoe generate --record FILE' wrote, for one sequence.
    """

    needs: ClassVar[Needs] = "a recording"

    file: str
    _recording: Recording | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_recording", read_recording(self.file))

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        """Look the tokens up.

        Raises:
            InputError: other tokens than those recorded, more of them, several sequences, or another model.
        """
        assert self._recording is not None
        layers, ids_T = self._recording.layers, self._recording.ids_T
        if len(layers) != (context.num_layers or len(layers)) or layers[0].num_experts != logits_TE.shape[1]:
            raise InputError(
                f"{self.file} was recorded on a model of {len(layers)} layers with {layers[0].num_experts} experts, "
                f"not on this one of {context.num_layers} with {logits_TE.shape[1]}."
            )
        positions_T = context.positions_T.cpu()
        if len(positions_T) and int(context.sequence_T.max()) > 0:
            raise InputError(f"{self.file} holds one sequence, and several are run together; run one at a time.")
        if len(positions_T) and int(positions_T.max()) >= len(ids_T):
            raise InputError(
                f"{self.file} holds {len(ids_T)} tokens, but token {int(positions_T.max()) + 1} is to be routed."
            )
        if not torch.equal(ids_T[positions_T], context.ids_T.cpu()):
            raise InputError(f"{self.file} was recorded on another text than this one.")
        rows = layers[context.layer].rows(positions_T)
        device = logits_TE.device
        return Routing(rows.experts_TK.to(device), rows.weights_TK.to(device), rows.k_T.to(device), rows.num_experts)
