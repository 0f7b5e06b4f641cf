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
a copy whose memory is reused at once (`HostCache._evict`, `DeviceCache.start_read`, `DeviceArena.shrink`,
`SpeculativeWeights.begin`, `Pager.begin_load`). Every change of an entry wakes all waiters.

[Note: nobody waits in a circle] The update worker needs only its own tiles. If it gets no host buffer for fresh weights
it waits as long as no thread waits for the worker; otherwise it updates the unit without delivering its weights. A
thread that acquires a unit may evict any host buffer that is clean and not being copied, and finishes prefetched reads
that are in its way. The remaining buffers belong to writes and updates in progress, which end by themselves. While such
a thread waits for a host buffer no other thread allocates one (`waiting_for_buffer`). The pager can drop the device
buffer of any unit that is not pinned. If another thread uploads the unit ahead, the buffer can be dropped once that
thread has started the upload, and it waits for nobody to start it. If a read fills the buffer in place, the buffer can
be dropped once the read has ended. If pinned units fill the arena, waiting cannot help, and the pager raises
`BudgetError`. A thread waits for other ranks without the lock, and serves what they need meanwhile (`Peers.agree` calls
`serve_gather`), so no worker and no buffer of any rank waits for another rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from offload.errors import BudgetError, EngineFailed
from offload.interrupts import uninterrupted
from offload.states import Tier
from offload.swapper.caches import DeviceCache, Expand, Gathers, HostCache
from offload.swapper.memory.device import DONE, Device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, HostBuffer
from offload.swapper.policy import Limits, PassKind, keeps, leaves_room_ahead, row_reads
from offload.swapper.prefetch import Fetcher, Prefetcher, PrefetchStats
from offload.swapper.table import Residency, UnitEntry, UnitSize, UnitTable, WeightSource
from offload.timeline import OFF, Row, Timeline

# -- peers ---------------------------------------------------------------------------------------------
#
# The other ranks, as the pager of one rank sees them.


def checksum(*facts: object) -> int:
    """Returns a checksum of plain values that fits into 57 bits and is never 0."""
    return 1 + int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=7).digest(), "little")


class GatherSeries(NamedTuple):
    """Gathers that a rank could begin in a fixed order, each before the first use of its unit, without further rounds.

    Once all ranks have agreed, no use of a unit in `missing`, or of a unit that was on the device, needs a round.
    """

    missing: tuple[int, ...]
    """Units that are not on this rank's device, in the order of their uses. Their room is reserved."""
    ahead: int
    """Number of gathers that begin earlier than a use needs them."""
    checksum: int
    """Checksum of `missing`, `ahead` and the units that are on the device. Never 0."""
    begin: Callable[[], None]
    """Begins the series on this rank; called when all ranks have agreed, before any gather."""


class UnitState(NamedTuple):
    """State of the device of a rank that uses a unit."""

    unit: bool
    """True if the unit is on this rank's device."""
    all: bool
    """True if every unit is on this rank's device, and stays until weights change."""
    ahead: int
    """The unit that this rank could gather next; -1 if none is to be gathered, or none has room."""
    series: GatherSeries | None = None
    """The gathers that this rank could begin without further rounds; None if it needs rounds."""


class GatherDecision(NamedTuple):
    """Joint decision of all ranks about a unit that one of them uses."""

    gather: bool
    """True if a rank that uses the unit lacks it: all ranks gather it."""
    together: bool
    """True if all ranks announced the same use."""
    all: bool = False
    """True if every rank has every unit: no rank needs the others until weights change."""
    ahead: int = -1
    """A further unit, which all ranks gather before its use; -1 for none."""
    series: bool = False
    """True if a series has begun: `go_on` gathers the unit."""


class Peers(Gathers, Protocol):
    """The other ranks, which hold the rest of each unit. Called by the thread that runs the model or its backward."""

    def agree(self, unit: int, state: Callable[[], UnitState]) -> GatherDecision:
        """Announces that this rank uses `unit`, and returns the decision of all ranks.

        Serves the gathers of other ranks while it waits. The caller must not hold the table's lock. `state` returns the
        state of this rank; it is called without the lock, once for each round.
        """

    def agree_ahead(self, ahead: Callable[[], int]) -> int:
        """Returns the unit that every rank could gather next, or -1. Called after a gather that all ranks announced."""

    @property
    def behind(self) -> bool:
        """True if gathers of the series have not begun. Every round begins them first."""
        ...

    def go_on(self, unit: int) -> None:
        """Begins the gathers of the series that come before a use of `unit`; without the table's lock."""


# -- common uses ---------------------------------------------------------------------------------------
#
# Uses of units on several ranks: which of them need a round of agreement, and what is gathered before them.
#
# [Note: every use is a round] Ranks differ in the units that are on their devices. Suppose a rank asked the others only
# about units that it lacks. A rank that has all units would then run ahead into a collective of the user's own (such as
# a loss over the batches of all ranks), and both would wait for ever. So every use asks the other ranks, also for a
# unit that is on the device, and every rank acts on the same answer. There are two exceptions, which hold until weights
# change:
#
#     all have all    every unit is on every device, and stays there
#     a series        all ranks have announced the same units on their devices, the same missing ones in the order in
#                     which this pass is expected to use them, and room for all of these. They gather the missing units
#                     in that order, each before its first use, and ask nobody.
#
# [Note: a series binds nobody to a path] Gathers of a series begin in their order, and a rank that asks for anything
# else begins all that are left before it asks. So a rank that takes an unexpected path serves the others to the end of
# the series, and some gathers are in vain. Ranks on the same path have begun the same gathers at the same place of the
# program: a use begins the gathers up to its own unit and a fixed number more, never as many as happen to be ready. The
# units stay on the device: a rank reserves room for all of them before it announces a series, and drops nothing for it.
# The first gather of any other unit ends the series on every rank.


