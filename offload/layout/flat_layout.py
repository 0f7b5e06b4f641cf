"""Flat layout of a unit's parameters in one range of elements, and the partition of each rank.

    [ trainable segments, padding | frozen segments, padding ]
      rank 0 │ rank 1 │ …           rank 0 │ rank 1 │ …

Both regions are divided evenly, so that every rank holds equally many state elements and reads equally many bytes. A
rank's partition is its shard of the trainable region followed by its shard of the frozen region.

Frozen weights may be stored as blocks of codes, or as the bytes that another library has made of them. Their segments
come last in the frozen region, blocks behind bytes, counted in elements as all else. On the device the unit has more
elements than it has in its partitions: behind the two regions are the values of the blocks, which the device makes once
the partitions are there.

    device:  [ trainable region | frozen region: weights, bytes, blocks of codes | values of the blocks, padding ]
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from offload.layout.opaque_state import StateField, packed_nbytes
from offload.layout.units import Unit, Units
from offload.sizes import PAGE, align_up

_ALIGNMENT = 32
"""Alignment of segments in elements: 64 bytes in 16 bits, 128 in fp32.

A misaligned fp32 `F.linear` was seen to change bits.
"""

_PARTITION_ALIGNMENT = 2048
"""Alignment of partitions in elements: 4096 bytes of the smallest state.

Every state of every partition therefore takes full pages.
"""


WORD = 4
"""Bytes of a word; the size of a PACKED partition is a multiple of words."""


class Stored(NamedTuple):
    """Form in which a frozen parameter is stored that is not stored as values."""

    form: str
    """Name of the block format; see `offload.kernels.blocks`. Empty for the bytes of inner tensors."""
    numel: int
    """Elements of the weights' dtype whose memory the blocks or bytes take."""
    inner: tuple[StateField, ...] = ()
    """Inner tensors; see `offload.layout.frozen.opaque`."""
    kind: str = ""
    """Class of a parameter with inner tensors, and what else tells how its bytes are read."""


