"""The pager's table: the entries of all units, the access order, and the one lock that guards both.

An error or a Ctrl-C can abandon a call only while the call waits for a lock, a read or an update. The table is
consistent during each such wait; between waits every change is `uninterrupted`.
"""

from __future__ import annotations

import enum
import errno
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from offload.aio import Priority
from offload.aio.protocols import Future
from offload.errors import EngineFailed, no_memory
from offload.states import Tier
from offload.swapper.memory.device import DONE, Event
from offload.swapper.memory.device_arena import DeviceBuffer
from offload.swapper.memory.host_arena import HostBuffer
from offload.swapper.memory.lock import InterruptibleLock
from offload.swapper.policy import AccessOrder, Companions
from offload.timeline import Row, Timeline

# -- residency -----------------------------------------------------------------------------------------
#
# States of a unit's weights, and the transitions between them.
#
# The pager keeps one residency for each unit: the location of this rank's WEIGHT partition, the only state that moves
# as a whole. The other states stay in their tier; an update streams them through tiles and writes them back.
#
#     state       invariant
#     ---------   ---------------------------------------------------------------------------------
#     DISK        The source of weights contains the newest copy, and no buffer does. While the unit is updated, a host
#                 buffer may receive newer weights (`WeightUpdates.buffer_for`, `SpeculativeWeights.adopt`).
#     READING     A host buffer is being filled from there; the entry's transfer owns buffer and read.
#     HOST        A host buffer holds the newest copy, and no write of that copy is in flight: the store contains
#                 it as well, or the unit's tier is HOST. If the tier is DISK, the buffer may be evicted.
#                 With several ranks, a partition whose tier is DEVICE is HOST as well: at hand, not gathered.
#     WRITING     A host buffer holds the newest copy, whose write to the store is in flight. The buffer stays.
#     UPLOADING   A thread is starting the copy from a host buffer to a device buffer, and the gather of the other
#                 ranks' partitions. A unit that is too large for a host buffer is being read and copied chunk by chunk.
#                 On a CPU with one rank such a unit is read into its device buffer instead (`reading_in_place`):
#                 the entry's transfer owns the read, the entry the buffer.
#     DEVICE      A device buffer holds the newest copy, or will once the event `uploaded` is done; the host buffer
#                 is read until the event `copied` is done. A host buffer may hold the copy as well
#                 (`host_buffer is not None`): the write of an update may still be in flight (`unwritten`), or there was
#                 room to keep the buffer. On a CPU with one rank a unit of tier HOST is always DEVICE: both buffers
#                 are the same memory.
#     FAILED      A read, write or kernel failed on this unit. Memory and store may disagree; nothing is
#                 read from the unit again, and the store opens at its last committed step.
#
#               start_read            finish_read             upload              upload
#         DISK ────────────► READING ─────────────► HOST ───────────► UPLOADING ───────────► DEVICE
#          ▲ │                                      ▲ ▲ │                  ▲                   │
#          │ │                              flushed │ │ │ publish_weights  │ upload            │
#          │ │          publish_weights             │ │ ▼                  │                   │
#          │ └────────────────────────────────────► WRITING ───────────────┤                   │
#          ├──────────────────── stream, or a read in place ───────────────┘                   │
#          ├──────────────── evict ────────────── HOST                                         │
#          └───────────────────── drop: to WRITING or HOST if the host buffer is kept ◄────────┘
#
# A device copy is always clean: only an update or a load writes weights, and only in their tier, a host buffer or the
# store. (A partition of tier DEVICE is no copy: it is written in place.) So a unit leaves the device by a drop, never
# by a copy. `UnitTable.move` is the only code that assigns a residency, and refuses every arrow that `ARROWS` does not
# list.


class Residency(enum.Enum):
    """Location of the newest copy of a unit's weights; the module's docstring defines each value."""

    DISK = "disk"
    READING = "reading"
    HOST = "host"
    WRITING = "writing"
    UPLOADING = "uploading"
    DEVICE = "device"
    FAILED = "failed"

    # Enum's own hash is a function of Python, and `UnitTable.move` hashes two members. Each equals itself alone.
    __hash__ = object.__hash__


_R = Residency

