"""The fractions of a step in which each link was busy and in which updates ran under each phase, from a timeline.

A link is busy while at least one of its spans is in progress. The model computes while a module's forward, or a unit's
part of a backward, is in progress and the model's thread does not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

# -- spans ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span of a timeline; `start` and `end` are in microseconds, as in the file."""

    row: str
    lane: int
    name: str
    start: float
    end: float
    nbytes: int


Interval = tuple[float, float]
"""Start and end, in one unit of time."""


def union(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Returns the time that any of `intervals` covers within a window, as sorted intervals that do not touch."""
    merged: list[Interval] = []
    for first, last in sorted((max(first, start), min(last, end)) for first, last in intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        elif first < last:
            merged.append((first, last))
    return merged


def both(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Returns the time that two results of `union` cover at once."""
    common: list[Interval] = []
    one = other = 0
    while one < len(some) and other < len(others):
        first, last = max(some[one][0], others[other][0]), min(some[one][1], others[other][1])
        if first < last:
            common.append((first, last))
        # The interval that ends first cannot overlap later intervals.
        if some[one][1] < others[other][1]:
            one += 1
        else:
            other += 1
    return common


def total(intervals: Iterable[Interval]) -> float:
    """Returns the length of intervals that do not overlap."""
    return sum(last - first for first, last in intervals)


# -- links ---------------------------------------------------------------------------------------------


LINKS: Mapping[str, str] = {
    "compute": "the model's compute",
    "reads": "reads of the drives",
    "writes": "writes of the drives",
    "uploads": "copies to the device",
    "downloads": "copies from the device",
    "kernels": "the optimizer's kernel on the CPU",
}
"""Links of a machine, in the order in which they are shown, with their descriptions."""

FORWARD, BACKWARD = "forward", "backward"
_STEP, _KERNEL = "step ", "kernel of "
_OF_ENGINE = (_STEP, "synchronize")
"""Prefixes of the names of spans in the row of compute that are not the model's work."""


def busy(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Returns the fraction of a window in which each link was busy; a link without a span in the file is left out."""
    fractions = {}
    for link in LINKS:
        intervals = [(span.start, span.end) for span in spans if _is_of(link, span)]
        if not intervals:
            continue
        covered = union(intervals, start, end)
        seconds = total(covered)
        if link == "compute":
            waits = union([(span.start, span.end) for span in spans if span.row == "waits"], start, end)
            seconds -= total(both(covered, waits))
        fractions[link] = seconds / (end - start)
    return fractions


def _is_of(link: str, span: Span) -> bool:
    if link == "compute":
        return span.row == "compute" and not span.name.startswith(_OF_ENGINE)
    if link == "kernels":
        return span.row == "update worker" and span.name.startswith(_KERNEL)
    return span.row == link


def updates(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Returns the fractions of a window in which updates ran under a forward and under a backward."""
    covered = union([(span.start, span.end) for span in spans if span.row == "updates"], start, end)
    if not covered:
        return {}
    sums = dict.fromkeys((FORWARD, BACKWARD), 0.0)
    for phase, interval in phases(spans, start, end):
        sums[phase] += total(both(covered, [interval]))
    return {phase: seconds / (end - start) for phase, seconds in sums.items()}


def phases(spans: Sequence[Span], start: float, end: float) -> list[tuple[str, Interval]]:
    """Returns the phases of a window in order, each with its start and end. A window begins in a forward.

    A forward inside a backward, which recomputes a block, belongs to the backward. Such a forward follows a part of a
    backward, and the backward of its own block comes next. A phase lasts until the next one begins, so that the time
    after the end of a step belongs to the forward of the next step.
    """
    marks = [(start, FORWARD)]
    for begins, phase in _marks(sorted(spans, key=lambda span: (span.start, -span.end))):
        if marks[-1][1] != phase:
            marks.append((max(begins, start), phase))
    ends = [*(begins for begins, _ in marks[1:]), end]
    return [(phase, (begins, last)) for (begins, phase), last in zip(marks, ends, strict=True) if begins < last]


def _marks(spans: Sequence[Span]) -> Iterator[tuple[float, str]]:
    """Yields the start of each span of compute with its phase; the end of a step begins the next forward."""
    compute = [span for span in spans if span.row == "compute"]
    phase = FORWARD
    for position, span in enumerate(compute):
        if span.name.startswith(_STEP):
            phase = FORWARD
            yield span.end, phase
        elif span.name.startswith(BACKWARD):
            phase = BACKWARD
            yield span.start, phase
        elif span.name.startswith(FORWARD) and not (phase == BACKWARD and _is_again(compute, position)):
            phase = FORWARD
            yield span.start, phase


def _is_again(compute: Sequence[Span], position: int) -> bool:
    """Returns True if a forward is a recomputation: the next backward is of the forward's own unit."""
    name = compute[position].name.removeprefix(FORWARD).strip()
    after = islice(compute, position + 1, None)
    later = (span.name for span in after if not span.name.startswith(FORWARD))
    following = next(later, "")
    # A block may consist of several units, whose names begin with the block's.
    unit = following.removeprefix(BACKWARD).strip()
    return following.startswith(BACKWARD) and (
        unit == name or unit.startswith(f"{name}.") or name.startswith(f"{unit}.")
    )
