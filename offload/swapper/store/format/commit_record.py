"""The commit record: 4096 bytes that name the slots of the last committed step. Two records alternate.

A record is valid if its checksum is correct. Of two valid records, the one with the higher serial is the newest. An
incomplete record counts as never written.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from offload.aio import crc32c
from offload.errors import IoError
from offload.sizes import PAGE
from offload.swapper.store.rank_folder import cut_short, read_whole, write_in_place

FORMAT_VERSION = 3
"""Version of record, manifest and blob together: see docs/reference/store-format.md."""

_MAGIC = b"OFFLDREC"
_HEAD = struct.Struct("<8sIIQQQQII")  # magic, version, which blob, serial, step, ns since 1970, blob bytes, crc, units
_CRC = struct.Struct("<I")
MAX_UNITS = (PAGE - _HEAD.size - _CRC.size) * 8
"""Number of units whose slots fit into the record's bitmap, one bit each."""


class Record(NamedTuple):
    """Contents of one commit record."""

    serial: int
    """Number of the commit, from 1. A step may be committed again, with a higher serial, after an edit of weights."""
    step: int
    slots: tuple[int, ...]
    """The newest slot of each unit: 0 or 1."""
    blob: int
    """Index of the blob, and of the page of the commit file that holds the record: 0 or 1."""
    blob_nbytes: int
    blob_crc: int
    time_ns: int = 0
    """Time of the commit, in nanoseconds since 1970."""

    def pack(self) -> bytes:
        """Returns the record's page of the commit file, 4096 bytes."""
        # One bit for each unit, the first unit in the lowest bit of the first byte.
        bitmap = bytearray((len(self.slots) + 7) // 8)
        for unit, slot in enumerate(self.slots):
            bitmap[unit // 8] |= slot << (unit % 8)
        head = _HEAD.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.blob,
            self.serial,
            self.step,
            self.time_ns,
            self.blob_nbytes,
            self.blob_crc,
            len(self.slots),
        )
        # The checksum covers the whole page, so a write that was cut short anywhere is noticed.
        body = (head + bytes(bitmap)).ljust(PAGE - _CRC.size, b"\0")
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def unpack(cls, page: bytes, which: int) -> Record | None:
        """Returns the record in page number `which`; None if the page is incomplete, empty or of another format."""
        if len(page) != PAGE:
            return None
        body, crc = page[: -_CRC.size], _CRC.unpack(page[-_CRC.size :])[0]
        magic, version, blob, serial, step, time_ns, nbytes, blob_crc, units = _HEAD.unpack_from(body)
        # Any mismatch means no record: the caller falls back to the other page.
        if magic != _MAGIC or version != FORMAT_VERSION or crc != crc32c(body) or units > MAX_UNITS:
            return None
        # A record of the other page has been copied here, or was made up.
        if blob != which or not 0 < serial < 2**63 or step >= 2**63:
            return None
        bitmap = body[_HEAD.size :]
        slots = tuple(bitmap[unit // 8] >> (unit % 8) & 1 for unit in range(units))
        return cls(serial, step, slots, blob, nbytes, blob_crc, time_ns)


def page_version(page: bytes) -> int | None:
    """Returns the format version that a page claims for its record; None if the page contains no record's head."""
    if len(page) < _HEAD.size or page[: len(_MAGIC)] != _MAGIC:
        return None
    return int(_HEAD.unpack_from(page)[1])


class Records(NamedTuple):
    """Contents of a commit file."""

    valid: tuple[Record, ...]
    """The valid records, newest first."""
    invalid_pages: tuple[int, ...]
    """Indices of pages that are neither empty nor valid: interrupted commits, or damage."""
    other_format: int | None = None
    """The format version that an invalid page claims, if it is not this version's; else None."""

    def forget_later(self, path: Path, record: Record) -> None:
        """Deletes durably all records of the commit file at `path` that are newer than `record`."""
        for later in self.valid:
            if later.serial > record.serial:
                write_in_place(path, bytes(PAGE), later.blob * PAGE)
        cut_short(path, 2 * PAGE)


def last_of_all(newest: Iterable[int | None]) -> int | None:
    """Returns the serial of the last commit that every rank with a commit holds; None if no rank has one.

    Each rank commits on its own, and overwrites nothing of the commit before until the ranks meet in the next step.
    A rank that was killed is therefore at most one commit behind the others, and the others still hold its commit.

    Args:
        newest: the serial of each rank's newest commit. None, for a rank without a commit, is ignored.
    """
    return min((serial for serial in newest if serial is not None), default=None)


def read_records(path: Path) -> Records:
    """Reads a commit file. A file that does not exist has no records.

    Raises:
        IoError: if the file exists and cannot be read.
    """
    return unpack_records(read_if_any(path))


def unpack_records(data: bytes) -> Records:
    """Returns the records in the bytes of a commit file; of a short file, complete pages count."""
    pages = [data[start : start + PAGE] for start in (0, PAGE)]
    found = [Record.unpack(page, which) for which, page in enumerate(pages)]
    valid = sorted((record for record in found if record is not None), key=lambda record: -record.serial)
    # An empty page was never written. Any other page without a valid record is an interrupted commit, or damage.
    invalid_pages = tuple(which for which in (0, 1) if found[which] is None and any(pages[which]))
    # A page of another format is invalid here, but must not pass as an interrupted commit.
    said = (page_version(pages[which]) for which in invalid_pages)
    other = next((version for version in said if version not in (None, FORMAT_VERSION)), None)
    return Records(tuple(valid), invalid_pages, other)


def was_committed(folder: Path) -> bool:
    """Returns True if a rank's folder holds, or must have held, a commit; False if at most a start was interrupted.

    The second commit begins with blob 1 and ends with page 1, and the first commit is complete by then. So if page 0 is
    invalid, and blob 1 and page 1 are empty, the first commit was interrupted. A page of another format is a
    commit as well.

    Raises:
        IoError: if a file exists and cannot be read. It may hold a commit.
    """
    found = read_records(folder / "commit")
    if found.valid or 1 in found.invalid_pages or found.other_format is not None:
        return True
    return any(read_if_any(folder / "blob.1")[:8])


def read_if_any(path: Path) -> bytes:
    """Returns the bytes of a file, none if it does not exist. Raises `IoError` if the file cannot be read."""
    try:
        return read_whole(path)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except OSError as error:
        # Not a missing file: a start would otherwise take a run for none and delete its commits, and a resume would
        # take a commit for damaged.
        wrong = IoError(str(path), 0, 0, error.errno or errno.EIO, "read")
        wrong.strerror = error.strerror  # which may tell more than the system's words for the number
        raise wrong from error
