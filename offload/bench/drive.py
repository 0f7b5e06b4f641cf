"""Rates of the drives beside which a benchmark's steps are held, and the bytes that Linux counts for a process."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from offload.aio import IoQueue, StripedFile, aligned_empty
from offload.aio.measure import move, remove
from offload.hardware.noise import fill_with_noise
from offload.sizes import MIB, align_up

_REQUEST_BYTES = 16 * MIB


class Rates(NamedTuple):
    """Bytes a second of the drives by themselves: reading, writing, and both at once in equal parts."""

    read: float
    write: float
    mixed: float

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Returns the least time for so many bytes: one direction after the other, or both at once."""
        # Equal amounts move at the mixed rate, the excess of one direction at that direction's rate.
        both = min(read_bytes, written_bytes)
        at_once = 2 * both / self.mixed + (read_bytes - both) / self.read + (written_bytes - both) / self.write
        return min(at_once, read_bytes / self.read + written_bytes / self.write)


def median_rates(rates: Sequence[Rates]) -> Rates:
    """Returns the median of each rate."""
    return Rates(*(statistics.median(each) for each in zip(*rates, strict=True)))


@contextlib.contextmanager
def drive_rates(
    paths: Sequence[Path],
    nbytes: int,
    backend: str = "auto",
    block_bytes: int | None = None,
    depth: int | None = None,
) -> Iterator[Callable[[], Rates]]:
    """Yields a function that measures the rates of all drives together, with a queue and files like an engine's.

    Args:
        paths: one file for each drive, created here and removed afterwards.
        nbytes: bytes of the files together, and of a buffer in memory.
        backend: backend of the queue.
        block_bytes: bytes of a block; None for the backend's default.
        depth: blocks in flight; None for the backend's default.

    Raises:
        IoError: a file cannot be created, written or read.
    """
    buffer = aligned_empty(nbytes)
    fill_with_noise(buffer)
    try:
        with (
            StripedFile(paths, create=True) as file,
            IoQueue(backend, block_bytes=block_bytes, depth=depth) as queue,
        ):
            file.reserve(len(buffer))
            move(queue, file, buffer, "write", _REQUEST_BYTES)  # untimed: first writes are slower

            def rate(operation: str) -> float:
                # Two requests at least, so that a mixed pass reads and writes.
                request_bytes = min(_REQUEST_BYTES, align_up(len(buffer) // 2))
                passes = [move(queue, file, buffer, operation, request_bytes) for _ in range(3)]
                return statistics.median(each.nbytes / each.seconds for each in passes)

            yield lambda: Rates(rate("read"), rate("write"), rate("mixed"))
    finally:
        for path in paths:
            remove(path)


def kernel_bytes() -> tuple[int, int] | None:
    """Returns the bytes that this process has read from and written to drives; None if Linux does not count them."""
    try:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["read_bytes"]), int(lines["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None
