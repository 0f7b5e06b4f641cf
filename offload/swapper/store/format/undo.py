"""Slots that an edit overwrites although another process may still need the commit that names them.

A process of a grid edits weights without the others. The slot that it writes is named by the commit before its last
one, from which all resume if another process is lost before it has made the last one too. So the slot is copied first:

    file    entries, one for each state of an edited unit
    entry   a page of JSON with its CRC-32C in the last 4 bytes ► the bytes of the slot

The bytes are durable before their page, and the page before the slot is written: without a page a slot is whole. Bytes
that a drive has damaged since are noticed when the slot is used, by the checksums of the commit.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from offload.aio import aligned_empty, crc32c
from offload.aio.protocols import Future
from offload.errors import IoError
from offload.sizes import MIB, PAGE
from offload.states import State
from offload.swapper.store.format.commit_record import Record
from offload.swapper.store.rank_folder import write_in_place

_CHUNK_NBYTES = 8 * MIB
_CRC = struct.Struct("<I")


class _Entry(NamedTuple):
    """The copy of one slot."""

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
        """Returns the entry of a page; None if the page is incomplete."""
        body = page[: -_CRC.size]
        if len(page) != PAGE or _CRC.unpack(page[-_CRC.size :])[0] != crc32c(body):
            return None
        held = json.loads(body)
        commit = (held["serial"], held["time_ns"])
        return cls(commit, held["unit"], State(held["state"]), held["nbytes"])


class Undo:
    """The file `undo` of one rank, on its first drive. The rank's lock must be held; one thread at a time may call."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the rank's folder on the first drive."""
        self._path = folder / "undo"
        self._nbytes = 0
        """Bytes of the entries that this process has made durable."""

    def save(
        self,
        named_by: Record,
        unit: int,
        sizes: Mapping[State, int],
        read: Callable[[int, State, int, int, memoryview], Future],
    ) -> int:
        """Copies the slot of a unit durably.

        Args:
            named_by: the record that names the slot.
            unit: the unit.
            sizes: bytes of each state of the unit.
            read: starts to read a slot, of a unit and a state, from a byte offset into a buffer.

        Returns:
            The bytes that were written.

        Raises:
            IoError: if the slot cannot be read, or the copy cannot be written. The entries before stay as they are.
        """
        buffer = aligned_empty(min(_CHUNK_NBYTES, max(sizes.values(), default=PAGE)))
        began = self._nbytes
        for state, nbytes in sizes.items():
            at = self._nbytes
            for start in range(0, nbytes, len(buffer)):
                part = buffer[: min(len(buffer), nbytes - start)]
                read(unit, state, named_by.slots[unit], start, part).wait()
                write_in_place(self._path, part, at + PAGE + start)
            entry = _Entry((named_by.serial, named_by.time_ns), unit, state, nbytes)
            write_in_place(self._path, entry.pack(), at)
            self._nbytes = at + PAGE + nbytes
        return self._nbytes - began

    def restore(self, record: Record, write: Callable[[int, State, int, int, memoryview], Future]) -> bool:
        """Writes the copies of slots that `record` names to their places.

        Args:
            record: the record from which the run resumes.
            write: starts to write a slot, of a unit and a state, from a byte offset on.

        Returns:
            True if there was a copy. The caller makes the bytes durable.
        """
        if not self._path.exists():
            return False
        found = False
        with self._path.open("rb") as file:
            for entry, start in self._entries(file.fileno()):
                if entry.commit != (record.serial, record.time_ns):
                    continue
                found = True
                for offset, chunk in self._chunks(file.fileno(), start, entry.nbytes):
                    write(entry.unit, entry.state, record.slots[entry.unit], offset, chunk).wait()
        return found

    def remove(self) -> None:
        """Deletes the file, if there is one. If a power cut takes that back, the copies' record has gone."""
        self._path.unlink(missing_ok=True)
        self._nbytes = 0

    # -- reading --------------------------------------------------------------------------------------

    def _entries(self, descriptor: int) -> Iterator[tuple[_Entry, int]]:
        """Yields each whole entry with the offset of its bytes."""
        at = 0
        while (entry := _Entry.unpack(os.pread(descriptor, PAGE, at))) is not None:
            yield entry, at + PAGE
            at += PAGE + entry.nbytes

    def _chunks(self, descriptor: int, start: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
        """Yields the bytes of an entry, each chunk with its offset in the slot, in memory that the next one reuses."""
        buffer = aligned_empty(min(_CHUNK_NBYTES, nbytes))
        for offset in range(0, nbytes, len(buffer)):
            chunk = buffer[: min(len(buffer), nbytes - offset)]
            if os.preadv(descriptor, [chunk], start + offset) != len(chunk):  # the file was cut since
                raise IoError(str(self._path), start + offset, len(chunk), errno.EIO, "read")
            yield offset, chunk
