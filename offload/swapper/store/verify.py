"""Verification of a commit: reads every slot that the commit names and compares it with the commit's checksums."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from offload.aio import DirectFile, File, StripedFile, aligned_empty, crc32c, crc32c_joined
from offload.aio.protocols import Future, Queue, wait_for_all
from offload.errors import IoError, StoreError
from offload.fileio.inner_files import check_holes, inner_opener, open_inner
from offload.records import fields, read, text, whole
from offload.sizes import MIB, PAGE
from offload.states import State
from offload.swapper.store.folder import cut_short, is_there, unlink, writing_in_place
from offload.swapper.store.format import (
    ChecksumRange,
    Extent,
    Extents,
    Key,
    Record,
    Slot,
    StoreSpec,
    own_nbytes,
    sum_of,
    unpack,
)
from offload.swapper.store.requests import Joined, bytes_of

# -- undo ----------------------------------------------------------------------------------------------
#
# Slots that an edit overwrites although another process may still need the commit that names them.
#
# A process of a grid edits weights without the others. The slot that it writes is named by the commit before its last
# one, from which all resume if another process is lost before it has made the last one too. So the slot is copied
# first:
#
#     file    entries, one for each state of an edited unit
#     entry   a page of JSON with its CRC-32C in the last 4 bytes ► the bytes of the slot
#
# All entries of a unit are durable before its slot is written. So a copy that a kill or a power cut has interrupted is
# one of a slot that is whole. Only the checksums of the commit tell whether a copy is complete: a page may be durable
# before its bytes.


_CHUNK_NBYTES = 8 * MIB
_CRC = struct.Struct("<I")

_FIELDS = fields(
    {"serial": whole(), "time_ns": whole(0, 2**64), "unit": whole(), "state": text(), "nbytes": whole(1, 1 << 56)}
)
"""What a page of an entry must be."""

Places = Sequence[Mapping[State, Sequence[Extents]]]
"""For each unit and state, the places of all slots."""


class _Entry(NamedTuple):
    """The copy of one slot, without the bytes that both slots share."""

    commit: tuple[int, int]
    """Serial and time of the record that names the slot."""
    unit: int
    state: State
    nbytes: int

    def pack(self) -> bytes:
        """Returns the entry's page."""
        fields = {"serial": self.commit[0], "time_ns": self.commit[1], "unit": self.unit, "state": self.state.value}
        body = json.dumps({**fields, "nbytes": self.nbytes}).encode().ljust(PAGE - _CRC.size)
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def unpack(cls, page: bytes) -> _Entry | None:
        """Returns the entry of a page; None if the page is incomplete, or of another version."""
        body = page[: -_CRC.size]
        if len(page) != PAGE or _CRC.unpack(page[-_CRC.size :])[0] != crc32c(body):
            return None
        try:
            held = read(body, _FIELDS)
            entry = cls((held["serial"], held["time_ns"]), held["unit"], State(held["state"]), held["nbytes"])
        except ValueError:
            return None
        return entry if entry.nbytes % PAGE == 0 else None


class Copies(NamedTuple):
    """The copies of slots that one record names. Each is complete."""

    extents: Mapping[Key, Extent]
    """Where the file has them."""
    undamaged: bool
    """False if the file contains anything else: what a kill has left of a copy, copies for another record, damage."""


NO_COPIES = Copies({}, True)


