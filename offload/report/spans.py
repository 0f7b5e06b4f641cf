"""Spans of a timeline, and the time that sets of intervals cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
"""Start and end."""


def union(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Returns the time that any of `intervals` covers within a window, as sorted intervals that do not touch."""
    found: list[Interval] = []
    for first, last in sorted((max(first, start), min(last, end)) for first, last in intervals):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        elif first < last:
            found.append((first, last))
    return found


def both(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Returns the time that two results of `union` cover at once."""
    found: list[Interval] = []
    one = other = 0
    while one < len(some) and other < len(others):
        first, last = max(some[one][0], others[other][0]), min(some[one][1], others[other][1])
        if first < last:
            found.append((first, last))
        # The interval that ends first covers nothing of later ones.
        if some[one][1] < others[other][1]:
            one += 1
        else:
            other += 1
    return found


def total(intervals: Iterable[Interval]) -> float:
    """Returns the length of intervals that do not overlap."""
    return sum(last - first for first, last in intervals)
