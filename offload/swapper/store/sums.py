"""The checksums of a slot: a CRC-32C for each stretch that was written by one request.

An update writes a partition tile by tile, so a stretch is a tile; what one run wrote in tiles of one size another reads
in tiles of another, or all at once. Sums of neighbours add up to the sum of both, so whatever is read is compared as
soon as it reaches a border of what was written.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from offload.aio import crc32c_joined, crc32c_of_zeros
from offload.swapper.states import State

STATES = tuple(state for state in State if state is not State.GRAD)
"""A row of a packed table names a state by its place here."""


class Stretch(NamedTuple):
    """Bytes of a slot, from its start on, and their CRC-32C."""

    start: int
    nbytes: int
    crc: int


Slot = tuple[Stretch, ...]
"""The stretches of one state of one unit, one behind the other."""
Key = tuple[int, State]


def of_zeros(nbytes: int) -> Slot:
    """A slot that was never written, in a file whose room was reserved."""
    return (Stretch(0, nbytes, crc32c_of_zeros(nbytes)),)


def renewed(old: Slot, new: Iterable[Stretch]) -> Slot:
    """`old` after `new`, which begins at 0, was written over it: frozen weights lie behind and stay."""
    written = tuple(new)
    end = written[-1].start + written[-1].nbytes
    return (*written, *(stretch for stretch in old if stretch.start >= end))


def sum_of(slot: Sequence[Stretch], start: int, nbytes: int) -> int | None:
    """The CRC-32C of these bytes; None where they do not begin and end where stretches do."""
    first = bisect.bisect_left(slot, start, key=lambda stretch: stretch.start)
    crc, at = 0, start
    for stretch in itertools.islice(slot, first, None):
        if stretch.start != at or at + stretch.nbytes > start + nbytes:
            return None
        crc, at = crc32c_joined(crc, stretch.crc, stretch.nbytes), at + stretch.nbytes
        if at == start + nbytes:
            return crc
    return None


def pack(table: Mapping[Key, Slot]) -> torch.Tensor:
    """(stretches, 5) int64: unit, place of the state in `STATES`, start, nbytes, crc."""
    rows = [(unit, STATES.index(state), *stretch) for (unit, state), slot in table.items() for stretch in slot]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5)


def unpack(rows: torch.Tensor) -> dict[Key, Slot]:
    """The table that was packed."""
    table: dict[Key, list[Stretch]] = {}
    for unit, state, start, nbytes, crc in rows.tolist():
        table.setdefault((unit, STATES[state]), []).append(Stretch(start, nbytes, crc))
    return {key: tuple(slot) for key, slot in table.items()}


class _Passage:
    """How far one slot was read in order, and the sum since the last border."""

    def __init__(self) -> None:
        self.since = self.position = self.crc = 0
        self.whole = False
        """Whether it was read from its start on, without a gap."""


class Passages:
    """Compares what is read, piece by piece, with what was written. Any thread may add a piece."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, _Passage] = {}

    def compare(self, key: Key, slot: Slot, start: int, nbytes: int, crc: int) -> tuple[bool, bool]:
        """Whether these bytes are what was written, and whether all before them was read and is too.

        They are compared together with those before them that could not be yet. "Right" as well where it is not known
        yet: pieces must come in order, the last one tells.
        """
        with self._lock:
            passage = self._open.setdefault(key, _Passage())
            if start == 0:
                passage.since = passage.position = passage.crc = 0
                passage.whole = True
            expected = sum_of(slot, start, nbytes)
            if start != passage.position:  # somebody reads here and there
                passage.whole, passage.position = False, -1
                if expected is None:
                    return True, False
            if expected is not None and passage.since != start:
                passage.whole = False  # bytes before it were never compared
            if expected is None:
                crc = passage.crc = crc32c_joined(passage.crc, crc, nbytes)
                expected = sum_of(slot, passage.since, start + nbytes - passage.since)
            passage.position = start + nbytes
            if expected is None:
                return True, False
            passage.crc, passage.since = 0, passage.position
            passage.whole &= crc == expected
            return crc == expected, passage.whole
