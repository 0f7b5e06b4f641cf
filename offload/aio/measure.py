"""How fast a drive is, by the queue that will use it."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from offload.aio.file import DirectFile
from offload.aio.future import File
from offload.aio.memory import aligned_empty
from offload.aio.queue import IoQueue
from offload.errors import ConfigError
from offload.sizes import MIB, PAGE

OPERATIONS = ("write", "read", "mixed")


class Pass(NamedTuple):
    """One pass over a file: bytes moved, wall-clock and processor seconds."""

    nbytes: int
    seconds: float
    cpu_seconds: float


class Bandwidth(NamedTuple):
    """Bytes a second."""

    read: float
    write: float

    @property
    def swap(self) -> float:
        """Of as many bytes read as written, one after the other, as an optimizer step moves them."""
        return 2 / (1 / self.read + 1 / self.write)


def move(queue: IoQueue, file: File, buffer: memoryview, operation: str, request_bytes: int) -> Pass:
    """All of `buffer` to or from the start of `file`, in requests that are all queued at once.

    "mixed" reads every other request's bytes and writes the rest, both at once.
    """
    cpu, start = _cpu_seconds(), time.perf_counter()
    futures = []
    for index, at in enumerate(range(0, len(buffer), request_bytes)):
        name = operation if operation != "mixed" else ("read", "write")[index % 2]
        submit = queue.read if name == "read" else queue.write
        futures.append(submit(file, at, buffer[at : at + request_bytes]))
    for future in futures:
        future.wait()
    return Pass(len(buffer), time.perf_counter() - start, _cpu_seconds() - cpu)


def bandwidths(folders: Sequence[str | os.PathLike[str]], nbytes: int = 256 * MIB, rounds: int = 3) -> list[Bandwidth]:
    """What the drive under each folder moves by itself: the median of `rounds` over a file of `nbytes` bytes.

    The files are removed again. Errors are `IoError`.
    """
    if nbytes < PAGE or rounds < 1:
        raise ConfigError(f"expected nbytes >= {PAGE} and rounds >= 1, got {nbytes} and {rounds}")
    buffer = aligned_empty(nbytes)
    for start in range(0, nbytes, MIB):
        buffer[start : start + MIB] = os.urandom(len(buffer[start : start + MIB]))  # a drive may compress
    found: list[Bandwidth] = []
    with IoQueue() as queue:
        for folder in folders:
            path = Path(folder) / f".offload-bandwidth.{os.getpid()}"
            try:
                with DirectFile(path, create=True) as file:
                    file.reserve(nbytes)
                    move(queue, file, buffer, "write", 16 * MIB)  # the first write of a block does more
                    rates = {
                        operation: sorted(
                            nbytes / move(queue, file, buffer, operation, 16 * MIB).seconds for _ in range(rounds)
                        )[rounds // 2]
                        for operation in ("read", "write")
                    }
                found.append(Bandwidth(rates["read"], rates["write"]))
            finally:
                remove(path)
    return found


def remove(path: Path) -> None:
    """Remove a file that may never have been made: an error of the way there is the one to tell."""
    with contextlib.suppress(OSError):
        path.unlink()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
