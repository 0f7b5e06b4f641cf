"""What a store needs of an I/O queue, what it asks for, and a read that is compared when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from offload.aio import DirectFile, File
from offload.aio.file import Piece
from offload.aio.protocols import Future
from offload.swapper.store.format.manifest import Extent, Place


class Joined:
    """Stretches of a file, one behind the other, as a file of their own, so that one request moves all of them."""

    def __init__(self, file: File, stretches: Sequence[Extent]) -> None:
        self._file, self._place = file, Place(tuple(stretches))

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def closed(self) -> bool:
        return self._file.closed

    def pieces(self, offset: int, nbytes: int) -> list[Piece]:
        return [piece for each in self._place.stretches(offset, nbytes) for piece in self._file.pieces(*each)]

    def parts(self) -> list[DirectFile]:
        return self._file.parts()


def bytes_of(file: File, place: Place, start: int, nbytes: int) -> tuple[File, int]:
    """The file and the offset by which a queue is asked for bytes of a slot."""
    stretches = place.stretches(start, nbytes)
    return (file, stretches[0].offset) if len(stretches) == 1 else (Joined(file, stretches), 0)


class Compared:
    """A read whose bytes are compared when it is waited for."""

    def __init__(self, future: Future, compare: Callable[[int, int], None]) -> None:
        self._future, self._compare = future, compare
        self._compared = False

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> int:
        nbytes = self._future.wait(timeout)
        if not self._compared:
            self._compare(nbytes, self._future.crc32c())
            self._compared = True
        return nbytes

    def crc32c(self) -> int:
        return self._future.crc32c()

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        self._future.add_done_callback(lambda _: function(self))
