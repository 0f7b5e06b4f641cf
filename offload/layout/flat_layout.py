"""How a unit's parameters lie in one flat stretch of elements, and which part of it each rank holds.

    [ trainable segments, padding | frozen segments, padding ]
      rank 0 │ rank 1 │ …           rank 0 │ rank 1 │ …

Both stretches are cut evenly, so that each rank has its share of the states and of the bytes to be read. A rank's
partition is its part of the first followed by its part of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from offload.layout.opaque_state import Kept, packed_nbytes
from offload.layout.units import Units
from offload.sizes import PAGE, align_up

_ALIGNMENT = 32
"""Elements: 64 bytes in 16 bits, 128 in fp32. A misaligned fp32 `F.linear` was seen to change bits."""

_PARTITION_ALIGNMENT = 2048
"""Elements: 4096 bytes of the smallest state, so that every state of every partition is an extent."""


WORD = 4
"""Bytes of which a PACKED partition has a whole number."""


class Segment(NamedTuple):
    """One parameter's place in its unit, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    trainable: bool
    kept: tuple[Kept, ...] = ()
    """What an optimizer of torch keeps of it."""
    packed_start: int = 0
    """Where that begins in the unit's PACKED partition, in words of four bytes."""

    @property
    def packed(self) -> range:
        """The words of the unit's PACKED partition that are this parameter's."""
        return range(self.packed_start, self.packed_start + packed_nbytes(self.kept) // WORD)

    @property
    def stop(self) -> int:
        return self.start + self.numel


class UnitLayout(NamedTuple):
    """A unit's flat layout: trainable segments first, then frozen ones.

    What lies between segments and after them is padding: zero at the start, never read.
    """

    name: str
    segments: tuple[Segment, ...]
    numel: int
    trainable_stop: int
    """Where the trainable stretch ends. Both stretches are padded to a multiple of world size times 2048."""

    @property
    def packed_numel(self) -> int:
        """Words of the PACKED partition, which is of whole pages."""
        return align_up(max((segment.packed.stop for segment in self.segments), default=0) * WORD, PAGE) // WORD

    def trainable(self, rank: int, world_size: int) -> range:
        """This rank's elements that have states beside their weight: the first of its partition."""
        return _cut(range(self.trainable_stop), rank, world_size)

    def frozen(self, rank: int, world_size: int) -> range:
        """This rank's elements of the frozen stretch: the rest of its partition."""
        return _cut(range(self.trainable_stop, self.numel), rank, world_size)


def _cut(stretch: range, rank: int, world_size: int) -> range:
    length = len(stretch) // world_size
    return range(stretch.start + rank * length, stretch.start + (rank + 1) * length)


def lay_out(name: str, parameters: Iterable[tuple[str, nn.Parameter]], world_size: int) -> UnitLayout:
    """Place `parameters` one after the other, each at a multiple of 32 elements."""
    step = _PARTITION_ALIGNMENT * world_size
    given = list(parameters)
    end = trainable_stop = 0
    segments: list[Segment] = []
    for trainable in (True, False):
        for parameter_name, parameter in given:
            if parameter.requires_grad is trainable:
                numel = parameter.numel()
                segments.append(Segment(parameter_name, tuple(parameter.shape), end, numel, trainable))
                end = align_up(end + numel, _ALIGNMENT)
        end = align_up(end, step)
        if trainable:
            trainable_stop = end
    return UnitLayout(name, tuple(segments), max(end, step), trainable_stop)


def with_kept(layout: UnitLayout, kept: Mapping[str, tuple[Kept, ...]]) -> UnitLayout:
    """`layout` with what an optimizer of torch keeps of each parameter, by its name, packed one behind the other."""
    segments: list[Segment] = []
    end = 0
    for segment in layout.segments:
        segments.append(segment._replace(kept=kept.get(segment.name, ()), packed_start=end))
        end = segments[-1].packed.stop
    return layout._replace(segments=tuple(segments))


def layouts_of(
    model: nn.Module, units: Units, world_size: int = 1, kept: Mapping[str, tuple[Kept, ...]] = {}
) -> tuple[UnitLayout, ...]:
    """Returns the layout of every unit of `model`; `kept` are the states of an optimizer of torch, by parameter."""
    return tuple(
        with_kept(lay_out(unit.name, [(name, model.get_parameter(name)) for name in unit.parameters], world_size), kept)
        for unit in units.units
    )


class Piece(NamedTuple):
    """Elements of a parameter that one rank holds, one behind the other."""

    rank: int
    position: int
    """The first of them in the parameter."""
    start: int
    """The first of them in the rank's partition of the unit, of WEIGHT, or of any state where the parameter trains."""
    numel: int


def pieces(
    layout: UnitLayout, world_size: int, segment: Segment, start: int = 0, stop: int | None = None
) -> Iterator[Piece]:
    """The pieces that make up elements [start, stop) of a parameter, in order."""
    stretch = range(layout.trainable_stop) if segment.trainable else range(layout.trainable_stop, layout.numel)
    share = len(stretch) // world_size
    before = 0 if segment.trainable else layout.trainable_stop // world_size  # a partition's trainable part is first
    first = segment.start + start
    last = segment.stop if stop is None else segment.start + stop
    while first < last:
        rank, within = divmod(first - stretch.start, share)
        numel = min(last - first, share - within)
        yield Piece(rank, first - segment.start, before + within, numel)
        first += numel
