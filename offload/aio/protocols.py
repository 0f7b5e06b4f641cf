"""Protocols of a queue of reads and writes, and of the futures that such a queue returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from offload.aio import File, Priority


class Pending(Protocol):
    """The interface of anything that ends: a request in flight, or bytes that come from another rank."""

    def done(self) -> bool: ...
    def wait(self) -> int: ...


class Future(Protocol):
    """The interface of a request in flight that the store relies on."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def crc32c(self) -> int: ...
    def page_crcs(self) -> bytes: ...
    def add_done_callback(self, function: Callable[[Any], object]) -> None: ...


class Queue(Protocol):
    """The interface of an I/O queue that the store relies on. `aio.IoQueue` implements it; tests inject faults."""

    def read(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = ..., checksum: bool = ...
    ) -> Future: ...
    def write(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = ..., checksum: bool = ...
    ) -> Future: ...


def wait_for_all(futures: Iterable[Pending]) -> None:
    """Waits until every request has ended, so that its buffer may be freed. Errors of the requests are ignored.

    Called after an error that the caller reports, or when nobody needs the bytes any more.
    """
    for future in futures:
        with contextlib.suppress(OSError):
            future.wait()
