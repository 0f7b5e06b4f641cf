"""Output that the benches have in common: rounded numbers, and charts in files."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def rounded(value: Any) -> Any:
    """Returns a float with four digits, and anything else unchanged."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def pyplot() -> ModuleType:
    """Returns matplotlib's pyplot, which then draws to files and needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
