"""Allocator of offsets within a region of memory, and queries about its free blocks."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterable

from offload.sizes import PAGE, align_up

Region = tuple[int, int]
"""A region [start, stop)."""


def free_regions(holes: Iterable[Region], places: Iterable[tuple[int, int]]) -> list[Region]:
    """Returns the regions that are free once the blocks at `places`, (offset, nbytes), were freed, in ascending order.

    Each allocated block is named once.
    """
    merged: list[Region] = []
    for start, stop in sorted([*holes, *[(at, at + align_up(max(size, 1))) for at, size in places]]):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def gaps(start: int, stop: int, regions: Iterable[Region]) -> list[Region]:
    """Returns the regions of [start, stop) that none of `regions` covers, in ascending order."""
    holes: list[Region] = []
    for first, last in sorted(regions):
        if start < first:
            holes.append((start, first))
        start = max(start, last)
    return [*holes, (start, stop)] if start < stop else holes


class Allocator:
    """Best-fit allocator of offsets within `nbytes` bytes, in steps of 4096 bytes. Free neighbours are merged.

    With `scatter`, each block is placed at a random end of a random hole that fits. This reveals the use of a stale
    view: best fit returns to the same address so often that a stale view would often show the right values.
    """

    def __init__(self, nbytes: int, scatter: random.Random | None = None) -> None:
        self.nbytes = nbytes
        self.used_bytes = self.peak_bytes = 0
        self.scatter = scatter
        # A hole is a free block, (start, stop). Holes are sorted and never adjacent: `give` merges neighbours.
        self._holes: list[Region] = [(0, nbytes)] if nbytes else []
        self._stop = nbytes

    def add(self, nbytes: int) -> int:
        """Adds a free region after all others and returns its start.

        A gap keeps any block from spanning two regions.
        """
        start = align_up(self._stop) + PAGE
        self._stop = start + nbytes
        self.nbytes += nbytes
        self._holes.append((start, self._stop))
        return start

    def remove(self, start: int, nbytes: int) -> bool:
        """Removes a region that `add` has added. Returns False, and changes nothing, if a block in it is allocated."""
        region = (start, start + nbytes)
        if region not in self._holes:
            return False
        self._holes.remove(region)
        self.nbytes -= nbytes
        return True

    @property
    def end(self) -> int:
        """The end of the last block of the region [0, nbytes): a smaller region must hold at least these bytes."""
        return self._holes[-1][0] if self._holes and self._holes[-1][1] == self._stop else self._stop

    def resize(self, nbytes: int) -> None:
        """Moves the end of the region [0, nbytes), beyond which no block may be; `add` has added no other region."""
        assert self.nbytes == self._stop and self.end <= nbytes, "a block is beyond the new end"
        start = self.end
        if self._holes and self._holes[-1][1] == self._stop:
            self._holes.pop()
        if start < nbytes:
            self._holes.append((start, nbytes))
        self.nbytes = self._stop = nbytes

    def take(self, nbytes: int) -> int | None:
        """Allocates a block and returns its offset; None if no hole is large enough."""
        nbytes = align_up(max(nbytes, 1))
        fitting = [hole for hole in self._holes if hole[1] - hole[0] >= nbytes]
        if not fitting:
            return None
        if self.scatter is None:
            offset = min(fitting, key=lambda hole: hole[1] - hole[0])[0]
        else:
            start, stop = self.scatter.choice(fitting)
            offset = self.scatter.choice((start, stop - nbytes))
        self.take_at(offset, nbytes)
        return offset

    def take_last(self, nbytes: int) -> int | None:
        """Allocates the block with the highest offset and returns the offset; None if no hole is large enough."""
        nbytes = align_up(max(nbytes, 1))
        offsets = [stop - nbytes for start, stop in self._holes if stop - start >= nbytes]
        if not offsets:
            return None
        offset = max(offsets) // PAGE * PAGE
        self.take_at(offset, nbytes)
        return offset

    def take_at(self, offset: int, nbytes: int) -> None:
        """Allocates the block of `nbytes` at `offset`, which must be free."""
        nbytes = align_up(max(nbytes, 1))
        hole = next(hole for hole in self._holes if hole[0] <= offset and offset + nbytes <= hole[1])
        self._holes.remove(hole)
        for rest in ((hole[0], offset), (offset + nbytes, hole[1])):
            if rest[0] < rest[1]:
                insort(self._holes, rest)
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    @property
    def holes(self) -> tuple[Region, ...]:
        """Returns (start, stop) of each free region, in ascending order."""
        return tuple(self._holes)

    def could_take(self, nbytes: int, places: Iterable[tuple[int, int]]) -> bool:
        """Returns True if `take` would succeed once the blocks at `places`, (offset, nbytes), were freed."""
        nbytes = align_up(max(nbytes, 1))
        # Most calls are answered by the present holes, without a sort.
        return any(
            stop - start >= nbytes for start, stop in (free_regions(self._holes, places) if places else self._holes)
        )

    def give(self, offset: int, nbytes: int) -> None:
        """Frees the block at `offset` that `take` or `take_at` has allocated with the same `nbytes`."""
        nbytes = align_up(max(nbytes, 1))
        start, stop = offset, offset + nbytes
        position = bisect_left(self._holes, (start, stop))
        before = self._holes[position - 1] if position else (-1, -1)
        after = self._holes[position] if position < len(self._holes) else (-1, -1)
        assert before[1] <= start and (after[0] == -1 or stop <= after[0]), "a block was returned twice"
        # The hole after the block is merged first: its index would shift if the hole before were removed first.
        if after[0] == stop:
            stop = after[1]
            del self._holes[position]
        if before[1] == start:
            start = before[0]
            del self._holes[position - 1]
        insort(self._holes, (start, stop))
        self.used_bytes -= nbytes
