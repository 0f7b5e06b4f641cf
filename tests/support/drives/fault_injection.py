"""Faults of the world: I/O that is late or fails, bits that flip, processes that die."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from offload import testing
from offload.aio import File, IoFuture, IoQueue
from offload.errors import IoError
from offload.interrupts import interruptible
from offload.swapper.store import Store


class _Late:
    """A request that runs on a thread of its own, some time later."""

    def __init__(self, start: Callable[[], IoFuture], pool: ThreadPoolExecutor) -> None:
        self._future = pool.submit(start)

    def done(self) -> bool:
        return self._future.done()

    @interruptible  # as `IoFuture.wait`
    def wait(self, timeout: float | None = None) -> int:
        return self._future.result(timeout).wait()

    def crc32c(self) -> int:
        return self._future.result().crc32c()

    def page_crcs(self) -> bytes:
        return self._future.result().page_crcs()

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

    def read(self, file: File, offset: int, buffer: memoryview, **_: Any) -> _Late:
        buffer[:] = b"\xff" * len(buffer)
        return self._later("read", file, offset, buffer)

    def write(self, file: File, offset: int, buffer: memoryview, **_: Any) -> _Late:
        return self._later("write", file, offset, buffer)

    def _later(self, operation: str, file: File, offset: int, buffer: memoryview) -> _Late:
        delay = self._chance.uniform(0, self._delay)

        def start() -> IoFuture:
            time.sleep(delay)
            return self._carry_out(operation, file, offset, buffer)

        return _Late(start, self._pool)

    def _carry_out(self, operation: str, file: File, offset: int, buffer: memoryview) -> IoFuture:
        """Runs a request to its end, on a thread of the pool."""
        if self._fails(operation, file, offset):
            raise IoError(str(file.path), offset, len(buffer), errno.EIO, operation)
        future: IoFuture = getattr(self._inner, operation)(file, offset, buffer, checksum=True)
        future.wait()
        return future

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
    testing.replace(monkeypatch, "io.queue", lambda *_, **__: make())


def flip_bit(path: Path, offset: int, mask: int = 16) -> None:
    """Changes one bit of the byte at `offset` of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
        file.flush()
        os.fsync(file.fileno())  # reads that pass the page cache see it too


def die(*_: Any, **__: Any) -> NoReturn:
    """Ends this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead processes do not go on")


def dies_before(owner: Any, name: str, call: int = 1) -> Callable[[], None]:
    """Returns a function after which the `call`th call of `owner.name` kills this process."""

    def install() -> None:
        real, left = getattr(owner, name), [call]

        def counted(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                die()
            return real(*arguments, **named)

        setattr(owner, name, counted)

    return install


def die_after_writes(count: int) -> None:
    """Makes this process die after `count` writes of a store have ended."""
    write = Store.write

    def write_and_die(store: Store, *arguments: Any) -> Any:
        nonlocal count
        future = write(store, *arguments)
        future.wait()
        count -= 1
        if not count:
            die()
        return future

    Store.write = write_and_die  # type: ignore[method-assign]
