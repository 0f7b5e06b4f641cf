"""Verification of a commit: reads every slot that the commit names and compares it with the commit's checksums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

from offload.aio import File, StripedFile, aligned_empty, crc32c_joined
from offload.aio.protocols import Future, Queue, wait_for_all
from offload.errors import IoError
from offload.sizes import MIB
from offload.states import State
from offload.swapper.store.format import (
    ChecksumRange,
    CommitRecord,
    Extents,
    Key,
    Slot,
    StoreSpec,
    unpack,
)
from offload.swapper.store.requests import bytes_of
from offload.swapper.store.undo import Undo

_CHUNK_NBYTES = 8 * MIB
_CHUNKS = 4
"""Number of buffers: one chunk is compared while the others are read."""


class Damage(NamedTuple):
    """Bytes of a slot that differ from the bytes written, or cannot be read."""

    state: str
    unit: str
    slot: str
    """A or B."""
    path: str
    offset: int
    """Byte offset in the states file over all drives."""
    nbytes: int
    reason: str

    def __str__(self) -> str:
        what = f"{self.state} of {self.unit}, slot {self.slot}"
        return f"{what}: {self.nbytes} bytes at offset {self.offset} of {self.path}: {self.reason}"


class _RangeChunk(NamedTuple):
    """Bytes of one checksum range that one request reads."""

    key: Key
    checksum_range: ChecksumRange
    start: int
    nbytes: int


class _Comparison:
    """Comparison of a commit's slots with their checksums, chunk by chunk in the order of the table."""

    def __init__(
        self,
        file: StripedFile,
        places: Sequence[Mapping[State, Sequence[Extents]]],
        slots: Sequence[int],
        title: Callable[[int], str],
    ) -> None:
        self._file = file
        self._places = places
        self._slots = slots
        self._title = title
        self._known: tuple[ChecksumRange, int] | None = None
        """The range in progress and the checksum of its bytes so far."""
        self._bad: ChecksumRange | None = None
        """The range of the last read that failed. This failure was reported; later chunks report nothing."""

    def place(self, key: Key) -> Extents:
        """Returns the extents of the slot that the commit names for a unit and state."""
        return self._places[key[0]][key[1]][self._slots[key[0]]]

    def has(self, key: Key, slot: Slot) -> bool:
        """Returns True if the store contains all bytes of a slot's checksums."""
        unit, state = key
        if unit >= len(self._places) or state not in self._places[unit]:
            return False
        return sum(checksum_range.nbytes for checksum_range in slot) <= self.place(key).nbytes

    def uncovered(self, table: Mapping[Key, Slot]) -> Iterator[Damage]:
        """Yields the slots that the checksums of `table` do not cover as a whole."""
        for unit, row in enumerate(self._places):
            for state in row:
                key = (unit, state)
                covered, nbytes = (
                    sum(checksum_range.nbytes for checksum_range in table.get(key, ())),
                    self.place(key).nbytes,
                )
                if covered != nbytes:
                    yield self._damage(key, 0, nbytes, f"checksums cover {covered} bytes only")

    def finish(self, chunk: _RangeChunk, future: Future) -> Damage | None:
        """Waits for a chunk and returns its damage, or that of the range that the chunk completes; None if intact.

        A damaged range is reported once.
        """
        checksum_range = chunk.checksum_range
        try:
            future.wait()
            crc = future.crc32c()
        except IoError as error:
            # The checksum of this range cannot be completed any more; the later chunks of the range report nothing.
            reported, self._bad, self._known = self._bad is checksum_range, checksum_range, None
            return None if reported else self._damage(chunk.key, chunk.start, chunk.nbytes, str(error))
        # A chunk of another range than the one in progress begins a new checksum.
        before = self._known[1] if self._known is not None and self._known[0] is checksum_range else 0
        crc = crc32c_joined(before, crc, chunk.nbytes)
        # Only complete ranges have a stored checksum, so checksums of chunks are joined until the range is complete.
        self._known = (checksum_range, crc)
        last = chunk.start + chunk.nbytes == checksum_range.start + checksum_range.nbytes
        if last and crc != checksum_range.crc and self._bad is not checksum_range:
            return self._damage(
                chunk.key, checksum_range.start, checksum_range.nbytes, "the bytes do not match the stored checksum"
            )
        return None

    def _damage(self, key: Key, start: int, nbytes: int, reason: str) -> Damage:
        unit, state = key
        slot = "AB"[self._slots[unit]]
        offset = self.place(key).offset(start)
        return Damage(state.value, self._title(unit), slot, self._file.path, offset, nbytes, reason)


