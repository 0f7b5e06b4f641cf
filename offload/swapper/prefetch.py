"""Reads and uploads: of the units that the access order predicts next (`Prefetcher`), and on demand (`Fetcher`).

A lookup of a few rows (`Fetcher.look_up`) takes these from wherever the weights are, and moves no unit.

The policy chooses the unit to prefetch (`policy.next_to_fetch`); this module starts its read, or its upload. The caller
holds the pager's lock. No prefetch waits for an update. It waits for a read only if bytes were damaged and are read
again (`CheckedRead`). An upload blocks where `Device.upload` does.

[Note: who starts what]

    thread                               calls     when
    runs the model                       run       at each use, and at the end of a step
    update worker                        advance   fresh weights may be used, or their write has ended
    runs callbacks of the I/O queue      advance   a read ahead has ended

So a unit comes to the device as soon as possible, even while the model's thread computes, waits, or runs the user's
code between two steps. All threads take the next unit of the access order, and one unit at a time. A second thread that
finds this unit on its way starts no other unit, and the first thread looks again when its upload has started.

A thread that *advances* works for nobody in particular, so it gives way. Like every prefetch, it evicts only units that
are used later. It starts no upload while another thread fetches a unit on demand: the room belongs to that unit. It
takes no host buffer while a thread waits for one, and none whose copy to the device is under way. It waits in two
cases: damaged bytes are read again, and an upload from memory that is not pinned waits for compute that was started
before. Some operations must not meet an upload ahead: the begin of updates and loads, the transfer of the cache to
another engine, and `close`. They wait for it by `stopped`.

With several ranks an upload is a collective, which belongs to the thread that runs the model (`may_upload_elsewhere`).
On a CPU an upload is a copy by the calling thread; see there as well.

A unit that does not fit twice into the host buffers cannot be read ahead into one of them. On a CPU with one rank it is
read in place: the read fills its device buffer, and no upload is needed. Elsewhere it is streamed on demand.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from offload.aio import Priority
from offload.interrupts import uninterrupted
from offload.states import Tier
from offload.swapper.caches import DeviceCache, HostCache, read_rows
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import DeviceBuffer
from offload.swapper.memory.host_arena import HostBuffer
from offload.swapper.policy import Limits, next_to_fetch
from offload.swapper.table import Residency, Transfer, UnitEntry, UnitTable
from offload.timeline import Row


class PrefetchStats(NamedTuple):
    """Counts of uses of units."""

    uses: int
    on_device: int
    """Uses that found the unit on the device."""
    unforeseen: int
    """Uses that the access order did not predict."""


def may_upload_elsewhere(host_addressable: bool, several_ranks: bool) -> bool:
    """Returns whether threads other than the model's start uploads.

    On a CPU (`host_addressable`) an upload is a copy by the calling thread. With several ranks an upload ends with a
    gather, in which all ranks take part in one order.
    """
    return not host_addressable and not several_ranks


class Prefetcher:
    """Starts reads and uploads ahead of use, within the budgets of the host and the device cache."""

    def __init__(
        self,
        table: UnitTable,
        host_cache: HostCache,
        device_cache: DeviceCache,
        limits: Limits,
        device: Device,
        several_ranks: bool,
    ) -> None:
        self._table, self._host_cache, self._device_cache, self._limits = table, host_cache, device_cache, limits
        self._entries, self._device = table.entries, device
        self._all_stay = all(entry.size.device_resident for entry in table.entries)
        self._any_on_disk = any(entry.size.tier is Tier.DISK for entry in table.entries)
        self._uploads_elsewhere = may_upload_elsewhere(device.host_addressable, several_ranks)
        # The pager's lock guards both counts: of threads that advance, and of threads that forbid it.
        self._elsewhere = self._stops = 0

    # -- the thread that runs the model -------------------------------------------------------------

    def run(self) -> None:
        """Starts reads of the units that come next, then uploads of those whose weights are in a host buffer."""
        if self._all_stay:
            return
        # calling thread: both calls release the lock while bytes move, so each looks up the next unit again.
        self.read()
        self._upload()

    def read(self, wait: bool = True) -> None:
        """Finishes reads that are done, and starts reads of the units that come next.

        Without `wait`, takes no host buffer whose copy to the device is under way.
        """
        if not self._any_on_disk:
            return
        # Delivered first: the host buffer of a read that has ended may be evicted for the next read.
        for _, entry in sorted(self._table.reading.items()):
            self._finish_if_done(entry)
        self._host_cache.read_ahead(self._limits, self._watch, wait)

    def next_with_room(self) -> int:
        """Returns the next unit if it can be uploaded now, from a host buffer and with room on the device; else -1."""
        unit = next(self._table.access_order.upcoming(), None)
        if unit is None or unit != self._next_upload():
            return -1
        entry = self._entries[unit]
        if not self._is_in_host(entry):
            return -1
        place = self._device_cache.find_room(entry, self._table.access_order.distance(unit))
        return -1 if place is None else unit

    @property
    def busy_elsewhere(self) -> bool:
        """True while a thread advances, whose upload may be under way."""
        return self._elsewhere > 0

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Waits without the lock until no thread advances. None advances in the body, even if it releases the lock."""
        self._stops += 1
        try:
            # calling thread: the wait ends. An upload ahead waits for no thread, and `advance` notifies at its end.
            while self._elsewhere:
                self._table.wait("waits for an upload ahead")
            yield
        finally:
            self._stops -= 1

    # -- other threads ------------------------------------------------------------------------------

    def advance(self) -> None:
        """Starts reads and uploads, on a thread that does not run the model; see [Note: who starts what]."""
        if self._all_stay or self._stops or self._table.failure is not None:
            return
        # An upload releases the lock: `stopped` on another thread waits for this count to fall.
        self._elsewhere += 1
        try:
            # This thread works ahead: the next free host buffer belongs to a thread that waits for one.
            if not self._host_cache.waiting_for_buffer:
                self.read(wait=False)
            # Room on the device belongs to a unit that a thread has pinned and that is not there yet.
            if self._uploads_elsewhere and not any(
                entry.pins and entry.residency is not Residency.DEVICE for entry in self._table.held.values()
            ):
                self._upload()
        finally:
            self._elsewhere -= 1
            if self._stops and not self._elsewhere:
                self._table.notify()

    def _watch(self, entry: UnitEntry) -> None:
        """Makes the end of a read ahead start the upload of its unit."""
        # The callback receives the present transfer: when it runs, the entry may already have another one.
        if self._uploads_elsewhere and entry.transfer is not None:
            entry.transfer.future.add_done_callback(functools.partial(self._arrived, entry, entry.transfer))

    @uninterrupted
    def _arrived(self, entry: UnitEntry, transfer: Transfer, _: object) -> None:
        """Delivers a read ahead that has ended. Runs on a thread of the queue, or inside of `add_done_callback`."""
        # calling thread: the read ended before it could be watched. The thread that started it holds the lock, and this
        # or a later prefetch delivers it.
        if self._table.changed.held:
            return
        with self._table.changed.lock:
            try:
                # Otherwise another thread has delivered the read, or the engine has stopped.
                if entry.transfer is transfer and self._table.failure is None:
                    # thread of the I/O queue: it has no current device before this call.
                    self._device.enter_thread()
                    self._host_cache.finish_read(entry)
                    self.advance()
            except BaseException as error:  # no caller can receive it; every thread that waits for weights does
                self._table.fail(error)

    # -- any thread ---------------------------------------------------------------------------------

    def _upload(self) -> None:
        """Starts uploads and reads in place of the units that come next, as long as they are possible and have room."""
        while self._table.failure is None and (unit := self._next_upload()) is not None:
            entry = self._entries[unit]
            self._finish_if_done(entry)
            in_host = self._is_in_host(entry)
            # The order is kept: a unit that is used later would take the room of this one.
            on_disk = entry.residency is Residency.DISK and not entry.updating
            if not in_host and not (on_disk and self.reads_in_place(entry)):
                return
            buffer = self._device_cache.allocate(entry, self._table.access_order.distance(unit))
            if buffer is None:  # the units in the way are in use, or used sooner
                return
            if in_host:
                self._device_cache.upload(entry, buffer)
            else:
                self._device_cache.start_read(entry, buffer, self._host_cache.reader(entry, Priority.NORMAL))

    def _finish_if_done(self, entry: UnitEntry) -> None:
        if entry.transfer is not None and entry.transfer.future.done():
            cache = self._device_cache if entry.reading_in_place else self._host_cache
            cache.finish_read(entry)

    def _next_upload(self) -> int | None:
        return next_to_fetch(
            self._table.access_order, self._nbytes, self._device_cache.missing.upcoming(), self._limits
        )

    def _nbytes(self, unit: int) -> int:
        return self._entries[unit].size.nbytes

    @staticmethod
    def _is_in_host(entry: UnitEntry) -> bool:
        return entry.residency in (Residency.HOST, Residency.WRITING) and not entry.updating

    def reads_in_place(self, entry: UnitEntry) -> bool:
        """Returns True if reads of `entry` fill its device buffer.

        A unit that fits twice into the host buffers is read into a host buffer, where it stays for its next use.
        """
        return self._host_cache.streams(entry) and self._device_cache.reads_in_place(entry.size)


