"""Checksums of slots: a CRC-32C for each checksum range, the bytes written by one request or by a few small ones.

An update writes a partition tile by tile, so most ranges are tiles. A blob contains these checksums; a live run
compares its reads with finer ones (`page_sums`). An export reads everything in order, in chunks of another size: the
checksums of two neighbours can be joined to that of both, so bytes are compared as soon as they reach a border.
"""

from __future__ import annotations

import bisect
import itertools
import struct
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from offload.aio import crc32c_joined, crc32c_of_zeros
from offload.errors import StoreError
from offload.states import State
from offload.swapper.store.format.manifest import Extents

if TYPE_CHECKING:
    import torch

STATES = tuple(state for state in State if state is not State.GRAD)
"""States with checksums; a row of a packed table names a state by its index in this tuple."""


_ROW = struct.Struct("<5q")
ROW_NBYTES = _ROW.size
"""Bytes of one row of a packed table."""


class ChecksumRange(NamedTuple):
    """Bytes of a slot, offset from the slot's start, and their CRC-32C."""

    start: int
    nbytes: int
    crc: int


Slot = tuple[ChecksumRange, ...]
"""The checksum ranges of one state of one unit, in order and without gaps."""
Key = tuple[int, State]
"""A unit and a state."""


def of_zeros(place: Extents) -> Slot:
    """Returns the checksums of a slot that was reserved and never written: a range for each of its extents."""
    starts = itertools.accumulate((extent.nbytes for extent in place.extents), initial=0)
    return tuple(
        ChecksumRange(start, extent.nbytes, crc32c_of_zeros(extent.nbytes))
        for start, extent in zip(starts, place.extents, strict=False)
    )


def renewed(old: Slot, new: Iterable[ChecksumRange]) -> Slot:
    """Returns the checksum ranges of a slot after `new` was written over `old`.

    `new` begins at byte 0. Frozen weights behind `new` keep their checksums.
    """
    written = tuple(new)
    end = written[-1].start + written[-1].nbytes
    return (*written, *(checksum_range for checksum_range in old if checksum_range.start >= end))


def joined(checksum_ranges: Iterable[ChecksumRange], least: int) -> list[ChecksumRange]:
    """Returns the ranges with neighbours joined until each but the last has at least `least` bytes.

    Args:
        checksum_ranges: neighbours in order, without gaps.
        least: number of bytes.
    """
    found: list[ChecksumRange] = []
    for each in checksum_ranges:
        if found and found[-1].nbytes < least:
            one = found.pop()
            each = ChecksumRange(one.start, one.nbytes + each.nbytes, crc32c_joined(one.crc, each.crc, each.nbytes))
        found.append(each)
    return found


def sum_of(slot: Sequence[ChecksumRange], start: int, nbytes: int) -> int | None:
    """Returns the CRC-32C of bytes of a slot; None if they do not begin and end at borders of ranges.

    Args:
        slot: the checksum ranges of the slot.
        start: first byte, from the start of the slot.
        nbytes: number of bytes.
    """
    first, last = _border(slot, start), _border(slot, start + nbytes)
    if first is None or last is None:
        return None
    crc, at = 0, start
    for checksum_range in slot[first:last]:
        if checksum_range.start != at:
            return None
        crc, at = crc32c_joined(crc, checksum_range.crc, checksum_range.nbytes), at + checksum_range.nbytes
    return crc


def _border(slot: Sequence[ChecksumRange], at: int) -> int | None:
    """Returns the number of ranges before byte `at`; None if `at` is inside a range or behind the last."""
    before = bisect.bisect_left(slot, at, key=lambda checksum_range: checksum_range.start)
    # The end of the last range is a border as well.
    ends = before == len(slot) and before and slot[-1].start + slot[-1].nbytes == at
    return before if ends or (before < len(slot) and slot[before].start == at) else None


def pack(table: Mapping[Key, Slot]) -> torch.Tensor:
    """Returns the table as (ranges, 5) int64: unit, index of the state in `STATES`, start, nbytes, crc."""
    import torch

    rows = [
        (unit, STATES.index(state), *checksum_range) for (unit, state), slot in table.items() for checksum_range in slot
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 5)


