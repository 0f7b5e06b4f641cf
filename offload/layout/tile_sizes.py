"""Tiles of the update pipeline: elements of each, number of them, and bytes of the class of host memory that has them.

Pure functions of sizes.
"""

from __future__ import annotations

import torch

from offload.kernels.lamb import BLOCK as LAMB_BLOCK
from offload.layout.tiers import Homes, Partitions, Wish
from offload.sizes import MIB, align_up
from offload.states import State, Tier
from offload.swapper.memory.host_arena import TILE_BUFFERS
from offload.swapper.modes import LAMB, TORCH, Mode

_STEP = 2048
"""Elements: 4096 bytes of the smallest state."""
_WHOLE_UNITS = 3
"""Tiles where each is a whole unit, for an optimizer of torch: one is read, one computed, one written."""
_TILE_NBYTES = range(4 * MIB, 16 * MIB + 1)


def pipeline(parts: Partitions, mode: Mode, wish: Wish, homes: Homes) -> tuple[int, int]:
    """Returns the bytes of the smallest and of the largest class of tiles; both 0 where nothing trains."""
    numel = max(parts.trainable_numel, default=0)
    if not numel:
        return 0, 0
    step = tile_growth(parts, mode, homes)
    if mode.optimizer == TORCH:
        return _scratch_nbytes(parts, mode) + step, _scratch_nbytes(parts, mode) + _WHOLE_UNITS * step
    element_bytes = _tile_element_bytes(parts, mode, homes)
    if wish.tile is not None:
        numel = min(numel, max(wish.tile, _tile_step(mode)))
    small, large = (
        align_up(TILE_BUFFERS * min(numel * element_bytes, nbytes), step) or step
        for nbytes in (_TILE_NBYTES[0], _TILE_NBYTES[-1])
    )
    return small, large


def tile_growth(parts: Partitions, mode: Mode, homes: Homes) -> int:
    """Returns the bytes by which the class of tiles grows: one more unit, or one more step of every tile."""
    if not any(parts.trainable_numel):
        return 0
    if mode.optimizer == TORCH:
        return _whole_unit_nbytes(parts, homes)
    return TILE_BUFFERS * _tile_step(mode) * _tile_element_bytes(parts, mode, homes)


def tiles(parts: Partitions, mode: Mode, homes: Homes, nbytes: int) -> tuple[int, int, int]:
    """Returns the elements of a tile, the number of tiles and the bytes beside them, of a class of `nbytes`."""
    if mode.optimizer == TORCH:
        scratch = _scratch_nbytes(parts, mode) if nbytes else 0
        buffers = (nbytes - scratch) // max(_whole_unit_nbytes(parts, homes), 1)
        return max(parts.trainable_numel, default=0), buffers, scratch
    step, element_bytes = _tile_step(mode), _tile_element_bytes(parts, mode, homes)
    return nbytes // TILE_BUFFERS // element_bytes // step * step, TILE_BUFFERS, 0


def _whole_unit_nbytes(parts: Partitions, homes: Homes) -> int:
    """Returns the bytes of the largest tile where each holds a whole unit."""
    return max(
        sum(
            align_up(nbytes)
            for state, nbytes in row.items()
            if state is not State.GRAD or home[State.GRAD] is Tier.DISK
        )
        for row, home, numel in zip(parts.nbytes, homes, parts.trainable_numel, strict=True)
        if numel
    )


def _scratch_nbytes(parts: Partitions, mode: Mode) -> int:
    """Returns the bytes of a gradient, and of a master where it has no memory of its own, both of fp32."""
    copies = 2 if State.RESIDUAL in mode.weights else 1
    return copies * align_up(parts.largest_parameter * torch.float32.itemsize)


def _tile_step(mode: Mode) -> int:
    """Returns the elements of which a tile has a whole number: LAMB sums squares block by block."""
    return LAMB_BLOCK if mode.optimizer == LAMB else _STEP


def _tile_element_bytes(parts: Partitions, mode: Mode, homes: Homes) -> int:
    """Returns the bytes that a tile holds of one element: its states, and its gradient where some spill."""
    return mode.element_bytes + (parts.gradient_dtype.itemsize if _spills(parts, homes) else 0)


def _spills(parts: Partitions, homes: Homes) -> bool:
    """Returns whether any gradient waits on disk, and so passes through a tile."""
    return any(
        row[State.GRAD] > 0 and home[State.GRAD] is Tier.DISK
        for row, home in zip(parts.nbytes, homes, strict=True)
        if State.GRAD in row
    )