ARROWS: Final[dict[tuple[Residency, Residency], str]] = {
    (_R.DISK, _R.READING): "start_read",
    (_R.READING, _R.HOST): "finish_read",
    (_R.HOST, _R.UPLOADING): "upload",
    (_R.WRITING, _R.UPLOADING): "upload",
    (_R.DISK, _R.UPLOADING): "stream",  # or `DeviceCache.start_read`
    (_R.UPLOADING, _R.DEVICE): "upload",
    (_R.HOST, _R.DISK): "evict",  # or `SpeculativeWeights.begin`
    (_R.WRITING, _R.HOST): "flushed",
    (_R.DEVICE, _R.DISK): "drop",
    (_R.DEVICE, _R.HOST): "drop",
    (_R.DEVICE, _R.WRITING): "drop",
    # An update's result: the newest copy is in a new host buffer, or in the other slot if no buffer was free.
    (_R.DISK, _R.WRITING): "publish_weights",
    (_R.HOST, _R.WRITING): "publish_weights",
    (_R.DISK, _R.HOST): "publish_weights",
    # No transition leaves FAILED: the engine stops, and the next process opens the store at its last commit.
    **{(state, _R.FAILED): "fail" for state in _R if state is not _R.FAILED},
}
"""Every allowed transition, with the function of the pager (or of its host or device side) that performs it."""


# -- weight source -------------------------------------------------------------------------------------
#
# The files from which the pager reads units of tier DISK, whatever files these are.
#
#     store         swap files of a run: this rank's partition, from the slot of the newest weights
#     model files   the model's own files: the pages that contain the tensors of a unit


class UploadPiece(NamedTuple):
    """Consecutive bytes that a read delivers, and the bytes of the unit to which they are copied."""

    start: int
    """First byte in the host buffer."""
    target: range
    """Bytes of the unit on the device."""


def pieces_of(shard_ranges: Sequence[range]) -> tuple[UploadPiece, ...]:
    """Returns the pieces of a partition that consists of `shard_ranges` of its unit, one after the other."""
    ends = itertools.accumulate(map(len, shard_ranges))
    return tuple(UploadPiece(end - len(target), target) for end, target in zip(ends, shard_ranges, strict=True))


class WeightSource(Protocol):
    """Files that contain the weights of units. Any thread may submit reads and wait for them."""

    @property
    def committed(self) -> bool:
        """True if a later process can resume from these files."""

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: Priority) -> Future:
        """Submits a read of the newest weights of a unit. The weights must not change before the read has ended.

        Byte `start` counts in `UnitSize.shard_nbytes`. `buffer` belongs to the caller and must live until the future is
        done. The `wait` of the request raises `IoError` if the bytes cannot be read, are damaged, or have changed on
        disk. If this call itself raises, nothing writes to `buffer` any more.
        """


# -- unit table ----------------------------------------------------------------------------------------