class Fetcher:
    """Moves units to the device for threads that need them now. The caller of a method holds the table's lock.

    A fetch asks no other rank. `CommonUses` overrides it where ranks divide units.
    """

    def __init__(
        self,
        table: UnitTable,
        host_cache: HostCache,
        device_cache: DeviceCache,
        prefetcher: Prefetcher,
        wait_for_update: Callable[[UnitEntry], None],
    ) -> None:
        self._table, self._host_cache, self._device_cache = table, host_cache, device_cache
        self._prefetcher, self._wait_for_update = prefetcher, wait_for_update

    @property
    def settled(self) -> bool:
        """True if other ranks rely on units that are on this rank's device."""
        return False

    def forget(self) -> None:
        """Resets the agreement with other ranks, since weights change on all ranks at once."""

    def serve(self, entry: UnitEntry) -> None:
        """Takes part in a gather of a unit, as a part of a series or because another rank needs the unit."""
        raise AssertionError("only ranks that divide units ask for a gather")

    def prefetch(self) -> None:
        """Starts the reads and uploads that are possible now, between two passes."""
        self._prefetcher.run()

    def fetch(self, entry: UnitEntry, ahead: bool = False, safe: bool = False) -> None:
        """Moves a unit to DEVICE, one arrow of the residency table at a time.

        Each wait releases the lock, so the loop looks up the unit's residency again after each step. With `ahead`, also
        starts reads and uploads of the units that the access order predicts next. Raises `BudgetError` if pinned units
        leave no room, with `safe` no room that suits the unit's companions, and `EngineFailed` after an error on a
        background thread.
        """
        while entry.updating or entry.residency is not Residency.DEVICE:
            self._table.check()  # a wait may have ended because the engine failed
            if entry.updating:
                # calling thread: the wait ends. The worker takes this unit first, and needs nothing of this thread.
                self._wait_for_update(entry)
            elif entry.residency is Residency.DISK and self._prefetcher.reads_in_place(entry):
                if (device_buffer := self._place(entry, safe)) is not None:
                    self._device_cache.start_read(entry, device_buffer, self._host_cache.reader(entry, Priority.URGENT))
            elif entry.residency is Residency.DISK:
                if (host_buffer := self._host_cache.host_buffer(self._host_cache.buffer_nbytes(entry))) is None:
                    # Buffers belong to writes and updates, which end by themselves, or to reads, which this call
                    # delivers.
                    self._host_cache.wait_for_buffer(entry)
                elif self._host_cache.streams(entry):
                    self._stream(entry, host_buffer, safe)
                else:
                    self._host_cache.start_read(entry, host_buffer, Priority.URGENT)
            elif entry.residency is Residency.READING:
                # This thread started the read in the turn before, or any thread started it ahead. The queue's threads
                # end it.
                self._host_cache.finish_read(entry)
            elif entry.residency in (Residency.HOST, Residency.WRITING):
                # WRITING too: the write to the drive only reads the host buffer, as the upload does.
                if (device_buffer := self._place(entry, safe)) is not None:
                    self._device_cache.upload(entry, device_buffer)
            elif entry.reading_in_place:
                self._device_cache.finish_read(entry)
            else:
                # UPLOADING on another thread, which starts its copies without the help of this thread.
                self._table.wait(f"waits for upload of {entry.size.title}")
        self._table.check()
        if ahead:
            self._prefetcher.run()

    def look_up(self, entry: UnitEntry, rows: torch.Tensor, row_nbytes: int, reads: Sequence[range]) -> torch.Tensor:
        """Returns rows of a unit from wherever its weights are, on the host or on the device; see `Pager.look_up`."""
        host_buffer = None
        while host_buffer is None:
            self._table.check()
            if entry.updating:
                # calling thread: the wait ends, see `fetch`.
                self._wait_for_update(entry)
            elif entry.residency is Residency.DEVICE or entry.host_buffer is not None:
                break
            elif (host_buffer := self._host_cache.host_buffer(sum(map(len, reads)))) is None:
                self._host_cache.wait_for_buffer(entry)  # see `fetch`
        take: Callable[[], torch.Tensor]
        if host_buffer is not None:
            # DISK. Or a read or an upload of all the unit has begun, which takes longer.
            read = self._host_cache.reader(entry, Priority.URGENT)
            starts = entry.size.pieces[0].start + rows * row_nbytes
            take = functools.partial(read_rows, read, host_buffer, reads, starts, row_nbytes)
        elif entry.residency is Residency.DEVICE:
            take = functools.partial(self._device_cache.look_up, entry, rows, row_nbytes)
        else:
            take = functools.partial(self._host_cache.look_up, entry, rows, row_nbytes)
        # calling thread: it releases the lock. The unit keeps its buffers until the copy ends, and its newest slot
        # until the next step.
        self._device_cache.hold(entry, copying=1)
        try:
            with self._table.timeline.span(Row.WAITS, f"waits for read of rows of {entry.size.title}"):
                return self._table.changed.without_lock(take)
        except OSError as error:  # of a read; without memory for the rows a caller may try again
            self._table.fail(error, entry)
            raise
        finally:
            self._device_cache.hold(entry, copying=-1)
            if host_buffer is not None:
                host_buffer.release()
            self._table.notify()

    def _stream(self, entry: UnitEntry, host_buffer: HostBuffer, safe: bool) -> None:
        """Moves a unit from DISK to DEVICE in chunks, through `host_buffer` and a second buffer if memory is free."""
        # No wait for the second buffer: two threads that each hold one buffer would wait for each other.
        second = self._host_cache.host_buffer(host_buffer.nbytes)
        host_buffers = [host_buffer] if second is None else [host_buffer, second]
        device_buffer = None
        try:
            device_buffer = self._place(entry, safe)
        finally:
            if device_buffer is None:
                # `_place` has waited without the lock, so the caller must look up the unit again. Others may use the
                # buffers.
                for buffer in host_buffers:
                    buffer.release()
        if device_buffer is not None:
            self._device_cache.stream(
                entry, device_buffer, host_buffers, self._host_cache.reader(entry, Priority.URGENT)
            )

    def _place(self, entry: UnitEntry, safe: bool) -> DeviceBuffer | None:
        """Returns a device buffer for `entry`, or None after a wait for what was in the way.

        Raises `BudgetError` if the units in use leave no room; see `fetch`.
        """
        # From another place the unit might leave its companions no room, so what is on its way comes first.
        device_buffer = self._device_cache.allocate(entry, safe=True)
        if device_buffer is None:
            if (reading := self._device_cache.latest_read()) is not None:
                self._device_cache.finish_read(reading)  # its unit can be dropped then
            elif self._prefetcher.busy_elsewhere or self._device_cache.copying:
                # An upload or a copy by another thread ends without the help of this one. Then its unit can be dropped.
                self._table.wait(f"waits for an upload ahead of {entry.size.title}")
            elif safe or (device_buffer := self._device_cache.allocate(entry)) is None:
                raise self._device_cache.no_room(entry)
        return device_buffer
