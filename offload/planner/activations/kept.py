"""Where the inputs of repeated blocks wait for the backward: the config's wish, and its tiers for one machine."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple

from offload.config import Config, load_config
from offload.planner.activations.formulas import STAGED_INPUTS, Need, input_nbytes, need, recomputed
from offload.planner.activations.load import Load
from offload.planner.model_shape import Shape
from offload.sizes import PAGE, align_up

_LEAST_TILE = 1024
"""Least tokens of an automatic tile, as of the engine's."""


class Wish(NamedTuple):
    """The config's keys on activations."""

    tier: str | None = None
    """ "device", "cpu", "nvme" or "auto"; None if no block is computed again by the engine."""
    host: int | None = None
    """Bytes of host memory for inputs; None for the default."""
    tiles: int | None = 0
    """Tiles of an MLP; 0 for none, None for tiles of as many tokens as the engine takes by itself."""
    first: int = 0
    """Blocks that are recomputed, the first ones; 0 for all."""


def wish_of(config: Config) -> Wish:
    """Returns the wish of a config."""
    own, first = config.offload, config.activation_checkpointing.number_checkpoints or 0
    tiles = None if own.tile_mlp == "auto" else int(own.tile_mlp)
    return Wish(config.activation_tier, own.activation_memory, tiles, first)


def with_host_memory(content: Mapping[str, Any], host: int, inputs: int) -> dict[str, Any]:
    """Returns a config with a host budget for states and, as part of it, for inputs of blocks.

    Args:
        content: a config in DeepSpeed's form.
        host: bytes of the host arena.
        inputs: bytes of host memory for inputs, beside the arena.
    """
    found = copy.deepcopy(dict(content))
    block = found.setdefault("offload", {})
    # The least is a page: without the key, the engine would set half of what is left aside.
    uses = load_config(found).activation_tier not in (None, "device")
    inputs = align_up(max(inputs, PAGE)) if uses else 0
    block["host_memory"] = host + inputs
    block.pop("activation_memory", None)
    if inputs:
        block["activation_memory"] = inputs
    return found


def auto_tile(shape: Shape) -> int:
    """Returns the tokens of an automatic tile: as many as the hidden size, but no fewer than matrix units need."""
    hidden = max((shape.uses[block.uses[0]].boundary for block in shape.blocks), default=0)
    return max(hidden // (shape.sequence * shape.itemsize), _LEAST_TILE)


def placed(shape: Shape, load: Load, wish: Wish, room: Need, drives: bool, most_inputs: int | None = None) -> Load:
    """Returns `load` with the tiers that the inputs of blocks have under a wish. They may need more than `room`.

    "auto" keeps inputs on the device while they fit, then in HOST, then on DISK; "cpu" in HOST, then on DISK. The
    oldest leave first, since the backward needs them last.

    Args:
        shape: the model.
        load: work of a step; its own tiers do not matter.
        wish: the config's wish.
        room: bytes that each tier has for activations.
        drives: True if inputs can go to DISK.
        most_inputs: bytes of the device that "auto" gives to inputs at most; None for no limit but the room.
    """
    tile = auto_tile(shape) if wish.tiles is None else 0
    load = load._replace(tile=tile, tiles=wish.tiles or 0, on_disk=0, on_host=0, first=wish.first)
    if wish.tier is None:
        return load
    load = load._replace(recompute=True)
    # The newest input stays, since the backward begins with it.
    most = max(len(recomputed(shape, load)) - 1, 0)
    if wish.tier == "device" or not most:
        return load
    if wish.tier == "nvme":
        return load._replace(on_disk=most)

    sizes = [input_nbytes(shape, load, block) for block in recomputed(shape, load)]

    def on_device(gone: int) -> bool:
        load_gone = load._replace(on_host=gone)
        staying = load.alive * sum(sizes[gone:])
        return need(shape, load_gone).device <= room.device and (most_inputs is None or staying <= most_inputs)

    gone = most if wish.tier == "cpu" else min(bisect_left(range(most + 1), True, key=on_device), most)
    largest = load.alive * max(sizes)
    in_host = min(gone, max(room.host, 0) // largest)
    if in_host < gone and drives:
        # Inputs on DISK pass through buffers in HOST.
        in_host = max(0, min(gone, (max(room.host, 0) - STAGED_INPUTS * max(sizes)) // largest))
        return load._replace(on_host=in_host, on_disk=gone - in_host)
    return load._replace(on_host=gone)
