"""Layouts of units with states of a byte an element: moments in 8 bits, in blocks with a scale, and bf24 masters."""

from __future__ import annotations

from collections.abc import Sequence

from offload.layout.flat_layout import UnitLayout, arrange
from offload.layout.modes import Mode


def laid_out_for(layouts: Sequence[UnitLayout], mode: Mode, world_size: int) -> tuple[UnitLayout, ...]:
    """Returns the layouts as a mode needs them.

    A block of moments in 8 bits has one scale, so it may not contain elements of two parameters: each parameter begins
    at a multiple of a block. A state of a byte an element fills pages if partitions are multiples of 4096 elements.

    Args:
        layouts: the layout of each unit, of a mode without such states.
        mode: the states and their dtypes.
        world_size: number of ranks among which each region is divided.
    """
    return placed_for(layouts, mode, world_size) if mode.in_bytes else tuple(layouts)


def placed_for(layouts: Sequence[UnitLayout], mode: Mode, world_size: int) -> tuple[UnitLayout, ...]:
    """Does what `laid_out_for` does, with layouts of any mode."""

    def placed(layout: UnitLayout) -> UnitLayout:
        matrices = None
        if layout.matrices_start is not None:
            matrices = {segment.name for segment in layout.segments if layout.is_matrix(segment)}
        return arrange(layout.name, layout.segments, world_size, matrices, mode)

    return tuple(placed(layout) for layout in layouts)