class UnitTable:
    """State that all components of the pager share. The caller of a method holds the lock, except for `check`."""

    def __init__(
        self,
        sizes: Sequence[UnitSize],
        committed: Callable[[], bool],
        *,
        timeline: Timeline,
        record_memory: Callable[[], None],
    ) -> None:
        """Creates an entry for each unit.

        `committed` returns True if the store holds a commit, for the text of an error. `record_memory` is called after
        each change, under the lock.
        """
        self.changed = InterruptibleLock()
        # Counts changes, so that a waiter can detect a change that it missed.
        self.version = 0
        self.entries = [UnitEntry(index, size, size.start) for index, size in enumerate(sizes)]
        self.on_device = {entry.index for entry in self.entries if entry.residency is Residency.DEVICE}
        """Units whose residency is DEVICE."""
        self.access_order = AccessOrder()
        # Each use, release and read looks at some of these, and not at all units: a mixture has thousands.
        self.on_disk = self.access_order.units()
        """Units whose residency is DISK, and whose bytes there are the newest."""
        self.held: dict[int, UnitEntry] = {}
        """Units with a pin, or whose weights are being copied."""
        self.reading: dict[int, UnitEntry] = {}
        """Units with a read in flight, or one that has ended and is not delivered."""
        for entry in self.entries:
            self.on_disk.put(entry.index, entry.residency is Residency.DISK)
        self.timeline = timeline
        self._record_memory = record_memory
        self.failure: BaseException | None = None
        self._committed = committed
        self.rewritten = False
        """True if a load that is not committed yet has overwritten bytes that the last commit names."""

    def move(self, entry: UnitEntry, to: Residency) -> None:
        """Assigns a residency and notifies all waiters. No other code assigns one."""
        assert (entry.residency, to) in ARROWS, f"{entry.size.name}: {entry.residency} to {to}"
        entry.residency = to
        if to is Residency.DEVICE:
            self.on_device.add(entry.index)
        else:
            self.on_device.discard(entry.index)
        self.on_disk.put(entry.index, to is Residency.DISK and not entry.updating)
        self.notify()

    def set_updating(self, entry: UnitEntry, updating: bool) -> None:
        """Forbids or allows reads of a unit's weights."""
        entry.updating = updating
        self.on_disk.put(entry.index, entry.residency is Residency.DISK and not updating)

    def hold(self, entry: UnitEntry, pins: int = 0, copying: int = 0) -> None:
        """Adds to the pins of a unit, and to the copies of its weights in progress."""
        entry.pins += pins
        entry.copying += copying
        if entry.pins or entry.copying:
            self.held[entry.index] = entry
        else:
            self.held.pop(entry.index, None)

    def notify(self) -> None:
        """Wakes all threads that wait for a change."""
        self._record_memory()
        # any thread: `Pager.version` reads it without the lock, since it only ever grows.
        self.version += 1
        # One condition serves all kinds of waits, so each waiter checks again whether its own wait is over.
        self.changed.notify_all()

    def wait(self, what: str) -> None:
        """Waits for a change without the lock. The table must be consistent; `what` is the title on the timeline."""
        # calling thread: any entry may have changed by the time the lock is held again, so callers look again.
        with self.timeline.span(Row.WAITS, what):
            self.changed.wait()

    def used_last(self, entries: Iterable[UnitEntry]) -> UnitEntry | None:
        """Returns the entry whose next use is furthest away, of equals the lowest index; None without entries."""
        distance = self.access_order.distance
        return max(entries, key=lambda entry: (distance(entry.index), -entry.index), default=None)

    def begin_transfer(self, entry: UnitEntry, transfer: Transfer) -> None:
        """Records a read that has been submitted."""
        entry.transfer = transfer
        self.reading[entry.index] = entry

    def end_transfer(self, entry: UnitEntry) -> Transfer | None:
        """Waits for the read of `entry` without the lock, and returns its transfer to the first waiting thread.

        The caller delivers the transfer. Returns None if another thread has received it.
        """
        transfer = entry.transfer
        assert transfer is not None
        try:
            # calling thread: other threads need the lock while this one waits for the drive. The threads of the I/O
            # queue end the read without it.
            with self.timeline.span(Row.WAITS, f"waits for read of {entry.size.title}"):
                self.changed.without_lock(transfer.future.wait)
        except Exception as error:  # not KeyboardInterrupt: the read continues, and a later call delivers it
            self.fail(error, entry)
            raise
        # Another thread may have delivered this read, and even started the next one, while the lock was released.
        if entry.transfer is not transfer:
            return None
        entry.transfer = None
        del self.reading[entry.index]
        return transfer

    def fail(self, error: BaseException, entry: UnitEntry | None = None) -> None:
        """Stops the engine: every waiter and every later `check` raises `EngineFailed` from the first `error`.

        The residency of `entry`, the unit that failed, becomes FAILED; None if no unit is involved.
        """
        if entry is not None and entry.residency is not Residency.FAILED:
            self.move(entry, Residency.FAILED)
        # The first error is the cause; later ones are consequences.
        if self.failure is None:
            self.failure = no_memory(error) or error
        self.notify()

    def check(self) -> None:
        """Raises `EngineFailed`, with its cause, after `fail`. May be called without the lock."""
        # any thread, without the lock: `failure` is assigned once, and never reset.
        if self.failure is not None:
            cause = str(self.failure) or type(self.failure).__name__  # a KeyboardInterrupt has no text
            raise EngineFailed(
                f"the engine stopped at an earlier error: {cause}; {_what_is_left(self, self._committed())}"
            ) from self.failure


def _what_is_left(table: UnitTable, committed: bool) -> str:
    """Returns a sentence about the state from which a later process can resume, after the table's failure."""
    if not committed:
        return "nothing was committed, so start anew, or from a checkpoint"
    if table.rewritten:
        return (
            "a load was replacing frozen weights, so the last committed step is incomplete: start the run over and "
            "load the checkpoint again"
        )
    error = table.failure
    # A checksum that differs (EBADMSG) may be the cause of the error that stopped the engine.
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EBADMSG:
            return (
                'start again with "resume": "auto", which checks every byte and falls back to the previous commit if '
                "its bytes are right; otherwise fork a kept step (`offload log` lists them), or go back to a checkpoint"
            )
        error = error.__cause__
    return "the last committed step is intact"


