"""Checkpoints are written once a session; tests share them by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import write_checkpoint
from hypothesis import HealthCheck, settings

# The shapes are tiny: a second thread would only wait for the first.
torch.set_num_threads(1)
# A busy machine is no fault of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a variant (and options of write_checkpoint) to the folder of its checkpoint."""

    @cache
    def folder(variant: str = "base", **options: Any) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp(variant), variant, **options)

    return folder
