"""The small file that `minimoe calibrate` writes and a rule reads: what was fitted, for which checkpoint.

It is one JSON object: {"rule": name, "checkpoint": fingerprint, "values": one entry a layer, ...}; whatever else stands
in it (model, text, tokens) is there for people.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimoe.errors import InputError


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one file holds.

    Attributes:
        path: where it came from.
        rule: the name of the rule that it is for.
        checkpoint: the fingerprint of the model that it was made for.
        values: one entry a layer; what it is, the rule says.
    """

    path: str
    rule: str
    checkpoint: str
    values: list[Any]

    def value(self, layer: int, num_layers: int | None, checkpoint: Callable[[], str] | None) -> Any:
        """The entry of a layer of a model, of which the number of layers and the fingerprint may be unknown.

        Raises:
            InputError: the file was made for another checkpoint, or has not one entry for each layer.
        """
        if checkpoint is not None and checkpoint() != self.checkpoint:
            raise InputError(
                f"{self.path} was made for another checkpoint; make one for this model with 'minimoe calibrate'."
            )
        if len(self.values) != num_layers if num_layers is not None else layer >= len(self.values):
            has = "more" if num_layers is None else str(num_layers)
            raise InputError(
                f"{self.path} holds values for {len(self.values)} layers, but the model has {has}; make a new one with "
                "'minimoe calibrate'."
            )
        return self.values[layer]


def read_calibration(path: str, rule: str) -> Calibration:
    """Read a calibration file.

    Raises:
        InputError: no such file, no calibration file, or one for another rule.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        content = None
    fields = {"rule": str, "checkpoint": str, "values": list}
    if not isinstance(content, dict) or not all(isinstance(content.get(key), kind) for key, kind in fields.items()):
        raise InputError(f"{path} is no calibration file; make one with 'minimoe calibrate'.")
    if content["rule"] != rule:
        raise InputError(f"{path} was made for the rule {content['rule']}, not for {rule}.")
    return Calibration(path, rule, content["checkpoint"], content["values"])