class CommonUses(Fetcher):
    """Fetches units together with other ranks. The caller of a method holds the table's lock."""

    def __init__(
        self,
        table: UnitTable,
        host_cache: HostCache,
        device_cache: DeviceCache,
        prefetcher: Prefetcher,
        wait_for_update: Callable[[UnitEntry], None],
        limits: Limits,
        peers: Peers,
    ) -> None:
        super().__init__(table, host_cache, device_cache, prefetcher, wait_for_update)
        # Units that stay on the device are never fetched again after an update, so `fetch` could not wait for the
        # update.
        assert not any(entry.size.device_resident for entry in table.entries), (
            "each of these ranks has a part of a unit"
        )
        self._limits, self._peers = limits, peers
        self._nbytes = sum(entry.size.nbytes for entry in table.entries)
        self._settled: Container[int] = ()
        """Units whose uses need no round until weights change. Other ranks rely on their presence on this device."""
        self._asking: list[UnitEntry] = []
        """Units whose uses wait for the answer of the other ranks."""
        self._may_begin = True
        """False after a series has ended, or was not agreed on, until weights change."""

    @property
    def settled(self) -> bool:
        return self._settled != ()

    def forget(self) -> None:
        self._settled, self._may_begin = (), True

    def prefetch(self) -> None:
        """Starts reads only: an upload would be a collective that the other ranks do not expect."""
        self._prefetcher.read()

    def fetch(self, entry: UnitEntry, ahead: bool = False, safe: bool = False) -> None:
        """Fetches `entry` together with the other ranks; with `ahead` also the next unit, if all ranks have room."""
        self._table.check()
        while entry.index not in self._settled and not self._ask(entry, ahead):
            # Another autograd thread may have asked since the answer, and dropped the unit in `serve`.
            if entry.residency is Residency.DEVICE:
                return
        if self._peers.behind:
            if ahead:
                self._prefetcher.read()
            self._table.changed.without_lock(lambda: self._peers.go_on(entry.index))
            self._table.check()
        assert entry.residency is Residency.DEVICE, "its room was reserved, and nothing was dropped"

    def serve(self, entry: UnitEntry) -> None:
        if entry.index not in self._settled:
            self._end_series()
        try:
            self._gather(entry)
        except BudgetError:
            # The units of this rank's own next uses make room: each round announces anew whether they are there.
            waiting = [asked for asked in self._asking if asked is not entry and asked.pins == 1]
            if not waiting:
                raise
            for asked in waiting:
                self._device_cache.hold(asked, pins=-1)
            try:
                self._gather(entry)
            finally:
                for asked in waiting:
                    self._device_cache.hold(asked, pins=1)

    def _gather(self, entry: UnitEntry) -> None:
        """Gathers a unit, which this rank fetches if it lacks the unit."""
        if entry.device_buffer is None or entry.updating:
            super().fetch(entry)
        else:
            self._device_cache.gather(entry, entry.device_buffer, entry.copied)

    # -- rounds -------------------------------------------------------------------------------------

    def _ask(self, entry: UnitEntry, ahead: bool) -> bool:
        """Fetches `entry` as a round decides. Returns True if all have all, or a series has begun."""

        def state() -> UnitState:
            with self._table.changed.lock:
                series = self._possible_series(entry)
                if entry.residency is not Residency.DEVICE:
                    return UnitState(unit=False, all=False, ahead=-1, series=series)
                next_one = self._prefetcher.next_with_room() if ahead else -1
                # Under a limit of reuse a unit may leave at its release, so no rank relies on it.
                stay = self._limits.reuse is None
                has_all = stay and all(other.residency is Residency.DEVICE for other in self._table.entries)
                return UnitState(unit=True, all=has_all, ahead=next_one, series=series)

        if ahead and entry.residency is Residency.DEVICE:
            self._prefetcher.read()
        # `agree` waits for other ranks, and serves them, so this thread must not hold the lock.
        self._asking.append(entry)
        try:
            agreed = self._table.changed.without_lock(lambda: self._peers.agree(entry.index, state))
        finally:
            self._asking.remove(entry)
        if agreed.series:
            return True
        self._device_cache.free_reserved()
        if agreed.all:
            self._settled = range(len(self._table.entries))
            return True
        unit = agreed.ahead
        if agreed.gather:
            self._gather_beside(entry)
            if ahead:
                self._prefetcher.read()
            if agreed.together:
                unit = self._table.changed.without_lock(lambda: self._peers.agree_ahead(lambda: state().ahead))
        self._table.check()
        if unit >= 0:
            self._gather_beside(self._table.entries[unit])
        return False

    def _gather_beside(self, entry: UnitEntry) -> None:
        """Gathers a unit as a round decided. A unit outside the series may displace one of its units, and ends it."""
        if self.settled and entry.index not in self._settled:
            self._end_series()
        self._gather(entry)

    # -- series -------------------------------------------------------------------------------------

    def _possible_series(self, entry: UnitEntry) -> GatherSeries | None:
        """Returns the series that this rank could begin with a use of `entry`, and reserves room for its units.

        Tries once after each change of weights, else returns None: where ranks differ, further tries only cost time.
        """
        self._device_cache.free_reserved()
        order = self._table.access_order
        if not self._may_begin or self._limits.reuse is not None or not order.order:
            return None
        self._may_begin = False
        if self._nbytes > self._device_cache.nbytes:
            return None
        present = self._table.on_device.copy()
        if any(self._table.entries[unit].updating for unit in present):
            return None
        missing = tuple(unit for unit in dict.fromkeys((entry.index, *order.upcoming())) if unit not in present)
        if not self._device_cache.reserve(missing):
            return None

        def begin() -> None:
            with self._table.changed.lock:
                self._settled = present | set(missing)

        ahead = 0 if self._limits.ahead == 0 else 1
        return GatherSeries(missing, ahead, checksum(missing, ahead, sorted(present)), begin)

    def _end_series(self) -> None:
        """Ends a series, or the announcement of one, since all ranks gather a unit that is not in it."""
        self._device_cache.free_reserved()
        self._settled, self._may_begin = (), False


