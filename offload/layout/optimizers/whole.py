"""Parameters that an optimizer steps as a whole: which of them several ranks divide, and the memory that a step needs.

A rank steps the parameters of which it has all elements. One that is divided is stepped on one of its ranks, its
`home`: the others send what they have of it there, and receive what the step makes of it.

    Muon, SinkGD      matrices                there the update of the momentum (or the gradient), back the direction
    torch.optim.X     every parameter         there master and gradient, back the master

Pure functions of layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from offload.layout.flat_layout import Segment, UnitLayout, home, segment_shards
from offload.layout.modes import TORCH, Mode


class Whole(NamedTuple):
    """Sizes of the parameters that an optimizer steps as a whole, in elements; 0 if it has none."""

    parameter: int = 0
    """The largest such parameter."""
    square: int = 0
    """The square of the smaller dimension of a matrix, at most."""
    tile: int = 0
    """The largest run of this rank's elements that a tile must contain, with the padding behind it."""
    traded: int = 0
    """Most elements of a unit that this rank sends to the homes of parameters, and receives as their home."""


NO_WHOLE = Whole()


class Part(NamedTuple):
    """Elements [position, position + numel) of a parameter, which are on one rank."""

    rank: int
    position: int
    numel: int


class Divided(NamedTuple):
    """A parameter that several ranks divide, and that is stepped as a whole."""

    number: int
    """Index of the parameter in its unit."""
    home: int
    """Rank on which it is stepped."""
    parts: tuple[Part, ...]
    """The part of each rank that has one, in order."""


def divided(layout: UnitLayout, mode: Mode, world_size: int) -> tuple[Divided, ...]:
    """Returns the parameters of a unit that are stepped as a whole and that several ranks divide, in order.

    Args:
        layout: the unit.
        mode: the mode, whose optimizer decides.
        world_size: number of ranks.
    """
    found = []
    for index, segment in _stepped_whole(layout, mode):
        parts = tuple(Part(s.rank, s.position, s.numel) for s in segment_shards(layout, world_size, segment))
        if len(parts) > 1:
            found.append(Divided(index, home(layout, world_size, segment), parts))
    return tuple(found)


def cuts(layout: UnitLayout, mode: Mode, part: range, alone: bool, tile_numel: int) -> tuple[range, ...]:
    """Returns the elements of each tile of a unit's update, counted in the rank's partition, in order.

    What is in no matrix is in tiles of any size. A tile contains a matrix, or several that are small. Of several ranks
    each has all its parts of matrices in one tile, since they are exchanged at once.

    Args:
        layout: the unit.
        mode: the mode; its optimizer has a rule for matrices.
        part: elements of the unit that the rank updates.
        alone: True if there is one rank.
        tile_numel: largest number of elements of a tile that need not be larger.
    """
    rest = max(0, min(layout.rest_stop, part.stop) - part.start)
    found = [range(start, min(start + tile_numel, rest)) for start in range(0, rest, tile_numel)]
    borders = [rest, *_borders(layout)] if alone else [rest, len(part)]
    start = rest
    for border, following in zip(borders[1:], [*borders[2:], None], strict=True):
        if following is None or following - start > tile_numel:
            if start < border:
                found.append(range(start, border))
            start = border
    return tuple(found)


def whole_sizes(layouts: Sequence[UnitLayout], mode: Mode, rank: int, world_size: int) -> Whole:
    """Returns the sizes of what an optimizer steps as a whole, for one rank."""
    if not mode.steps_whole:
        return NO_WHOLE
    numels = [segment.numel for layout in layouts for _, segment in _stepped_whole(layout, mode)]
    shapes = [segment.shape for layout in layouts for _, segment in _stepped_whole(layout, mode)]
    return Whole(
        parameter=max(numels, default=0),
        square=max((min(shape) ** 2 for shape in shapes if len(shape) == 2), default=0),
        tile=max((_longest(layout, mode, rank, world_size) for layout in layouts), default=0),
        traded=max((_traded(divided(layout, mode, world_size), rank) for layout in layouts), default=0),
    )


def _stepped_whole(layout: UnitLayout, mode: Mode) -> Iterator[tuple[int, Segment]]:
    """Yields index and segment of the parameters that the mode's optimizer steps as a whole."""
    for index, segment in enumerate(layout.segments):
        if segment.trainable and segment.numel and (mode.optimizer == TORCH or _in_matrices(layout, mode, segment)):
            yield index, segment


def _in_matrices(layout: UnitLayout, mode: Mode, segment: Segment) -> bool:
    return mode.matrix_rule and layout.is_matrix(segment)


def _borders(layout: UnitLayout) -> list[int]:
    """Returns where the matrices of a unit begin behind the first one, and where they end with their padding."""
    starts = sorted(segment.start for segment in layout.segments if layout.is_matrix(segment) and segment.numel)
    return [*starts[1:], layout.trainable_stop]


def _longest(layout: UnitLayout, mode: Mode, rank: int, world_size: int) -> int:
    """Returns the elements of the longest run that a tile of a unit must contain."""
    part = layout.trainable(rank, world_size)
    if mode.whole_units:
        return len(part)
    rest = len(layout.rest(rank, world_size))
    if world_size > 1:
        return len(part) - rest
    borders = [rest, *_borders(layout)]
    return max(stop - start for start, stop in pairwise(borders))


def _traded(found: Sequence[Divided], rank: int) -> int:
    """Returns the elements of divided parameters that a rank sends to their homes, or receives as their home."""
    return sum(part.numel for each in found for part in each.parts if (part.rank == rank) is not (each.home == rank))
