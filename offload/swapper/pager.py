"""The pager: brings a unit's weights to the device before use and keeps both budgets.

Threads. `acquire`, `release`, `hold` and `take_part` are called by the thread that runs the model and by autograd's
threads; `lease_for_update`, `publish`, `written` by the update worker alone. One lock guards all (`lock`,
of the monitor `changed`): nobody holds it while bytes move or a kernel runs, and whoever changes an entry wakes all
waiters.

[Note: nobody waits in a circle] The update worker needs only its own tiles: where it can get no weight
lease it either waits, when nobody waits for anything of it, or goes on without delivering. A thread that
acquires may take any lease that is clean and not being copied, and delivers the reads ahead that it finds
in its way. The leases that are left then belong to writes and updates in progress, which end by
themselves. While such a thread waits for a lease the worker takes none (`_starved`), so that freed memory
is not taken from under it. Device slices are held only by pinned units: if those fill the arena, that is a
`BudgetError`, since waiting cannot help. Where there are other ranks, they are waited for without the lock, and what
they need is done meanwhile (`Peers.agree` calls `take_part`): no rank's worker, lease or slice waits for another rank.

[Note: torn] A Ctrl-C may come between any two lines of the thread that runs the model. While it waits, for a lock, a
read or an update, all is whole, and the call can be given up; that is where nearly all of its time goes. In between,
`_torn` is set. Where it still is at the next call, the engine stops (`check_whole`), and the last commit is intact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from offload.aio import Priority
from offload.errors import BudgetError, EngineFailed
from offload.sizes import PAGE, align_up, format_size
from offload.swapper.arena import DeviceArena, Slice
from offload.swapper.device import DONE, Device, Event
from offload.swapper.host import HostArena, Lease
from offload.swapper.monitor import Monitor
from offload.swapper.policy import Block, Floor, Limits, Place, find_place, keeps, next_to_bring, victims
from offload.swapper.residency import ARROWS, Residency, Tier
from offload.swapper.states import State
from offload.swapper.store import Future, Store
from offload.swapper.stream import stream
from offload.swapper.timeline import OFF, Row, Timeline
from offload.swapper.trace import Kind, Trace


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


class Peers(Protocol):
    """The other ranks, which hold what this one does not. Called by the thread that runs the model or its backward."""

    def agree(self, unit: int) -> None:
        """Return when every rank is about to gather `unit`, as this one is."""

    def agree_ahead(self, unit: int, ready: Callable[[], bool]) -> bool:
        """Whether every rank is about to gather `unit` before it is used; each is asked whether it is `ready`."""

    def gather(self, whole: torch.Tensor, share: Sequence[range], uploaded: Event) -> Event:
        """Fill in what the other ranks have of `whole`, (nbytes,) uint8 on the device.

        `share`, this rank's part, is there once `uploaded` is done; all of it is, once what is returned is.
        """


class Counts(NamedTuple):
    """What the uses of units came to."""

    uses: int
    on_device: int
    """Those that found the unit there."""
    unforeseen: int
    """Those that came although the recorded order said another."""


class Transfer(NamedTuple):
    """A read in flight, with the lease that it fills."""

    lease: Lease
    future: Future


@dataclass(eq=False)
class _Entry:
    """One unit's weights. Only `Pager` touches it, under the lock."""

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


