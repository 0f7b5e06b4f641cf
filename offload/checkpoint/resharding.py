"""Pure functions that map this model's parameters to a checkpoint's, by name, whatever units they are in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from offload.errors import StoreError
from offload.layout.flat_layout import ParameterSegment, SegmentShard, UnitLayout, segment_shards
from offload.layout.modes import MOMENT_BLOCK, Mode
from offload.states import State


class Run(NamedTuple):
    """Elements [start, stop) of a unit of this model that are contiguous in the checkpoint too, or are not in it."""

    start: int
    stop: int
    saved: SavedElement | None
    """None for elements that the checkpoint does not contain; they keep their values."""


class SavedElement(NamedTuple):
    """Position in the checkpoint of the first element of a run: the unit, and the element in this unit."""

    unit: int
    start: int
    trainable: bool
    """True if the elements have optimizer states in the checkpoint, in addition to the weight."""
    rank: int = 0
    """Rank that has saved the states that a torch optimizer keeps."""


class Difference(NamedTuple):
    """Names and shapes that do not match between a model and a checkpoint."""

    missing: list[str]
    surplus: list[str]
    shapes: list[str]
    """One sentence for each name with differing shapes."""

    def check(self, strict: bool, what: str) -> None:
        """Raises `StoreError` whenever torch's `load_state_dict` raises.

        Differing shapes are an error even if `strict` is false.
        """
        lines = list(self.shapes)
        if strict and self.missing:
            # The wording follows `load_state_dict` of torch, which users know.
            lines.insert(0, f"Missing key(s): {', '.join(self.missing)}.")
        if strict and self.surplus:
            lines.insert(0, f"Unexpected key(s): {', '.join(self.surplus)}.")
        if lines:
            advice = (
                ("; load_module_strict=False loads the names that both contain") if strict and not self.shapes else ""
            )
            raise StoreError(f"{what} does not fit this model{advice}:\n\t" + "\n\t".join(lines))


def difference(
    shapes: Mapping[str, tuple[int, ...]], names: Collection[str], saved: Mapping[str, tuple[int, ...]]
) -> Difference:
    """Compares a model with a checkpoint."""
    return Difference(
        [name for name in shapes if name not in saved],
        [name for name in saved if name not in names],
        [
            f"size mismatch for {name}: the checkpoint has {list(saved[name])}, this model has {list(shape)}."
            for name, shape in shapes.items()
            if name in saved and saved[name] != shape
        ],
    )


def places(
    layouts: Sequence[UnitLayout], tied: Mapping[str, str], frozen: bool
) -> dict[str, tuple[int, ParameterSegment]]:
    """Returns unit and segment of each parameter that a checkpoint contains, by all its names.

    Args:
        tied: First name of each tied parameter, by its other names.
    """
    by_name = {
        segment.name: (unit, segment)
        for unit, layout in enumerate(layouts)
        for segment in layout.segments
        if segment.trainable or frozen
    }
    # A tied name points to the segment of the first name: the values are saved once.
    return by_name | {name: by_name[first] for name, first in tied.items() if first in by_name}


def as_rows(
    saved: Mapping[str, tuple[int, ParameterSegment]], layouts: Sequence[UnitLayout]
) -> dict[str, tuple[int, ParameterSegment]]:
    """Returns the places in a checkpoint of rows that are units here, and parts of larger parts or parameters there."""
    groups: dict[str, list[tuple[int, ParameterSegment]]] = {}
    for unit, segment in saved.values():
        if segment.rows is not None:
            groups.setdefault(segment.stack, []).append((unit, segment))
    segments: dict[str, tuple[int, ParameterSegment]] = {}
    for segment in (segment for layout in layouts for segment in layout.segments if segment.stack):
        own = _rows(segment)
        if segment.stack in saved:
            segments[segment.name] = _row_of(saved[segment.stack], segment, own, 0)
        elif segment.name not in saved:
            for unit, group in groups.get(segment.stack, ()):
                if group.rows is not None and group.rows.start <= own.start and own.stop <= group.rows.stop:
                    segments[segment.name] = _row_of((unit, group), segment, own, group.rows.start)
    return segments


def _rows(segment: ParameterSegment) -> range:
    """Returns the rows of a parameter that are a part of it."""
    return range(segment.row, segment.row + 1) if segment.rows is None else segment.rows


def _row_of(
    place: tuple[int, ParameterSegment], row: ParameterSegment, own: range, first: int
) -> tuple[int, ParameterSegment]:
    """Returns the place of rows `own` within a whole parameter, or within a group that begins at row `first`.

    All rows have equally many stored elements.
    """
    unit, whole = place
    of_row = row.shape if row.rows is None else row.shape[1:]
    if whole.shape[1:] != of_row or own.stop - first > whole.shape[0]:
        return place  # the difference is reported
    numel = whole.numel // whole.shape[0]
    start = whole.start + (own.start - first) * numel
    return unit, whole._replace(
        shape=row.shape, start=start, numel=numel * len(own), stack=row.stack, row=row.row, rows=row.rows
    )


def all_places(
    segment: ParameterSegment, saved: Mapping[str, tuple[int, ParameterSegment]]
) -> list[tuple[int, ParameterSegment]]:
    """Returns the places of a segment in a checkpoint: one, none, or one for each row, group or piece of rows."""
    if segment.name in saved:
        return [saved[segment.name]]
    if segment.rows is not None:
        rows = [saved.get(f"{segment.stack}[{row}]") for row in segment.rows]
        return [row for row in rows if row is not None] if None not in rows else _across(segment, segment.rows, saved)
    if segment.stack or not segment.shape:
        return []
    pieces = {at.rows.start: (unit, at) for unit, at in saved.values() if at.stack == segment.name and at.rows}
    if pieces:
        return [pieces[start] for start in sorted(pieces)]
    rows = [saved.get(f"{segment.name}[{row}]") for row in range(segment.shape[0])]
    return [row for row in rows if row is not None] if None not in rows else []


def _across(
    segment: ParameterSegment, rows: range, saved: Mapping[str, tuple[int, ParameterSegment]]
) -> list[tuple[int, ParameterSegment]]:
    """Returns the places of a group's `rows` in several groups of a checkpoint; none if the checkpoint lacks a row."""
    groups = [(unit, at, at.rows) for unit, at in saved.values() if at.stack == segment.stack and at.rows is not None]
    segments: list[tuple[int, ParameterSegment]] = []
    first = rows.start
    while first < rows.stop:
        group = next((group for group in groups if first in group[2]), None)
        if group is None:
            return []
        unit, at, of_group = group
        part = range(first, min(of_group.stop, rows.stop))
        piece = segment._replace(shape=(len(part), *segment.shape[1:]), rows=part)
        segments.append(_row_of((unit, at), piece, part, of_group.start))
        first = part.stop
    return segments


