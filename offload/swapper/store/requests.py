"""Requests of a store to an I/O queue: for bytes in several extents, and reads that are compared with checksums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from offload.aio import DirectFile, File, StripedFile
from offload.aio.file import Piece
from offload.aio.protocols import Future
from offload.errors import IoError
from offload.swapper.store.format.manifest import Extent, Extents
from offload.swapper.store.rank_folder import clone_range


class Joined:
    """Byte ranges of files, presented as one contiguous file, so that one request moves all of them."""

    def __init__(self, ranges: Sequence[tuple[File, Extent]]) -> None:
        self._files = [file for file, _ in ranges]
        self._extents = [extent for _, extent in ranges]

    @property
    def path(self) -> str:
        """Returns the path of the first file."""
        return self._files[0].path

    @property
    def closed(self) -> bool:
        """True if one of the files is closed."""
        return any(file.closed for file in self._files)

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        """Returns the requests of the native queue for `nbytes` bytes from `offset` on."""
        found: list[Piece] = []
        for file, extent in zip(self._files, self._extents, strict=True):
            for each in Extents((extent,)).extents_of(offset, nbytes):
                found += file.pieces(*each)
            # From here on `offset` is relative to the next range.
            offset -= extent.nbytes
        return found

    def parts(self) -> list[DirectFile]:
        """Returns the files of the single drives."""
        return [part for file in dict.fromkeys(self._files) for part in file.parts()]


def bytes_of(file: File, place: Extents, start: int, nbytes: int, copied: File | None = None) -> tuple[File, int]:
    """Returns the file and the offset at which a queue finds bytes of a slot.

    Args:
        file: the states file over all drives.
        place: the extents of the slot.
        start: first byte, from the start of the slot.
        nbytes: number of bytes.
        copied: the slot as a file of its own, where some of its bytes are elsewhere; see `Undo.slots`.
    """
    if copied is not None:
        return copied, start
    extents = place.extents_of(start, nbytes)
    # Most requests lie in one extent and need no `Joined`. A request for a weight may also reach into its second
    # extent, the frozen bytes.
    return (file, extents[0].offset) if len(extents) == 1 else (Joined([(file, each) for each in extents]), 0)


def clone_extents(file: StripedFile, extents: Sequence[Extent], descriptor: int, offset: int) -> bool:
    """Lets another file share bytes of `file`, without a copy. Returns False if that is impossible.

    Args:
        file: the states file over all drives; of several drives none is shared.
        extents: the bytes, in pages of 4096.
        descriptor: the other file, open for writing; it belongs to the caller.
        offset: the first byte in the other file, a multiple of 4096.
    """
    parts = file.parts()
    if len(parts) > 1:
        return False
    for start, length in extents:
        if not clone_range(parts[0].descriptors.buffered, start, length, descriptor, offset):
            return False
        offset += length
    return True


class Compared:
    """A read whose bytes are compared with their checksum by the first `wait`. Every `wait` has that outcome."""

    def __init__(self, future: Future, compare: Callable[[int, int], None]) -> None:
        self._future, self._compare = future, compare
        # Two threads may wait for one read, and a comparison consumes the reads before it: only one is made.
        self._lock = threading.Lock()
        self._compared = False
        self._damage: IoError | None = None

    def done(self) -> bool:
        """Returns True if the read has ended; the bytes may not be compared yet."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the read, compares its bytes, and returns their number; raises `IoError` if they are damaged."""
        nbytes = self._future.wait(timeout)
        with self._lock:
            if not self._compared:
                try:
                    self._compare(nbytes, self._future.crc32c())
                except IoError as error:
                    self._damage = error
                self._compared = True
        if self._damage is not None:
            raise self._damage
        return nbytes

    def crc32c(self) -> int:
        """Returns the CRC-32C of the bytes read."""
        return self._future.crc32c()

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Calls `function` with the request of the queue once the read has ended."""
        # Not with this object: reads end in any order, on the queue's thread, and a `wait` there would compare them in
        # that order and take the damage from the thread that uses the bytes.
        self._future.add_done_callback(function)
