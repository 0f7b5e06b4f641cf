"""Prefetch: reads and uploads of the units that the access order predicts next.

The policy chooses the unit (`policy.next_to_fetch`); this module starts its read, or its upload. The caller holds the
pager's lock. No function of this module waits for a read or an update; an upload blocks where `Device.upload` does.
"""

from __future__ import annotations

from typing import NamedTuple

from offload.states import Tier
from offload.swapper.device_cache import DeviceCache
from offload.swapper.host_cache import HostCache
from offload.swapper.policy import Limits, next_to_fetch
from offload.swapper.residency import Residency
from offload.swapper.unit_table import UnitEntry, UnitTable


class PrefetchStats(NamedTuple):
    """Counts of uses of units."""

    uses: int
    on_device: int
    """Uses that found the unit on the device."""
    unforeseen: int
    """Uses that the access order did not predict."""


class Prefetcher:
    """Starts reads and uploads ahead of use, within the budgets of the host and the device cache."""

    def __init__(self, table: UnitTable, host_cache: HostCache, device_cache: DeviceCache, limits: Limits) -> None:
        self._table, self._host_cache, self._device_cache, self._limits = table, host_cache, device_cache, limits
        self._entries = table.entries
        self._all_stay = all(entry.size.stays for entry in table.entries)
        self._any_on_disk = any(entry.size.tier is Tier.DISK for entry in table.entries)

    def run(self) -> None:
        """Starts reads of the units that come next, then uploads of those whose weights are in a host buffer."""
        if self._all_stay:
            return
        self.read()
        while (unit := self._next_upload()) is not None:
            entry = self._entries[unit]
            buffer = None
            if self._is_in_host(entry):
                buffer = self._device_cache.allocate(entry, self._table.access_order.distance(unit))
            if buffer is None:
                return
            self._device_cache.upload(entry, buffer)

    def read(self) -> None:
        """Finishes reads that are done, and starts reads of the units that come next."""
        if not self._any_on_disk:
            return
        for entry in self._entries:
            if entry.transfer is not None and entry.transfer.future.done():
                self._host_cache.finish_read(entry)
        self._host_cache.read_ahead(self._limits)

    def next_with_room(self) -> int:
        """Returns the very next unit if it can be uploaded now: in a host buffer, with room on the device; else -1."""
        unit = next(self._table.access_order.upcoming(), None)
        if unit is None or unit != self._next_upload():
            return -1
        entry = self._entries[unit]
        if not self._is_in_host(entry):
            return -1
        found = self._device_cache.find_room(entry, self._table.access_order.distance(unit))
        return -1 if found is None else unit

    def _next_upload(self) -> int | None:
        def is_missing(unit: int) -> bool:
            return self._entries[unit].residency is not Residency.DEVICE

        return next_to_fetch(self._table.access_order, self._nbytes, is_missing, self._limits)

    def _nbytes(self, unit: int) -> int:
        return self._entries[unit].size.nbytes

    @staticmethod
    def _is_in_host(entry: UnitEntry) -> bool:
        return entry.residency in (Residency.HOST, Residency.WRITING) and not entry.updating
