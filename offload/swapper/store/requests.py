"""What a store needs of an I/O queue, and a read that is compared with a checksum when it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from offload.aio import File, Priority


class Future(Protocol):
    """What the store needs of a request in flight."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def crc32c(self) -> int: ...
    def add_done_callback(self, function: Callable[[Any], object]) -> None: ...


class Queue(Protocol):
    """What the store needs of an I/O queue; `aio.IoQueue` is one, tests put faults in front of it."""

    def read(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = ..., checksum: bool = ...
    ) -> Future: ...
    def write(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = ..., checksum: bool = ...
    ) -> Future: ...


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