@dataclass(frozen=True)
class UnitSize:
    """Sizes of a unit, and the tier of its WEIGHT partition."""

    name: str
    nbytes: int
    """Bytes of all weights of the unit, as laid out on the device."""
    tier: Tier
    shard_nbytes: int
    """Bytes of this rank's WEIGHT partition; for a unit in other files, the bytes that its source delivers."""
    pieces: tuple[UploadPiece, ...]
    """The ranges of these bytes that are copied to the device, each with its place there."""
    expanded_nbytes: int = 0
    """Bytes at the end of the unit that are in no partition: the device computes them from the other bytes."""
    gathered: bool = False
    """True if ranks gather the unit, although this rank's partition may be all of it."""
    share: tuple[range, ...] = ()
    """The byte ranges of the unit that form this rank's WEIGHT partition; empty for the targets of the pieces."""
    companions: tuple[Companions, ...] = ()
    """Units that come and go, and are on the device at the same time; one entry for each place where they are."""
    host_addressable: bool = False
    """True if the device works in host memory, so that a unit of tier HOST is used where it is."""

    @property
    def title(self) -> str:
        """Returns the name for messages; the root module's unit has an empty name."""
        return self.name or "the root"

    @property
    def stored_nbytes(self) -> int:
        """Returns the bytes of the partitions of all ranks."""
        return self.nbytes - self.expanded_nbytes

    # Cached: each use of a unit reads the properties below.
    @functools.cached_property
    def shard_ranges(self) -> tuple[range, ...]:
        """The byte ranges of the unit that form this rank's WEIGHT partition, in the order of the partition's bytes."""
        return self.share or tuple(piece.target for piece in self.pieces)

    @functools.cached_property
    def is_whole(self) -> bool:
        """True if the partition contains the bytes of the unit in their order, so that one copy moves it."""
        in_order = all(piece.start == piece.target.start for piece in self.pieces)
        return in_order and self.shard_nbytes == self.nbytes

    @functools.cached_property
    def device_resident(self) -> bool:
        """True if the unit never leaves the device: it is in the device's memory, and this rank has all of it."""
        there = self.tier is Tier.DEVICE or (self.tier is Tier.HOST and self.host_addressable)
        return there and self.shard_nbytes == self.nbytes and not self.gathered

    @property
    def start(self) -> Residency:
        """Returns the residency before the first use."""
        if self.tier is Tier.DISK:
            return Residency.DISK
        return Residency.DEVICE if self.device_resident else Residency.HOST


class Transfer(NamedTuple):
    """A read in flight. Its host buffer is None if the read fills the unit's device buffer."""

    host_buffer: HostBuffer | None
    future: Future


@dataclass(eq=False)
class UnitEntry:
    """Weights of one unit. Only the pager uses an entry, under the lock; `UnitTable.move` alone sets the residency."""

    index: int
    size: UnitSize
    residency: Residency
    host_buffer: HostBuffer | None = None
    device_buffer: DeviceBuffer | None = None
    tier_buffer: DeviceBuffer | None = None
    """Buffer of the partition if its tier is DEVICE.

    With several ranks, the gathered unit has another buffer, `device_buffer`.
    """
    transfer: Transfer | None = None
    copied: Event = DONE
    """End of the last copy out of the host buffer, or out of `tier_buffer`."""
    uploaded: Event = DONE
    """Event after which the device buffer is filled: after `copied`, and with several ranks after the gather."""
    read: Event = DONE
    """End of the last compute that reads the device buffer."""
    pins: int = 0
    """Number of open uses on the device. A pinned unit is never dropped."""
    updating: bool = False
    """True until the result of a scheduled update is ready: no thread may read these weights."""
    in_update: bool = False
    """True once the update worker has begun to update the unit: the host buffer must stay."""
    unwritten: bool = False
    """True while the write of the host buffer to the store is in flight: the host buffer must stay."""
    copying: int = 0
    """Number of copies of weights in progress, for an update under the backward or a lookup: both buffers must stay."""
    fresh: HostBuffer | None = None
    """Weights after an update under the backward. Nobody reads them before the step is decided."""
    fresh_stays: bool = False
    """True while the update writes `fresh`, or the store does not contain all of it."""
    updates: int = 0
    """Number of changes of the weights so far. A view saved before a change must not be read after the change."""

    @property
    def reading_in_place(self) -> bool:
        """True while a read fills the unit's device buffer."""
        return self.residency is Residency.UPLOADING and self.transfer is not None
