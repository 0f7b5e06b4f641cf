"""A commit record: 4096 bytes that say which slots are the last committed step. Two of them alternate.

A record counts where its checksum is right; of two, the one with the higher serial. A torn one is as if it had never
been written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from offload.aio import crc32c
from offload.sizes import PAGE
from offload.swapper.store.rank_folder import read_whole

FORMAT_VERSION = 3
"""Of record, manifest and blob together: docs/store-format.md."""

_MAGIC = b"OFFLDREC"
_HEAD = struct.Struct("<8sIIQQQQII")  # magic, version, which blob, serial, epoch, ns since 1970, blob bytes, crc, units
_CRC = struct.Struct("<I")
MAX_UNITS = (PAGE - _HEAD.size - _CRC.size) * 8


class Record(NamedTuple):
    """What one commit record says."""

    serial: int
    """Counts commits from 1. An epoch may be committed again, where weights were edited after its step."""
    epoch: int
    slots: tuple[int, ...]
    """The newest slot of each unit: 0 or 1."""
    blob: int
    """The number of the blob, which is also the page of the commit file that the record lies in: 0 or 1."""
    blob_nbytes: int
    blob_crc: int
    time_ns: int = 0
    """When it was made, since 1970."""

    def pack(self) -> bytes:
        """The page."""
        bitmap = bytearray((len(self.slots) + 7) // 8)
        for unit, slot in enumerate(self.slots):
            bitmap[unit // 8] |= slot << (unit % 8)
        head = _HEAD.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.blob,
            self.serial,
            self.epoch,
            self.time_ns,
            self.blob_nbytes,
            self.blob_crc,
            len(self.slots),
        )
        body = (head + bytes(bitmap)).ljust(PAGE - _CRC.size, b"\0")
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def unpack(cls, page: bytes) -> Record | None:
        """The record in `page`, or None where it is torn, empty or of another format."""
        if len(page) != PAGE:
            return None
        body, crc = page[: -_CRC.size], _CRC.unpack(page[-_CRC.size :])[0]
        magic, version, blob, serial, epoch, time_ns, nbytes, blob_crc, units = _HEAD.unpack_from(body)
        if magic != _MAGIC or version != FORMAT_VERSION or crc != crc32c(body) or units > MAX_UNITS:
            return None
        bitmap = body[_HEAD.size :]
        slots = tuple(bitmap[unit // 8] >> (unit % 8) & 1 for unit in range(units))
        return cls(serial, epoch, slots, blob, nbytes, blob_crc, time_ns)


def page_version(page: bytes) -> int | None:
    """The format of the record that a page says it holds; None where it says nothing."""
    if len(page) < _HEAD.size or page[: len(_MAGIC)] != _MAGIC:
        return None
    return int(_HEAD.unpack_from(page)[1])


class Records(NamedTuple):
    """The commit file as it was found."""

    valid: tuple[Record, ...]
    """Newest first."""
    torn: tuple[int, ...]
    """The pages that hold something that is no record: a commit that was interrupted, or damage."""
    other_format: int | None = None
    """What pages say of themselves that are torn for this version, because another one made them."""


def last_of_all(newest: Iterable[int | None]) -> int | None:
    """The serial of the last commit that every rank holds, from that of each rank's newest; None where there is none.

    Each rank commits by itself, and overwrites nothing of the commit before until all have met in the next step with
    theirs: so a rank that was killed is one commit behind others at most, and these still have what it has.
    """
    return min((serial for serial in newest if serial is not None), default=None)


def read_records(path: Path) -> Records:
    """Read a commit file; one that is missing or short holds nothing but what it has."""
    try:
        data = read_whole(path)
    except OSError:
        return Records((), ())
    pages = [data[start : start + PAGE] for start in (0, PAGE)]
    found = [Record.unpack(page) for page in pages]
    valid = sorted((record for record in found if record is not None), key=lambda record: -record.serial)
    torn = tuple(which for which in (0, 1) if found[which] is None and any(pages[which]))
    said = (page_version(pages[which]) for which in torn)
    other = next((version for version in said if version not in (None, FORMAT_VERSION)), None)
    return Records(tuple(valid), torn, other)


def was_committed(folder: Path) -> bool:
    """Whether there is, or must have been, a commit in a rank's folder; with none, a start was interrupted at most.

    The second commit begins with blob 1 and ends with page 1, and the first has ended by then. A torn page 0 with
    neither is the first commit, interrupted: nothing was trained yet. A page of another format is a commit as well.
    """
    found = read_records(folder / "commit")
    if found.valid or 1 in found.torn or found.other_format is not None:
        return True
    try:
        return any(read_whole(folder / "blob.1")[:8])
    except OSError:
        return False
