"""Gradients that wait for their update on DISK: a few windows of them are in HOST, the rest is in files.

    added to ─► its window is in HOST ─► another window is needed: written ─► read by the update, into its tile
                    ▲                                              │
                    └────────────── added to once more: read ──────┘

A window is a range of one unit's gradient, of one parameter if it is large. A backward fills one after the other, so
all but the newest are written while the backward runs; only a window that is added to again, by another micro-batch, is
waited for.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from offload.aio.protocols import Future, wait_for_all
from offload.swapper.memory.host_arena import HostBuffer
from offload.swapper.store.spill_file import SpillFile
from offload.timeline import Row, Timeline

_TOGETHER = 16
"""Fraction of the longest window, 1/16, up to which parameters share one."""


def windows(borders: Sequence[int], starts: Sequence[int], numel: int) -> tuple[range, ...]:
    """Returns ranges of at most `numel` elements that begin and end at some of `borders` and cover all between them.

    Parameters share a window only while it is small: their gradients come in an order of their own, so a large window
    would be written, read back for the next parameter, and written once more.

    Args:
        borders: positions at which chunks begin, sorted, with the first and the last of all.
        starts: positions at which parameters begin, sorted.
        numel: most elements of a window.
    """
    # Behind its last parameter a partition has padding, in which no chunk begins.
    borders = [*(cut for each in itertools.pairwise(borders) for cut in range(*each, numel)), borders[-1]]
    found: list[range] = []
    start = borders[0]
    for before, border in zip(borders, [*borders[1:], None], strict=True):
        shared = bisect_right(starts, before) > bisect_right(starts, start)
        if border is None or border - start > (numel // _TOGETHER if shared else numel):
            if start < before:
                found.append(range(start, before))
            start = before
    assert all(len(window) <= numel for window in found), "two borders are further apart than a window is long"
    return tuple(found)


class DiskSpill:
    """The gradients of some units, in host buffers and a scratch file.

    Any thread may call `part`, one at a time. The update worker calls `read`, and `forget` after an update. All other
    methods, and `forget` without an update, belong to the thread that calls `step()`. The lock's holder waits only for
    I/O. An error is raised in the caller and reported to `fail`,
    since a gradient is lost.
    """

    def __init__(
        self,
        windows: Mapping[int, Sequence[range]],
        dtype: torch.dtype,
        host_buffers: Sequence[HostBuffer],
        scratch: SpillFile,
        fail: Callable[[BaseException], None],
        timeline: Timeline,
    ) -> None:
        """Takes the memory of `host_buffers`, and owns `scratch` from now on.

        Args:
            windows: the windows of each unit, in order.
            dtype: dtype of the stored gradients.
            host_buffers: host buffers, each as large as the largest window.
            scratch: the file of all units.
            fail: receives an error that loses a gradient.
            timeline: receives the waits of `part`.
        """
        self._windows = windows
        self._dtype, self.scratch, self._fail, self._timeline = dtype, scratch, fail, timeline
        self._lock = threading.Lock()
        self._free = list(host_buffers)
        self._here: dict[tuple[int, int], HostBuffer] = {}
        """Windows whose newest bytes are in a host buffer only, by unit and number; oldest first."""
        self._writing: dict[tuple[int, int], tuple[HostBuffer, Future]] = {}
        """Windows whose write is in flight; the buffer must not change until its future is done."""
        self._written: set[tuple[int, int]] = set()

    def __contains__(self, unit: int) -> bool:
        return unit in self._windows

    def part(self, unit: int, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of a unit's gradient, all in one window, to be used before the next call."""
        # The last window that begins at or before `start`.
        number = bisect_right(self._windows[unit], start, key=lambda window: window.start) - 1
        window = self._windows[unit][number]
        assert window.start <= start and stop <= window.stop
        with self._locked():
            host_buffer = self._fetch((unit, number))
        return host_buffer.tensor(torch.uint8)[: len(window) * self._dtype.itemsize].view(self._dtype)[
            start - window.start : stop - window.start
        ]

    def flush(self) -> None:
        """Starts the writes of all windows in HOST, since updates read gradients from the file."""
        with self._locked():
            for key in list(self._here):
                self._write(key)

    def read(self, unit: int, start: int, stop: int, buffer: memoryview) -> Future:
        """Starts to fill `buffer` with elements [start, stop) of a unit's gradient, which must have been flushed."""
        with self._locked():
            for key in [key for key in self._writing if key[0] == unit]:
                self._end_write(key)
        return self.scratch.read(unit, start * self._dtype.itemsize, buffer)

    def forget(self, unit: int) -> None:
        """Drops the gradient of a unit; its buffers may be reused."""
        with self._locked():
            for key in [key for key in self._writing if key[0] == unit]:
                self._end_write(key)
            for key in [key for key in self._here if key[0] == unit]:
                self._free.append(self._here.pop(key))
            # So the unit's next gradient does not read back the bytes of this step.
            self._written = {key for key in self._written if key[0] != unit}

    def close(self) -> None:
        """Waits for writes in flight, whose errors no longer matter, and frees the space on the drives."""
        with self._lock:
            wait_for_all(future for _, future in self._writing.values())
            self.scratch.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Takes the lock for a change of windows. An error in the context loses a gradient, and so stops the engine."""
        with self._lock:
            try:
                yield
            except BaseException as error:  # also Ctrl-C: the state of writes in flight is unknown then
                self._fail(error)
                raise

    # -- under the lock -----------------------------------------------------------------------------

    def _fetch(self, key: tuple[int, int]) -> HostBuffer:
        """Returns the host buffer of a window, read back from the file if the window was written before."""
        if key in self._here:
            return self._here[key]
        if key in self._writing:
            host_buffer, future = self._writing[key]
            with self._waits("write"):
                future.wait()  # a write's buffer may not change before its end
            del self._writing[key]
        else:
            host_buffer = self._take()
            # A window that was never written needs no read: its first gradients are stored, not added.
            if key in self._written:
                with self._waits("read"):
                    self.scratch.read(key[0], self._offset(key), host_buffer.buffer[: self._nbytes(key)]).wait()
        # Start to write all other windows now: the backward does not return to them, so writes overlap the compute.
        for other in list(self._here):
            self._write(other)
        self._here[key] = host_buffer
        return host_buffer

    def _take(self) -> HostBuffer:
        """Returns a free host buffer, after the oldest write if necessary."""
        if not self._free:
            # If no write is in flight that would free a buffer, the oldest window is written.
            if not self._writing:
                self._write(next(iter(self._here)))
            with self._waits("write"):
                self._end_write(next(iter(self._writing)))
        return self._free.pop()

    def _write(self, key: tuple[int, int]) -> None:
        """Starts to write a window."""
        host_buffer = self._here.pop(key)
        future = self.scratch.write(key[0], self._offset(key), host_buffer.buffer[: self._nbytes(key)])
        self._writing[key] = (host_buffer, future)
        self._written.add(key)

    def _end_write(self, key: tuple[int, int]) -> None:
        """Waits for a write and frees its buffer."""
        host_buffer, future = self._writing[key]
        future.wait()
        del self._writing[key]
        self._free.append(host_buffer)

    def _waits(self, act: str) -> AbstractContextManager[None]:
        return self._timeline.span(Row.WAITS, f"waits for the {act} of gradients")

    def _offset(self, key: tuple[int, int]) -> int:
        return self._windows[key[0]][key[1]].start * self._dtype.itemsize

    def _nbytes(self, key: tuple[int, int]) -> int:
        return len(self._windows[key[0]][key[1]]) * self._dtype.itemsize
