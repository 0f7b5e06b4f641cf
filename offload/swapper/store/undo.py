"""Slots that an edit overwrites although another process may still need the commit that names them.

A process of a grid edits weights without the others. The slot that it writes is named by the commit before its last
one, from which all resume if another process is lost before it has made the last one too. So the slot is copied
first:

    file    entries, one for each state of an edited unit
    entry   a page of JSON with its CRC-32C in the last 4 bytes ► the bytes of the slot

All entries of a unit are durable before its slot is written. So a copy that a kill or a power cut has interrupted is
one of a slot that is whole. Only the checksums of the commit show whether a copy is complete: a page may be durable
before its bytes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from offload.aio import DirectFile, File, aligned_empty, crc32c
from offload.aio.protocols import Future
from offload.errors import IoError, StoreError
from offload.fileio.inner_files import check_holes, inner_opener, open_inner
from offload.records import fields, read, text, whole
from offload.sizes import MIB, PAGE
from offload.states import State
from offload.swapper.store.folder import cut_short, is_there, unlink, writing_in_place
from offload.swapper.store.format import (
    CommitRecord,
    Extent,
    Extents,
    Key,
    Slot,
    own_nbytes,
    sum_of,
    unpack,
)
from offload.swapper.store.requests import Joined

_CHUNK_NBYTES = 8 * MIB
_CRC = struct.Struct("<I")

_FIELDS = fields(
    {"serial": whole(), "time_ns": whole(0, 2**64), "unit": whole(), "state": text(), "nbytes": whole(1, 1 << 56)}
)
"""What a page of an entry must be."""

Places = Sequence[Mapping[State, Sequence[Extents]]]
"""For each unit and state, the places of all slots."""


class _UndoEntry(NamedTuple):
    """The copy of one slot, without the bytes that both slots share."""

    commit: tuple[int, int]
    """Serial and time of the record that names the slot."""
    unit: int
    state: State
    nbytes: int

    def pack(self) -> bytes:
        fields = {"serial": self.commit[0], "time_ns": self.commit[1], "unit": self.unit, "state": self.state.value}
        body = json.dumps({**fields, "nbytes": self.nbytes}).encode().ljust(PAGE - _CRC.size)
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def unpack(cls, page: bytes) -> _UndoEntry | None:
        """Returns the entry of a page; None if the page is incomplete, or of another version."""
        body = page[: -_CRC.size]
        if len(page) != PAGE or _CRC.unpack(page[-_CRC.size :])[0] != crc32c(body):
            return None
        try:
            values = read(body, _FIELDS)
            entry = cls((values["serial"], values["time_ns"]), values["unit"], State(values["state"]), values["nbytes"])
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
        named_by: CommitRecord,
        unit: int,
        places: Mapping[State, Sequence[Extents]],
        read: Callable[[int, State, int, int, memoryview], Future],
    ) -> int:
        """Copies the slot of a unit durably.

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
                    write(_UndoEntry((named_by.serial, named_by.time_ns), unit, state, nbytes).pack(), at)
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

    def copies(self, record: CommitRecord, places: Places, table: Mapping[Key, Slot]) -> Copies:
        """Returns the copies of slots that `record` names, after their bytes have been compared.

        Raises:
            IoError: if the file cannot be read.
        """
        if not is_there(self.path):
            return NO_COPIES
        extents: dict[Key, Extent] = {}
        at, undamaged = 0, True
        with self._opened() as file:
            size = os.fstat(file).st_size
            while (entry := _UndoEntry.unpack(os.pread(file, PAGE, at))) is not None:
                extent, at = Extent(at + PAGE, entry.nbytes), at + PAGE + entry.nbytes
                key = (entry.unit, entry.state)
                slots = places[entry.unit].get(entry.state) if 0 <= entry.unit < len(places) else None
                # A page that is whole may be in another file's or another version's place: all of it is compared.
                right = entry.commit == (record.serial, record.time_ns) and at <= size
                if right and slots and own_nbytes(slots) == entry.nbytes and _fits(file, extent, table.get(key, ())):
                    extents[key] = extent
                else:
                    undamaged = False
        return Copies(extents, undamaged and at == size)

    def put_back(
        self,
        record: CommitRecord,
        places: Places,
        packed: bytes,
        write: Callable[[int, State, int, int, memoryview], Future],
        sync: Callable[[], None],
        find_damage: Callable[[], object | None] | None,
    ) -> None:
        """Writes the copies of slots that `record` names to their places, durably. May be repeated.

        Args:
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
                    for offset, chunk in _chunks(file, extent):
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
        self, states: File, record: CommitRecord, places: Places, table: Mapping[Key, Slot]
    ) -> Iterator[Mapping[Key, File]]:
        """Yields each slot of `record` that has a copy, with its bytes from there, as a file of its own.

        Raises:
            IoError: if the file cannot be read.
        """
        copies = self.copies(record, places, table)
        # The usual case opens no file: only an edit between two steps of a grid makes copies.
        if not copies.extents:
            yield {}
            return
        with DirectFile(self.path, writable=False, opener=inner_opener(3)) as file:
            files: dict[Key, File] = {}
            for (unit, state), extent in copies.extents.items():
                place = places[unit][state][record.slots[unit]]
                # Frozen bytes have no copy, since no edit writes them.
                shared = place.extents_of(extent.nbytes, place.nbytes - extent.nbytes)
                files[unit, state] = Joined([(file, extent), *((states, shared_extent) for shared_extent in shared)])
            yield files

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
    for _, chunk in _chunks(descriptor, extent):
        crc = crc32c(chunk, crc)
    return crc == sum_of(slot, 0, extent.nbytes)


def _chunks(descriptor: int, extent: Extent) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes of an extent, each chunk with its offset there, in memory that the next one reuses."""
    buffer = aligned_empty(min(_CHUNK_NBYTES, extent.nbytes))
    for offset in range(0, extent.nbytes, len(buffer)):
        chunk = buffer[: min(len(buffer), extent.nbytes - offset)]
        if os.preadv(descriptor, [chunk], extent.offset + offset) != len(chunk):
            raise OSError(errno.EIO, "the file was cut short meanwhile")
        yield offset, chunk