class Pager:
    """Weights of all units, between DISK, HOST and DEVICE. Close it after the update worker has ended."""

    def __init__(
        self,
        sizes: Sequence[UnitSize],
        host: HostArena,
        arena: DeviceArena,
        device: Device,
        store: Store | None,
        limits: Limits,
        peers: Peers | None = None,
    ) -> None:
        self.changed = Monitor()
        self.lock = self.changed.lock
        self.version = 0  # counts changes, so that a waiter can tell whether it missed one
        self.trace = Trace()
        self.timeline: Timeline = OFF
        self.host = host
        self.arena = arena
        self._device = device
        self._store = store
        self._limits = limits
        self._peers = peers
        self._entries = [_Entry(index, size, _start(size)) for index, size in enumerate(sizes)]
        self._floor: tuple[int, int] | None = None
        self._uses = self._hits = 0
        self._starved = 0
        self._wanted: list[int] = []
        self._failure: BaseException | None = None
        self._torn = False
        """Whether the caller's thread is in the middle of a change; see [Note: torn]."""
        for entry in self._entries:
            if entry.size.home is Tier.HOST:
                entry.lease = host.homes.take(entry.size.part_nbytes)
                assert entry.lease is not None, "the class of homes was sized for every home"
            elif entry.size.home is Tier.DEVICE:
                entry.home_slice = arena.take(entry.size.part_nbytes)
                assert entry.home_slice is not None, "the device arena was sized for every home"
                if entry.size.stays:
                    entry.slice = entry.home_slice

    # -- the thread that runs the model -------------------------------------------------------------

    def acquire(self, unit: int, ahead: bool = True) -> torch.Tensor:
        """Pin `unit` on the device and return its slice: (nbytes,) uint8, valid until `release`.

        Compute that the calling thread starts from now on finds the weights there, also where they are still on their
        way. With `ahead`, what the trace says comes next is begun as well. Waits for the unit's update and its read,
        and for the other ranks. Raises `BudgetError` where what is pinned leaves no room, and `EngineFailed` after an
        error on a background thread.
        """
        entry = self._entries[unit]
        with self.lock:
            self._torn = True
            entry.pins += 1  # from here on nobody drops it
            try:
                if entry.pins == 1:
                    self.trace.use(unit)
                    self._uses += 1
                    self._hits += entry.residency is Residency.DEVICE
                if self._peers is not None and entry.residency is not Residency.DEVICE:
                    self._agree(self._peers, unit)
                self._bring(entry)
                if ahead:
                    self._look_ahead()
            except Exception:
                entry.pins -= 1
                self._torn = False
                raise
            assert entry.slice is not None
            view, uploaded = self.arena.view(entry.slice), entry.uploaded
            self._torn = False
        try:
            self._device.hold(uploaded)
        except Exception:  # the other ranks did not bring theirs
            self.release(unit)
            raise
        return view

    def release(self, unit: int) -> None:
        """End one use. The slice stays where it is until its room is needed."""
        with self.lock:
            entry = self._entries[unit]
            assert entry.pins > 0, f"unit {entry.size.name} was released more often than acquired"
            self._device.hold(entry.read)  # of another stream, if there are several: the last read is after all of them
            entry.read = self._device.computed()
            entry.pins -= 1
            if not keeps(self.trace, unit, self._nbytes, self._limits) and entry in self._idle():
                self._drop(entry)
            self.notify()  # an interrupt in here is seen by the count of pins

    def hold(self, unit: int) -> None:
        """Let compute that the calling thread starts from now on wait for the weights of `unit`, which is pinned."""
        with self.lock:
            uploaded = self._entries[unit].uploaded
        self._device.hold(uploaded)

    def take_part(self, unit: int) -> None:
        """Another rank gathers `unit`, which this one may not need: give it this rank's part of it."""
        with self.lock:
            self._take_part(self._entries[unit])

    def _take_part(self, entry: _Entry) -> None:
        if entry.slice is None or entry.updating:
            self._bring(entry)
        else:
            self._gather(entry, entry.slice, entry.copied)

    def _agree(self, peers: Peers, unit: int) -> None:
        """Wait for the other ranks without the lock, and serve them meanwhile."""
        torn, self._torn = self._torn, False
        self.changed.without_lock(lambda: peers.agree(unit))
        self._torn = torn

    def updates(self, unit: int) -> int:
        """How many updates this unit has had; see `_Entry.updates`."""
        return self._entries[unit].updates

    @property
    def pins(self) -> int:
        """Open uses of all units."""
        with self.lock:
            return sum(entry.pins for entry in self._entries)

    def set_pins(self, units: Sequence[int]) -> None:
        """End every open use but one for each entry of `units`: an aborted forward or backward left some behind."""
        with self.lock:
            for entry in self._entries:
                if entry.pins:
                    entry.read = self._device.computed()
                entry.pins = units.count(entry.index)
            self.notify()

    def read_weights(self, unit: int, receive: Callable[[torch.Tensor], None]) -> None:
        """Call `receive` with the newest weights, (nbytes,) uint8 on the device, pinned meanwhile."""
        weights = self.acquire(unit, ahead=False)
        try:
            receive(weights)
        finally:
            self.release(unit)

    def _bring(self, entry: _Entry) -> None:
        """Move `entry` towards DEVICE, one arrow at a time, until it is there. The lock is held."""
        while entry.updating or entry.residency is not Residency.DEVICE:
            self.check()
            if entry.updating:
                self._wait_for_update(entry)
            elif entry.residency is Residency.DISK:
                if (lease := self._lease(self._lease_nbytes(entry))) is None:
                    self._wait_for_lease(entry)
                elif self.streams(entry.index):
                    self._stream(entry, lease)
                else:
                    self._start_read(entry, lease, Priority.URGENT)
            elif entry.residency is Residency.READING:
                self._finish_read(entry)
            elif entry.residency in (Residency.HOST, Residency.WRITING):
                self._upload(entry)
            else:  # UPLOADING on another thread
                self._wait(f"waits for upload of {entry.size.title}")
        self.check()

    def _wait(self, what: str) -> None:
        """Wait for a change; `what` is for the time line. The lock is held; what it guards is whole meanwhile."""
        self._torn = False
        with self.timeline.span(Row.WAITS, what):
            self.changed.wait()
        self._torn = True

    def _wait_for_update(self, entry: _Entry) -> None:
        self._wanted.append(entry.index)
        self.notify()
        try:
            self._wait(f"waits for update of {entry.size.title}")
        finally:
            self._wanted.remove(entry.index)

    def _wait_for_lease(self, entry: _Entry) -> None:
        """Let some weight lease become free for `entry`, or free to be taken."""
        reading = [entry for entry in self._entries if entry.residency is Residency.READING]
        if reading:  # ahead, they have taken the room; once one is delivered its lease is clean
            self._finish_read(max(reading, key=lambda entry: (self.trace.distance(entry.index), -entry.index)))
            return
        self._starved += 1
        self.notify()
        try:
            self._wait(f"waits for a lease for {entry.size.title}")
        finally:
            self._starved -= 1

    def _start_read(self, entry: _Entry, lease: Lease, priority: Priority) -> None:
        assert self._store is not None
        slot = self._store.newest[entry.index]
        future = self._store.read(entry.index, State.WEIGHT, slot, 0, lease.buffer, priority)
        entry.transfer = Transfer(lease, future)
        self._move(entry, Residency.READING)

    def _finish_read(self, entry: _Entry) -> None:
        """Wait for the read without the lock; whoever comes first delivers it."""
        transfer = entry.transfer
        assert transfer is not None
        torn, self._torn = self._torn, False
        failure: Exception | None = None
        try:
            with self.timeline.span(Row.WAITS, f"waits for read of {entry.size.title}"):
                self.changed.without_lock(transfer.future.wait)
        except Exception as error:  # after a Ctrl-C the read goes on, and somebody else will deliver it
            failure = error
        if failure is not None:
            self._fail(failure, entry)
            raise failure
        self._torn = torn
        if entry.transfer is transfer:
            entry.transfer, entry.lease = None, transfer.lease
            self._move(entry, Residency.HOST)

    def streams(self, unit: int) -> bool:
        """Whether two leases of this unit have no room, so that it comes from DISK to the device piece by piece."""
        size = self._entries[unit].size
        return size.home is Tier.DISK and 2 * align_up(size.part_nbytes) > self.host.weights.space.nbytes

    def _lease_nbytes(self, entry: _Entry) -> int:
        if self.streams(entry.index):
            return self.host.weights.space.nbytes // 2 // PAGE * PAGE
        return entry.size.part_nbytes

    def _stream(self, entry: _Entry, lease: Lease) -> None:
        """DISK to DEVICE in pieces, through `lease` and a second one where there is room."""
        second = self._lease(lease.nbytes)
        leases = [lease] if second is None else [lease, second]
        try:
            piece = self._room_on_device(entry)
        except BudgetError:
            for each in leases:
                each.release()
            raise
        self._move(entry, Residency.UPLOADING)
        store = self._store
        assert store is not None
        slot = store.newest[entry.index]
        whole, share = self.arena.view(piece), entry.size.share

        def read(start: int, buffer: memoryview) -> Future:
            return store.read(entry.index, State.WEIGHT, slot, start, buffer, Priority.URGENT)

        try:
            with self.timeline.span(Row.UPLOADS, f"{entry.size.title} in pieces", entry.size.part_nbytes):
                entry.uploaded = self.changed.without_lock(
                    lambda: stream(read, leases, whole, share, self._device, piece.after)
                )
            self._gather(entry, piece, entry.uploaded)
        except BaseException as error:  # what is under way may still write there: neither is used again
            self._fail(error, entry)
            raise
        for each in leases:
            each.release()
        entry.slice = piece
        self._move(entry, Residency.DEVICE)

    def _upload(self, entry: _Entry) -> None:
        self._upload_into(entry, self._room_on_device(entry))

    def _room_on_device(self, entry: _Entry) -> Slice:
        """A slice for `entry`; raises `BudgetError` where what is in use leaves none."""
        piece = self._take_slice(entry)
        if piece is None:
            held = [e.size.name or "the root" for e in self._entries if e.slice is not None and e is not entry]
            free = self.arena.nbytes - self.arena.used_bytes
            raise BudgetError(
                f"unit {entry.size.name} needs {format_size(entry.size.nbytes)} in one piece on the device, whose "
                f"budget of {format_size(self.arena.nbytes)} is held by {', '.join(held) or 'nothing'} "
                f"({format_size(free)} are free); "
                f'raise "device_memory" in the "offload" block, or checkpoint smaller regions'
            )
        return piece

    def _upload_into(self, entry: _Entry, piece: Slice) -> None:
        """Start the copy of this rank's part into the slice, and the gather of the others'."""
        self._move(entry, Residency.UPLOADING)
        try:
            with self.timeline.span(Row.UPLOADS, entry.size.title, entry.size.part_nbytes):
                self.changed.without_lock(lambda: self._copy_part(entry, piece))
            self._gather(entry, piece, entry.copied)
        except Exception as error:  # what is under way may still write there: the slice is not used again
            self._fail(error, entry)
            raise
        entry.slice = piece
        self._move(entry, Residency.DEVICE)

    def _copy_part(self, entry: _Entry, piece: Slice) -> None:
        whole, start = self.arena.view(piece), 0
        part = self._part(entry)
        for stretch in entry.size.share:
            source = part[start : start + len(stretch)]
            entry.copied = self._device.upload(whole[stretch.start : stretch.stop], source, piece.after)
            start += len(stretch)
        entry.uploaded = entry.copied

    def _part(self, entry: _Entry) -> torch.Tensor:
        """(part_nbytes,) uint8: the partition, at home or in a lease."""
        if entry.home_slice is not None:
            return self.arena.view(entry.home_slice)
        assert entry.lease is not None
        return entry.lease.tensor(torch.uint8)

    def _gather(self, entry: _Entry, piece: Slice, copied: Event) -> None:
        """Fill in what other ranks have, once `copied`, this rank's part, is there."""
        if self._peers is not None:
            peers, whole = self._peers, self.arena.view(piece)
            entry.uploaded = self.changed.without_lock(lambda: peers.gather(whole, entry.size.share, copied))

    def _take_slice(self, entry: _Entry, beyond: int = -1) -> Slice | None:
        """Room for `entry` on the device; drops released units for it that are next used after `beyond` uses."""
        place = self._find_place(entry, beyond)
        if place is None:
            return None
        for unit in place.victims:
            self._drop(self._entries[unit])
        return self.arena.take_at(place.offset, entry.size.nbytes)

    def _find_place(self, entry: _Entry, beyond: int) -> Place | None:
        if self._floor is None:  # all that stays on the device is there by now
            self._floor = max(self.arena.space.stretches(), key=lambda stretch: stretch[1] - stretch[0], default=(0, 0))
        others = (e.size.nbytes for e in self._entries if e is not entry and not e.size.stays)
        floor = Floor(*self._floor, max(others, default=0))
        return find_place(self.arena.space, entry.size.nbytes, self._droppable(), self.trace, floor, beyond)

    def _droppable(self) -> list[Block]:
        return [Block(e.index, e.slice.offset, e.slice.nbytes) for e in self._idle() if e.slice is not None]

    def _idle(self) -> Iterator[_Entry]:
        """Units on the device that nobody uses, and that may leave it."""
        return (e for e in self._entries if e.residency is Residency.DEVICE and not e.pins and not e.size.stays)

    def _look_ahead(self) -> None:
        """Begin to bring what the trace says comes next: reads first, then uploads of what is at hand."""
        if all(entry.size.stays for entry in self._entries):
            return
        for entry in self._entries:
            if entry.transfer is not None and entry.transfer.future.done():
                self._finish_read(entry)
        self._read_ahead()
        self._bring_ahead()

    def _read_ahead(self) -> None:
        def wanting(unit: int) -> bool:
            entry = self._entries[unit]
            on_disk = entry.residency is Residency.DISK and entry.lease is None
            return on_disk and not entry.updating and not self.streams(unit)

        def nbytes(unit: int) -> int:
            return self._entries[unit].size.part_nbytes

        while (unit := next_to_bring(self.trace, nbytes, wanting, self._limits)) is not None:
            lease = self._lease(nbytes(unit), self.trace.distance(unit))
            if lease is None:
                return
            self._start_read(self._entries[unit], lease, Priority.NORMAL)

    def _bring_ahead(self) -> None:
        """Start uploads of what comes next and is at hand; where there are other ranks, of the very next alone."""
        if self._peers is not None:
            self._bring_ahead_with(self._peers)
            return
        while (unit := self._next_upload()) is not None:
            entry = self._entries[unit]
            piece = self._take_slice(entry, self.trace.distance(unit)) if self._at_hand(entry) else None
            if piece is None:
                return
            self._upload_into(entry, piece)

    def _next_upload(self) -> int | None:
        def wanting(unit: int) -> bool:
            return self._entries[unit].residency is not Residency.DEVICE

        return next_to_bring(self.trace, self._nbytes, wanting, self._limits)

    def _at_hand(self, entry: _Entry) -> bool:
        return entry.residency in (Residency.HOST, Residency.WRITING) and not entry.updating

    def _bring_ahead_with(self, peers: Peers) -> None:
        unit = next(self.trace.upcoming(), None)
        if unit is None or unit != self._next_upload():
            return
        entry, beyond = self._entries[unit], self.trace.distance(unit)

        def ready() -> bool:
            with self.lock:
                return self._at_hand(entry) and self._find_place(entry, beyond) is not None

        if self._agree_ahead(peers, entry, ready):
            self._take_part(entry)

    def _nbytes(self, unit: int) -> int:
        return self._entries[unit].size.nbytes

    def _agree_ahead(self, peers: Peers, entry: _Entry, ready: Callable[[], bool]) -> bool:
        torn, self._torn = self._torn, False
        agreed = self.changed.without_lock(lambda: peers.agree_ahead(entry.index, ready))
        self._torn = torn
        return agreed

    def _drop(self, entry: _Entry) -> None:
        """Leave the device; the copy there is clean, so nothing moves."""
        assert entry.slice is not None and not entry.pins
        self.arena.give(entry.slice, entry.uploaded, entry.read)
        entry.slice = None
        if entry.lease is None and entry.home_slice is None:
            self._move(entry, Residency.DISK)
        else:
            self._move(entry, Residency.WRITING if entry.unwritten else Residency.HOST)

    def begin(self, kind: Kind) -> None:
        """A forward begins: one of a step, or one by itself."""
        with self.lock:
            self.trace.begin(kind)

    def end_forward(self) -> None:
        """The outermost forward is over. Of an evaluation that was all; what comes next is a step again."""
        with self.lock:
            if self.trace.kind is Kind.EVAL:
                self.trace.finish()
                self.trace.begin(Kind.TRAIN)

    def end_step(self) -> tuple[int, ...]:
        """The step's uses are over: their order is the prediction for the next, and returned."""
        with self.lock:
            self.trace.begin(Kind.TRAIN)  # an evaluation that was interrupted did not end
            self.trace.finish()
            return self.trace.order

    def counts(self) -> Counts:
        """What the uses so far came to."""
        with self.lock:
            return Counts(self._uses, self._hits, self.trace.unforeseen)

    # -- leases of weights --------------------------------------------------------------------------

    def _lease(self, nbytes: int, beyond: int = -1) -> Lease | None:
        """A weight lease: a free one, else of units that are next used after `beyond` uses."""
        going = victims(self.host.weights.space, nbytes, self._takeable(), self._distance, beyond)
        if going is None:
            return None
        for unit in going:
            self._take_lease(self._entries[unit])
        return self.host.weights.take(nbytes)

    def _distance(self, unit: int) -> int:
        """Uses between now and the next use; 0 of a unit that somebody is about to bring, whose use has been told."""
        entry = self._entries[unit]
        return 0 if entry.pins and entry.residency is not Residency.DEVICE else self.trace.distance(unit)

    def _takeable(self) -> list[Block]:
        return [
            Block(e.index, e.lease.offset, e.lease.nbytes)
            for e in self._entries
            if e.lease is not None and self._may_take_lease_of(e)
        ]

    def _may_take_lease_of(self, entry: _Entry) -> bool:
        """Whether its bytes are in the store and nobody reads them from the lease now."""
        return (
            entry.lease is not None
            and entry.size.home is Tier.DISK
            and entry.residency in (Residency.HOST, Residency.DEVICE)
            and not entry.unwritten
            and not entry.in_update
        )

    def _take_lease(self, entry: _Entry) -> None:
        assert entry.lease is not None
        entry.copied.wait()  # blocks only where a copy to the device is slower than all that came after it
        entry.lease.release()
        entry.lease = None
        if entry.residency is Residency.HOST:
            self._move(entry, Residency.DISK)

    # -- the update worker --------------------------------------------------------------------------

    def begin_updates(self, units: Sequence[int]) -> None:
        """From now until `publish`, nobody may read these units. No use of them may be open."""
        with self.lock:
            for unit in units:
                entry = self._entries[unit]
                assert not entry.pins, f"unit {entry.size.name} is in use during step()"
                entry.updating = True
                entry.updates += 1
                if entry.residency is Residency.DEVICE and not entry.size.stays:
                    self._drop(entry)

    def lease_for_update(self, unit: int) -> Lease | None:
        """The lease in which the fresh weights of `unit` will lie, or None where there is none to have now.

        `holds_weights` says whether the old ones lie in it already. A home in HOST is its own lease; a unit
        whose home is DEVICE has none, and its update works on `device_home`.
        """
        entry = self._entries[unit]
        assert entry.size.home is not Tier.DEVICE
        entry.copied.wait()  # the worker is about to write where an upload may still read
        with self.lock:
            while entry.residency is Residency.READING:  # a read ahead from before step()
                self.check()
                self._finish_read(entry)
            if entry.lease is None and not self._starved:
                urgent = unit in self._wanted
                entry.lease = self._lease(entry.size.part_nbytes, -1 if urgent else self.trace.distance(unit))
            entry.in_update = entry.lease is not None
            return entry.lease

    def delivers(self, unit: int) -> bool:
        """Whether the fresh weights of `unit` lie in a lease when it is updated: a part of it, where it streams, helps
        nobody."""
        return self._entries[unit].size.home is not Tier.DEVICE and not self.streams(unit)

    def publish(self, unit: int, delivered: bool, unwritten: bool) -> None:
        """The update of `unit` is computed: its fresh weights lie in its lease (or home) if `delivered`.

        `unwritten` says that writes of them to the store are in flight. An update that is not delivered is
        published when these are done.
        """
        with self.lock:
            entry = self._entries[unit]
            if delivered and entry.size.home is not Tier.DEVICE:
                entry.unwritten = unwritten
                fresh = Residency.WRITING if unwritten else Residency.HOST
                if entry.residency is not fresh:
                    self._move(entry, fresh)
            entry.updating = entry.in_update = False
            self.timeline.end(Row.UPDATES, entry.size.title)
            self.notify()

    def written(self, unit: int) -> None:
        """The last write of the update of `unit` is done: its lease is clean."""
        with self.lock:
            entry = self._entries[unit]
            entry.unwritten = False
            if entry.residency is Residency.WRITING:
                self._move(entry, Residency.HOST)
            self.notify()

    def device_home(self, unit: int) -> torch.Tensor:
        """(part_nbytes,) uint8: the partition of a unit whose home is DEVICE, for its update. Nothing reads it now."""
        entry = self._entries[unit]
        assert entry.home_slice is not None
        entry.copied.wait()
        entry.read.wait()
        return self.arena.view(entry.home_slice)

    def home_lease(self, unit: int) -> Lease:
        """The lease of a unit whose home is HOST."""
        lease = self._entries[unit].lease
        assert lease is not None and self._entries[unit].size.home is Tier.HOST
        return lease

    def holds_weights(self, unit: int) -> bool:
        """Whether the lease of `unit` holds its weights as they are before the update."""
        return self._entries[unit].residency is Residency.HOST

    def wanted(self) -> int | None:
        """A unit whose update somebody waits for, if any. The lock is held by the caller."""
        return next((unit for unit in self._wanted if self._entries[unit].updating), None)

    @property
    def starved(self) -> bool:
        """Whether somebody waits for a weight lease. The lock is held by the caller."""
        return self._starved > 0

    # -- state --------------------------------------------------------------------------------------

    def _move(self, entry: _Entry, to: Residency) -> None:
        """The one place that assigns a residency."""
        assert (entry.residency, to) in ARROWS, f"{entry.size.name}: {entry.residency} to {to}"
        entry.residency = to
        self.notify()

    def notify(self) -> None:
        self.version += 1
        self.changed.notify_all()

    def residency(self, unit: int) -> Residency:
        return self._entries[unit].residency

    @property
    def failed(self) -> bool:
        """Whether an error has stopped this engine."""
        return self._failure is not None

    def check(self) -> None:
        """Raise `EngineFailed`, with its cause, after an error on a background thread."""
        if self._failure is not None:
            raise EngineFailed(
                f"the engine stopped at an earlier error: {self._failure}; the last committed epoch is intact"
            ) from self._failure

    def check_whole(self) -> None:
        """Stop where a Ctrl-C came in the middle of a change. For the thread that runs the model, between its calls."""
        with self.lock:
            if self._torn and self._failure is None:
                self._fail(KeyboardInterrupt("in the middle of a change of the pager"), None)

    def fail(self, error: BaseException) -> None:
        """Stop: every waiter and every later call raises `EngineFailed` from `error`."""
        with self.lock:
            self._fail(error, None)

    def _fail(self, error: BaseException, entry: _Entry | None) -> None:
        if entry is not None and entry.residency is not Residency.FAILED:
            self._move(entry, Residency.FAILED)
        if self._failure is None:
            self._failure = error
        self.notify()

    def give_cache(self, drop_spare: Callable[[], None]) -> None:
        """Take every lease of weights away, for another engine of the process. No update may be under way.

        `drop_spare` gives back what else lies in their class. Called by the thread that starts the other engine.
        """
        with self.lock:
            self._torn = True
            drop_spare()
            while not self._failure and self.host.weights.space.used_bytes:
                for entry in self._entries:
                    if entry.residency is Residency.READING:
                        self._finish_read(entry)
                    if self._may_take_lease_of(entry):
                        self._take_lease(entry)
                if self.host.weights.space.used_bytes:
                    self._wait("waits for a unit that is streamed")
            if not self._failure:
                self.host.drop_cache()
            self._torn = False

    def close(self) -> None:
        """Wait for reads in flight and give everything back. The update worker must have ended."""
        with self.lock:
            for entry in self._entries:
                if entry.transfer is not None:
                    transfer, entry.transfer = entry.transfer, None
                    _quietly(transfer.future)
                    transfer.lease.release()
            self._failure = self._failure or EngineFailed("the engine was destroyed")
            self.notify()


def _start(size: UnitSize) -> Residency:
    """Where the weights are before the first use."""
    if size.home is Tier.DISK:
        return Residency.DISK
    return Residency.DEVICE if size.stays else Residency.HOST


def _quietly(future: Future) -> None:
    """Wait for a read that nobody needs any more; its error has no meaning now."""
    try:
        future.wait()
    except OSError:
        pass
