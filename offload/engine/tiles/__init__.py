"""Modules computed piece by piece: an MLP by chunks of the sequence, a linear layer by blocks of its weight."""

from __future__ import annotations

from offload.engine.tiles.linear import TiledLinear
from offload.engine.tiles.sequence import tiled, untiled

__all__ = ["TiledLinear", "tiled", "untiled"]