def unpack(rows: bytes) -> dict[Key, Slot]:
    """Returns the table that `pack` packed.

    Raises:
        StoreError: if a row is none of a table, or the ranges of a slot have gaps.
    """
    table: dict[Key, list[ChecksumRange]] = {}
    for unit, state, start, nbytes, crc in _ROW.iter_unpack(rows):
        key = (unit, STATES[state] if 0 <= state < len(STATES) else State.GRAD)
        slot = table.setdefault(key, [])
        end = slot[-1].start + slot[-1].nbytes if slot else 0
        if unit < 0 or key[1] is State.GRAD or start != end or nbytes <= 0 or not 0 <= crc < 1 << 32:
            raise StoreError(
                f"the checksums of a commit are damaged: {nbytes} bytes from byte {start} on of state {state} of unit "
                f"{unit}, expected the next ones of a slot from byte {end} on; go back to a checkpoint"
            )
        slot.append(ChecksumRange(start, nbytes, crc))
    return {key: tuple(slot) for key, slot in table.items()}


def check_whole(table: Mapping[Key, Slot], places: Sequence[Mapping[State, Sequence[Extents]]]) -> None:
    """Raises `StoreError` if a table does not have the checksums of all bytes of each slot, and of no others.

    Args:
        table: made by `unpack`.
        places: for each unit and state, the places of all slots.
    """
    for unit, row in enumerate(places):
        for state, slots in row.items():
            slot, nbytes = table.get((unit, state), ()), slots[0].nbytes
            if sum(each.nbytes for each in slot) != nbytes:
                raise StoreError(
                    f"the checksums of a commit are damaged: those of {state.value} of unit {unit} do not cover its "
                    f"{nbytes} bytes; go back to a checkpoint"
                )


_MOST_PASSAGES = 64
"""Passages of a slot that may be open: as many as threads read it at a time, and those of readers that have stopped."""


class _Passage(NamedTuple):
    """Consecutive reads of a slot that are not compared yet."""

    since: int
    """First byte, a border."""
    end: int
    crc: int
    """Joined checksum."""


class Passages:
    """Comparison of sequential reads with the checksums of ranges. Any thread may add a read.

    A read that ends inside a range stays open, and the read of the bytes behind it is compared together with it. Of
    many open ones the oldest is forgotten: its bytes are compared when they are read again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, tuple[Slot, deque[_Passage]]] = {}
        """Open reads of each slot, oldest first.

        They are dropped when the slot gets another `Slot` value: the bytes have then been replaced.
        """

    def compare(self, key: Key, slot: Slot, start: int, nbytes: int, crc: int) -> tuple[bool, range]:
        """Returns True if the bytes read are those written, and the range of bytes that is now verified.

        The bytes are compared together with earlier bytes that could not be compared yet. If no comparison is possible
        yet, the result is True with an empty range. The calls must come in the order of the bytes: a read inside a
        range whose predecessor did not come first is never compared.

        Args:
            key: the unit and the state.
            slot: the checksum ranges of the slot at the time of the request.
            start: first byte read, from the start of the slot.
            nbytes: number of bytes read.
            crc: CRC-32C of the bytes read.
        """
        with self._lock:
            # A read that begins and ends at borders is compared at once.
            expected = sum_of(slot, start, nbytes)
            if expected is not None:
                return crc == expected, range(start, start + nbytes)
            of, open_ = self._open.get(key, ((), deque[_Passage]()))
            # Compared by identity: an update replaces the tuple, and open reads of the old bytes must not be joined
            # with new ones.
            if of is not slot:
                open_ = deque(maxlen=_MOST_PASSAGES)
                self._open[key] = slot, open_
            # A read that continues a passage takes it over. Two readers of the same bytes have a passage each.
            passage = next((each for each in reversed(open_) if each.end == start), None)
            if passage is not None:
                open_.remove(passage)
            # A read that begins at a border, and ends inside a range, begins a passage.
            elif _border(slot, start) is not None:
                passage = _Passage(start, start, 0)
            else:
                return True, range(0)  # a read in the middle of a range: there is no checksum to compare with
            end, crc = start + nbytes, crc32c_joined(passage.crc, crc, nbytes)
            expected = sum_of(slot, passage.since, end - passage.since)
            if expected is not None:
                return crc == expected, range(passage.since, end)
            open_.append(_Passage(passage.since, end, crc))
            return True, range(0)