def damages(
    file: StripedFile,
    queue: Queue,
    places: Sequence[Mapping[State, Sequence[Extents]]],
    slots: Sequence[int],
    table: Mapping[Key, Slot],
    title: Callable[[int], str],
    copied: Mapping[Key, File] = {},
    progress: Callable[[int], None] = lambda _: None,
) -> Generator[Damage]:
    """Yields each damaged checksum range of the slots that a commit names; takes 32 MiB of memory.

    Close the generator, or exhaust it, before the file is closed: reads are in flight between two results.
    """
    comparison = _Comparison(file, places, slots, title)
    yield from comparison.uncovered(table)
    # Checksums of bytes that the store has not are compared with nothing.
    table = {key: slot for key, slot in table.items() if comparison.has(key, slot)}
    buffers = [aligned_empty(_CHUNK_NBYTES) for _ in range(_CHUNKS)]
    reading: deque[tuple[_RangeChunk, Future]] = deque()

    def finish() -> Iterator[Damage]:
        """Finishes the oldest chunk and yields its damage, if any."""
        # Popped only after the wait: the `finally` below waits for all that is left, whatever is raised.
        chunk, future = reading[0]
        if damage := comparison.finish(chunk, future):
            yield damage
        reading.popleft()
        progress(chunk.nbytes)

    try:
        for count, chunk in enumerate(_chunks(table)):
            if len(reading) == _CHUNKS:
                yield from finish()
            # The buffers are used in turn. The oldest chunk was finished above, so its buffer is free.
            buffer = buffers[count % _CHUNKS][: chunk.nbytes]
            of, at = bytes_of(file, comparison.place(chunk.key), chunk.start, chunk.nbytes, copied.get(chunk.key))
            reading.append((chunk, queue.read(of, at, buffer, checksum=True)))
        while reading:
            yield from finish()
    finally:
        wait_for_all(future for _, future in reading)


def damages_of_commit(
    file: StripedFile,
    queue: Queue,
    spec: StoreSpec,
    record: CommitRecord,
    table: Mapping[Key, Slot],
    undo: Undo,
    progress: Callable[[int], None] = lambda _: None,
) -> Generator[Damage]:
    """Yields the damages of the slots that a record names. Complete copies count in the place of their slots."""
    places = spec.places()
    with undo.slots(file, record, places, table) as copied:
        yield from damages(file, queue, places, record.slots, table, spec.title, copied, progress)


def first_damage(
    file: StripedFile, queue: Queue, spec: StoreSpec, record: CommitRecord, packed: bytes, undo: Undo
) -> Damage | None:
    """Returns the first of `damages_of_commit`, or None. `packed` is the table as a blob contains it."""
    scan = damages_of_commit(file, queue, spec, record, unpack(packed), undo)
    try:
        return next(scan, None)
    finally:
        scan.close()  # waits for the reads in flight: the caller closes the file next


def _chunks(table: Mapping[Key, Slot]) -> Iterator[_RangeChunk]:
    for key, slot in table.items():
        for checksum_range in slot:
            end = checksum_range.start + checksum_range.nbytes
            for start in range(checksum_range.start, end, _CHUNK_NBYTES):
                yield _RangeChunk(key, checksum_range, start, min(_CHUNK_NBYTES, end - start))
