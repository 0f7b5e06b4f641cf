"""Gradients that wait for their update on DISK: a few windows of them are in HOST, the rest is in files.

    added to ─► its window is here ─► another window is needed: written ─► read by the update, into its tile
                    ▲                                              │
                    └────────────── added to once more: read ──────┘

A window is a stretch of one unit's gradient. Backward fills one after the other, so all but the newest are written
while it goes on; only a window that is added to again, by another micro-batch, is waited for.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import torch

from offload.aio.protocols import Future
from offload.swapper.memory.host_arena import Lease
from offload.swapper.store.spill_file import Scratch


def windows(borders: Sequence[int], numel: int) -> tuple[range, ...]:
    """Stretches of at most `numel` elements that begin and end at some of `borders` and cover all between them."""
    found: list[range] = []
    start = borders[0]
    for before, border in zip(borders, [*borders[1:], None], strict=True):
        if border is None or border - start > numel:
            if start < before:
                found.append(range(start, before))
            start = before
    assert all(len(window) <= numel for window in found), "two borders are further apart than a window is long"
    return tuple(found)


class Spill:
    """The gradients of some units, in `leases` (whose memory it takes) and `scratch`.

    `part` may be called by any thread, one at a time; `read` by the update worker; the others by the thread that calls
    `step()`. Who holds the lock waits for I/O at most. Any error in here is told to `fail`: a gradient is lost.
    """

    def __init__(
        self,
        windows: Mapping[int, Sequence[range]],
        dtype: torch.dtype,
        leases: Sequence[Lease],
        scratch: Scratch,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._windows = windows
        self._dtype, self.scratch, self._fail = dtype, scratch, fail
        self._lock = threading.Lock()
        self._free = list(leases)
        self._here: dict[tuple[int, int], Lease] = {}
        """Windows whose newest bytes are in a lease alone, by unit and number; oldest first."""
        self._writing: dict[tuple[int, int], tuple[Lease, Future]] = {}
        self._written: set[tuple[int, int]] = set()

    def __contains__(self, unit: int) -> bool:
        return unit in self._windows

    def part(self, unit: int, start: int, stop: int) -> torch.Tensor:
        """(stop - start,) of a unit's gradient, to be changed before the next call. It must lie in one window."""
        number = bisect_right(self._windows[unit], start, key=lambda window: window.start) - 1
        window = self._windows[unit][number]
        assert window.start <= start and stop <= window.stop
        with self._lock:
            try:
                lease = self._bring((unit, number))
            except BaseException as error:  # also Ctrl-C: what was on its way is not known any more
                self._fail(error)
                raise
        return lease.tensor(torch.uint8)[: len(window) * self._dtype.itemsize].view(self._dtype)[
            start - window.start : stop - window.start
        ]

    def flush(self) -> None:
        """Begin to write all that is here: the updates will read it."""
        with self._lock:
            for key in list(self._here):
                self._write(key)

    def read(self, unit: int, start: int, stop: int, buffer: memoryview) -> Future:
        """Fill `buffer` with elements [start, stop) of a unit's gradient, which must have been flushed."""
        with self._lock:
            for key in [key for key in self._writing if key[0] == unit]:
                self._end_write(key)
        return self.scratch.read(unit, start * self._dtype.itemsize, buffer)

    def forget(self, unit: int) -> None:
        """The bytes of a unit mean nothing any more."""
        with self._lock:
            for key in [key for key in self._writing if key[0] == unit]:
                self._end_write(key)
            for key in [key for key in self._here if key[0] == unit]:
                self._free.append(self._here.pop(key))
            self._written = {key for key in self._written if key[0] != unit}

    def close(self) -> None:
        """Wait for writes in flight, whose errors mean nothing any more, and give the room on the drives back."""
        with self._lock:
            for _, future in self._writing.values():
                try:
                    future.wait()
                except OSError:
                    pass
            self.scratch.close()

    # -- under the lock -----------------------------------------------------------------------------

    def _bring(self, key: tuple[int, int]) -> Lease:
        if key in self._here:
            return self._here[key]
        if key in self._writing:
            lease, future = self._writing[key]
            future.wait()  # a write's buffer may not change before its end
            del self._writing[key]
        else:
            lease = self._take()
            if key in self._written:
                self.scratch.read(key[0], self._offset(key), lease.buffer[: self._nbytes(key)]).wait()
        for other in list(self._here):
            self._write(other)
        self._here[key] = lease
        return lease

    def _take(self) -> Lease:
        if not self._free:
            if not self._writing:
                self._write(next(iter(self._here)))
            self._end_write(next(iter(self._writing)))
        return self._free.pop()

    def _write(self, key: tuple[int, int]) -> None:
        lease = self._here.pop(key)
        future = self.scratch.write(key[0], self._offset(key), lease.buffer[: self._nbytes(key)])
        self._writing[key] = (lease, future)
        self._written.add(key)

    def _end_write(self, key: tuple[int, int]) -> None:
        lease, future = self._writing[key]
        future.wait()
        del self._writing[key]
        self._free.append(lease)

    def _offset(self, key: tuple[int, int]) -> int:
        return self._windows[key[0]][key[1]].start * self._dtype.itemsize

    def _nbytes(self, key: tuple[int, int]) -> int:
        return len(self._windows[key[0]][key[1]]) * self._dtype.itemsize
