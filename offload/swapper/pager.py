"""The pager: fetches the weights of a unit before use, and keeps the budgets of host and device.

    Pager ──► HostCache       host buffers of weights, reads, eviction
      │  ├──► DeviceCache     device buffers of weights, uploads, gathers, eviction
      │  ├──► Fetcher         reads and uploads that a thread waits for
      │  ├──► Prefetcher      reads and uploads ahead of use
      │  ├──► WeightUpdates   the update worker's side
      │  ├──► CommonUses      with several ranks: uses that all agree on
      └──┴──► UnitTable       the entries of all units, their access order, and the lock that all of these share

Threads. The thread that runs the model and autograd's threads call `acquire`, `release`, `wait_upload` and
`serve_gather`. The update worker calls `weight_updates`. The thread that runs the I/O queue's callbacks delivers reads
ahead. The last two also start what comes next: see [Note: who starts what] in `prefetch`. One lock guards everything
(`lock`, of the monitor `changed`). No thread holds the lock while it moves bytes or runs a kernel, except at the end of
a copy whose memory is reused at once (`HostCache._evict`, `DeviceArena.shrink`). Every change of an entry wakes all
waiters.

[Note: nobody waits in a circle] The update worker needs only its own tiles. If it gets no host buffer for fresh weights
it waits as long as no thread waits for the worker; otherwise it updates the unit without delivering its weights. A
thread that acquires a unit may evict any host buffer that is clean and not being copied, and finishes prefetched reads
that are in its way. The remaining buffers belong to writes and updates in progress, which end by themselves. While such
a thread waits for a host buffer no other thread allocates one (`waiting_for_buffer`). Device buffers of units that are
not pinned can be dropped; that of an upload ahead on another thread can be once the upload is started, for which its
thread waits for nobody, and that of a read in place once the read has ended. If pinned units fill the arena, waiting
cannot help, and the pager raises `BudgetError`. A thread waits for other ranks without the lock, and serves what they
need meanwhile (`Peers.agree` calls `serve_gather`), so no worker and no buffer of any rank waits for another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.errors import EngineFailed
from offload.interrupts import uninterrupted
from offload.swapper.access_order import PassKind
from offload.swapper.device_cache import DeviceCache, Expand
from offload.swapper.host_cache import HostCache
from offload.swapper.in_place.model_files import ModelFiles
from offload.swapper.memory.device import DONE, Device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena
from offload.swapper.policy import Limits, keeps
from offload.swapper.prefetch import Fetcher, Prefetcher, PrefetchStats
from offload.swapper.ranks.common_uses import CommonUses
from offload.swapper.ranks.peers import Peers
from offload.swapper.residency import Residency
from offload.swapper.store import Store
from offload.swapper.unit_table import MemoryCounters, UnitSize, UnitTable
from offload.swapper.weight_updates import WeightUpdates
from offload.timeline import OFF, Timeline


class Pager:
    """The weights of all units, between DISK, HOST and DEVICE. The update worker must end before `close`."""

    def __init__(
        self,
        sizes: Sequence[UnitSize],
        host: HostArena,
        arena: DeviceArena,
        device: Device,
        store: Store | ModelFiles | None,
        limits: Limits,
        peers: Peers | None = None,
        *,
        expand: Expand | None = None,
        timeline: Timeline = OFF,
    ) -> None:
        self.table = UnitTable(
            sizes,
            lambda: isinstance(store, Store) and store.spec.slots == 2 and store.durable is not None,
            timeline=timeline,
            memory=None if timeline.recorded is OFF else MemoryCounters(host, arena, timeline.recorded),
        )
        self.changed = self.table.changed
        self.lock = self.changed.lock
        self.sizes = sizes
        self.host = host
        self.arena = arena
        self._entries = self.table.entries
        self._host_cache = HostCache(self.table, host, store)
        self._device_cache = DeviceCache(self.table, arena, device, peers, expand)
        caches = (self.table, self._host_cache, self._device_cache)
        self._prefetcher = Prefetcher(*caches, limits, device, peers is not None)
        self.weight_updates = WeightUpdates(*caches, self._prefetcher, arena, device)
        self._fetcher = Fetcher(*caches, self._prefetcher, self.weight_updates.wait)
        self._device, self._limits = device, limits
        self._common_uses: CommonUses | None = None
        """The uses that several ranks agree on; None with one rank."""
        if peers is not None:
            self._common_uses = CommonUses(
                self.table, self._device_cache, self._prefetcher, self._fetcher, limits, peers
            )
        self._stays = tuple(peers is None and size.stays for size in sizes)
        self._uses = self._hits = 0

    # -- the thread that runs the model -------------------------------------------------------------

    @uninterrupted
    def acquire(self, unit: int, ahead: bool = True) -> torch.Tensor:
        """Pins `unit` on the device and returns its weights.

        Compute that the calling thread starts from now on is ordered after the upload, also if it is in flight. Waits
        for the update of the unit, for its read, and for the other ranks.

        Args:
            unit: the unit.
            ahead: whether to prefetch what the access order predicts next.

        Returns:
            (nbytes,) uint8 on the device: the pager's memory, valid until `release`.

        Raises:
            BudgetError: if pinned units leave no room.
            EngineFailed: after an error on a background thread.
        """
        entry = self._entries[unit]
        with self.lock:
            entry.pins += 1  # from here on nobody drops it
            try:
                if entry.pins == 1:
                    self.table.access_order.use(unit)
                    self._uses += 1
                    self._hits += entry.residency is Residency.DEVICE
                if self._common_uses is not None:
                    self._common_uses.fetch(entry, ahead)
                else:
                    self._fetcher.fetch(entry)
                    if ahead:
                        self._prefetcher.run()
            except BaseException:  # also a Ctrl-C at a wait
                entry.pins -= 1
                raise
            assert entry.device_buffer is not None
            view, uploaded = self.arena.view(entry.device_buffer), entry.uploaded
        try:
            self._device.wait_event(uploaded)
        except BaseException:  # `uploaded` is the event of a gather to which another rank did not contribute
            self.release(unit)
            raise
        return view

    def stays(self, unit: int) -> bool:
        """Returns True if `unit` never leaves its place on the device, and needs no other rank."""
        return self._stays[unit]

    @uninterrupted
    def use_in_place(self, unit: int) -> None:
        """Waits for the update of a unit that `stays`, and begins a use without a pin, which needs no end."""
        entry = self._entries[unit]
        with self.lock:
            self.table.access_order.use(unit)
            self._uses, self._hits = self._uses + 1, self._hits + 1
            self._fetcher.fetch(entry)
            self._prefetcher.run()
        self.wait_upload(unit)

    @uninterrupted
    def release(self, unit: int) -> None:
        """Ends one use. The device buffer stays allocated until its memory is needed."""
        with self.lock:
            entry = self._entries[unit]
            assert entry.pins > 0, f"unit {entry.size.name} was released more often than acquired"
            # If several streams read the unit, this one follows the earlier reads, so that `read` covers them all.
            self._device.wait_event(entry.read)
            entry.read = self._device.record_event()
            entry.pins -= 1
            if not keeps(
                self.table.access_order, unit, lambda each: self._entries[each].size.nbytes, self._limits
            ) and self._device_cache.idle(entry):
                self._device_cache.drop(entry)
            self.notify()

    @uninterrupted
    def wait_upload(self, unit: int) -> None:
        """Orders compute that the calling thread starts from now on after the upload of `unit`, which is pinned."""
        uploaded = self._entries[unit].uploaded  # set before the pin, so it needs no lock
        if uploaded is not DONE:
            self._device.wait_event(uploaded)

    def waits(self, unit: int) -> bool:
        """Returns True if `wait_upload` of a pinned unit may wait: with several ranks, as each may gather it again."""
        return self._common_uses is not None or self._entries[unit].uploaded is not DONE

    @uninterrupted
    def serve_gather(self, unit: int) -> None:
        """Takes part in a gather of `unit` that another rank needs, with this rank's shard of the unit."""
        assert self._common_uses is not None, "only other ranks ask for a gather"
        with self.lock:
            self._common_uses.serve(self._entries[unit])

    def updates(self, unit: int) -> int:
        """Returns the number of updates of a unit; see `UnitEntry.updates`."""
        return self._entries[unit].updates

    @uninterrupted
    def read_weights(self, unit: int, receive: Callable[[torch.Tensor], None]) -> None:
        """Calls `receive` with the newest weights of `unit`, (nbytes,) uint8 on the device, pinned meanwhile."""
        weights = self.acquire(unit, ahead=False)
        try:
            receive(weights)
        finally:
            self.release(unit)

    def streams(self, unit: int) -> bool:
        """Returns whether `unit` comes from DISK to the device in chunks, since two host buffers of it do not fit."""
        return self._host_cache.streams(self._entries[unit])

    @uninterrupted
    def grow_device(self, nbytes: int, kept: Sequence[int] = ()) -> list[torch.Tensor]:
        """Grows the device arena, between steps.

        Args:
            nbytes: bytes to add.
            kept: sizes in bytes of buffers in the new memory that belong to the caller for good.

        Returns:
            Those buffers, each (nbytes,) uint8.

        Raises:
            BudgetError: if the device has not as much free memory.
        """
        with self.lock:
            return self._device_cache.grow(nbytes, kept)

    @uninterrupted
    def shrink_device(self) -> int:
        """Frees the memory of `grow_device`; no forward or backward may run, and the caller has left its buffers.

        Returns:
            The bytes; 0 if there are none, if a view of weights is alive there, or if other ranks count on the units.
        """
        with self.lock, self._prefetcher.stopped():
            counted_on = self._common_uses is not None and self._common_uses.settled
            return 0 if counted_on else self._device_cache.shrink()

    @uninterrupted
    def begin(self, kind: PassKind) -> None:
        """Starts the access order of a forward: of a training step, or of an evaluation."""
        with self.lock:
            self.table.access_order.begin(kind)

    @uninterrupted
    def end_forward(self) -> None:
        """Ends the outermost forward, and with it an evaluation; the next pass is one of training again."""
        with self.lock:
            if self.table.access_order.kind is PassKind.EVAL:
                self.table.access_order.finish()
                self.table.access_order.begin(PassKind.TRAIN)

    @uninterrupted
    def end_step(self) -> tuple[int, ...]:
        """Ends the uses of a step and returns their order, which predicts the next step."""
        with self.lock:
            self.table.access_order.begin(PassKind.TRAIN)  # an evaluation that was aborted did not end
            self.table.access_order.finish()
            return self.table.access_order.order

    @uninterrupted
    def prefetch(self) -> None:
        """Starts reads and uploads of the units that the access order predicts next, as far as they are possible now.

        Called between two passes, such as at the end of a step. With several ranks only reads start: an upload would
        be a collective that the other ranks do not expect.
        """
        with self.lock:
            if self._common_uses is None:
                self._prefetcher.run()
            else:
                self._prefetcher.read()

    def counts(self) -> PrefetchStats:
        """Returns the counts of uses so far."""
        with self.lock:
            return PrefetchStats(self._uses, self._hits, self.table.access_order.unforeseen)

    # -- updates and loads --------------------------------------------------------------------------

    @uninterrupted
    def begin_updates(self, units: Sequence[int]) -> None:
        """Forbids every read of `units` until their weights are ready. No use of them may be open."""
        with self.lock, self._prefetcher.stopped():  # an upload ahead would bring old weights
            if units and self._common_uses is not None:
                self._common_uses.forget()
            self.weight_updates.begin(units)

    def mark_rewritten(self, rewritten: bool) -> None:
        """Notes whether bytes that the last commit names were written over, by a load that is not committed yet."""
        self.table.rewritten = rewritten

    @uninterrupted
    def begin_load(self) -> None:
        """Forbids reads of weights until `end_load`, and frees all cached copies; no use may be open."""
        self.begin_updates(range(len(self._entries)))
        with self.lock:
            for entry in self._entries:
                if entry.residency is Residency.READING:  # a read ahead
                    self._host_cache.finish_read(entry)
                entry.copied.wait()  # an upload ahead may still read where the load is about to write
                self._host_cache.forget(entry)

    @uninterrupted
    def end_load(self) -> None:
        """Ends a load: all weights are new, in their tiers and in the newest slots of the store."""
        with self.lock:
            for entry in self._entries:
                entry.updating = False
            self.notify()

    # -- state --------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of changes so far: if it is the same after a check as before, the check missed none. Needs no lock."""
        return self.table.version

    def notify(self) -> None:
        """Wakes all waiters after a change. The caller holds the lock."""
        self.table.notify()

    def residency(self, unit: int) -> Residency:
        return self._entries[unit].residency

    @property
    def failed(self) -> bool:
        """True if an error has stopped this engine."""
        return self.table.failure is not None

    def check(self) -> None:
        """Raises `EngineFailed`, with its cause, after an error on a background thread."""
        self.table.check()

    @uninterrupted
    def fail(self, error: BaseException) -> None:
        """Stops the engine: every waiter and every later call raises `EngineFailed` from `error`."""
        with self.lock:
            self.table.fail(error)

    @uninterrupted
    def give_cache(self, drop_spare: Callable[[], None]) -> None:
        """Frees every host buffer of weights, for another engine of the process. No update may be under way.

        The thread that starts the other engine calls it.

        Args:
            drop_spare: frees what else is in the memory of the cache: promoted states.
        """
        with self.lock, self._prefetcher.stopped():
            self._host_cache.give_cache(drop_spare)

    @uninterrupted
    def close(self) -> None:
        """Waits for reads and uploads in flight and frees all buffers. The update worker must have ended."""
        with self.lock:
            sound = self.table.failure is None
            # First, so that no read that ends from now on starts anything.
            self.table.failure = self.table.failure or EngineFailed("the engine was destroyed")
            with self._prefetcher.stopped():
                self._host_cache.close()
                if sound:
                    self._device_cache.close()
            self.notify()
