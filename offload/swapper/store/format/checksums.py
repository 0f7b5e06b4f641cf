"""The checksums of a slot: a CRC-32C for each stretch that was written by one request.

An update writes a partition tile by tile, so a stretch is a tile; what one run wrote in tiles of one size another reads
in tiles of another, or all at once. Sums of neighbours add up to the sum of both, so whatever is read is compared as
soon as it reaches a border of what was written.
"""

from __future__ import annotations

import bisect
import itertools
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from offload.aio import crc32c_joined, crc32c_of_zeros
from offload.states import State
from offload.swapper.store.format.manifest import Place

if TYPE_CHECKING:
    import torch

STATES = tuple(state for state in State if state is not State.GRAD)
"""A row of a packed table names a state by its place here."""


_ROW = struct.Struct("<5q")
ROW_NBYTES = _ROW.size


class Stretch(NamedTuple):
    """Bytes of a slot, from its start on, and their CRC-32C."""

    start: int
    nbytes: int
    crc: int


Slot = tuple[Stretch, ...]
"""The stretches of one state of one unit, one behind the other."""
Key = tuple[int, State]


def of_zeros(place: Place) -> Slot:
    """A slot that was never written, in a file whose room was reserved: a stretch for each of its extents."""
    starts = itertools.accumulate((extent.nbytes for extent in place.extents), initial=0)
    return tuple(
        Stretch(start, extent.nbytes, crc32c_of_zeros(extent.nbytes))
        for start, extent in zip(starts, place.extents, strict=False)
    )


def renewed(old: Slot, new: Iterable[Stretch]) -> Slot:
    """`old` after `new`, which begins at 0, was written over it: frozen weights lie behind and stay."""
    written = tuple(new)
    end = written[-1].start + written[-1].nbytes
    return (*written, *(stretch for stretch in old if stretch.start >= end))


def joined(stretches: Iterable[Stretch], least: int) -> list[Stretch]:
    """Neighbours that follow each other, put together until each but the last has `least` bytes."""
    found: list[Stretch] = []
    for each in stretches:
        if found and found[-1].nbytes < least:
            one = found.pop()
            each = Stretch(one.start, one.nbytes + each.nbytes, crc32c_joined(one.crc, each.crc, each.nbytes))
        found.append(each)
    return found


def sum_of(slot: Sequence[Stretch], start: int, nbytes: int) -> int | None:
    """The CRC-32C of these bytes; None where they do not begin and end where stretches do."""
    first, last = _border(slot, start), _border(slot, start + nbytes)
    if first is None or last is None:
        return None
    crc, at = 0, start
    for stretch in slot[first:last]:
        if stretch.start != at:
            return None
        crc, at = crc32c_joined(crc, stretch.crc, stretch.nbytes), at + stretch.nbytes
    return crc


def _border(slot: Sequence[Stretch], at: int) -> int | None:
    """How many stretches lie before byte `at`; None where it lies inside of one."""
    before = bisect.bisect_left(slot, at, key=lambda stretch: stretch.start)
    ends = before == len(slot) and before and slot[-1].start + slot[-1].nbytes == at
    return before if ends or (before < len(slot) and slot[before].start == at) else None


def pack(table: Mapping[Key, Slot]) -> torch.Tensor:
    """(stretches, 5) int64: unit, place of the state in `STATES`, start, nbytes, crc."""
    import torch

    rows = [(unit, STATES.index(state), *stretch) for (unit, state), slot in table.items() for stretch in slot]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5)


def unpack(rows: bytes) -> dict[Key, Slot]:
    """The table whose bytes were packed."""
    table: dict[Key, list[Stretch]] = {}
    for unit, state, start, nbytes, crc in _ROW.iter_unpack(rows):
        table.setdefault((unit, STATES[state]), []).append(Stretch(start, nbytes, crc))
    return {key: tuple(slot) for key, slot in table.items()}


class _Passage(NamedTuple):
    """Somebody has read a slot in order, from the border `since` on: the sum of that."""

    since: int
    crc: int


class Passages:
    """Compares what is read, piece by piece, with what was written. Any thread may add a piece."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, tuple[Slot, dict[int, list[_Passage]]]] = {}
        """By where they have come to, all within the stretches of one slot: others have other bytes."""

    def compare(self, key: Key, slot: Slot, start: int, nbytes: int, crc: int) -> tuple[bool, range]:
        """Whether these bytes are what was written, and of which bytes that is known now.

        They are compared together with those before them that could not be yet. Where none can be yet, what is right is
        not known: pieces must come in order, the last one tells.
        """
        with self._lock:
            expected = sum_of(slot, start, nbytes)
            if expected is not None:
                return crc == expected, range(start, start + nbytes)
            of, open_ = self._open.get(key, ((), {}))
            if of is not slot:
                open_ = {}
                self._open[key] = slot, open_
            if start in open_:
                passage = open_[start].pop()
                if not open_[start]:
                    del open_[start]
            elif _border(slot, start) is not None:
                passage = _Passage(start, 0)
            else:
                return True, range(0)  # somebody reads here and there: nothing to compare with
            end, crc = start + nbytes, crc32c_joined(passage.crc, crc, nbytes)
            expected = sum_of(slot, passage.since, end - passage.since)
            if expected is not None:
                return crc == expected, range(passage.since, end)
            open_.setdefault(end, []).append(_Passage(passage.since, crc))
            return True, range(0)
