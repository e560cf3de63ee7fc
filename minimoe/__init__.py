"""minimoe: a mixture-of-experts inference engine small enough to read, and a laboratory for routing rules."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["InputError", "NumericalError", "load"]


def __getattr__(name: str) -> Any:
    """Import on first use: `minimoe --help` must answer before torch could be imported."""
    if name == "load":
        from minimoe.engine import load

        return load
    if name in ("InputError", "NumericalError"):
        from minimoe import errors

        return getattr(errors, name)
    raise AttributeError(f"module 'minimoe' has no attribute {name!r}")
