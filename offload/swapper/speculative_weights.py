"""Weights under an update that is made before its step is decided, as the pager sees them.

    begin ─► copy, tile by tile, or the unit's host buffer ─► may_evict ─┬► adopt: the fresh weights become the newest
                                                                         └► drop

The unit's old weights stay what every thread reads: on the device, or in the newest slot of the store. The fresh ones
are written to the other slot. They also stay in the host buffer of the old ones where the reads of the backward have
room beside it; that buffer is evicted as any other once the fresh weights are written.

Threads. The update worker calls everything but `paused`, which belongs to the thread that calls
`step()`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch

from offload.states import Tier
from offload.swapper.host_cache import HostCache
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostBuffer
from offload.swapper.policy import leaves_room_ahead
from offload.swapper.residency import Residency
from offload.swapper.unit_table import UnitEntry, UnitTable


class Begun(NamedTuple):
    """An update that may begin."""

    host_buffer: HostBuffer | None
    """Receives the fresh weights, and contains the old ones; None if tiles receive both."""


class SpeculativeWeights:
    """The part of the pager that updates under the backward call."""

    def __init__(self, table: UnitTable, host_cache: HostCache, arena: DeviceArena, device: Device) -> None:
        self._table, self._host_cache, self._arena, self._device = table, host_cache, arena, device
        self._entries, self._lock = table.entries, table.changed.lock
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Yields once no old weights are being copied, and lets no copy begin in the context."""
        with self._lock:
            self._paused = True
        try:
            with self._lock:
                while any(entry.copying for entry in self._entries):
                    self._table.check()
                    self._table.wait("waits for a copy of weights")
            yield
        finally:
            self._paused = False

    def begin(self, unit: int) -> Begun | None:
        """Begins the update of a unit of tier DISK; None if its weights would have to be read for the update.

        They would be read once more by the next forward then, so the update is better made after the step. The caller
        holds the lock.
        """
        entry = self._entries[unit]
        assert entry.size.tier is Tier.DISK and entry.fresh is None
        if entry.updating or entry.residency not in (Residency.HOST, Residency.DEVICE):
            return None
        if not self._gives_host_buffer(entry):
            return Begun(None)
        fresh = entry.host_buffer
        assert fresh is not None
        entry.copied.wait()  # the worker is about to write where an upload may still read
        entry.host_buffer, entry.fresh, entry.fresh_stays = None, fresh, True
        if entry.residency is Residency.HOST:
            self._table.move(entry, Residency.DISK)
        return Begun(fresh)

    def _gives_host_buffer(self, entry: UnitEntry) -> bool:
        """Returns True if the unit's host buffer may receive its fresh weights."""
        if entry.host_buffer is None or entry.copying:
            return False
        held = [each.fresh.nbytes for each in self._entries if each.fresh is not None and each.fresh_stays]
        ahead = [
            self._host_cache.buffer_nbytes(each)
            for each in map(self._entries.__getitem__, self._table.access_order.upcoming())
            if each.size.tier is Tier.DISK
        ]
        return leaves_room_ahead(self._host_cache.nbytes, [entry.host_buffer.nbytes, *held], ahead)

    def copy(self, unit: int, first: int, destination: torch.Tensor) -> bool:
        """Copies old weights from memory, if they are there. Returns False if they must be read from the store.

        Args:
            unit: the unit.
            first: byte of the partition at which the copy begins.
            destination: (nbytes,) uint8 on the host.
        """
        with self._lock:
            entry = self._entries[unit]
            source, on_device = self._weights_in_memory(entry)
            if source is None or self._paused:
                return False
            entry.copying += 1  # both buffers stay until the end
        try:
            source = source[first : first + len(destination)]
            if on_device:
                entry.uploaded.wait()
                self._device.copy(destination, source)
            else:
                # Not `copy_`, which would start a team of threads for this thread, beside those of the kernels.
                ctypes.memmove(destination.data_ptr(), source.data_ptr(), destination.nbytes)
        finally:
            with self._lock:
                entry.copying -= 1
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
        """Lets the memory of fresh weights be evicted, since they are written."""
        with self._lock:
            self._entries[unit].fresh_stays = False
            self._table.notify()

    def adopt(self, unit: int) -> bool:
        """Replaces the old weights by the fresh ones once the step is decided. `weights_ready` must follow.

        Returns:
            True if the fresh weights are in the unit's host buffer; False if they are in the store alone.
        """
        with self._lock:
            entry = self._entries[unit]
            while entry.residency is Residency.READING:  # a prefetch from before step()
                self._table.check()
                self._host_cache.finish_read(entry)
            self._host_cache.forget(entry)
            entry.host_buffer, entry.fresh, entry.fresh_stays = entry.fresh, None, False
            return entry.host_buffer is not None

    def drop(self, unit: int) -> None:
        """Frees the memory of fresh weights that are of no use."""
        with self._lock:
            entry = self._entries[unit]
            if entry.fresh is not None:
                entry.fresh.release()
            entry.fresh, entry.fresh_stays = None, False
            self._table.notify()
