"""Where a checkpoint has the parameters of this model: by name, whatever its units and ranks were. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from offload.errors import StoreError
from offload.layout.flat_layout import Segment, UnitLayout


class Run(NamedTuple):
    """Elements [start, stop) of a unit of this model, and where the checkpoint has them, one behind the other."""

    start: int
    stop: int
    saved: Source | None
    """None of elements that the checkpoint has not: they stay as they are."""


class Source(NamedTuple):
    """Elements of a unit of the checkpoint."""

    unit: int
    start: int
    trainable: bool
    """Whether they have states beside their weight."""


class Difference(NamedTuple):
    """What of a model and a checkpoint does not match, by name."""

    missing: list[str]
    surplus: list[str]
    shapes: list[str]

    def check(self, strict: bool, what: str) -> None:
        """Raise `StoreError` as `load_state_dict` does; other shapes are an error also where it is not `strict`."""
        lines = list(self.shapes)
        if strict and self.missing:
            lines.insert(0, f"Missing key(s): {', '.join(self.missing)}.")
        if strict and self.surplus:
            lines.insert(0, f"Unexpected key(s): {', '.join(self.surplus)}.")
        if lines:
            advice = "; load_module_strict=False loads what both have" if strict and not self.shapes else ""
            raise StoreError(f"{what} does not fit this model{advice}:\n\t" + "\n\t".join(lines))


def difference(
    shapes: Mapping[str, tuple[int, ...]], names: Collection[str], saved: Mapping[str, tuple[int, ...]]
) -> Difference:
    """Compare the `shapes` of what a model has with what was saved, tied names among both `names` and `saved`."""
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
    """Unit and segment of each parameter that a checkpoint holds, also by its `tied` names."""
    found = {
        segment.name: (unit, segment)
        for unit, layout in enumerate(layouts)
        for segment in layout.segments
        if segment.trainable or frozen
    }
    return found | {name: found[first] for name, first in tied.items() if first in found}


def runs(layout: UnitLayout, saved: Mapping[str, tuple[int, Segment]]) -> list[Run]:
    """All segments of a unit in order; neighbours that were saved as neighbours are one run, with what is between."""
    found: list[Run] = []
    for segment in layout.segments:
        place = saved.get(segment.name)
        source = None if place is None else Source(place[0], place[1].start, place[1].trainable)
        run = Run(segment.start, segment.stop, source)
        if found and _joins(found[-1], run, layout.trainable_stop):
            run = found.pop()._replace(stop=run.stop)
        found.append(run)
    return found


def packed_runs(layout: UnitLayout, saved: Mapping[str, tuple[int, Segment]]) -> list[Run]:
    """The same of what an optimizer of torch keeps, in words of the PACKED partitions, parameter after parameter."""
    found: list[Run] = []
    for segment in layout.segments:
        place = saved.get(segment.name)
        has = place is not None and place[1].kept == segment.kept
        source = Source(place[0], place[1].packed.start, True) if place is not None and has else None
        found.append(Run(segment.packed.start, segment.packed.stop, source))
    return found


def _joins(one: Run, other: Run, border: int) -> bool:
    """Whether `other` follows in the checkpoint as it does here, within the same stretch of both."""
    if one.saved is None or other.saved is None or one.start < border <= other.start:
        return False
    same = (one.saved.unit, one.saved.trainable) == (other.saved.unit, other.saved.trainable)
    return same and other.saved.start - one.saved.start == other.start - one.start


def overlaps(found: Sequence[Run], start: int, stop: int) -> list[Run]:
    """What lies in elements [start, stop) of `found`."""
    cut: list[Run] = []
    for run in found:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            source = run.saved and run.saved._replace(start=run.saved.start + first - run.start)
            cut.append(Run(first, last, source))
    return cut