def parameter_shapes(named: Iterable[tuple[str, ParameterSegment]]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter, by the names of segments; rows are joined, under the parameter's name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, segment in named:
        whole = segment.stack or name
        shapes[whole] = segment.joined_to(shapes.get(whole))
    return shapes


def runs(layout: UnitLayout, saved: Mapping[str, tuple[int, ParameterSegment]]) -> list[Run]:
    """Returns the segments of a unit, in order, as runs.

    Segments that are neighbours both in this unit and in the checkpoint become one run, together with the padding
    between them.
    """
    joined: list[Run] = []
    for run in (run for segment in layout.segments for run in _runs_of(segment, saved)):
        # Merging keeps the reads long: without it each parameter would be a request of its own.
        if joined and _joins(joined[-1], run, (layout.trainable_stop, layout.values_stop)):
            run = joined.pop()._replace(stop=run.stop)
        joined.append(run)
    return joined


def _runs_of(segment: ParameterSegment, saved: Mapping[str, tuple[int, ParameterSegment]]) -> Iterator[Run]:
    """Yields the run of a segment, or a run for each row if the checkpoint stores a whole parameter by rows."""
    start = segment.start
    for unit, place in all_places(segment, saved):
        yield Run(start, start + place.numel, SavedElement(unit, place.start, place.trainable))
        start += place.numel
    if start == segment.start:
        yield Run(segment.start, segment.stop, None)


def packed_runs(layout: UnitLayout, saved: Mapping[str, tuple[int, ParameterSegment]], rank: int) -> list[Run]:
    """Returns the runs of a torch optimizer's states, in words of the PACKED partitions, one for each parameter."""
    packed: list[Run] = []
    for segment in (segment for segment in layout.segments if segment.packed_rank == rank):
        place = saved.get(segment.name)
        # Packed states can only be copied if this optimizer keeps the same states of the parameter, in the same order.
        has = place is not None and place[1].kept == segment.kept
        source = None
        if place is not None and has:
            source = SavedElement(place[0], place[1].packed.start, True, place[1].packed_rank)
        packed.append(Run(segment.packed.start, segment.packed.stop, source))
    return packed


def scale_runs(layout: UnitLayout, saved: Mapping[str, tuple[int, ParameterSegment]], mode: Mode) -> list[Run]:
    """Returns the runs of the scales of moments in 8 bits, in scales of a unit, one for each trainable parameter."""
    scales: list[Run] = []
    for segment in (candidate for candidate in layout.segments if candidate.trainable and mode.in_blocks):
        for run in _runs_of(segment, saved):
            part = mode.part(State.SCALES, run.start, run.stop)
            source = run.saved and run.saved._replace(start=mode.part(State.SCALES, run.saved.start, 0).start)
            scales.append(Run(part.start, part.stop, source))
    return scales


def shards_of_scales(
    layout: UnitLayout, world_size: int, segment: ParameterSegment, mode: Mode
) -> Iterator[SegmentShard]:
    """Yields the runs of scales, each on one rank, that make up a segment of scales of a unit, in order.

    Args:
        segment: the scales, counted in the unit, as if they were a parameter.
    """
    one = len(mode.moments)
    elements = segment._replace(start=segment.start // one * MOMENT_BLOCK, numel=segment.numel // one * MOMENT_BLOCK)
    # Ranks hold whole blocks.
    for rank, position, start, numel in segment_shards(layout, world_size, elements):
        yield SegmentShard(rank, *(count // MOMENT_BLOCK * one for count in (position, start, numel)))


def _joins(before: Run, after: Run, borders: Sequence[int]) -> bool:
    """Returns whether `after` follows `before` at the same distance in the checkpoint as in this unit.

    Both must be trainable or both frozen, in the checkpoint as well as in this unit.
    """
    if before.saved is None or after.saved is None:
        return False
    # A run must not cross the border between trainable and frozen elements, which ranks divide separately, nor the
    # border between values and codes, which are not converted as numbers.
    if any(before.start < border <= after.start for border in borders):
        return False
    same = (before.saved.unit, before.saved.trainable) == (after.saved.unit, after.saved.trainable)
    return same and after.saved.start - before.saved.start == after.start - before.start


def overlaps(candidates: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Returns the runs that overlap elements [start, stop), cut to this range."""
    cut: list[Run] = []
    for run in candidates:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            # A cut at the front moves the position in the checkpoint by the same number of elements.
            source = run.saved and run.saved._replace(start=run.saved.start + first - run.start)
            cut.append(Run(first, last, source))
    return cut
