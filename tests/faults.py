"""I/O that is late, out of order or fails, put in front of the real queue."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from offload.aio import File, IoFuture, IoQueue, Priority
from offload.engine import initialize
from offload.errors import IoError


class _Late:
    """A request that runs on a thread of its own, some time later."""

    def __init__(self, start: Callable[[], IoFuture], pool: ThreadPoolExecutor) -> None:
        self._future = pool.submit(start)

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> int:
        return self._future.result(timeout).wait()

    def crc32c(self) -> int:
        return self._future.result().crc32c()

    def add_done_callback(self, function: Callable[[_Late], object]) -> None:
        self._future.add_done_callback(lambda _: function(self))


class LateQueue:
    """Starts every request up to `delay` seconds late; until then a read's buffer holds NaN.

    `fails` is asked before each request: where it says yes, the request ends with EIO.
    """

    def __init__(self, seed: int, delay: float, fails: Callable[[str, File, int], bool] = lambda *_: False) -> None:
        self._inner, self._pool = IoQueue(), ThreadPoolExecutor(16)
        self.backend, self.refusals = self._inner.backend, self._inner.refusals
        self._chance, self._delay, self._fails = random.Random(seed), delay, fails

    def read(
        self,
        file: File,
        offset: int,
        buffer: memoryview,
        priority: Priority = Priority.NORMAL,
        checksum: bool = False,
    ) -> _Late:
        buffer[:] = b"\xff" * len(buffer)
        return self._later("read", file, offset, buffer)

    def write(
        self,
        file: File,
        offset: int,
        buffer: memoryview,
        priority: Priority = Priority.NORMAL,
        checksum: bool = False,
    ) -> _Late:
        return self._later("write", file, offset, buffer)

    def _later(self, operation: str, file: File, offset: int, buffer: memoryview) -> _Late:
        delay = self._chance.uniform(0, self._delay)

        def start() -> IoFuture:
            time.sleep(delay)
            if self._fails(operation, file, offset):
                raise IoError(str(file.path), offset, len(buffer), errno.EIO, operation)
            future: IoFuture = getattr(self._inner, operation)(file, offset, buffer, checksum=True)
            future.wait()
            return future

        return _Late(start, self._pool)

    @property
    def read_bytes(self) -> int:
        return self._inner.read_bytes

    @property
    def written_bytes(self) -> int:
        return self._inner.written_bytes

    def close(self) -> None:
        self._pool.shutdown()
        self._inner.close()


def use_queue(monkeypatch: pytest.MonkeyPatch, make: Callable[[], LateQueue]) -> None:
    """Engines made from now on use the queue that `make` gives."""
    monkeypatch.setattr(initialize, "IoQueue", lambda *_, **__: make())
