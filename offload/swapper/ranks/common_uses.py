"""Uses of units on several ranks: which of them need a round of agreement, and what is gathered before them.

[Note: every use is a round] Ranks differ in the units that are on their devices. Suppose a rank asked the others only
about units that it lacks. A rank that has all units would then run ahead into a collective of the user's own (such as a
loss over the batches of all ranks), and both would wait for ever. So every use asks the other ranks, also for a unit
that is on the device, and every rank acts on the same answer. There are two exceptions, both until weights change:

    all have all    every unit is on every device, and stays there
    a series        all ranks have announced the same units on their devices, the same missing ones in the order in
                    which this pass is expected to use them, and room for all of those. They gather the missing units in
                    that order, each before its first use, and ask nobody.

[Note: a series binds nobody to a path] Gathers of a series begin in their order, and a rank that asks for anything
else begins all that are left before it asks. So a rank that takes another path than was expected serves the others to
the end of the series, and costs some gathers in vain. On one path all ranks have begun the same gathers at the same
place of the program, since a use begins those up to its own unit and a fixed number more, never as many as happen to be
ready. That the units stay is promised by room: it is reserved for all of them before the rank announces a series,
nothing is dropped for it, and the first gather of any other unit ends the series on every rank.
"""

from __future__ import annotations

from collections.abc import Container

from offload.swapper.device_cache import DeviceCache
from offload.swapper.policy import Limits
from offload.swapper.prefetch import Fetcher, Prefetcher
from offload.swapper.ranks.peers import Having, Peers, Series, checksum
from offload.swapper.residency import Residency
from offload.swapper.unit_table import UnitEntry, UnitTable


class CommonUses:
    """The uses that one rank's pager makes together with other ranks. The caller of a method holds the table's lock."""

    def __init__(
        self,
        table: UnitTable,
        device_cache: DeviceCache,
        prefetcher: Prefetcher,
        fetcher: Fetcher,
        limits: Limits,
        peers: Peers,
    ) -> None:
        self._table, self._device_cache, self._prefetcher, self._fetcher = table, device_cache, prefetcher, fetcher
        # A use of a unit that stays would have to wait for its update here: none is fetched again after one.
        assert not any(entry.size.stays for entry in table.entries), "each of these ranks has a part of a unit"
        self._limits, self._peers = limits, peers
        self._nbytes = sum(entry.size.nbytes for entry in table.entries)
        self._settled: Container[int] = ()
        """Units whose uses need no round until weights change; other ranks count on their being on this device."""
        self._may_begin = True
        """False from a series that was not agreed on, or has ended, until weights change."""

    @property
    def settled(self) -> bool:
        """True if other ranks count on units that are on this rank's device."""
        return self._settled != ()

    def forget(self) -> None:
        """Begins anew, since weights change, on all ranks at once."""
        self._settled, self._may_begin = (), True

    def fetch(self, entry: UnitEntry, ahead: bool) -> None:
        """Fetches `entry` together with the other ranks; with `ahead` also what is next, if all ranks have room."""
        self._table.check()
        if entry.index not in self._settled and not self._ask(entry, ahead):
            return
        if self._peers.behind:
            if ahead:
                self._prefetcher.read()
            self._table.changed.without_lock(lambda: self._peers.go_on(entry.index))
            self._table.check()
        assert entry.residency is Residency.DEVICE, "its room was reserved, and nothing was dropped"

    def serve(self, entry: UnitEntry) -> None:
        """Takes part in a gather of a unit: of a series, or because a rank needs the unit."""
        if entry.index not in self._settled:
            self._end_series()
        self._gather(entry)

    def _gather(self, entry: UnitEntry) -> None:
        """Gathers a unit, which this rank fetches if it lacks the unit."""
        if entry.device_buffer is None or entry.updating:
            self._fetcher.fetch(entry)
        else:
            self._device_cache.gather(entry, entry.device_buffer, entry.copied)

    # -- rounds -------------------------------------------------------------------------------------

    def _ask(self, entry: UnitEntry, ahead: bool) -> bool:
        """Fetches `entry` as a round decides. Returns True if all have all, or a series has begun."""

        def having() -> Having:
            with self._table.changed.lock:
                series = self._possible_series(entry)
                if entry.residency is not Residency.DEVICE:
                    return Having(unit=False, all=False, ahead=-1, series=series)
                next_one = self._prefetcher.next_with_room() if ahead else -1
                return Having(unit=True, all=self._has_all(), ahead=next_one, series=series)

        if ahead and entry.residency is Residency.DEVICE:
            self._prefetcher.read()
        # Other ranks are waited for, and served, without the lock.
        agreed = self._table.changed.without_lock(lambda: self._peers.agree(entry.index, having))
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
                unit = self._table.changed.without_lock(lambda: self._peers.agree_ahead(lambda: having().ahead))
        self._table.check()
        if unit >= 0:
            self._gather_beside(self._table.entries[unit])
        return False

    def _gather_beside(self, entry: UnitEntry) -> None:
        """Gathers a unit as a round decided. A unit of a series may be dropped for another, so that one ends it."""
        if self.settled and entry.index not in self._settled:
            self._end_series()
        self._gather(entry)

    def _has_all(self) -> bool:
        """Returns whether every unit is on the device and stays there until weights change."""
        return self._limits.reuse is None and all(entry.residency is Residency.DEVICE for entry in self._table.entries)

    # -- series -------------------------------------------------------------------------------------

    def _possible_series(self, entry: UnitEntry) -> Series | None:
        """Returns the series that this rank could begin with a use of `entry`, for which room is reserved from now on.

        It is asked for once after each change of weights: where ranks differ, each try would take time in vain.
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
        return Series(missing, ahead, checksum(missing, ahead, sorted(present)), begin)

    def _end_series(self) -> None:
        """Ends a series, or the announcement of one, since all ranks gather a unit that is not in it."""
        self._device_cache.free_reserved()
        self._settled, self._may_begin = (), False
