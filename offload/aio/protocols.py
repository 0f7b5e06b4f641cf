"""What any queue of reads and writes offers, and what it returns for each."""

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
