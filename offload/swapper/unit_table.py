"""The pager's table: the entries of all units, the order of their uses, and the one lock that guards all of it.

[Note: torn] A Ctrl-C may come between any two lines of the thread that runs the model. While it waits, for a lock, a
read or an update, all is whole, and the call can be given up; that is where nearly all of its time goes. In between,
`torn` is set. Where it still is at the next call, `Pager.check_whole` stops the engine, and the last commit is intact.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from offload.aio.protocols import Future
from offload.errors import EngineFailed
from offload.states import Tier
from offload.swapper.access_order import Trace
from offload.swapper.memory.device import DONE, Event
from offload.swapper.memory.device_arena import DeviceArena, Slice
from offload.swapper.memory.host_arena import HostArena, Lease
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


class UnitSize(NamedTuple):
    """What the pager must know of a unit."""

    name: str
    nbytes: int
    """Bytes of all its weights, as they lie on the device."""
    home: Tier
    share: tuple[range, ...]
    """Which of these bytes are this rank's WEIGHT partition, in the order in which they lie there."""

    @property
    def title(self) -> str:
        """The name, for words."""
        return self.name or "the root"

    @property
    def part_nbytes(self) -> int:
        """Bytes of this rank's WEIGHT partition."""
        return sum(len(stretch) for stretch in self.share)

    @property
    def stays(self) -> bool:
        """Whether the slice on the device is the home: one rank has the whole unit, and that is where it lives."""
        return self.home is Tier.DEVICE and self.part_nbytes == self.nbytes

    @property
    def start(self) -> Residency:
        """Where the weights are before the first use."""
        if self.home is Tier.DISK:
            return Residency.DISK
        return Residency.DEVICE if self.stays else Residency.HOST


class Transfer(NamedTuple):
    """A read in flight, with the lease that it fills."""

    lease: Lease
    future: Future


@dataclass(eq=False)
class Entry:
    """One unit's weights. Only the pager touches it, under the lock; only `Table.move` assigns the residency."""

    index: int
    size: UnitSize
    residency: Residency
    lease: Lease | None = None
    slice: Slice | None = None
    home_slice: Slice | None = None
    """The partition's home on the device, where a unit that is in use lies elsewhere, gathered from all ranks."""
    transfer: Transfer | None = None
    copied: Event = DONE
    """The end of the last copy out of the lease, or out of the home on the device."""
    uploaded: Event = DONE
    """When the slice is filled: after that copy, and with several ranks the gather."""
    read: Event = DONE
    """The last compute that was started on the slice."""
    pins: int = 0
    """Uses on the device that have begun and not ended; a pinned unit is never dropped."""
    updating: bool = False
    """An update is scheduled and not delivered: nobody may read these weights."""
    in_update: bool = False
    """The update worker has begun with it: the lease must stay."""
    unwritten: bool = False
    """The lease's write to the store is in flight: the lease must stay."""
    updates: int = 0
    """How often the weights have changed; a view saved before a change must not be read after it."""
