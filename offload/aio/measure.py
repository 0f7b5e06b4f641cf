"""Bandwidth measurements of a drive, made with the queue that will use the drive."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from offload.aio.file import DirectFile, open_new
from offload.aio.future import File
from offload.aio.memory import aligned_empty
from offload.aio.queue import IoQueue, Priority
from offload.errors import ConfigError
from offload.sizes import MIB, PAGE

OPERATIONS = ("write", "read", "mixed")


class TimedTransfer(NamedTuple):
    """One pass over a file: bytes moved, wall-clock seconds and processor seconds."""

    nbytes: int
    seconds: float
    cpu_seconds: float


class Bandwidth(NamedTuple):
    """Bandwidth of a drive in bytes a second."""

    read: float
    write: float

    @property
    def swap(self) -> float:
        """Bytes a second when equal amounts are read and written one after the other, as in an optimizer step."""
        # The harmonic mean: the times of both directions add up.
        return 2 / (1 / self.read + 1 / self.write)


def move(queue: IoQueue, file: File, buffer: memoryview, operation: str, request_bytes: int) -> TimedTransfer:
    """Moves all of `buffer` to or from the start of `file`, in requests that are all queued at once, and waits.

    Args:
        file: a file of at least `len(buffer)` bytes.
        operation: "read", "write" or "mixed": alternating reads and writes, of one priority.
        request_bytes: bytes of each request; the last one may be shorter.
    """
    cpu, start = _cpu_seconds(), time.perf_counter()
    # With the usual priority of writes, the queue would read eight blocks for each block that it writes, not equal
    # parts.
    writes = Priority.NORMAL if operation == "mixed" else Priority.BACKGROUND
    futures = []
    for index, at in enumerate(range(0, len(buffer), request_bytes)):
        part = buffer[at : at + request_bytes]
        name = operation if operation != "mixed" else ("read", "write")[index % 2]
        futures.append(queue.read(file, at, part) if name == "read" else queue.write(file, at, part, priority=writes))
    # All requests are queued by now, so the queue always has as many blocks in flight as its shape allows.
    for future in futures:
        future.wait()
    return TimedTransfer(len(buffer), time.perf_counter() - start, _cpu_seconds() - cpu)


def bandwidths(folders: Sequence[str | os.PathLike[str]], nbytes: int = 256 * MIB, rounds: int = 3) -> list[Bandwidth]:
    """Returns the bandwidth of the drive under each folder, measured one folder at a time.

    Args:
        folders: folders on the drives; a temporary file is written to each and removed.
        nbytes: bytes of the temporary file and of the host buffer that this call allocates.
        rounds: passes in each direction; their median is the result.

    Raises:
        ConfigError: `nbytes` or `rounds` is too small.
        IoError: a file cannot be created, written or read.
    """
    if nbytes < PAGE or rounds < 1:
        raise ConfigError(f"expected nbytes >= {PAGE} and rounds >= 1, got {nbytes} and {rounds}")
    # Folders are measured one after the other, since drives on one bus would slow each other down. So they can share
    # one buffer.
    buffer = aligned_empty(nbytes)
    for start in range(0, nbytes, MIB):
        buffer[start : start + MIB] = os.urandom(len(buffer[start : start + MIB]))  # random: some drives compress
    measured: list[Bandwidth] = []
    with IoQueue() as queue:
        for folder in folders:
            path = Path(folder) / f".offload-bandwidth.{os.getpid()}-{os.urandom(4).hex()}"
            try:
                with DirectFile(path, create=True, opener=open_new) as file:
                    file.reserve(nbytes)
                    move(queue, file, buffer, "write", 16 * MIB)  # untimed: first writes are slower
                    rates = {
                        operation: sorted(
                            nbytes / move(queue, file, buffer, operation, 16 * MIB).seconds for _ in range(rounds)
                        )[rounds // 2]
                        for operation in ("read", "write")
                    }
                measured.append(Bandwidth(rates["read"], rates["write"]))
            finally:
                remove(path)
    return measured


def remove(path: Path) -> None:
    """Removes a file that may never have been created. Ignores errors: the caller reports an earlier error."""
    with contextlib.suppress(OSError):
        path.unlink()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