class Segment(NamedTuple):
    """Position of one parameter in its unit, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    """Elements in the partitions: those of the parameter, or those whose memory its blocks or bytes take."""
    trainable: bool
    kept: tuple[StateField, ...] = ()
    """States of the parameter, for an optimizer whose states are packed."""
    packed_start: int = 0
    """Start of those states in the unit's PACKED partition, in words of four bytes."""
    matrix: bool = False
    """True if Muon and SinkGD step the parameter as a matrix; set by the planner, where a run has groups."""
    form: str = ""
    """Name of the block format of a frozen parameter; empty for values in the dtype of the weights."""
    inner: tuple[StateField, ...] = ()
    """Inner tensors of a parameter that is stored as their bytes, as another library has quantized it."""
    kind: str = ""
    """Class of such a parameter, and what else tells how its bytes are read."""

    @property
    def value_numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def packed(self) -> range:
        """Words of the unit's PACKED partition that belong to this parameter."""
        # Packed states are padded to 64 bytes, so the division leaves no remainder.
        return range(self.packed_start, self.packed_start + packed_nbytes(self.kept) // WORD)

    @property
    def stop(self) -> int:
        """End of the parameter's elements in the unit."""
        return self.start + self.numel


class UnitLayout(NamedTuple):
    """Flat layout of a unit: trainable segments first, then frozen ones.

    The elements between and after the segments are padding: zero at the start, and never read.
    """

    name: str
    segments: tuple[Segment, ...]
    numel: int
    """Elements in the partitions of all ranks."""
    trainable_stop: int
    """End of the trainable region. Both regions are padded to a multiple of world size times 2048."""

    @property
    def blocks_start(self) -> int:
        """Start of the segments that are stored as blocks; `numel` if none is."""
        return min((segment.start for segment in self.segments if segment.form), default=self.numel)

    @property
    def values_stop(self) -> int:
        """End of the elements that are values: start of bytes of others and of blocks; `numel` if there are none."""
        return min((segment.start for segment in self.segments if segment.form or segment.inner), default=self.numel)

    @property
    def device_starts(self) -> tuple[int, ...]:
        """First element of each parameter's values on the device, in the order of the segments."""
        starts: list[int] = []
        end = self.numel
        for segment in self.segments:
            starts.append(end if segment.form else segment.start)
            if segment.form:
                end = align_up(end + segment.value_numel, _ALIGNMENT)
        return tuple(starts)

    @property
    def device_numel(self) -> int:
        """Elements of the unit on the device: those of the partitions, and the values of what is stored as blocks."""
        values = sum(align_up(segment.value_numel, _ALIGNMENT) for segment in self.segments if segment.form)
        return self.numel + align_up(values, _PARTITION_ALIGNMENT)

    @property
    def used_numel(self) -> int:
        """Elements that a use of the unit reads: those of its weights, without those of blocks."""
        return self.blocks_start + self.device_numel - self.numel

    @property
    def packed_numel(self) -> int:
        """Words of the PACKED partition, padded to full pages."""
        return align_up(max((segment.packed.stop for segment in self.segments), default=0) * WORD, PAGE) // WORD

    def trainable(self, rank: int, world_size: int) -> range:
        """Returns this rank's elements of the trainable region, which come first in its partition and have states."""
        return _shard_of(range(self.trainable_stop), rank, world_size)

    def frozen(self, rank: int, world_size: int) -> range:
        """Returns this rank's elements of the frozen region: the rest of its partition."""
        return _shard_of(range(self.trainable_stop, self.numel), rank, world_size)


def _shard_of(region: range, rank: int, world_size: int) -> range:
    """Returns one rank's even shard of a region; the length is a multiple of `world_size`."""
    length = len(region) // world_size
    return range(region.start + rank * length, region.start + (rank + 1) * length)


class _Place(enum.Enum):
    """Place of a parameter in its unit, in this order."""

    TRAINABLE = 0
    VALUES = 1
    BYTES = 2
    BLOCKS = 3


def _place(parameter: nn.Parameter, stored: Stored | None) -> _Place:
    """Returns the place of a parameter, which is stored as values if `stored` is None."""
    if parameter.requires_grad:
        return _Place.TRAINABLE
    if stored is None:
        return _Place.VALUES
    return _Place.BLOCKS if stored.form else _Place.BYTES


def lay_out(
    name: str, parameters: Iterable[tuple[str, nn.Parameter]], world_size: int, stored: Mapping[str, Stored] = {}
) -> UnitLayout:
    """Places parameters one after the other, each at a multiple of 32 elements, and returns the layout.

    Args:
        name: the unit's name.
        parameters: names and parameters of the unit, in the model's order.
        world_size: number of ranks among which each region is divided.
        stored: frozen parameters that are stored as blocks or bytes, by name.
    """
    step = _PARTITION_ALIGNMENT * world_size
    named_parameters = list(parameters)
    end = trainable_stop = 0
    segments: list[Segment] = []
    # Parameters keep the model's order among those of one place.
    for place in _Place:
        for parameter_name, parameter in named_parameters:
            here = None if parameter.requires_grad else stored.get(parameter_name)
            if _place(parameter, here) is place:
                as_stored = here or Stored("", parameter.numel())
                segments.append(
                    Segment(
                        parameter_name,
                        tuple(parameter.shape),
                        end,
                        as_stored.numel,
                        parameter.requires_grad,
                        form=as_stored.form,
                        inner=as_stored.inner,
                        kind=as_stored.kind,
                    )
                )
                end = align_up(end + as_stored.numel, _ALIGNMENT)
        # Each region ends at a multiple of the alignment of all ranks, so that `_shard_of` divides it evenly.
        if place is _Place.TRAINABLE:
            trainable_stop = end = align_up(end, step)
    end = align_up(end, step)
    # A unit whose parameters are all empty still gets one step of padding, so that no rank's partition is empty.
    return UnitLayout(name, tuple(segments), max(end, step), trainable_stop)


def with_kept(layout: UnitLayout, kept: Mapping[str, tuple[StateField, ...]]) -> UnitLayout:
    """Returns `layout` with the states that an optimizer of torch keeps of each parameter, packed one after the other.

    Args:
        layout: a unit's layout.
        kept: the states by parameter name; a parameter that is missing keeps none.
    """
    segments: list[Segment] = []
    end = 0
    for segment in layout.segments:
        # The end of a segment's packed range follows from its start, so the start is set first.
        segments.append(segment._replace(kept=kept.get(segment.name, ()), packed_start=end))
        end = segments[-1].packed.stop
    return layout._replace(segments=tuple(segments))


def layouts_of(
    model: nn.Module,
    units: Units,
    world_size: int = 1,
    kept: Mapping[str, tuple[StateField, ...]] = {},
    stored: Mapping[str, Stored] = {},
) -> tuple[UnitLayout, ...]:
    """Returns the layout of every unit of `model`.

    Args:
        model: the model, whose parameters give shapes and `requires_grad`.
        units: the division of its parameters.
        world_size: number of ranks.
        kept: the states of an optimizer of torch, by parameter name.
        stored: frozen parameters that are stored as blocks or bytes, by name.
    """

    def layout(unit: Unit) -> UnitLayout:
        parameters = [(name, model.get_parameter(name)) for name in unit.parameters]
        return with_kept(lay_out(unit.name, parameters, world_size, stored), kept)

    return tuple(layout(unit) for unit in units.units)


class SegmentShard(NamedTuple):
    """Consecutive elements of a parameter that one rank holds."""

    rank: int
    position: int
    """Index of the first element in the parameter."""
    start: int
    """Index of the first element in the rank's partition of WEIGHT, or of any state if the parameter is trainable."""
    numel: int


def segment_shards(
    layout: UnitLayout, world_size: int, segment: Segment, start: int = 0, stop: int | None = None
) -> Iterator[SegmentShard]:
    """Yields the runs of elements, each on one rank, that make up elements [start, stop) of a parameter, in order.

    Args:
        layout: the layout of the parameter's unit.
        world_size: number of ranks.
        segment: the parameter's segment in `layout`.
        start: first element, counted in the parameter.
        stop: end of the elements; None stands for the parameter's end.
    """
    region = range(layout.trainable_stop) if segment.trainable else range(layout.trainable_stop, layout.numel)
    shard_numel = len(region) // world_size
    before = 0 if segment.trainable else layout.trainable_stop // world_size  # the trainable shard comes first
    first = segment.start + start
    last = segment.stop if stop is None else segment.start + stop
    while first < last:
        # Both regions are divided evenly, so the rank follows from the position alone.
        rank, within = divmod(first - region.start, shard_numel)
        numel = min(last - first, shard_numel - within)
        yield SegmentShard(rank, first - segment.start, before + within, numel)
        first += numel