class Undo:
    """The file `undo` of one rank, on its first drive.

    The rank's lock must be held where files are written; one thread at a time may call.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is the rank's folder on the first drive."""
        self.path = folder / "undo"
        self._nbytes = 0
        """Bytes of the entries that this process has made durable."""

    def save(
        self,
        named_by: Record,
        unit: int,
        places: Mapping[State, Sequence[Extents]],
        read: Callable[[int, State, int, int, memoryview], Future],
    ) -> int:
        """Copies the slot of a unit durably.

        Args:
            named_by: the record that names the slot.
            unit: the unit.
            places: for each state of the unit, the places of its slots.
            read: starts to read a slot, of a unit and a state, from a byte offset into a buffer.

        Returns:
            The bytes that were written.

        Raises:
            IoError: if the slot cannot be read, or the copy cannot be written. The entries before stay as they are.
        """
        sizes = {state: nbytes for state, slots in places.items() if (nbytes := own_nbytes(slots))}
        buffer = aligned_empty(min(_CHUNK_NBYTES, max(sizes.values(), default=PAGE)))
        at = self._nbytes
        try:
            with writing_in_place(self.path) as write:
                for state, nbytes in sizes.items():
                    # In any order: only the sync at the end of the block counts, and nothing is overwritten before.
                    write(_Entry((named_by.serial, named_by.time_ns), unit, state, nbytes).pack(), at)
                    for start in range(0, nbytes, len(buffer)):
                        part = buffer[: min(len(buffer), nbytes - start)]
                        read(unit, state, named_by.slots[unit], start, part).wait()
                        write(part, at + PAGE + start)
                    at += PAGE + nbytes
        except BaseException:
            # Only gives room back, which others may need now: a reader passes over what is incomplete.
            with contextlib.suppress(OSError):
                cut_short(self.path, self._nbytes)
            raise
        began, self._nbytes = self._nbytes, at
        return at - began

    def copies(self, record: Record, places: Places, table: Mapping[Key, Slot]) -> Copies:
        """Returns the copies of slots that `record` names, after their bytes have been compared.

        Args:
            record: the record from which the run resumes.
            places: for each unit and state, the places of all slots.
            table: the checksums of the slots that the record names.

        Raises:
            IoError: if the file cannot be read.
        """
        if not is_there(self.path):
            return NO_COPIES
        found: dict[Key, Extent] = {}
        at, undamaged = 0, True
        with self._opened() as file:
            size = os.fstat(file).st_size
            while (entry := _Entry.unpack(os.pread(file, PAGE, at))) is not None:
                extent, at = Extent(at + PAGE, entry.nbytes), at + PAGE + entry.nbytes
                key = (entry.unit, entry.state)
                slots = places[entry.unit].get(entry.state) if 0 <= entry.unit < len(places) else None
                # A page that is whole may be in another file's or another version's place: all of it is compared.
                right = entry.commit == (record.serial, record.time_ns) and at <= size
                if right and slots and own_nbytes(slots) == entry.nbytes and _fits(file, extent, table.get(key, ())):
                    found[key] = extent
                else:
                    undamaged = False
        return Copies(found, undamaged and at == size)

    def put_back(
        self,
        record: Record,
        places: Places,
        packed: bytes,
        write: Callable[[int, State, int, int, memoryview], Future],
        sync: Callable[[], None],
        find_damage: Callable[[], object | None] | None,
    ) -> None:
        """Writes the copies of slots that `record` names to their places, durably. May be repeated.

        Args:
            record: see `copies`.
            places: see `copies`.
            packed: the packed checksums in its blob.
            write: starts to write a slot, of a unit and a state, from a byte offset on.
            sync: makes all writes durable.
            find_damage: compares all data of the commit, and returns the first damage; None if there is no later
                commit, beside which an edit could have written over a slot of this one.

        Raises:
            IoError: if something cannot be read or written.
            StoreError: if a copy is damaged, and the commit needs it.
        """
        copies = self.copies(record, places, unpack(packed))
        if copies.extents:
            with self._opened() as file:
                for (unit, state), extent in copies.extents.items():
                    for offset, chunk in _undo_chunks(file, extent):
                        write(unit, state, record.slots[unit], offset, chunk).wait()
            sync()
        # A kill may have interrupted a copy, whose slot is then whole. After damage of a copy it is not.
        if not copies.undamaged and find_damage is not None and (damage := find_damage()) is not None:
            raise StoreError(
                f"{self.path} is damaged: it has the copies of slots that an edit of weights has overwritten, and step "
                f"{record.step}, the last one that all processes have, needs them ({damage}); go back to a checkpoint"
            )

    @contextlib.contextmanager
    def slots(
        self, states: File, record: Record, places: Places, table: Mapping[Key, Slot]
    ) -> Iterator[Mapping[Key, File]]:
        """Yields each slot of `record` that has a copy, with its bytes from there, as a file of its own.

        Args:
            states: the states file over all drives.
            record: see `copies`.
            places: see `copies`.
            table: see `copies`.

        Raises:
            IoError: if the file cannot be read.
        """
        copies = self.copies(record, places, table)
        # The usual case opens no file: only an edit between two steps of a grid makes copies.
        if not copies.extents:
            yield {}
            return
        with DirectFile(self.path, writable=False, opener=inner_opener(3)) as file:
            found: dict[Key, File] = {}
            for (unit, state), extent in copies.extents.items():
                place = places[unit][state][record.slots[unit]]
                # Frozen bytes have no copy, since no edit writes them.
                shared = place.extents_of(extent.nbytes, place.nbytes - extent.nbytes)
                found[unit, state] = Joined([(file, extent), *((states, each) for each in shared)])
            yield found

    def remove(self) -> None:
        """Deletes the file, if there is one. If a power cut takes that back, the copies' record has gone."""
        unlink(self.path)
        self._nbytes = 0

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Yields a descriptor for reads. An error of a read of the block names the file."""
        try:
            file = open_inner(self.path, 3)
            try:
                check_holes(file, self.path)
                yield file
            finally:
                os.close(file)
        except IoError:
            raise
        except OSError as error:
            wrong = IoError(str(self.path), 0, 0, error.errno or errno.EIO, "read")
            wrong.strerror = error.strerror
            raise wrong from error


def _fits(descriptor: int, extent: Extent, slot: Slot) -> bool:
    """Returns True if bytes of the file are the first ones of a slot with these checksums."""
    crc = 0
    for _, chunk in _undo_chunks(descriptor, extent):
        crc = crc32c(chunk, crc)
    return crc == sum_of(slot, 0, extent.nbytes)


def _undo_chunks(descriptor: int, extent: Extent) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes of an extent, each chunk with its offset there, in memory that the next one reuses."""
    buffer = aligned_empty(min(_CHUNK_NBYTES, extent.nbytes))
    for offset in range(0, extent.nbytes, len(buffer)):
        chunk = buffer[: min(len(buffer), extent.nbytes - offset)]
        if os.preadv(descriptor, [chunk], extent.offset + offset) != len(chunk):
            raise OSError(errno.EIO, "the file was cut short meanwhile")
        yield offset, chunk


