"""Updates of weights as the pager sees them: the units under update, and the buffers of their fresh weights.

    begin ─► buffer_for ─► (the kernel writes the buffer) ─► weights_ready ─► (writes to the store end) ─► flushed

Threads. `begin` belongs to the thread that runs the model, `wait` to every thread that fetches a unit, everything else
to the update worker. That thread also starts what its work has made possible: the upload of the fresh weights, if they
are used next (`Prefetcher.advance`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.states import Tier
from offload.swapper.device_cache import DeviceCache
from offload.swapper.host_cache import HostCache
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostBuffer
from offload.swapper.prefetch import Prefetcher
from offload.swapper.residency import Residency
from offload.swapper.speculative_weights import SpeculativeWeights
from offload.swapper.unit_table import UnitEntry, UnitTable
from offload.timeline import Row


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
        self.speculative = SpeculativeWeights(table, host_cache, arena, device)
        """Updates that are made before their step is decided."""
        self._entries, self._lock = table.entries, table.changed.lock
        self._awaited: list[int] = []
        """Units whose update a thread waits for."""

    # -- the thread that runs the model -------------------------------------------------------------

    def begin(self, units: Sequence[int]) -> None:
        """Forbids every read of `units` until `weights_ready`. The lock is held, and no use of them is open."""
        for unit in units:
            entry = self._entries[unit]
            assert not entry.pins, f"unit {entry.size.name} is in use during step()"
            while entry.reading_in_place:  # a prefetch from before step(), whose bytes are old from now on
                self._table.check()
                self._device_cache.finish_read(entry)
            entry.updating = True
            entry.updates += 1
            if entry.size.stays:
                # A use in place has no end of its own: the update follows all compute so far.
                self._device.wait_event(entry.read)
                entry.read = self._device.record_event()
            elif entry.residency is Residency.DEVICE:
                self._device_cache.drop(entry)

    def wait(self, entry: UnitEntry) -> None:
        """Waits for a change while the update of a unit is under way. The lock is held."""
        # The update worker takes an awaited unit first, so it must learn of it before this thread sleeps.
        self._awaited.append(entry.index)
        self._table.notify()
        try:
            self._table.wait(f"waits for update of {entry.size.title}")
        finally:
            self._awaited.remove(entry.index)

    # -- the update worker --------------------------------------------------------------------------

    def buffer_for(self, unit: int) -> HostBuffer | None:
        """Returns the host buffer that receives the fresh weights of `unit`, or None if none is free now.

        `holds_weights` tells whether the buffer contains the old weights already. A unit of tier HOST has a buffer of
        its own. A unit of tier DEVICE has none: its update works on `device_tier`.
        """
        entry = self._entries[unit]
        assert entry.size.tier is not Tier.DEVICE
        entry.copied.wait()  # the worker is about to write where an upload may still read
        with self._lock:
            while entry.residency is Residency.READING:  # a prefetch from before step()
                self._table.check()
                self._host_cache.finish_read(entry)
            if entry.host_buffer is None and not self._host_cache.waiting_for_buffer:
                beyond = -1 if unit in self._awaited else self._table.access_order.distance(unit)
                entry.host_buffer = self._host_cache.host_buffer(entry.size.shard_nbytes, beyond)
            entry.in_update = entry.host_buffer is not None
            return entry.host_buffer

    def delivers(self, unit: int) -> bool:
        """Returns whether the fresh weights of `unit` go into a host buffer.

        A unit that streams from DISK has room for a chunk of it only, which helps nobody.
        """
        return self._entries[unit].size.tier is not Tier.DEVICE and not self._host_cache.streams(self._entries[unit])

    def weights_ready(self, unit: int, in_host_buffer: bool, unwritten: bool) -> None:
        """Ends the update of `unit`: its weights may be used from now on.

        Args:
            unit: the unit, all of whose tiles are computed.
            in_host_buffer: whether the fresh weights are in the unit's host buffer, or in its tier. If not, all of
                their writes to the store must have ended.
            unwritten: whether writes of them to the store are in flight.
        """
        with self._lock:
            entry = self._entries[unit]
            if in_host_buffer and entry.size.tier is not Tier.DEVICE:
                entry.unwritten = unwritten
                fresh = Residency.WRITING if unwritten else Residency.HOST
                if entry.residency is not fresh:
                    self._table.move(entry, fresh)
            entry.updating = entry.in_update = False
            self._table.timeline.end(Row.UPDATES, entry.size.title)
            self._table.notify()
            self._prefetcher.advance()

    def flushed(self, unit: int) -> None:
        """Marks the host buffer of `unit` clean: the last write of its update has ended."""
        with self._lock:
            entry = self._entries[unit]
            entry.unwritten = False
            if entry.residency is Residency.WRITING:
                self._table.move(entry, Residency.HOST)
            self._table.notify()
            self._prefetcher.advance()

    def device_tier(self, unit: int) -> torch.Tensor:
        """Returns the partition of a unit of tier DEVICE, (part_nbytes,) uint8, which nothing reads now."""
        entry = self._entries[unit]
        assert entry.tier_buffer is not None
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
        return self._entries[unit].residency is Residency.HOST

    def awaited_unit(self) -> int | None:
        """Returns a unit whose update a thread waits for, if any. The caller holds the lock."""
        return next((unit for unit in self._awaited if self._entries[unit].updating), None)

    @property
    def waiting_for_buffer(self) -> bool:
        """True if a thread waits for a host buffer of weights. The caller holds the lock."""
        return self._host_cache.waiting_for_buffer > 0
