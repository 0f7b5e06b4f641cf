"""The pager: brings a unit's weights to the device before use and keeps both budgets.

    Pager ──► Leases     host side: who has a lease of weights, whose may be taken, reads
      │  └──► Slices     device side: where a unit lies, copies, what leaves for it
      └─────► Table      the entries of all units, the order of their uses, the lock; Leases and Slices have it too

Threads. `acquire`, `release`, `hold` and `serve_gather` are called by the thread that runs the model and by autograd's
threads; `lease_for_update`, `publish`, `written` by the update worker alone. One lock guards all (`lock`,
of the monitor `changed`): nobody holds it while bytes move or a kernel runs, and whoever changes an entry wakes all
waiters.

[Note: nobody waits in a circle] The update worker needs only its own tiles: where it can get no weight
lease it either waits, when nobody waits for anything of it, or goes on without delivering. A thread that
acquires may take any lease that is clean and not being copied, and delivers the reads ahead that it finds
in its way. The leases that are left then belong to writes and updates in progress, which end by
themselves. While such a thread waits for a lease the worker takes none (`waiting_for_buffer`), so that freed memory
is not taken from under it. Device slices are held only by pinned units: if those fill the arena, that is a
`BudgetError`, since waiting cannot help. Where there are other ranks, they are waited for without the lock, and what
they need is done meanwhile (`Peers.agree` calls `serve_gather`): no rank's worker, lease or slice waits for another
rank.

[Note: every use is a round] Which units lie on the device is another thing on each rank: it depends on when gradients
gave their room back. If only a rank that lacks a unit asked for it, one that has all it needs would run ahead into a
collective of the user's own (a loss over the batches of all ranks, say), and both would wait for ever. So every use
asks, of a unit that is there too, and what follows from the answer follows on all ranks alike. Once every rank has
every unit, none asks until weights change, which they do on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from offload.aio import Priority
from offload.errors import EngineFailed
from offload.swapper.access_order import PassKind
from offload.swapper.device_cache import DeviceCache, Having, Peers
from offload.swapper.host_cache import HostCache
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, HostBuffer
from offload.swapper.policy import Limits, keeps
from offload.swapper.prefetch import Prefetcher
from offload.swapper.residency import Residency
from offload.swapper.store import Store
from offload.swapper.unit_table import MemoryCounters, UnitEntry, UnitSize, UnitTable
from offload.swapper.weight_updates import WeightUpdates
from offload.timeline import OFF, Timeline

_T = TypeVar("_T")


class PrefetchStats(NamedTuple):
    """What the uses of units came to."""

    uses: int
    on_device: int
    """Those that found the unit there."""
    unforeseen: int
    """Those that came although the recorded order said another."""


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
        *,
        timeline: Timeline = OFF,
    ) -> None:
        recorded = timeline.recorded
        self.table = UnitTable(
            sizes,
            lambda: store is not None and store.spec.slots == 2 and store.durable is not None,
            timeline=timeline,
            memory=None if recorded is OFF else MemoryCounters(host, arena, recorded),
        )
        self.changed = self.table.changed
        self.lock = self.changed.lock
        self.sizes = sizes
        self.host = host
        self.arena = arena
        self._entries = self.table.entries
        self._leases = HostCache(self.table, host, store)
        self._slices = DeviceCache(self.table, arena, device, peers)
        self._prefetcher = Prefetcher(self.table, self._leases, self._slices, limits)
        self.weight_updates = WeightUpdates(self.table, self._leases, self._slices, arena)
        self._device = device
        self._limits = limits
        self._peers = peers
        self._uses = self._hits = 0
        self._all_have_all = False
        """Whether every rank is known to have every unit on its device."""

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
            self.table.in_critical_section = True
            entry.pins += 1  # from here on nobody drops it
            try:
                if entry.pins == 1:
                    self.table.access_order.use(unit)
                    self._uses += 1
                    self._hits += entry.residency is Residency.DEVICE
                if self._peers is not None:
                    self._fetch_with(self._peers, entry, ahead)
                else:
                    self._fetch(entry)
                    if ahead:
                        self._prefetcher.run()
            except Exception:
                entry.pins -= 1
                self.table.in_critical_section = False
                raise
            assert entry.slice is not None
            view, uploaded = self.arena.view(entry.slice), entry.uploaded
            self.table.in_critical_section = False
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
            if not keeps(
                self.table.access_order, unit, lambda each: self._entries[each].size.nbytes, self._limits
            ) and self._slices.idle(entry):
                self._slices.drop(entry)
            self.notify()  # an interrupt in here is seen by the count of pins

    def hold(self, unit: int) -> None:
        """Let compute that the calling thread starts from now on wait for the weights of `unit`, which is pinned."""
        with self.lock:
            uploaded = self._entries[unit].uploaded
        self._device.hold(uploaded)

    def serve_gather(self, unit: int) -> None:
        """Another rank gathers `unit`, which this one may not need: give it this rank's part of it."""
        with self.lock:
            self._serve_gather(self._entries[unit])

    def _serve_gather(self, entry: UnitEntry) -> None:
        if entry.slice is None or entry.updating:
            self._fetch(entry)
        else:
            self._slices.gather(entry, entry.slice, entry.copied)

    def updates(self, unit: int) -> int:
        """How many updates this unit has had; see `UnitEntry.updates`."""
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

    def _fetch(self, entry: UnitEntry) -> None:
        """Move `entry` towards DEVICE, one arrow at a time, until it is there. The lock is held."""
        while entry.updating or entry.residency is not Residency.DEVICE:
            self.check()
            if entry.updating:
                self.weight_updates.wait(entry)
            elif entry.residency is Residency.DISK:
                if (lease := self._leases.lease(self._leases.lease_nbytes(entry))) is None:
                    self._leases.wait_for_lease(entry)
                elif self.streams(entry.index):
                    self._stream(entry, lease)
                else:
                    self._leases.start_read(entry, lease, Priority.URGENT)
            elif entry.residency is Residency.READING:
                self._leases.finish_read(entry)
            elif entry.residency in (Residency.HOST, Residency.WRITING):
                self._slices.upload(entry, self._slices.room_on_device(entry))
            else:  # UPLOADING on another thread
                self.table.wait(f"waits for upload of {entry.size.title}")
        self.check()

    def _stream(self, entry: UnitEntry, lease: HostBuffer) -> None:
        """DISK to DEVICE in pieces, through `lease` and a second one where there is room."""
        second = self._leases.lease(lease.nbytes)
        leases = [lease] if second is None else [lease, second]
        self._slices.stream(entry, leases, self._leases.reader(entry))

    def streams(self, unit: int) -> bool:
        """Whether two leases of this unit have no room, so that it comes from DISK to the device piece by piece."""
        return self._leases.streams(self._entries[unit])

    def _fetch_with(self, peers: Peers, entry: UnitEntry, ahead: bool) -> None:
        """Bring `entry` where there are other ranks, and with `ahead` the very next, if all have room for it.

        See [Note: every use is a round].
        """

        def having() -> Having:
            with self.lock:
                if entry.residency is not Residency.DEVICE:
                    return Having(unit=False, all=False, ahead=-1)
                return Having(unit=True, all=self._has_all(), ahead=self._prefetcher.next_with_room() if ahead else -1)

        self.check()
        if self._all_have_all:
            return
        if ahead and entry.residency is Residency.DEVICE:
            self._prefetcher.read()
        agreed = self._with_ranks(lambda: peers.agree(entry.index, having))
        unit, self._all_have_all = agreed.ahead, agreed.all
        if agreed.gather:
            self._serve_gather(entry)
            if ahead:
                self._prefetcher.read()
            if agreed.together:
                unit = self._with_ranks(lambda: peers.agree_ahead(lambda: having().ahead))
        self.check()
        if unit >= 0:
            self._serve_gather(self._entries[unit])

    def _with_ranks(self, ask: Callable[[], _T]) -> _T:
        """Wait for the other ranks without the lock, and serve them meanwhile."""
        with self.table.whole():
            return self.changed.without_lock(ask)

    def _has_all(self) -> bool:
        """Whether every unit is on the device and stays there until weights change."""
        return self._limits.reuse is None and all(entry.residency is Residency.DEVICE for entry in self._entries)

    def grow_device(self, nbytes: int, kept: Sequence[int] = ()) -> list[torch.Tensor]:
        """Have `nbytes` more of device memory. Between steps; raises `BudgetError` where they are not free.

        Of them stretches of `kept` bytes each are for the caller alone: returns these, uint8.
        """
        with self.lock:
            return self._slices.grow(nbytes, kept)

    def begin(self, kind: PassKind) -> None:
        """A forward begins: one of a step, or one by itself."""
        with self.lock:
            self.table.access_order.begin(kind)

    def end_forward(self) -> None:
        """The outermost forward is over. Of an evaluation that was all; what comes next is a step again."""
        with self.lock:
            if self.table.access_order.kind is PassKind.EVAL:
                self.table.access_order.finish()
                self.table.access_order.begin(PassKind.TRAIN)

    def end_step(self) -> tuple[int, ...]:
        """The step's uses are over: their order is the prediction for the next, and returned."""
        with self.lock:
            self.table.access_order.begin(PassKind.TRAIN)  # an evaluation that was interrupted did not end
            self.table.access_order.finish()
            return self.table.access_order.order

    def counts(self) -> PrefetchStats:
        """What the uses so far came to."""
        with self.lock:
            return PrefetchStats(self._uses, self._hits, self.table.access_order.unforeseen)

    # -- updates and loads --------------------------------------------------------------------------

    def begin_updates(self, units: Sequence[int]) -> None:
        """Forbids every read of `units` until their weights are ready. No use of them may be open."""
        with self.lock:
            if units:
                self._all_have_all = False
            self.weight_updates.begin(units)

    def mark_rewritten(self, rewritten: bool) -> None:
        """Notes whether bytes that the last commit names were written over, by a load that is not committed yet."""
        self.table.rewritten = rewritten

    def begin_load(self) -> None:
        """From now until `end_load`, nobody may read any unit; what lay in leases and slices beside homes is dropped.

        Called by the thread that runs the model. No use may be open, and no update under way.
        """
        self.begin_updates(range(len(self._entries)))
        with self.lock:
            for entry in self._entries:
                if entry.residency is Residency.READING:  # a read ahead
                    self._leases.finish_read(entry)
                self._leases.forget(entry)

    def end_load(self) -> None:
        """All weights are new, at home and in the store's newest slots."""
        with self.lock:
            for entry in self._entries:
                entry.updating = False
            self.notify()

    # -- state --------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Goes up with every change. The lock is held by the caller."""
        return self.table.version

    def notify(self) -> None:
        """Tell all waiters of a change. The lock is held by the caller."""
        self.table.notify()

    def residency(self, unit: int) -> Residency:
        return self._entries[unit].residency

    @property
    def failed(self) -> bool:
        """Whether an error has stopped this engine."""
        return self.table.failure is not None

    def check(self) -> None:
        """Raise `EngineFailed`, with its cause, after an error on a background thread."""
        self.table.check()

    def check_whole(self) -> None:
        """Stop where a Ctrl-C came in the middle of a change. For the thread that runs the model, between its calls."""
        with self.lock:
            if self.table.in_critical_section and self.table.failure is None:
                self.table.fail(KeyboardInterrupt("in the middle of a change of the pager"))

    def fail(self, error: BaseException) -> None:
        """Stop: every waiter and every later call raises `EngineFailed` from `error`."""
        with self.lock:
            self.table.fail(error)

    def give_cache(self, drop_spare: Callable[[], None]) -> None:
        """Take every lease of weights away, for another engine of the process. No update may be under way.

        `drop_spare` gives back what else lies in their class. Called by the thread that starts the other engine.
        """
        with self.lock:
            self._leases.give_cache(drop_spare)

    def close(self) -> None:
        """Wait for reads in flight and give everything back. The update worker must have ended."""
        with self.lock:
            self._leases.close()
            self.table.failure = self.table.failure or EngineFailed("the engine was destroyed")
            self.notify()
