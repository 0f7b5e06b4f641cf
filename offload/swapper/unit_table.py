"""The pager's table: the entries of all units, the order of their uses, and the one lock that guards all of it.

[Note: torn] A Ctrl-C may come between any two lines of the thread that runs the model. While it waits, for a lock, a
read or an update, all is whole, and the call can be given up; that is where nearly all of its time goes. In between,
`torn` is set. Where it still is at the next call, `Pager.check_whole` stops the engine, and the last commit is intact.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from offload.errors import EngineFailed
from offload.swapper.access_order import Trace
from offload.swapper.entry import Entry, UnitSize
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena
from offload.swapper.memory.interruptible_lock import Monitor
from offload.swapper.residency import ARROWS, Residency
from offload.timeline import OFF, Row, Timeline


class MemoryCounters:
    """Counters of the bytes in use: of the device arena, and of each class of the host's leases."""

    def __init__(self, host: HostArena, device: DeviceArena, timeline: Timeline) -> None:
        self._host, self._device, self._timeline = host, device, timeline
        self._titles = {name: f"leases of {name}" for name in host.regions}

    def count(self) -> None:
        """Records the counters as they are now. The lock of the pager is held."""
        for name, region in self._host.regions.items():  # anew each time: a region changes when the cache is dropped
            if region.space.nbytes:
                self._timeline.count(self._titles[name], region.space.used_bytes)
        self._timeline.count("device memory", self._device.used_bytes)


class Table:
    """What all parts of the pager share. The methods are for the thread that holds the lock, but for `check`."""

    def __init__(
        self,
        sizes: Sequence[UnitSize],
        committed: Callable[[], bool] = lambda: False,
        *,
        timeline: Timeline = OFF,
        memory: MemoryCounters | None = None,
    ) -> None:
        """Makes an entry for each unit.

        Args:
            sizes: the units.
            committed: returns whether the store holds a commit, for the text of an error.
            timeline: shows the waits.
            memory: is counted at each change; None where nothing records it.
        """
        self.changed = Monitor()
        self.version = 0  # counts changes, so that a waiter can tell whether it missed one
        self.entries = [Entry(index, size, size.start) for index, size in enumerate(sizes)]
        self.trace = Trace()
        self.timeline = timeline
        self._memory = memory
        self.failure: BaseException | None = None
        self.torn = False
        """Whether the caller's thread is in the middle of a change; see [Note: torn]."""
        self._committed = committed
        self.rewritten = False
        """Whether bytes that the last commit names were written over, by a load that is not committed yet."""

    def move(self, entry: Entry, to: Residency) -> None:
        """The one place that assigns a residency."""
        assert (entry.residency, to) in ARROWS, f"{entry.size.name}: {entry.residency} to {to}"
        entry.residency = to
        self.notify()

    def notify(self) -> None:
        """Tell all waiters of a change."""
        if self._memory is not None:
            self._memory.count()
        self.version += 1
        self.changed.notify_all()

    def wait(self, what: str) -> None:
        """Wait for a change; `what` is for the time line. What the lock guards is whole meanwhile."""
        torn, self.torn = self.torn, False  # whoever serves another rank may not be in the middle of anything
        with self.timeline.span(Row.WAITS, what):
            self.changed.wait()
        self.torn = torn

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What the lock guards is whole in here: for a wait of another kind."""
        torn, self.torn = self.torn, False
        yield
        self.torn = torn

    def fail(self, error: BaseException, entry: Entry | None = None) -> None:
        """Stop: every waiter and every later `check` raises `EngineFailed` from the first such `error`."""
        if entry is not None and entry.residency is not Residency.FAILED:
            self.move(entry, Residency.FAILED)
        if self.failure is None:
            self.failure = error
        self.notify()

    def check(self) -> None:
        """Raise `EngineFailed`, with its cause, after `fail`."""
        if self.failure is not None:
            raise EngineFailed(
                f"the engine stopped at an earlier error: {self.failure}; {_what_is_left(self, self._committed())}"
            ) from self.failure


def _what_is_left(table: Table, committed: bool) -> str:
    """What a later process can go on from, after the table's failure."""
    if not committed:
        return "nothing was committed, so start again, or from a checkpoint"
    if table.rewritten:
        return (
            "a load was replacing frozen weights, so the last committed step is not whole: start the run over and "
            "load the checkpoint again"
        )
    error = table.failure
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EBADMSG:
            return (
                'start again with "resume": "auto", which checks everything and takes the commit before if that is '
                "whole; else go back to a checkpoint"
            )
        error = error.__cause__
    return "the last committed step is intact"
