"""Seconds that the memory of activations costs, beside recomputation and copies: those of tiles and of chunks."""

from __future__ import annotations

import math

from offload.planner.activations.formulas import CHUNK_TOKENS, is_tiled, mlp_numel, tile_tokens
from offload.planner.activations.load import Load
from offload.planner.hardware import Hardware
from offload.planner.model_shape import Shape, Use

_FP32 = 4


def of_tiles(shape: Shape, use: Use, load: Load, hardware: Hardware) -> float:
    """Returns the seconds that tiles of an MLP add to the backward: its forward once more, and sums of gradients."""
    if not is_tiled(shape, load) or not use.mlp_flops:
        return 0.0
    tiles = math.ceil(load.batch * shape.sequence / tile_tokens(shape, load))
    again = load.batch * use.mlp_flops / hardware.matmul
    return again + tiles * _sum_seconds(mlp_numel(shape, use), hardware)


def of_chunks(shape: Shape, load: Load, hardware: Hardware) -> float:
    """Returns the seconds that chunks of the loss add: a sum of the head's gradients for each chunk."""
    if not load.chunked_loss:
        return 0.0
    chunks = math.ceil(load.batch * shape.sequence / CHUNK_TOKENS)
    return chunks * _sum_seconds(shape.layouts[shape.uses[-1].unit].numel, hardware)


def _sum_seconds(numel: int, hardware: Hardware) -> float:
    """Returns the seconds to add gradients to sums in fp32, which are read and written."""
    return numel * (2 * _FP32 + hardware.itemsize) / hardware.elementwise
