"""Pure functions that map parameters of this model to those of a checkpoint, by name, whatever units they have."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from offload.errors import StoreError
from offload.layout.flat_layout import Segment, UnitLayout


class Run(NamedTuple):
    """Elements [start, stop) of a unit of this model that are contiguous in the checkpoint too, or are not in it."""

    start: int
    stop: int
    saved: Source | None
    """None for elements that the checkpoint does not contain; they keep their values."""


class Source(NamedTuple):
    """Position in the checkpoint of the first element of a run: the unit, and the element in this unit."""

    unit: int
    start: int
    trainable: bool
    """True if the elements have optimizer states in the checkpoint, in addition to the weight."""


class Difference(NamedTuple):
    """Names and shapes that do not match between a model and a checkpoint."""

    missing: list[str]
    surplus: list[str]
    shapes: list[str]
    """One sentence for each name with differing shapes."""

    def check(self, strict: bool, what: str) -> None:
        """Raises `StoreError` in the cases in which torch's `load_state_dict` raises.

        Differing shapes are an error even if `strict` is false.

        Args:
            strict: True to refuse missing and surplus names.
            what: The checkpoint, for the message.
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
    """Compares a model with a checkpoint.

    Args:
        shapes: Shapes of the model's parameters and buffers that the checkpoint should contain.
        names: All names of the model, tied ones included.
        saved: Shapes in the checkpoint, tied names included.
    """
    return Difference(
        [name for name in shapes if name not in saved],
        [name for name in saved if name not in names],
        [
            f"size mismatch for {name}: the checkpoint has {list(saved[name])}, this model has {list(shape)}."
            for name, shape in shapes.items()
            if name in saved and saved[name] != shape
        ],
    )


def places(layouts: Sequence[UnitLayout], tied: Mapping[str, str], frozen: bool) -> dict[str, tuple[int, Segment]]:
    """Returns unit and segment of each parameter that a checkpoint contains, by all its names.

    Args:
        layouts: Units of the checkpoint.
        tied: First name of each tied parameter, by its other names.
        frozen: True if the checkpoint includes frozen weights.
    """
    found = {
        segment.name: (unit, segment)
        for unit, layout in enumerate(layouts)
        for segment in layout.segments
        if segment.trainable or frozen
    }
    # A tied name points to the segment of the first name: the values are saved once.
    return found | {name: found[first] for name, first in tied.items() if first in found}


def runs(layout: UnitLayout, saved: Mapping[str, tuple[int, Segment]]) -> list[Run]:
    """Returns the segments of a unit, in order, as runs.

    Segments that are neighbours both in this unit and in the checkpoint become one run, together with the padding
    between them.
    """
    found: list[Run] = []
    for segment in layout.segments:
        place = saved.get(segment.name)
        source = None if place is None else Source(place[0], place[1].start, place[1].trainable)
        run = Run(segment.start, segment.stop, source)
        # Merging keeps the reads long: without it each parameter would be a request of its own.
        if found and _joins(found[-1], run, (layout.trainable_stop, layout.values_stop)):
            run = found.pop()._replace(stop=run.stop)
        found.append(run)
    return found


def packed_runs(layout: UnitLayout, saved: Mapping[str, tuple[int, Segment]]) -> list[Run]:
    """Returns the runs of a torch optimizer's states, in words of the PACKED partitions, one for each parameter."""
    found: list[Run] = []
    for segment in layout.segments:
        place = saved.get(segment.name)
        # Packed states can only be copied if this optimizer keeps the same states of the parameter, in the same order.
        has = place is not None and place[1].kept == segment.kept
        source = Source(place[0], place[1].packed.start, True) if place is not None and has else None
        found.append(Run(segment.packed.start, segment.packed.stop, source))
    return found


def _joins(one: Run, other: Run, borders: Sequence[int]) -> bool:
    """Returns whether `other` follows `one` at the same distance in the checkpoint as in this unit.

    Both must be trainable or both frozen, in the checkpoint as well as in this unit.
    """
    if one.saved is None or other.saved is None:
        return False
    # A run must not cross the border between trainable and frozen elements, which ranks divide separately, nor that
    # between values and codes, which are no numbers to convert.
    if any(one.start < border <= other.start for border in borders):
        return False
    same = (one.saved.unit, one.saved.trainable) == (other.saved.unit, other.saved.trainable)
    return same and other.saved.start - one.saved.start == other.start - one.start


def overlaps(found: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Returns the runs that overlap elements [start, stop), cut to this range."""
    cut: list[Run] = []
    for run in found:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            # A cut at the front moves the position in the checkpoint by the same number of elements.
            source = run.saved and run.saved._replace(start=run.saved.start + first - run.start)
            cut.append(Run(first, last, source))
    return cut
