"""The pager's host side: host buffers for weights, their eviction, and reads from the store into them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from offload.aio import Priority
from offload.aio.protocols import Future, wait_for_all
from offload.sizes import PAGE, align_up
from offload.states import State, Tier
from offload.swapper.in_place.model_files import ModelFiles
from offload.swapper.memory.host_arena import HostArena, HostBuffer
from offload.swapper.policy import Block, Limits, next_to_fetch, victims
from offload.swapper.residency import Residency
from offload.swapper.store import Store
from offload.swapper.unit_table import Transfer, UnitEntry, UnitTable


class HostCache:
    """Host buffers of weights: permanent ones of units whose tier is HOST, and ones that units of tier DISK share.

    The caller of every method holds the table's lock. Methods that wait release the lock meanwhile.
    """

    def __init__(self, table: UnitTable, host: HostArena, store: Store | ModelFiles | None) -> None:
        """Allocates the permanent host buffers.

        Args:
            table: the table that all components of the pager share.
            host: the memory of all host buffers.
            store: the swap files, or the model's own files; None if no unit's tier is DISK.
        """
        self._table = table
        self._host = host
        self._store = store
        self.waiting_for_buffer = 0
        """Number of threads that wait for a host buffer."""
        for entry in table.entries:
            if entry.size.tier is Tier.HOST:
                entry.host_buffer = host.take_copied(entry.size.shard_nbytes)
                assert entry.host_buffer is not None, (
                    "the arena class of the host tier was sized for every unit in that tier"
                )

    # -- allocation and eviction --------------------------------------------------------------------

    def host_buffer(self, nbytes: int, beyond: int = -1, wait: bool = True) -> HostBuffer | None:
        """Returns a host buffer for weights; None if too little memory is free or can be evicted.

        Args:
            nbytes: bytes of the buffer.
            beyond: only units whose next use is more than `beyond` uses away may be evicted; -1 for any unit.
            wait: False to evict nothing whose copy to the device is under way.
        """
        going = victims(self._host.weights.space, nbytes, self._evictable(), self._distance, beyond)
        if going is None or not (wait or all(self._table.entries[unit].copied.done() for unit in going)):
            return None
        for unit in going:
            self._evict(self._table.entries[unit])
        return self._host.weights.take(nbytes)

    def wait_for_buffer(self, entry: UnitEntry) -> None:
        """Waits until a host buffer for `entry` may have become free or evictable. The caller tries again."""
        reading = self._table.used_last(e for e in self._table.entries if e.residency is Residency.READING)
        # Prefetches in flight occupy the memory. A buffer can be evicted once its read has been delivered, so this
        # thread delivers the read whose use is furthest away.
        if reading is not None:
            self.finish_read(reading)
            return
        # The update worker takes no buffer while this count is above 0, or freed memory might never reach this
        # thread.
        self.waiting_for_buffer += 1
        self._table.notify()
        try:
            self._table.wait(f"waits for a host buffer for {entry.size.title}")
        finally:
            self.waiting_for_buffer -= 1

    def _distance(self, unit: int) -> int:
        """Returns the number of uses before the next use of `unit`; 0 if a thread is about to fetch it."""
        entry = self._table.entries[unit]
        # The fetching thread has recorded its use already, so the access order would report the use after that one.
        return 0 if entry.pins and entry.residency is not Residency.DEVICE else self._table.access_order.distance(unit)

    @property
    def nbytes(self) -> int:
        """Bytes of all host buffers that units of tier DISK share."""
        return self._host.weights.space.nbytes

    def _evictable(self) -> list[Block]:
        """Returns the blocks of all host buffers that may be evicted, one for each unit."""
        found = []
        for entry in self._table.entries:
            if entry.host_buffer is None and entry.fresh is None:
                continue  # most of thousands of experts
            buffer = entry.host_buffer if self._is_evictable(entry) else None
            if entry.host_buffer is None and entry.fresh is not None and not entry.fresh_stays:
                buffer = entry.fresh
            if buffer is not None:
                found.append(Block(entry.index, buffer.offset, buffer.nbytes))
        return found

    def _is_evictable(self, entry: UnitEntry) -> bool:
        """Returns True if the store contains the bytes of the unit's host buffer and no thread uses the buffer."""
        return (
            entry.host_buffer is not None
            and entry.size.tier is Tier.DISK
            and entry.residency in (Residency.HOST, Residency.DEVICE)
            and not entry.unwritten
            and not entry.in_update
            and not entry.copying
        )

    def _evict(self, entry: UnitEntry) -> None:
        """Evicts the host buffer of `entry`, after the last copy out of it; without one, that of fresh weights."""
        if entry.host_buffer is None:
            assert entry.fresh is not None and not entry.fresh_stays
            entry.fresh.release()
            entry.fresh = None
            return
        # The buffer is reused at once, so the copy to the device must be over. The wait blocks only if the copy took
        # longer than all work since.
        entry.copied.wait()
        entry.host_buffer.release()
        entry.host_buffer = None
        if entry.residency is Residency.HOST:
            self._table.move(entry, Residency.DISK)

    def forget(self, entry: UnitEntry) -> None:
        """Evicts the host buffer of a unit whose tier is DISK, if any.

        The buffer must be neither in use nor unwritten.
        """
        if entry.host_buffer is not None and entry.size.tier is Tier.DISK:
            self._evict(entry)

    # -- reads --------------------------------------------------------------------------------------

    def start_read(self, entry: UnitEntry, host_buffer: HostBuffer, priority: Priority) -> None:
        """Starts the read of the newest weights of `entry` into `host_buffer`, which the transfer owns from now on."""
        entry.transfer = Transfer(host_buffer, self.reader(entry, priority)(0, host_buffer.buffer))
        self._table.move(entry, Residency.READING)

    def finish_read(self, entry: UnitEntry) -> None:
        """Waits for the read of `entry` without the lock, then delivers it.

        The first of several waiting threads delivers.
        """
        if (transfer := self._table.end_transfer(entry)) is not None:
            entry.host_buffer = transfer.host_buffer
            self._table.move(entry, Residency.HOST)

    def read_ahead(self, limits: Limits, started: Callable[[UnitEntry], None], wait: bool) -> None:
        """Starts reads of upcoming units, into host memory that is free or holds only units used later.

        Args:
            limits: limits of the config.
            started: receives each unit whose read has started.
            wait: False to take no host buffer whose copy to the device is under way.
        """
        entries, trace = self._table.entries, self._table.access_order

        def wanting(unit: int) -> bool:
            entry = entries[unit]
            on_disk = entry.residency is Residency.DISK and entry.host_buffer is None
            return on_disk and not entry.updating and not self.streams(entry)

        def nbytes(unit: int) -> int:
            return entries[unit].size.shard_nbytes

        while (unit := next_to_fetch(trace, nbytes, wanting, limits)) is not None:
            host_buffer = self.host_buffer(nbytes(unit), trace.distance(unit), wait)
            if host_buffer is None:
                return
            self.start_read(entries[unit], host_buffer, Priority.NORMAL)
            started(entries[unit])

    # -- units too large for a host buffer ----------------------------------------------------------

    def streams(self, entry: UnitEntry) -> bool:
        """Returns True if two host buffers of this size do not fit, so that the unit is streamed in chunks."""
        size = entry.size
        return size.tier is Tier.DISK and 2 * align_up(size.shard_nbytes) > self._host.weights.space.nbytes

    def buffer_nbytes(self, entry: UnitEntry) -> int:
        """Returns the bytes of a host buffer for this unit, or for a chunk of the unit if it is streamed."""
        if self.streams(entry):
            return self._host.weights.space.nbytes // 2 // PAGE * PAGE
        return entry.size.shard_nbytes

    def reader(self, entry: UnitEntry, priority: Priority) -> Callable[[int, memoryview], Future]:
        """Returns a function that starts to read the newest partition from a byte offset into a buffer.

        The returned function needs no lock: the slot is looked up now.
        """
        store, unit = self._store, entry.index
        assert store is not None
        if isinstance(store, ModelFiles):
            return lambda start, buffer: store.read(unit, start, buffer, priority)
        slot = store.newest[unit]
        return lambda start, buffer: store.read(unit, State.WEIGHT, slot, start, buffer, priority)

    # -- shutdown -----------------------------------------------------------------------------------

    def give_cache(self, drop_spare: Callable[[], None]) -> None:
        """Evicts all host buffers of weights; see `Pager.give_cache`."""
        drop_spare()
        while not self._table.failure and self._host.weights.space.used_bytes:
            for entry in self._table.entries:
                if entry.residency is Residency.READING:
                    self.finish_read(entry)
                if self._is_evictable(entry):
                    self._evict(entry)
            if self._host.weights.space.used_bytes:
                self._table.wait("waits for a streamed unit")
        if not self._table.failure:
            self._host.drop_cache()

    def close(self) -> None:
        """Waits for reads in flight and releases their buffers.

        Errors of these reads are ignored: no one needs the bytes.
        """
        for entry in self._table.entries:
            if entry.transfer is not None:
                transfer, entry.transfer = entry.transfer, None
                # Without the lock, which the callbacks of other reads may wait for on the thread that ends this one.
                self._table.changed.without_lock(functools.partial(wait_for_all, [transfer.future]))
                if transfer.host_buffer is not None:
                    transfer.host_buffer.release()
