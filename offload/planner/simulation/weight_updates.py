"""Updates of weights in a simulation: the pager's side of the update worker, as the real `swapper.weight_updates`."""

from __future__ import annotations

from collections.abc import Sequence

from offload.planner.simulation.entry import Entry
from offload.planner.simulation.machine import Acting, until
from offload.planner.simulation.pager import SimulatedPager
from offload.states import Tier
from offload.swapper.table import Residency


class SimulatedWeightUpdates:
    """What the update worker changes of the weights that a simulated pager moves."""

    def __init__(self, pager: SimulatedPager) -> None:
        """Changes nothing yet; `pager` owns the entries."""
        self._pager = pager

    def wanted_update(self) -> int | None:
        """Returns the unit for whose update the model's thread waits, or None."""
        return next((unit for unit in self._pager.wanted if self._pager.entries[unit].updating), None)

    def begin_updates(self, units: Sequence[int]) -> None:
        """Marks units as being updated, and evicts their outdated weights from the device."""
        for entry in (self._pager.entries[unit] for unit in units):
            self._pager.set_updating(entry, True)
            if entry.reading_in_place:
                self._pager.stop_reading_in_place(entry)
            if entry.residency is Residency.DEVICE and not entry.size.stays:
                self._pager.drop(entry)

    def buffer_for_update(self, entry: Entry) -> Acting[bool]:
        """Allocates a host buffer for updated weights if there is room. Returns True if the update may write to one."""
        yield from until(entry.copied)
        while entry.residency is Residency.READING:
            yield from self._pager.finish_read(entry)
        if not entry.at_hand and not self._pager.waiting_for_buffer:
            beyond = -1 if entry.index in self._pager.wanted else self._pager.access_order.distance(entry.index)
            entry.host_buffer = yield from self._pager.take_host_buffer(entry.index, entry.size.shard_nbytes, beyond)
        entry.in_update = entry.at_hand
        return entry.in_update

    def delivers(self, unit: int) -> bool:
        """Returns True if an update can leave the new weights in a host buffer."""
        return self._pager.entries[unit].size.tier is not Tier.DEVICE and not self._pager.streams(unit)

    def holds_weights(self, unit: int) -> bool:
        """Returns True if HOST holds the unit's weights, so that an update need not read them."""
        return self._pager.entries[unit].residency is Residency.HOST

    def publish(self, unit: int, has_buffer: bool, unwritten: bool) -> None:
        """Ends a unit's update for the model's thread.

        Args:
            unit: the unit.
            has_buffer: True if a host buffer holds the new weights.
            unwritten: True if writes of the new weights are in flight.
        """
        entry = self._pager.entries[unit]
        if has_buffer:
            entry.unwritten = unwritten
            fresh = Residency.WRITING if unwritten else Residency.HOST
            if entry.residency is not fresh:
                self._pager.move(entry, fresh)
        entry.in_update = False
        self._pager.set_updating(entry, False)
        self._pager.notify()

    def written(self, unit: int) -> None:
        """Marks a unit's new weights as flushed to DISK."""
        entry = self._pager.entries[unit]
        entry.unwritten = False
        if entry.residency is Residency.WRITING:
            self._pager.move(entry, Residency.HOST)
        self._pager.notify()