# -- verify --------------------------------------------------------------------------------------------


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


class _Chunk(NamedTuple):
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
        """Prepares the comparison; see `damages` for the arguments."""
        self._file = file
        self._places = places
        self._slots = slots
        self._title = title
        self._known: tuple[ChecksumRange, int] | None = None
        """The range in progress and the checksum of its bytes so far."""
        self._bad: ChecksumRange | None = None
        """The range in which a read failed last. The failure was reported; later chunks of the range report nothing."""

    def place(self, key: Key) -> Extents:
        """Returns the extents of the slot that the commit names for a unit and state."""
        return self._places[key[0]][key[1]][self._slots[key[0]]]

    def has(self, key: Key, slot: Slot) -> bool:
        """Returns True if the store has all bytes of a slot's checksums."""
        unit, state = key
        if unit >= len(self._places) or state not in self._places[unit]:
            return False
        return sum(checksum_range.nbytes for checksum_range in slot) <= self.place(key).nbytes

    def uncovered(self, table: Mapping[Key, Slot]) -> Iterator[Damage]:
        """Yields the slots of which `table` does not contain the checksums of all bytes."""
        for unit, row in enumerate(self._places):
            for state in row:
                key = (unit, state)
                covered, nbytes = (
                    sum(checksum_range.nbytes for checksum_range in table.get(key, ())),
                    self.place(key).nbytes,
                )
                if covered != nbytes:
                    yield self._damage(key, 0, nbytes, f"checksums cover {covered} bytes only")

    def finish(self, chunk: _Chunk, future: Future) -> Damage | None:
        """Waits for a chunk and returns its damage, or that of the range that the chunk completes; None if intact.

        A damaged range is reported once.
        """
        checksum_range = chunk.checksum_range
        try:
            future.wait()
            crc = future.crc32c()
        except IoError as error:
            # The checksum of this range cannot be completed any more; the later chunks of the range report nothing.
            told, self._bad, self._known = self._bad is checksum_range, checksum_range, None
            return None if told else self._damage(chunk.key, chunk.start, chunk.nbytes, str(error))
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
        """Returns the damage of `nbytes` bytes of a slot, from byte `start` on."""
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

    Args:
        file: the states file over all drives.
        queue: reads the file.
        places: for each unit and state, the extents of each slot.
        slots: for each unit, the slot that the commit names.
        table: for each unit and state, the checksums of its byte ranges, in order.
        title: returns the name of a unit for messages.
        copied: slots whose bytes are elsewhere; see `Undo.slots`.
        progress: receives the number of bytes of each chunk compared.
    """
    comparison = _Comparison(file, places, slots, title)
    yield from comparison.uncovered(table)
    # Checksums of bytes that the store has not are compared with nothing.
    table = {key: slot for key, slot in table.items() if comparison.has(key, slot)}
    buffers = [aligned_empty(_CHUNK_NBYTES) for _ in range(_CHUNKS)]
    reading: deque[tuple[_Chunk, Future]] = deque()

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
    record: Record,
    table: Mapping[Key, Slot],
    undo: Undo,
    progress: Callable[[int], None] = lambda _: None,
) -> Generator[Damage]:
    """Yields the damages of the slots that a record names. Complete copies count in the place of their slots.

    Args:
        file: see `damages`.
        queue: see `damages`.
        spec: the contents of the store.
        record: the record of the commit.
        table: see `damages`.
        undo: the copies of slots.
        progress: see `damages`.
    """
    places = spec.places()
    with undo.slots(file, record, places, table) as copied:
        yield from damages(file, queue, places, record.slots, table, spec.title, copied, progress)


def first_damage(
    file: StripedFile, queue: Queue, spec: StoreSpec, record: Record, packed: bytes, undo: Undo
) -> Damage | None:
    """Returns the first of `damages_of_commit`, or None. `packed` is the table as a blob contains it."""
    found = damages_of_commit(file, queue, spec, record, unpack(packed), undo)
    try:
        return next(found, None)
    finally:
        found.close()  # waits for the reads in flight: the caller closes the file next


def _chunks(table: Mapping[Key, Slot]) -> Iterator[_Chunk]:
    """Yields the chunks of all checksum ranges, in the order of the table."""
    for key, slot in table.items():
        for checksum_range in slot:
            end = checksum_range.start + checksum_range.nbytes
            for start in range(checksum_range.start, end, _CHUNK_NBYTES):
                yield _Chunk(key, checksum_range, start, min(_CHUNK_NBYTES, end - start))
