"""The pager on numbers: the same decisions and moves as in `pager`, `leases` and `slices`, whose methods
have the same names here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offload.aio import Priority
from offload.errors import BudgetError
from offload.planner.simulation.clock import Work
from offload.planner.simulation.machine import Acting, Machine, until
from offload.sizes import PAGE, align_up, format_size
from offload.states import Tier
from offload.swapper.access_order import Trace
from offload.swapper.memory.allocator import Space
from offload.swapper.policy import Block, Floor, Limits, find_place, keeps, next_to_bring, victims
from offload.swapper.residency import ARROWS, Residency
from offload.swapper.unit_table import UnitSize


@dataclass
class Entry:
    """One unit's weights, as in the pager."""

    index: int
    size: UnitSize
    residency: Residency
    lease: Block | None = None
    """Also while it is being read; a home in HOST has none."""
    slice: Block | None = None
    reading: Work | None = None
    copied: Work | None = None
    """The last copy out of the lease, which is what the slice is filled by."""
    pins: int = 0
    updating: bool = False
    in_update: bool = False
    unwritten: bool = False

    @property
    def at_hand(self) -> bool:
        """Whether HOST has the newest weights, or will have them when a read is done."""
        return self.lease is not None or self.size.home is not Tier.DISK


class SimulatedPager:
    """Weights of all units between DISK, HOST and DEVICE. What may wait is an `Acting`."""

    def __init__(self, sizes: Sequence[UnitSize], host: Space, device: Space, limits: Limits, machine: Machine) -> None:
        self.host, self.device, self.machine = host, device, machine
        self.trace = Trace()
        self.version = self.uses = self.hits = self.starved = 0
        self.wanted: list[int] = []
        self.entries = [Entry(index, size, size.start) for index, size in enumerate(sizes)]
        self._limits = limits

    # -- the thread that runs the model -------------------------------------------------------------

    def acquire(self, unit: int) -> Acting[None]:
        entry = self.entries[unit]
        entry.pins += 1
        if entry.pins == 1:
            self.trace.use(unit)
            self.uses += 1
            self.hits += entry.residency is Residency.DEVICE
        yield from self._bring(entry)
        yield from self._look_ahead()
        yield from self.machine.counted("upload", until(entry.copied))

    def release(self, units: Iterable[int]) -> None:
        for entry in (self.entries[unit] for unit in units):
            entry.pins -= 1
            if (
                not entry.pins
                and not entry.size.stays
                and not keeps(self.trace, entry.index, self._nbytes, self._limits)
            ):
                self._drop(entry)
        self.notify()

    def _bring(self, entry: Entry) -> Acting[None]:
        while entry.updating or entry.residency is not Residency.DEVICE:
            if entry.updating:
                yield from self.machine.counted("update", self._wait_for_update(entry))
            elif entry.residency is Residency.DISK:
                lease = yield from self.machine.counted("room", self._lease(entry.index, self._lease_nbytes(entry)))
                if lease is None:
                    yield from self.machine.counted("room", self._wait_for_lease())
                elif self.streams(entry.index):
                    yield from self._stream(entry, lease)
                else:
                    self._start_read(entry, lease, Priority.URGENT)
            elif entry.residency is Residency.READING:
                yield from self.machine.counted("read", self._finish_read(entry))
            else:
                place = self._take_slice(entry)
                if place is None:
                    raise self._no_room(entry)
                yield from self._upload(entry, place)

    def _wait_for_update(self, entry: Entry) -> Acting[None]:
        self.wanted.append(entry.index)
        self.notify()
        yield from self.change()
        self.wanted.remove(entry.index)

    def _wait_for_lease(self) -> Acting[None]:
        reading = [entry for entry in self.entries if entry.residency is Residency.READING]
        if reading:
            yield from self._finish_read(
                max(reading, key=lambda entry: (self.trace.distance(entry.index), -entry.index))
            )
            return
        self.starved += 1
        self.notify()
        yield from self.change()
        self.starved -= 1

    def _start_read(self, entry: Entry, lease: Block, priority: Priority) -> None:
        entry.lease = lease
        entry.reading = self.machine.read("weight read", "weights_read", entry.index, entry.size.part_nbytes, priority)
        self._move(entry, Residency.READING)

    def _finish_read(self, entry: Entry) -> Acting[None]:
        """Whoever comes first delivers it."""
        work = entry.reading
        yield from until(work)
        if entry.reading is work:
            entry.reading = None
            self._move(entry, Residency.HOST)

    def streams(self, unit: int) -> bool:
        size = self.entries[unit].size
        return size.home is Tier.DISK and 2 * align_up(size.part_nbytes) > self.host.nbytes

    def _lease_nbytes(self, entry: Entry) -> int:
        return self.host.nbytes // 2 // PAGE * PAGE if self.streams(entry.index) else entry.size.part_nbytes

    def _stream(self, entry: Entry, lease: Block) -> Acting[None]:
        """From DISK to the device in pieces: all but the last are copied while the next is read."""
        second = yield from self.machine.counted("room", self._lease(entry.index, lease.nbytes))
        place = self._take_slice(entry)
        if place is None:
            raise self._no_room(entry)
        self._move(entry, Residency.UPLOADING)
        part = entry.size.part_nbytes
        read = self.machine.read("weight read", "weights_read", entry.index, part, Priority.URGENT)
        yield from self.machine.counted("read", until(read))
        entry.copied = self.machine.upload(entry.index, min(part, lease.nbytes))
        yield from self.machine.counted("upload", until(entry.copied))
        for each in (lease, second):
            if each is not None:
                self.host.give(each.offset, each.nbytes)
        entry.slice = place
        self._move(entry, Residency.DEVICE)

    def _upload(self, entry: Entry, place: Block) -> Acting[None]:
        self._move(entry, Residency.UPLOADING)
        entry.copied = self.machine.upload(entry.index, entry.size.part_nbytes)
        if self.machine.on_cpu:
            yield from self.machine.counted("upload", until(entry.copied))
        entry.slice = place
        self._move(entry, Residency.DEVICE)

    def _take_slice(self, entry: Entry, beyond: int = -1) -> Block | None:
        others = (e.size.nbytes for e in self.entries if e is not entry and not e.size.stays)
        floor = Floor(0, self.device.nbytes, max(others, default=0))
        idle = [
            e.slice
            for e in self.entries
            if e.slice is not None and e.residency is Residency.DEVICE and not e.pins and not e.size.stays
        ]
        place = find_place(self.device, entry.size.nbytes, idle, self.trace, floor, beyond)
        if place is None:
            return None
        for unit in place.victims:
            self._drop(self.entries[unit])
        self.device.take_at(place.offset, entry.size.nbytes)
        return Block(entry.index, place.offset, entry.size.nbytes)

    def _no_room(self, entry: Entry) -> BudgetError:
        return BudgetError(
            f"unit {entry.size.name} needs {format_size(entry.size.nbytes)} in one piece on the device, where units in "
            f"use leave no such room in {format_size(self.device.nbytes)}"
        )

    def _look_ahead(self) -> Acting[None]:
        for entry in self.entries:
            if entry.reading is not None and entry.reading.done:
                yield from self._finish_read(entry)
        yield from self._read_ahead()
        while (unit := self._next_upload()) is not None:
            entry = self.entries[unit]
            ready = entry.residency in (Residency.HOST, Residency.WRITING) and not entry.updating
            place = self._take_slice(entry, self.trace.distance(unit)) if ready else None
            if place is None:
                return
            yield from self._upload(entry, place)

    def _read_ahead(self) -> Acting[None]:
        def wanting(unit: int) -> bool:
            entry = self.entries[unit]
            on_disk = entry.residency is Residency.DISK and entry.lease is None
            return on_disk and not entry.updating and not self.streams(unit)

        def nbytes(unit: int) -> int:
            return self.entries[unit].size.part_nbytes

        while (unit := next_to_bring(self.trace, nbytes, wanting, self._limits)) is not None:
            lease = yield from self.machine.counted("room", self._lease(unit, nbytes(unit), self.trace.distance(unit)))
            if lease is None:
                return
            self._start_read(self.entries[unit], lease, Priority.NORMAL)

    def _next_upload(self) -> int | None:
        def wanting(unit: int) -> bool:
            return self.entries[unit].residency is not Residency.DEVICE

        return next_to_bring(self.trace, self._nbytes, wanting, self._limits)

    def _nbytes(self, unit: int) -> int:
        return self.entries[unit].size.nbytes

    def _drop(self, entry: Entry) -> None:
        assert entry.slice is not None and not entry.pins
        self.device.give(entry.slice.offset, entry.slice.nbytes)
        entry.slice = None
        kept = Residency.WRITING if entry.unwritten else Residency.HOST
        self._move(entry, kept if entry.at_hand else Residency.DISK)

    # -- leases of weights --------------------------------------------------------------------------

    def _lease(self, unit: int, nbytes: int, beyond: int = -1) -> Acting[Block | None]:
        while True:
            takeable = [e.lease for e in self.entries if e.lease is not None and self._may_take_lease_of(e)]
            going = victims(self.host, nbytes, takeable, self._distance, beyond)
            if going is None:
                return None
            entries = [self.entries[unit] for unit in going]
            copying = next((e.copied for e in entries if e.copied is not None and not e.copied.done), None)
            if copying is None:
                break
            yield from until(copying)
        for entry in entries:
            assert entry.lease is not None
            self.host.give(entry.lease.offset, entry.lease.nbytes)
            entry.lease = None
            if entry.residency is Residency.HOST:
                self._move(entry, Residency.DISK)
        offset = self.host.take(nbytes)
        assert offset is not None
        return Block(unit, offset, nbytes)

    def _distance(self, unit: int) -> int:
        entry = self.entries[unit]
        return 0 if entry.pins and entry.residency is not Residency.DEVICE else self.trace.distance(unit)

    def _may_take_lease_of(self, entry: Entry) -> bool:
        clean = not entry.unwritten and not entry.in_update
        return clean and entry.residency in (Residency.HOST, Residency.DEVICE)

    def _move(self, entry: Entry, to: Residency) -> None:
        assert (entry.residency, to) in ARROWS, f"{entry.size.name}: {entry.residency} to {to}"
        entry.residency = to
        self.notify()

    def notify(self) -> None:
        self.version += 1

    def change(self, seen: int | None = None) -> Acting[None]:
        """Wait until something has changed, since it was at version `seen`."""
        since = self.version if seen is None else seen
        yield lambda: self.version != since

    # -- the update worker --------------------------------------------------------------------------

    def wanted_update(self) -> int | None:
        return next((unit for unit in self.wanted if self.entries[unit].updating), None)

    def begin_updates(self, units: Sequence[int]) -> None:
        for entry in (self.entries[unit] for unit in units):
            entry.updating = True
            if entry.residency is Residency.DEVICE and not entry.size.stays:
                self._drop(entry)

    def lease_for_update(self, entry: Entry) -> Acting[bool]:
        yield from until(entry.copied)
        while entry.residency is Residency.READING:
            yield from self._finish_read(entry)
        if not entry.at_hand and not self.starved:
            beyond = -1 if entry.index in self.wanted else self.trace.distance(entry.index)
            entry.lease = yield from self._lease(entry.index, entry.size.part_nbytes, beyond)
        entry.in_update = entry.at_hand
        return entry.in_update

    def delivers(self, unit: int) -> bool:
        return self.entries[unit].size.home is not Tier.DEVICE and not self.streams(unit)

    def holds_weights(self, unit: int) -> bool:
        return self.entries[unit].residency is Residency.HOST

    def publish(self, unit: int, leased: bool, unwritten: bool) -> None:
        entry = self.entries[unit]
        if leased:
            entry.unwritten = unwritten
            fresh = Residency.WRITING if unwritten else Residency.HOST
            if entry.residency is not fresh:
                self._move(entry, fresh)
        entry.updating = entry.in_update = False
        self.notify()

    def written(self, unit: int) -> None:
        entry = self.entries[unit]
        entry.unwritten = False
        if entry.residency is Residency.WRITING:
            self._move(entry, Residency.HOST)
        self.notify()
