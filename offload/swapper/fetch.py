"""Fetch on demand: a unit moves to DEVICE, one arrow of the residency table at a time.

A thread that fetches a unit may wait for an update, a read, a host buffer, or the upload of another thread. Each wait
releases the lock, so the unit is looked at anew after each step.
"""

from __future__ import annotations

from offload.aio import Priority
from offload.swapper.device_cache import DeviceCache
from offload.swapper.host_cache import HostCache
from offload.swapper.memory.device_arena import DeviceBuffer
from offload.swapper.memory.host_arena import HostBuffer
from offload.swapper.prefetch import Prefetcher
from offload.swapper.residency import Residency
from offload.swapper.unit_table import UnitEntry, UnitTable
from offload.swapper.weight_updates import WeightUpdates


class Fetcher:
    """Moves units to the device for threads that need them now. The caller of a method holds the table's lock."""

    def __init__(
        self,
        table: UnitTable,
        host_cache: HostCache,
        device_cache: DeviceCache,
        prefetcher: Prefetcher,
        weight_updates: WeightUpdates,
    ) -> None:
        self._table, self._host_cache, self._device_cache = table, host_cache, device_cache
        self._prefetcher, self._weight_updates = prefetcher, weight_updates

    def fetch(self, entry: UnitEntry) -> None:
        """Moves a unit to DEVICE.

        Raises:
            BudgetError: if pinned units leave no room.
            EngineFailed: after an error on a background thread.
        """
        while entry.updating or entry.residency is not Residency.DEVICE:
            self._table.check()
            if entry.updating:
                self._weight_updates.wait(entry)
            elif entry.residency is Residency.DISK:
                if (host_buffer := self._host_cache.host_buffer(self._host_cache.buffer_nbytes(entry))) is None:
                    self._host_cache.wait_for_buffer(entry)
                elif self._host_cache.streams(entry):
                    self._stream(entry, host_buffer)
                else:
                    self._host_cache.start_read(entry, host_buffer, Priority.URGENT)
            elif entry.residency is Residency.READING:
                self._host_cache.finish_read(entry)
            elif entry.residency in (Residency.HOST, Residency.WRITING):
                if (device_buffer := self._place(entry)) is not None:
                    self._device_cache.upload(entry, device_buffer)
            else:  # UPLOADING on another thread
                self._table.wait(f"waits for upload of {entry.size.title}")
        self._table.check()

    def _stream(self, entry: UnitEntry, host_buffer: HostBuffer) -> None:
        """Moves a unit from DISK to DEVICE in chunks, through `host_buffer` and a second buffer if memory is free."""
        second = self._host_cache.host_buffer(host_buffer.nbytes)
        host_buffers = [host_buffer] if second is None else [host_buffer, second]
        device_buffer = None
        try:
            device_buffer = self._place(entry)
        finally:
            if device_buffer is None:
                for each in host_buffers:
                    each.release()
        if device_buffer is not None:
            self._device_cache.stream(entry, device_buffer, host_buffers, self._host_cache.reader(entry))

    def _place(self, entry: UnitEntry) -> DeviceBuffer | None:
        """Returns a device buffer for `entry`, or None after a wait for an upload ahead that was in the way.

        Raises:
            BudgetError: if the units in use leave no room.
        """
        device_buffer = self._device_cache.allocate(entry)
        if device_buffer is None:
            if not self._prefetcher.busy_elsewhere:
                raise self._device_cache.no_room(entry)
            # The upload of another thread ends without this one, and its unit can be dropped then.
            self._table.wait(f"waits for an upload ahead of {entry.size.title}")
        return device_buffer
