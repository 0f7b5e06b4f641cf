"""Sizes of the update pipeline's tiles: elements of each, their number, and the bytes of their class of host memory.

Pure functions of sizes.
"""

from __future__ import annotations

import torch

from offload.kernels.lamb import BLOCK as LAMB_BLOCK
from offload.layout.modes import LAMB, Mode
from offload.layout.tiers import Partitions, PlacementRequest, TierMap
from offload.sizes import MIB, PAGE, align_up
from offload.states import State, Tier
from offload.swapper.memory.host_arena import TILE_BUFFERS

_WHOLE_UNITS = 3
"""Number of tiles if each holds an entire unit: one is read, one computed, one written."""
_MATRICES = 4
"""Number of tiles if each holds a matrix: matrices differ in size, so that one more evens them out."""
_TILE_NBYTES = range(4 * MIB, 16 * MIB + 1)
"""Smallest and largest bytes of the host buffer of one tile."""


def pipeline(parts: Partitions, mode: Mode, request: PlacementRequest, tiers: TierMap) -> tuple[int, int]:
    """Returns the bytes of the smallest and of the largest useful class of tiles; both 0 if nothing trains.

    Args:
        parts: this rank's partitions.
        mode: the states and their dtypes.
        request: the config's request, which may limit the elements of a tile.
        tiers: the tiers of the partitions.
    """
    numel = max(parts.trainable_numel, default=0)
    if not numel:
        return 0, 0
    step = tile_growth(parts, mode, tiers)
    # An optimizer of torch needs all elements of a parameter at once: its tiles are entire units. One with a rule for
    # matrices needs a matrix at once.
    if mode.steps_whole:
        most = _WHOLE_UNITS if mode.whole_units else _MATRICES
        return _scratch_nbytes(parts, mode) + step, _scratch_nbytes(parts, mode) + most * step
    element_bytes = _tile_element_bytes(parts, mode, tiers)
    if request.tile is not None:
        # A tile holds at least one step, however small the config's limit is.
        numel = min(numel, max(request.tile, _tile_step(mode)))
    small, large = (
        align_up(TILE_BUFFERS * min(numel * element_bytes, nbytes), step) or step
        for nbytes in (_TILE_NBYTES[0], _TILE_NBYTES[-1])
    )
    return small, large


def tile_growth(parts: Partitions, mode: Mode, tiers: TierMap) -> int:
    """Returns the bytes by which the class of tiles grows: one more unit or matrix, or one more step of every tile."""
    if not any(parts.trainable_numel):
        return 0
    if mode.whole_units:
        return _whole_unit_nbytes(parts, tiers)
    if mode.matrix_rule:
        return _matrix_nbytes(parts, mode, tiers)
    return TILE_BUFFERS * _tile_step_nbytes(parts, mode, tiers)


def tiles(parts: Partitions, mode: Mode, tiers: TierMap, nbytes: int) -> tuple[int, int, int]:
    """Returns the elements of a tile, the number of tiles and the scratch bytes, for a class of `nbytes`.

    Args:
        parts: this rank's partitions.
        mode: the states and their dtypes.
        tiers: the tiers of the partitions.
        nbytes: bytes of the class; 0 if nothing trains.
    """
    if mode.whole_units:
        scratch = _scratch_nbytes(parts, mode) if nbytes else 0
        buffers = (nbytes - scratch) // max(_whole_unit_nbytes(parts, tiers), 1)
        return max(parts.trainable_numel, default=0), buffers, scratch
    if mode.matrix_rule:
        scratch, tile = _scratch_nbytes(parts, mode) if nbytes else 0, _matrix_nbytes(parts, mode, tiers)
        step = mode.tile_step
        numel = tile // _tile_element_bytes(parts, mode, tiers) // step * step
        return numel, (nbytes - scratch) // max(tile, 1), scratch
    # Elements are rounded down to steps, so that every state of every tile begins at a page of its partition.
    return nbytes // TILE_BUFFERS // _tile_step_nbytes(parts, mode, tiers) * _tile_step(mode), TILE_BUFFERS, 0


def _whole_unit_nbytes(parts: Partitions, tiers: TierMap) -> int:
    """Returns the bytes of the largest tile if each holds an entire unit."""
    return max(
        sum(
            align_up(nbytes)
            for state, nbytes in row.items()
            # A gradient in HOST or on the device is read from its own memory, so a tile needs no room for it.
            if state is not State.GRAD or row_tiers[State.GRAD] is Tier.DISK
        )
        for row, row_tiers, numel in zip(parts.nbytes, tiers, parts.trainable_numel, strict=True)
        if numel
    )


def _matrix_nbytes(parts: Partitions, mode: Mode, tiers: TierMap) -> int:
    """Returns the bytes of a tile that holds any matrix, or else elements that are in none, in tiles as of others."""
    spilled = parts.gradient_dtype.itemsize if _spills(parts, tiers) else 0
    of_matrices = [dtype.itemsize for state, dtype in mode.states.items() if state not in mode.partial]
    matrix = sum(align_up(parts.whole.tile * itemsize) for itemsize in (*of_matrices, spilled))
    element_bytes = _tile_element_bytes(parts, mode, tiers)
    steps = max(_TILE_NBYTES[0] // element_bytes // mode.tile_step, 1)
    numel = min(max(parts.trainable_numel, default=0), steps * mode.tile_step)
    return align_up(max(matrix, numel * element_bytes))


def _scratch_nbytes(parts: Partitions, mode: Mode) -> int:
    """Returns the bytes beside the tiles of a step that needs whole parameters.

    These are an fp32 gradient, an fp32 master if masters have no memory of their own as a whole, and what ranks
    exchange: of an optimizer of torch a master and a gradient, else an update. Rules of matrices also compute in the
    memory of gradient and master, and of a square, so they have it for any precision.
    """
    itemsize, whole = torch.float32.itemsize, parts.whole
    copies = 2 if State.MASTER_LOW_BITS in mode.weights or mode.matrix_rule or not parts.alone else 1
    squares = align_up(whole.square * itemsize) if mode.matrix_rule else 0
    traded = align_up((1 if mode.matrix_rule else 2) * whole.traded * itemsize)
    # A model may have no matrix, and an arena gives no empty memory.
    return copies * align_up(whole.parameter * itemsize) + squares + traded or PAGE


def _tile_step(mode: Mode) -> int:
    """Returns the number of which a tile's elements are a multiple: LAMB sums squares block by block."""
    return max(LAMB_BLOCK, mode.tile_step) if mode.optimizer == LAMB else mode.tile_step


def _tile_step_nbytes(parts: Partitions, mode: Mode, tiers: TierMap) -> int:
    """Returns the bytes of a tile of one step: its elements, and the page of the scales of its blocks."""
    return _tile_step(mode) * _tile_element_bytes(parts, mode, tiers) + (PAGE if mode.in_blocks else 0)


def _tile_element_bytes(parts: Partitions, mode: Mode, tiers: TierMap) -> int:
    """Returns the bytes of a tile for one element: its states without scales, and a gradient if any spills."""
    return mode.element_bytes + (parts.gradient_dtype.itemsize if _spills(parts, tiers) else 0)


def _spills(parts: Partitions, tiers: TierMap) -> bool:
    """Returns True if any gradient waits on disk, and so passes through a tile."""
    return any(
        row[State.GRAD] > 0 and row_tiers[State.GRAD] is Tier.DISK
        for row, row_tiers in zip(parts.nbytes, tiers, strict=True)
        if State.GRAD in row
    )