# -- speculative weights -------------------------------------------------------------------------------
#
# Weights under an update that is made before its step is decided, as the pager sees them.
#
#     begin ─► copy, tile by tile, or the unit's host buffer ─► may_evict ─┬► adopt: the fresh weights become the newest
#                                                                          └► drop
#
# The unit's old weights stay what every thread reads: on the device, or in the newest slot of the store. The fresh
# weights are written to the other slot. They also stay in the unit's host buffer if the reads of the backward have room
# next to it. Once the fresh weights are written, that buffer may be evicted like any other.
#
# Threads. The update worker calls everything but `paused`, which belongs to the thread that calls
# `step()`.


class Begun(NamedTuple):
    """An update that may begin."""

    host_buffer: HostBuffer | None
    """Receives the fresh weights, and contains the old ones; None if tiles receive both."""


class SpeculativeWeights:
    """The part of the pager that updates under the backward call."""

    def __init__(
        self, table: UnitTable, host_cache: HostCache, device_cache: DeviceCache, arena: DeviceArena, device: Device
    ) -> None:
        self._table, self._host_cache, self._device_cache = table, host_cache, device_cache
        self._arena, self._device = arena, device
        self._entries, self._lock = table.entries, table.changed.lock
        self._staying: dict[int, HostBuffer] = {}
        """Fresh weights of units whose `fresh_stays` is True."""
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Yields once no old weights are being copied, and lets no copy begin in the context."""
        with self._lock:
            self._paused = True
        try:
            with self._lock:
                while any(entry.copying for entry in self._table.held.values()):
                    self._table.check()
                    # calling thread: the wait ends. `copy` on the update worker waits for an upload at most.
                    self._table.wait("waits for a copy of weights")
            yield
        finally:
            # calling thread: needs no lock. A copy that still finds the flag set reads from the store.
            self._paused = False

    def begin(self, unit: int) -> Begun | None:
        """Begins the update of a unit of tier DISK; returns None if the update would have to read its weights.

        The next forward would then read them once more, so the update is better made after the step. The caller holds
        the lock.
        """
        entry = self._entries[unit]
        assert entry.size.tier is Tier.DISK and entry.fresh is None
        if entry.updating or entry.residency not in (Residency.HOST, Residency.DEVICE):
            return None
        if not self._gives_host_buffer(entry):
            return Begun(None)
        fresh = entry.host_buffer
        assert fresh is not None
        # update thread: it is about to write where an upload may still read.
        entry.copied.wait()
        entry.host_buffer, entry.fresh, entry.fresh_stays = None, fresh, True
        self._staying[unit] = fresh
        if entry.residency is Residency.HOST:
            self._table.move(entry, Residency.DISK)
        return Begun(fresh)

    def _gives_host_buffer(self, entry: UnitEntry) -> bool:
        if entry.host_buffer is None or entry.copying:
            return False
        fresh_nbytes = [fresh.nbytes for fresh in self._staying.values()]
        ahead = (
            self._host_cache.buffer_nbytes(upcoming)
            for upcoming in map(self._entries.__getitem__, self._table.access_order.upcoming())
            if upcoming.size.tier is Tier.DISK
        )
        return leaves_room_ahead(self._host_cache.nbytes, [entry.host_buffer.nbytes, *fresh_nbytes], ahead)

    def copy(self, unit: int, first: int, destination: torch.Tensor) -> bool:
        """Copies old weights from memory, if they are there. Returns False if they must be read from the store.

        The copy starts at byte `first` of the partition, and fills `destination`, (nbytes,) uint8 on the host.
        """
        with self._lock:
            entry = self._entries[unit]
            source, on_device = self._weights_in_memory(entry)
            if source is None or self._paused:
                return False
            self._device_cache.hold(entry, copying=1)  # both buffers stay until the end
        try:
            source = source[first : first + len(destination)]
            if on_device:
                # update thread: it reads the device buffer, which an upload may still fill.
                entry.uploaded.wait()
                self._device.copy(destination, source)
            else:
                # Not `copy_`, which would start a team of threads for this thread, next to the kernels' team.
                ctypes.memmove(destination.data_ptr(), source.data_ptr(), destination.nbytes)
        finally:
            with self._lock:
                self._device_cache.hold(entry, copying=-1)
                self._table.notify()
        return True

    def _weights_in_memory(self, entry: UnitEntry) -> tuple[torch.Tensor | None, bool]:
        """Returns the old weights, (nbytes,) uint8 or None, and whether they are on the device."""
        if entry.residency not in (Residency.HOST, Residency.DEVICE):
            return None, False
        if entry.host_buffer is not None:
            return entry.host_buffer.tensor(torch.uint8), False
        assert entry.device_buffer is not None and entry.size.shard_nbytes == entry.size.stored_nbytes
        return self._arena.view(entry.device_buffer), True

    def may_evict(self, unit: int) -> None:
        """Allows eviction of the memory of fresh weights, whose writes have ended."""
        with self._lock:
            # update thread: from here on another thread may evict the fresh weights, which are in the other slot too.
            self._entries[unit].fresh_stays = False
            self._staying.pop(unit, None)
            self._table.notify()

    def adopt(self, unit: int) -> bool:
        """Replaces the old weights by the fresh ones once the step is decided. `publish_weights` must follow.

        Returns False if the fresh weights are in the store alone, and not in the host buffer.
        """
        with self._lock:
            entry = self._entries[unit]
            while entry.residency is Residency.READING:  # a prefetch from before step()
                self._table.check()
                self._host_cache.finish_read(entry)
            self._host_cache.forget(entry)
            # update thread: until `publish_weights` the unit is on DISK, and the host buffer of such a unit is never
            # evicted.
            entry.host_buffer, entry.fresh, entry.fresh_stays = entry.fresh, None, False
            self._staying.pop(unit, None)
            self._host_cache.note(entry)
            return entry.host_buffer is not None

    def drop(self, unit: int) -> None:
        """Frees the memory of fresh weights that no step adopts."""
        with self._lock:
            entry = self._entries[unit]
            if entry.fresh is not None:
                entry.fresh.release()
            entry.fresh, entry.fresh_stays = None, False
            self._staying.pop(unit, None)
            self._host_cache.note(entry)
            self._table.notify()


# -- weight updates ------------------------------------------------------------------------------------
#
# Updates of weights as the pager sees them: the units under update, and the buffers of their fresh weights.
#
#     begin ─► buffer_for ─► (the kernel writes the buffer) ─► publish_weights ─► (writes to the store end) ─► flushed
#
# Threads. `begin` belongs to the thread that runs the model, `wait` to every thread that fetches a unit, everything
# else to the update worker. That thread also starts what its work has made possible: the upload of the fresh weights,
# if their unit is used next (`Prefetcher.advance`).


class WeightUpdates:
    """The part of the pager that the update worker calls."""

    def __init__(
        self,
        table: UnitTable,
        host_cache: HostCache,
        device_cache: DeviceCache,
        prefetcher: Prefetcher,
        arena: DeviceArena,
        device: Device,
    ) -> None:
        self._table, self._host_cache, self._device_cache, self._arena = table, host_cache, device_cache, arena
        self._prefetcher, self._device = prefetcher, device
        self.speculative = SpeculativeWeights(table, host_cache, device_cache, arena, device)
        """Updates that are made before their step is decided."""
        self._entries, self._lock = table.entries, table.changed.lock
        self._awaited: list[int] = []
        """Units whose update a thread waits for."""
        self.waits = 0
        """Number of such waits so far; each wake-up of a thread that goes on waiting counts once more."""

    # -- the thread that runs the model -------------------------------------------------------------

    def begin(self, units: Sequence[int]) -> None:
        """Forbids every read of `units` until `publish_weights`. The lock is held, and no use of them is open."""
        for unit in units:
            entry = self._entries[unit]
            assert not entry.pins, f"unit {entry.size.name} is in use during step()"
            while entry.reading_in_place:  # a prefetch from before step(), whose bytes are old from now on
                self._table.check()
                self._device_cache.finish_read(entry)
            self._table.set_updating(entry, True)
            entry.updates += 1
            if entry.size.device_resident:
                # compute stream: a use in place is never released, so the update follows all compute so far.
                self._device.wait_event(entry.read)
                entry.read = self._device.record_event()
            elif entry.residency is Residency.DEVICE:
                self._device_cache.drop(entry)

    def wait(self, entry: UnitEntry) -> None:
        """Waits for a change while the update of a unit is under way. The lock is held."""
        # calling thread: the update worker takes an awaited unit first, so it must learn of it before the wait.
        self._awaited.append(entry.index)
        self.waits += 1
        self._table.notify()
        try:
            self._table.wait(f"waits for update of {entry.size.title}")
        finally:
            self._awaited.remove(entry.index)

    # -- the update worker --------------------------------------------------------------------------

    def buffer_for(self, unit: int) -> HostBuffer | None:
        """Returns the host buffer that receives the fresh weights of `unit`, or None if none is free now.

        `holds_weights` is True if the buffer contains the old weights already. A unit of tier HOST has a buffer of
        its own. A unit of tier DEVICE has none: its update works on `device_tier`.
        """
        entry = self._entries[unit]
        assert entry.size.tier is not Tier.DEVICE
        # update thread: it is about to write where an upload may still read. It waits without the lock, since no
        # further upload of a unit that is `updating` begins.
        entry.copied.wait()
        if entry.size.device_resident:  # a use in place may still read too
            entry.read.wait()
        with self._lock:
            while entry.residency is Residency.READING:  # a prefetch from before step()
                self._table.check()
                self._host_cache.finish_read(entry)
            if entry.host_buffer is None and not self._host_cache.waiting_for_buffer:
                beyond = -1 if unit in self._awaited else self._table.access_order.distance(unit)
                entry.host_buffer = self._host_cache.host_buffer(entry.size.shard_nbytes, beyond)
                self._host_cache.note(entry)
            entry.in_update = entry.host_buffer is not None
            return entry.host_buffer

    def delivers(self, unit: int) -> bool:
        """Returns whether the fresh weights of `unit` go into a host buffer.

        A unit that streams from DISK has a host buffer for one chunk only, from which no thread could fetch the unit.
        """
        return self._entries[unit].size.tier is not Tier.DEVICE and not self._host_cache.streams(self._entries[unit])

    def publish_weights(self, unit: int, in_host_buffer: bool, unwritten: bool) -> None:
        """Ends the update of `unit`: its weights may be used from now on.

        With `in_host_buffer` the fresh weights are in the unit's host buffer, or in its tier; otherwise all of their
        writes to the store must have ended. With `unwritten` such writes are in flight.
        """
        with self._lock:
            entry = self._entries[unit]
            if in_host_buffer and entry.size.tier is not Tier.DEVICE:
                entry.unwritten = unwritten
                fresh = Residency.WRITING if unwritten else Residency.HOST
                if entry.residency is not fresh and not entry.size.device_resident:
                    self._table.move(entry, fresh)
            # update thread: threads that fetch this unit wake up, and its fresh weights may be uploaded from here on.
            entry.in_update = False
            self._table.set_updating(entry, False)
            self._table.timeline.end(Row.UPDATES, entry.size.title)
            self._table.notify()
            self._prefetcher.advance()

    def flushed(self, unit: int) -> None:
        """Marks the host buffer of `unit` clean: the last write of its update has ended."""
        with self._lock:
            entry = self._entries[unit]
            # update thread: the store contains the bytes now, so another thread may evict the buffer.
            entry.unwritten = False
            if entry.residency is Residency.WRITING:
                self._table.move(entry, Residency.HOST)
            self._table.notify()
            self._prefetcher.advance()

    def device_tier(self, unit: int) -> torch.Tensor:
        """Returns the partition of a unit of tier DEVICE, (part_nbytes,) uint8, which nothing reads now."""
        entry = self._entries[unit]
        assert entry.tier_buffer is not None
        # update thread: the update writes where an upload, or a use in place, may still read.
        entry.copied.wait()
        entry.read.wait()
        return self._arena.view(entry.tier_buffer)

    def tier_buffer(self, unit: int) -> HostBuffer:
        """Returns the host buffer of a unit of tier HOST."""
        host_buffer = self._entries[unit].host_buffer
        assert host_buffer is not None and self._entries[unit].size.tier is Tier.HOST
        return host_buffer

    def holds_weights(self, unit: int) -> bool:
        """Returns whether the host buffer of `unit` contains its weights as they are before the update."""
        entry = self._entries[unit]
        return entry.residency is Residency.HOST or (entry.size.device_resident and entry.size.tier is Tier.HOST)

    def awaited_unit(self) -> int | None:
        """Returns a unit whose update a thread waits for, if any. The caller holds the lock."""
        return next((unit for unit in self._awaited if self._entries[unit].updating), None)

    @property
    def waiting_for_buffer(self) -> bool:
        """True if a thread waits for a host buffer of weights. The caller holds the lock."""
        return self._host_cache.waiting_for_buffer > 0


# -- pager ---------------------------------------------------------------------------------------------


class Pager:
    """The weights of all units, between DISK, HOST and DEVICE. The update worker must end before `close`."""

    def __init__(
        self,
        sizes: Sequence[UnitSize],
        host: HostArena,
        arena: DeviceArena,
        device: Device,
        source: WeightSource,
        limits: Limits,
        peers: Peers | None = None,
        *,
        expand: Expand = lambda unit, memory: None,
        timeline: Timeline = OFF,
    ) -> None:
        self.table = UnitTable(sizes, lambda: source.committed, timeline=timeline, record_memory=self._record_memory)
        self.changed = self.table.changed
        self.lock = self.changed.lock
        self.sizes = sizes
        self.host = host
        self.arena = arena
        self._entries = self.table.entries
        self._host_cache = HostCache(self.table, host, source)
        self._device_cache = DeviceCache(self.table, arena, device, peers, expand)
        caches = (self.table, self._host_cache, self._device_cache)
        self._prefetcher = Prefetcher(*caches, limits, device, several_ranks=peers is not None)
        self.weight_updates = WeightUpdates(*caches, self._prefetcher, arena, device)
        work = (*caches, self._prefetcher, self.weight_updates.wait)
        self._fetcher = Fetcher(*work) if peers is None else CommonUses(*work, limits, peers)
        self._device, self._limits, self._divided = device, limits, peers is not None
        self._recorded = timeline.recorded
        self._titles = {name: f"host buffers of {name}" for name in host.regions}
        self._device_resident = tuple(size.device_resident and not self._divided for size in sizes)
        self._looked_up: dict[int, None] = {}
        """Units of lookups since the last step, in their order."""
        self._uses = self._hits = 0

    def _record_memory(self) -> None:
        """Records the bytes in use, in the device arena and in each class of the host arena. The lock is held."""
        if self._recorded is OFF:  # every change of a unit comes here
            return
        for name, region in self.host.regions.items():
            if region.space.nbytes:
                self._recorded.count(self._titles[name], region.space.used_bytes)
        self._recorded.count("device memory", self.arena.used_bytes)

    # -- the thread that runs the model -------------------------------------------------------------

    @uninterrupted
    def acquire(self, unit: int, ahead: bool = True, safe: bool = False) -> torch.Tensor:
        """Pins `unit` on the device and returns its weights.

        Compute that the calling thread starts from now on is ordered after the upload, which may be in flight. Waits
        for the update of the unit, for its read, and for the other ranks. With `ahead`, prefetches what the access
        order predicts next. The weights, (nbytes,) uint8, are the pager's memory, valid until `release`. Raises
        `BudgetError` if pinned units leave no room, with `safe` no room that suits the unit's companions, and
        `EngineFailed` after an error on a background thread.
        """
        entry = self._entries[unit]
        with self.lock:
            self._device_cache.hold(entry, pins=1)  # from here on nobody drops it
            try:
                begins, on_device = entry.pins == 1, entry.residency is Residency.DEVICE
                if begins:
                    self.table.access_order.use(unit)
                self._fetcher.fetch(entry, ahead, safe)
                if begins:  # only now: a caller that makes room after a `BudgetError` calls again for the same use
                    self._uses, self._hits = self._uses + 1, self._hits + on_device
            except BaseException:  # also a Ctrl-C at a wait
                self._device_cache.hold(entry, pins=-1)
                raise
            assert entry.device_buffer is not None
            view, uploaded = self.arena.view(entry.device_buffer), entry.uploaded
        try:
            # compute stream: the upload may be in flight.
            self._device.wait_event(uploaded)
        except BaseException:  # `uploaded` is the event of a gather that another rank did not contribute to
            self.release(unit)
            raise
        return view

    def device_resident(self, unit: int) -> bool:
        """Returns True if `unit` never leaves its place on the device, and needs no other rank."""
        return self._device_resident[unit]

    @uninterrupted
    def use_in_place(self, unit: int) -> None:
        """Waits for the update of a `device_resident` unit, and begins a use, without a pin and without a `release`."""
        entry = self._entries[unit]
        with self.lock:
            self.table.access_order.use(unit)
            self._uses, self._hits = self._uses + 1, self._hits + 1
            self._fetcher.fetch(entry, ahead=True)
        self.wait_upload(unit)

    @uninterrupted
    def release(self, unit: int) -> None:
        """Ends one use. The device buffer stays allocated until its memory is needed."""
        with self.lock:
            entry = self._entries[unit]
            assert entry.pins > 0, f"unit {entry.size.name} was released more often than acquired"
            # compute stream: if several streams read the unit, this stream waits for the others, so that `read` covers
            # all.
            self._device.wait_event(entry.read)
            entry.read = self._device.record_event()
            self._device_cache.hold(entry, pins=-1)
            if not keeps(
                self.table.access_order, unit, lambda index: self._entries[index].size.nbytes, self._limits
            ) and self._device_cache.idle(entry):
                self._device_cache.drop(entry)
            self.notify()

    @uninterrupted
    def wait_upload(self, unit: int) -> None:
        """Orders compute that the calling thread starts from now on after the upload of `unit`, which is pinned."""
        # calling thread: needs no lock. With several ranks, a pinned unit may be gathered again meanwhile: the event is
        # replaced by one assignment, and a gather writes the same bytes again.
        uploaded = self._entries[unit].uploaded
        if uploaded is not DONE:
            self._device.wait_event(uploaded)

    def waits(self, unit: int) -> bool:
        """Returns True if `wait_upload` of a pinned unit may wait: with several ranks, any rank may gather it again."""
        return self._divided or self._entries[unit].uploaded is not DONE

    @uninterrupted
    def serve_gather(self, unit: int) -> None:
        """Takes part in a gather of `unit` that another rank needs, with this rank's shard of the unit."""
        with self.lock:
            self._fetcher.serve(self._entries[unit])

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

    @uninterrupted
    def read_copies(self, unit: int, receive: Callable[[Sequence[torch.Tensor]], None], on_device: bool = True) -> None:
        """Calls `receive` with each copy of the unit's partition that is in memory.

        A copy is given as its pieces, (nbytes,) uint8 each, in the order of the partition. Moves no weights and asks no
        other rank. Calls nothing while an update of the unit is under way. Without `on_device`, leaves out the copy
        with which the device computes, unless the unit's tier is DEVICE.
        """
        with self.lock:
            entry = self._entries[unit]
            if entry.updating:
                return
            partitions, copies = list[torch.Tensor](), list[list[torch.Tensor]]()
            if entry.tier_buffer is not None:
                partitions.append(self.arena.view(entry.tier_buffer))
            readable = (Residency.HOST, Residency.WRITING, Residency.DEVICE)
            if entry.host_buffer is not None and entry.residency in readable:
                partitions.append(entry.host_buffer.tensor(torch.uint8))
            for memory in partitions:
                copies.append([memory[start : start + len(target)] for start, target in entry.size.pieces])
            if on_device and entry.residency is Residency.DEVICE and entry.device_buffer != entry.tier_buffer:
                assert entry.device_buffer is not None
                memory = self.arena.view(entry.device_buffer)
                copies.append([memory[target.start : target.stop] for _, target in entry.size.pieces])
            entry.copying += 1  # all buffers stay until the end
        try:
            # compute stream: the upload may be in flight. No lock: see `wait_upload`.
            self._device.wait_event(entry.uploaded)
            for pieces in copies:
                receive(pieces)
        finally:
            with self.lock:
                entry.copying -= 1
                self.notify()

    def row_reads(self, unit: int, rows: Sequence[int], row_nbytes: int) -> tuple[range, ...] | None:
        """Returns the ranges of the partition that `look_up` must read for `rows`; None if the unit is better fetched.

        `rows` are ascending. A unit in memory needs no reads. A unit is fetched if it stays on the device, if ranks
        divide it, or if the device computes its values.
        """
        size = self.sizes[unit]
        if self._divided or self._device_resident[unit] or size.expanded_nbytes or len(size.pieces) != 1:
            return None
        if size.tier is not Tier.DISK:
            return ()
        most = self._host_cache.buffer_nbytes(self._entries[unit])
        return row_reads(rows, row_nbytes, size.pieces[0].start, size.shard_nbytes, most) or None

    @uninterrupted
    def expect(self, units: Sequence[int], group: Sequence[int]) -> None:
        """Predicts that a lookup in `group` next fetches `units`, in this order, and prefetches them.

        Does nothing where ranks divide units, which gather them in the order that all of them recorded.
        """
        if self._divided:
            return
        with self.lock:
            self.table.access_order.expect(units, group, backward=False)
            self._fetcher.prefetch()

    @uninterrupted
    def look_up(self, unit: int, rows: torch.Tensor, row_nbytes: int, reads: Sequence[range]) -> torch.Tensor:
        """Returns a copy of rows of a unit, (n, row_nbytes) uint8, on the host or on the device, without a fetch.

        Waits for the update of the unit, as `acquire` does. The access order does not record the lookup: no prefetch
        shall bring the unit for it. Raises `EngineFailed` after an error on a background thread.

        Args:
            rows: (n,) int64 on the host, in any order. Row 0 is at the start of the unit.
            reads: the result of `row_reads` for these rows.
        """
        with self.lock:
            self._looked_up[unit] = None
            return self._fetcher.look_up(self._entries[unit], rows, row_nbytes, reads)

    @uninterrupted
    def grow_device(self, nbytes: int, block_sizes: Sequence[int] = ()) -> list[torch.Tensor]:
        """Grows the device arena, between steps.

        Returns buffers of `block_sizes` in the new memory, (nbytes,) uint8, which belong to the caller for good. Raises
        `BudgetError` if the device has less free memory than `nbytes`.
        """
        with self.lock:
            return self._device_cache.grow(nbytes, block_sizes)

    @uninterrupted
    def shrink_device(self) -> int:
        """Frees the memory of `grow_device`; no forward or backward may run, and the caller has left its buffers.

        Returns the bytes; 0 if there are none, a view of weights is alive there, or other ranks rely on the units.
        """
        with self.lock, self._prefetcher.stopped():
            return 0 if self._fetcher.settled else self._device_cache.shrink()

    @uninterrupted
    def begin(self, kind: PassKind) -> None:
        """Starts the access order of a forward: of a training step, or of an evaluation."""
        with self.lock:
            self.table.access_order.begin(kind)

    @uninterrupted
    def end_forward(self) -> None:
        """Ends the outermost forward, and with it an evaluation; the next pass is a training pass again."""
        with self.lock:
            if self.table.access_order.kind is PassKind.EVAL:
                self.table.access_order.finish()
                self.table.access_order.begin(PassKind.TRAIN)

    @uninterrupted
    def end_step(self) -> tuple[int, ...]:
        """Ends the uses of a step and returns their order, which predicts the next step, after the units looked up."""
        with self.lock:
            self.table.access_order.begin(PassKind.TRAIN)  # an evaluation that was aborted did not end
            self.table.access_order.finish()
            # Lookups come first in a forward, so the updates of their units do too.
            looked_up, self._looked_up = self._looked_up, {}
            return *looked_up, *self.table.access_order.order

    @uninterrupted
    def prefetch(self) -> None:
        """Starts reads and uploads of the units that the access order predicts next, as far as they are possible now.

        Called between two passes, such as at the end of a step.
        """
        with self.lock:
            self._fetcher.prefetch()

    def counts(self) -> PrefetchStats:
        """Returns the counts of uses so far."""
        with self.lock:
            return PrefetchStats(self._uses, self._hits, self.table.access_order.unforeseen)

    # -- updates and loads --------------------------------------------------------------------------

    @uninterrupted
    def begin_updates(self, units: Sequence[int]) -> None:
        """Forbids every read of `units` until their weights are ready. No use of them may be open."""
        with self.lock, self._prefetcher.stopped():  # an upload ahead would bring old weights
            if units:
                self._fetcher.forget()
            self.weight_updates.begin(units)

    def mark_rewritten(self, rewritten: bool) -> None:
        """Records whether a load that is not committed yet has overwritten bytes that the last commit names."""
        self.table.rewritten = rewritten  # no lock: only the text of an error depends on it

    @uninterrupted
    def begin_load(self) -> None:
        """Forbids reads of weights until `end_load`, and frees all cached copies; no use may be open."""
        self.begin_updates(range(len(self._entries)))
        # calling thread: outside of `stopped`. All units are `updating` by now, and no thread prefetches such a unit.
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
                self.table.set_updating(entry, False)
            self.notify()

    # -- state --------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of changes so far: if it is the same after a check as before, the check missed none. Needs no lock."""
        return self.table.version

    def notify(self) -> None:
        """Wakes all waiters after a change. The caller holds the lock."""
        self.table.notify()

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

    # -- budgets ------------------------------------------------------------------------------------

    # [Note: budgets that change] The end of the host cache and of the device arena moves under two locks and one wait:
    # the lock of `HostMemory` (no other engine starts and takes the memory meanwhile), then the pager's lock, and
    # `stopped` (no thread reads or uploads ahead). Weights in memory are copies of weights elsewhere, unless an update
    # has just written them: such a buffer is not evictable until its write has ended, so it stays, or is waited for.
    # Promoted states belong to the update worker, whose `drop_spare` refuses while an update may use them. A buffer
    # below the new end stays where it is, so a thread that reads it needs not know of the change.

    @uninterrupted
    def shrink_host(self, cache: int, drop_spare: Callable[[int], bool], wait: bool = True) -> bool:
        """Gives the end of the cache of weights back to the system, so that `cache` bytes, whole pages, are left.

        With `wait`, waits for reads and writes of buffers in the way. Otherwise the end moves as far as clean buffers
        allow. `drop_spare` as in `give_cache`. Returns False, and changes nothing, if `drop_spare` does.
        """
        with self.host.alone(), self.lock, self._prefetcher.stopped():
            return self._host_cache.shrink(cache, drop_spare, wait)

    @uninterrupted
    def grow_host(self, cache: int, nbytes: Sequence[int] = ()) -> list[HostBuffer | None]:
        """Takes memory again, so that the cache of weights holds `cache` bytes, whole pages.

        Returns a buffer of each of `nbytes` near the end of the cache, or None where it has no room. Raises
        `BudgetError`, before any change, if another engine of the process has the memory.
        """
        with self.host.alone(), self.lock, self._prefetcher.stopped():
            self.host.resize(cache)
            self.notify()  # a thread may wait for a host buffer
            # Taken before any thread reads ahead, which would fill the cache.
            return [self.host.weights.take_last(size) for size in nbytes]

    def device_kept(self) -> int:
        """Returns the bytes of the device arena that no unit that comes and goes may use, between steps."""
        with self.lock:
            return self._device_cache.kept_nbytes

    def forget(self) -> None:
        """Forgets what ranks have agreed on about units on their devices. All ranks call it at the same time."""
        with self.lock:
            self._fetcher.forget()

    @uninterrupted
    def resize_device(self, nbytes: int) -> None:
        """Moves the end of the device arena, between steps, when no view of weights is alive.

        All units that come and go are dropped. Raises `BudgetError` if the device has too little memory free: the arena
        then keeps its size.
        """
        with self.lock, self._prefetcher.stopped():
            self._device_cache.resize(nbytes)

    @uninterrupted
    def give_cache(self, drop_spare: Callable[[int], bool]) -> bool:
        """Frees the cache for another engine of the process, for good; False if updates are under way.

        The thread that starts the other engine calls it. `drop_spare` frees the promoted states, which are in the
        memory of the cache too, if they end beyond a byte of the class of weights. It returns False, and frees nothing,
        while an update may use them.
        """
        with self.lock, self._prefetcher.stopped():
            freed = self._host_cache.shrink(0, drop_spare)
            if freed and not self.failed:
                self.host.drop_cache()
            return freed

    @uninterrupted
    def close(self) -> None:
        """Waits for reads and uploads in flight and frees all buffers. The update worker must have ended."""
        with self.lock:
            sound = self.table.failure is None
            # First, so that no read that ends from now on starts anything.
            self.table.failure = self.table.failure or EngineFailed("the engine was destroyed")
            self.host.viewed = self.arena.shares_viewed_memory
            with self._prefetcher.stopped():
                self._host_cache.close()
                if sound:
                    self._device_cache.close()
            self.notify()
