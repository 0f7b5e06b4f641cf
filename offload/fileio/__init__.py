"""Files, as every room writes them."""

from __future__ import annotations

from offload.fileio.atomic_write import atomic_write

__all__ = ["atomic_write"]
