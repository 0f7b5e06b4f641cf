"""The simulated pager: the decisions and moves of the real pager without data.

The functions of `swapper.policy` decide, as in the real pager, and methods carry the names of the real ones. Methods
that may wait are coroutines (`Acting`); the others return at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.aio import Priority
from offload.errors import BudgetError
from offload.planner.simulation.machine import Acting, SimulatedMachine, Work, until
from offload.sizes import PAGE, align_up, format_size
from offload.states import Tier
from offload.swapper.memory.allocator import Allocator
from offload.swapper.policy import (
    AccessOrder,
    Floor,
    IdleBlocks,
    Limits,
    UnitBlock,
    company_of,
    find_room,
    keeps,
    largest_beside,
    next_to_fetch,
    victims,
)
from offload.swapper.prefetch import may_upload_elsewhere
from offload.swapper.table import ARROWS, Residency, UnitSize


class Expected(NamedTuple):
    """Units of a group that are used next, one after the other; see `AccessOrder.expect`."""

    units: tuple[int, ...] = ()
    """Empty if nothing is known."""
    group: Collection[int] = ()
    backward: bool = True
    """False for a lookup, whose backward needs no weights."""
    at_once: bool = False
    """True in a recomputation, whose backward follows at once."""


Event = int | Expected | tuple[int, Residency | None, UnitBlock | None, UnitBlock | None]
"""A use of a unit, expected uses, or a unit with its new residency and buffers in both memories."""


@dataclass
class Entry:
    """Weights of one unit, as in the real pager."""

    index: int
    size: UnitSize
    residency: Residency
    host_buffer: UnitBlock | None = None
    """Host buffer of the weights, also during their read. None for weights whose tier is HOST."""
    device_buffer: UnitBlock | None = None
    """Device buffer of the weights."""
    reading: Work | None = None
    copied: Work | None = None
    """Last copy from the host buffer to the device buffer. The host buffer must not be reused before this copy ends."""
    pins: int = 0
    updating: bool = False
    in_update: bool = False
    unwritten: bool = False

    def read_ended(self) -> bool:
        """Returns True if a read of the weights has ended but is not delivered yet."""
        return self.reading is not None and self.reading.done

    @property
    def reading_in_place(self) -> bool:
        """Returns True while a read fills the device buffer."""
        return self.residency is Residency.UPLOADING and self.reading is not None

    @property
    def at_hand(self) -> bool:
        """Returns True if HOST holds the newest weights, or will hold them once a read has ended."""
        return self.host_buffer is not None or self.size.tier is not Tier.DISK


class SimulatedPager:
    """Moves of all units' weights between DISK, HOST and DEVICE."""

    def __init__(
        self, sizes: Sequence[UnitSize], host: Allocator, device: Allocator, limits: Limits, machine: SimulatedMachine
    ) -> None:
        self.host, self.device, self.machine = host, device, machine
        self.access_order = AccessOrder()
        # `version` counts changes: an actor waits for a version other than the one it has seen.
        self.version = self.uses = self.hits = self.waiting_for_buffer = 0
        self.wanted: list[int] = []
        self.update_waits = 0
        """Waits of the model's thread for an update; each wake-up in a wait that goes on counts once more."""
        self.entries = [Entry(index, size, size.start) for index, size in enumerate(sizes)]
        self._ascending = sorted(
            (align_up(size.nbytes), unit) for unit, size in enumerate(sizes) if not size.device_resident
        )
        # Units whose reads have begun and are not delivered, by index. After each event, actors check for ended reads.
        self._reading: dict[int, Entry] = {}
        self._evictable = self.access_order.units()
        """Units with host buffers that may be freed: flushed, not in an update and not being read."""
        self._idle = IdleBlocks(self.access_order)
        """Device buffers of units that are not in use and may leave."""
        self._pinned: dict[int, Entry] = {}
        """Units in use, by index."""
        self._limits = limits
        self._streams = [size.tier is Tier.DISK and 2 * align_up(size.shard_nbytes) > host.nbytes for size in sizes]
        self._events: list[Event] = []
        """Since the last `take_events`."""
        self._looked_up: dict[int, None] = {}
        self._to_read = self.access_order.units()
        """Units on DISK that may be read into a host buffer."""
        self._to_upload = self.access_order.units()
        """Units that are not on the device, and that no read from DISK to the device is bringing."""
        for entry in self.entries:
            self._note(entry)
        self._uploads_elsewhere = may_upload_elsewhere(machine.on_cpu, several_ranks=False)

    # -- the thread that runs the model -------------------------------------------------------------

    def acquire(self, unit: int) -> Acting[None]:
        """Pins a unit, fetches the unit to the device, and prefetches others."""
        entry = self._pinned[unit] = self.entries[unit]
        entry.pins += 1
        self._idle.remove(unit)
        # A nested use of a pinned unit does not count as a use, as in the real pager.
        if entry.pins == 1:
            self.access_order.use(unit)
            self._events.append(unit)
            self.uses += 1
            self.hits += entry.residency is Residency.DEVICE
        yield from self._fetch(entry)
        yield from self.prefetch()
        yield from self.machine.counted("upload", until(entry.copied))

    def expect(self, expected: Expected) -> None:
        """Predicts the next uses; see `AccessOrder.expect`."""
        self.access_order.expect(*expected)
        self._events.append(expected)

    def take_events(self) -> list[Event]:
        """Returns what has happened since the last call, in its order."""
        events, self._events = self._events, []
        return events

    def repeat(self, event: Event) -> None:
        """Records an event of a micro-batch that is passed over; a move changes nothing."""
        if isinstance(event, int):
            self.access_order.use(event)
        elif isinstance(event, Expected):
            self.access_order.expect(*event)

    def looks_up(self, unit: int, nbytes: int) -> bool:
        """Returns True if a lookup of rows, of `nbytes` on DISK, does not fetch the unit."""
        size = self.entries[unit].size
        if size.tier is Tier.DISK:
            room = self.host.nbytes // 2 // PAGE * PAGE if self.streams(unit) else size.shard_nbytes
            return nbytes <= room and nbytes < size.shard_nbytes
        return not size.device_resident

    def look_up(self, unit: int, nbytes: int) -> Acting[None]:
        """Waits for the update of a unit, and reads `nbytes` of rows if the unit is not in memory."""
        entry, block = self.entries[unit], None
        if not nbytes:
            return
        self._looked_up[unit] = None
        while block is None:
            if entry.updating:
                yield from self.machine.counted("update", self._wait_for_update(entry))
            elif entry.residency is Residency.DEVICE or (entry.at_hand and entry.residency is not Residency.READING):
                return
            else:
                block = yield from self.machine.counted("room", self.take_host_buffer(unit, nbytes))
                if block is None:
                    yield from self.machine.counted("room", self._wait_for_buffer())
        read = self.machine.read("weight read", "weights_read", unit, nbytes, Priority.URGENT)
        yield from self.machine.counted("read", until(read))
        self.host.give(block.offset, block.nbytes)
        self.notify()

    def end_lookups(self) -> tuple[int, ...]:
        """Returns the units of the lookups of a step, in their order."""
        looked_up, self._looked_up = tuple(self._looked_up), {}
        return looked_up

    def release(self, units: Iterable[int]) -> None:
        """Unpins units, and evicts from the device the units that the policy does not keep.

        An actor that waits for the end of a use has to be notified by the caller.
        """
        for entry in (self.entries[unit] for unit in units):
            entry.pins -= 1
            if not entry.pins:
                del self._pinned[entry.index]
                self._note(entry)
            if (
                not entry.pins
                and not entry.size.device_resident
                and not keeps(self.access_order, entry.index, self._nbytes, self._limits)
            ):
                self.drop(entry)

    def _fetch(self, entry: Entry) -> Acting[None]:
        """Moves a unit to the device, step by step: each wait may let the update worker change the state."""
        while entry.updating or entry.residency is not Residency.DEVICE:
            if entry.updating:
                yield from self.machine.counted("update", self._wait_for_update(entry))
            elif entry.residency is Residency.DISK and self._reads_in_place(entry):
                place = self._allocate_on_device(entry)
                if place is None:
                    yield from self.machine.counted("read", self._wait_for_place(entry))
                else:
                    self._start_read(entry, Residency.UPLOADING, place, Priority.URGENT)
            elif entry.residency is Residency.DISK:
                half = self.host.nbytes // 2 // PAGE * PAGE
                nbytes = half if self.streams(entry.index) else entry.size.shard_nbytes
                host_buffer = yield from self.machine.counted("room", self.take_host_buffer(entry.index, nbytes))
                if host_buffer is None:
                    yield from self.machine.counted("room", self._wait_for_buffer())
                elif entry.residency is not Residency.DISK:
                    # During a wait for the buffer another thread has started the read.
                    self.host.give(host_buffer.offset, host_buffer.nbytes)
                elif self.streams(entry.index):
                    yield from self._stream(entry, host_buffer)
                else:
                    self._start_read(entry, Residency.READING, host_buffer, Priority.URGENT)
            elif entry.residency is Residency.READING or entry.reading_in_place:
                yield from self.machine.counted("read", self.finish_read(entry))
            else:
                place = self._allocate_on_device(entry)
                if place is None:
                    yield from self.machine.counted("read", self._wait_for_place(entry))
                else:
                    yield from self._upload(entry, place)

    def _wait_for_update(self, entry: Entry) -> Acting[None]:
        """Waits for a change, and meanwhile asks the update worker to update this unit next."""
        # The worker updates this unit next, and may evict other buffers for its weights.
        self.wanted.append(entry.index)
        self.update_waits += 1
        self.notify()
        yield from self.change()
        self.wanted.remove(entry.index)

    def _wait_for_buffer(self) -> Acting[None]:
        """Waits until a host buffer may be free: for a prefetch that can then be evicted, or for the update worker."""
        reading = [entry for entry in self._reading.values() if entry.residency is Residency.READING]
        # A unit in READING cannot be evicted. The prefetch for the latest use is the best victim once it has ended.
        if reading:
            yield from self._finish_latest(reading)
            return
        self.waiting_for_buffer += 1
        self.notify()
        yield from self.change()
        self.waiting_for_buffer -= 1

    def _wait_for_place(self, entry: Entry) -> Acting[None]:
        """Waits for a read in place to end, so that its unit can be dropped; raises `BudgetError` if there is none."""
        reading = [entry for entry in self._reading.values() if entry.reading_in_place]
        if not reading:
            raise self._no_room(entry)
        yield from self._finish_latest(reading)

    def _finish_latest(self, reading: list[Entry]) -> Acting[None]:
        """Waits for the read of the unit whose next use is latest. That unit can then be evicted or dropped."""
        distance = self.access_order.distance
        yield from self.finish_read(max(reading, key=lambda entry: (distance(entry.index), -entry.index)))

    def _start_read(self, entry: Entry, to: Residency, buffer: UnitBlock, priority: Priority) -> None:
        """Starts a read into a host buffer (READING), or into the unit's device buffer (UPLOADING)."""
        if to is Residency.READING:
            entry.host_buffer = buffer
        else:
            entry.device_buffer = buffer
        self._reading[entry.index] = entry
        entry.reading = self.machine.read("weight read", "weights_read", entry.index, entry.size.shard_nbytes, priority)
        self.move(entry, to)

    def finish_read(self, entry: Entry) -> Acting[None]:
        """Waits for a unit's read. The first actor to resume delivers it; both actors may wait."""
        work = entry.reading
        yield from until(work)
        if entry.reading is work:
            entry.reading = None
            del self._reading[entry.index]
            self.move(entry, Residency.DEVICE if entry.residency is Residency.UPLOADING else Residency.HOST)

    def streams(self, unit: int) -> bool:
        """Returns True if the host budget cannot hold two partitions of this size, so that the unit moves in chunks."""
        return self._streams[unit]

    def _reads_in_place(self, entry: Entry) -> bool:
        return self.machine.on_cpu and entry.size.is_whole and self.streams(entry.index)

    def _stream(self, entry: Entry, host_buffer: UnitBlock) -> Acting[None]:
        """Moves a unit from DISK to the device in chunks. Each chunk is copied while the next one is read."""
        second = yield from self.machine.counted("room", self.take_host_buffer(entry.index, host_buffer.nbytes))
        place = self._allocate_on_device(entry)
        if place is None:
            raise self._no_room(entry)
        self.move(entry, Residency.UPLOADING)
        part = entry.size.shard_nbytes
        read = self.machine.read("weight read", "weights_read", entry.index, part, Priority.URGENT)
        yield from self.machine.counted("read", until(read))
        # The copies of all chunks but the last overlap reads, so only the last copy adds time.
        made = entry.size.expanded_nbytes if self.machine.on_cpu else 0
        entry.copied = self.machine.upload(entry.index, min(part, host_buffer.nbytes) + made)
        yield from self.machine.counted("upload", until(entry.copied))
        for buffer in (host_buffer, second):
            if buffer is not None:
                self.host.give(buffer.offset, buffer.nbytes)
        entry.device_buffer = place
        self.move(entry, Residency.DEVICE)

    def _upload(self, entry: Entry, place: UnitBlock) -> Acting[None]:
        """Starts the copy of a unit to the device. On a CPU the model's thread makes the copy and waits for it."""
        self.move(entry, Residency.UPLOADING)
        # A GPU expands blocks to values far faster than the bus copies them; a CPU expands them at its copy speed.
        made = entry.size.expanded_nbytes if self.machine.on_cpu else 0
        entry.copied = self.machine.upload(entry.index, entry.size.shard_nbytes + made)
        if self.machine.on_cpu:
            yield from self.machine.counted("upload", until(entry.copied))
        entry.device_buffer = place
        self.move(entry, Residency.DEVICE)

    def _allocate_on_device(self, entry: Entry, beyond: int = -1) -> UnitBlock | None:
        """Allocates a device buffer, evicting idle units whose next use is later than `beyond`; None without room."""
        beside = largest_beside(entry.index, entry.size.nbytes, self._ascending, self.device.nbytes)
        floor = Floor(0, self.device.nbytes, beside)
        company = company_of(entry.size.companions, self._offset)
        place = find_room(self.device, entry.size.nbytes, self._idle, floor, beyond, company)
        # From an unsafe place it would leave its companions no room, so a use first waits for reads in place.
        if place is None or (not place.safe and any(read.reading_in_place for read in self._reading.values())):
            return None
        for unit in place.victims:
            self.drop(self.entries[unit])
        self.device.take_at(place.offset, entry.size.nbytes)
        return UnitBlock(entry.index, place.offset, entry.size.nbytes)

    def _offset(self, unit: int) -> int | None:
        place = self.entries[unit].device_buffer
        return None if place is None else place.offset

    def _no_room(self, entry: Entry) -> BudgetError:
        return BudgetError(
            f"unit {entry.size.name} needs {format_size(entry.size.nbytes)} of contiguous device memory, and units in "
            f"use leave no such room in {format_size(self.device.nbytes)}"
        )

    def prefetch(self) -> Acting[None]:
        """Completes reads that have ended, starts reads ahead, and starts copies to the device ahead."""
        yield from self._prefetch_reads()
        yield from self._prefetch_uploads()

    def advance(self) -> Acting[None]:
        """Prefetches on another thread than the model's, and then lets the model's thread run."""
        if not self.waiting_for_buffer:
            yield from self._prefetch_reads(wait=False)
        waiting = any(entry.residency is not Residency.DEVICE for entry in self._pinned.values())
        if self._uploads_elsewhere and not waiting:
            yield from self._prefetch_uploads()

    def deliver(self) -> Acting[None]:
        """Acts as the callbacks of the I/O queue: a read ahead that has ended lets the next step begin."""

        def ended() -> bool:
            return self._uploads_elsewhere and any(map(Entry.read_ended, self._reading.values()))

        while True:
            yield ended
            yield from self._finish_ended_reads()
            yield from self.advance()

    def _prefetch_uploads(self) -> Acting[None]:
        """Starts copies to the device of the next units in the access order whose weights are in a host buffer."""
        order = self.access_order
        while (unit := next_to_fetch(order, self._nbytes, self._to_upload.upcoming(), self._limits)) is not None:
            entry = self.entries[unit]
            if entry.read_ended():
                yield from self.finish_read(entry)
            # The order is strict: if the next unit is not ready, later ones must not take its room.
            in_host = entry.residency in (Residency.HOST, Residency.WRITING)
            in_place = entry.residency is Residency.DISK and self._reads_in_place(entry)
            ready = (in_host or in_place) and not entry.updating
            place = self._allocate_on_device(entry, self.access_order.distance(unit)) if ready else None
            if place is None:
                return
            if in_host:
                yield from self._upload(entry, place)
            else:
                self._start_read(entry, Residency.UPLOADING, place, Priority.NORMAL)

    def _prefetch_reads(self, wait: bool = True) -> Acting[None]:
        yield from self._finish_ended_reads()
        order = self.access_order
        while (unit := next_to_fetch(order, self._shard_nbytes, self._to_read.upcoming(), self._limits)) is not None:
            nbytes, beyond = self._shard_nbytes(unit), self.access_order.distance(unit)
            host_buffer = yield from self.machine.counted("room", self.take_host_buffer(unit, nbytes, beyond, wait))
            if host_buffer is None:
                return
            if unit in self._to_read:
                self._start_read(self.entries[unit], Residency.READING, host_buffer, Priority.NORMAL)
            else:  # another thread has started the read, during a wait for the buffer
                self.host.give(host_buffer.offset, host_buffer.nbytes)

    def _finish_ended_reads(self) -> Acting[None]:
        for _, entry in sorted(self._reading.items()):
            if entry.read_ended():
                yield from self.finish_read(entry)

    def _shard_nbytes(self, unit: int) -> int:
        return self.entries[unit].size.shard_nbytes

    def _nbytes(self, unit: int) -> int:
        return self.entries[unit].size.nbytes

    def drop(self, entry: Entry) -> None:
        """Frees an unpinned unit's device buffer."""
        assert entry.device_buffer is not None and not entry.pins
        self.device.give(entry.device_buffer.offset, entry.device_buffer.nbytes)
        entry.device_buffer = None
        # After an update the writes of the host buffer may still be in flight.
        kept = Residency.WRITING if entry.unwritten else Residency.HOST
        self.move(entry, kept if entry.at_hand else Residency.DISK)

    # -- host buffers of weights ------------------------------------------------------------------

    def take_host_buffer(self, unit: int, nbytes: int, beyond: int = -1, wait: bool = True) -> Acting[UnitBlock | None]:
        """Allocates a host buffer, evicting units whose next use is later than `beyond`; None without room.

        Without `wait`, units whose copy to the device is under way are not evicted.
        """
        while not self.host.could_take(nbytes, ()):
            chosen = victims(self.host, nbytes, self._may_go(beyond))
            if chosen is None:
                return None
            going = [self.entries[victim] for victim in chosen]
            copying = next((e.copied for e in going if e.copied is not None and not e.copied.done), None)
            if copying is not None:
                if not wait:
                    return None
                # During the wait the update worker may change the victims' states: choose them again.
                yield from until(copying)
                continue
            for entry in going:
                assert entry.host_buffer is not None
                self.host.give(entry.host_buffer.offset, entry.host_buffer.nbytes)
                entry.host_buffer = None
                if entry.residency is Residency.HOST:
                    self.move(entry, Residency.DISK)
                else:
                    self._note(entry)
                    self._events.append((entry.index, None, None, entry.device_buffer))
        offset = self.host.take(nbytes)
        assert offset is not None
        return UnitBlock(unit, offset, nbytes)

    def _may_go(self, beyond: int) -> Iterator[UnitBlock]:
        """Yields the host buffers whose next use is more than `beyond` uses away, the furthest next use first."""
        last: list[UnitBlock] = []
        for unit in self._evictable.latest():
            block, distance = self.entries[unit].host_buffer, self.access_order.distance(unit)
            assert block is not None
            if not distance or (unit in self._pinned and self._pinned[unit].residency is not Residency.DEVICE):
                last.append(block)  # on its way to the device
            elif distance > beyond:
                yield block
            else:
                return
        if beyond < 0:
            yield from sorted(last)

    def _note(self, entry: Entry) -> None:
        """Adds a unit whose state has changed to the candidates of reads, uploads and evictions, or removes it."""
        # A unit on DISK has a host buffer only during an update.
        reads = entry.residency is Residency.DISK and not entry.updating and not self.streams(entry.index)
        uploads = entry.residency is not Residency.DEVICE and not entry.reading_in_place
        self._to_read.put(entry.index, reads)
        self._to_upload.put(entry.index, uploads)
        settled = entry.residency in (Residency.HOST, Residency.DEVICE)
        # A buffer with unwritten weights is the only copy of them.
        evictable = entry.host_buffer is not None and settled and not entry.unwritten and not entry.in_update
        self._evictable.put(entry.index, evictable)
        self._idle.remove(entry.index)
        on_device = entry.residency is Residency.DEVICE and not entry.size.device_resident and not entry.pins
        if on_device and entry.device_buffer is not None:
            self._idle.add(entry.device_buffer)

    def move(self, entry: Entry, to: Residency) -> None:
        """Changes a unit's residency; asserts that the real pager allows the change."""
        assert (entry.residency, to) in ARROWS, f"{entry.size.name}: {entry.residency} to {to}"
        entry.residency = to
        self._events.append((entry.index, to, entry.host_buffer, entry.device_buffer))
        self._note(entry)
        self.notify()

    def set_updating(self, entry: Entry, updating: bool) -> None:
        """Marks the begin or the end of a unit's update."""
        entry.updating = updating
        self._note(entry)

    def notify(self) -> None:
        """Wakes every actor that waits in `change`."""
        self.version += 1

    def change(self, seen: int | None = None) -> Acting[None]:
        """Waits until the version differs from `seen`, by default from the current version."""
        since = self.version if seen is None else seen
        yield lambda: self.version != since

    # -- the update worker ------------------------------------------------------------------------

    def wanted_update(self) -> int | None:
        """Returns the unit for whose update the model's thread waits, or None."""
        return next((unit for unit in self.wanted if self.entries[unit].updating), None)

    def begin_updates(self, units: Sequence[int]) -> None:
        """Marks units as being updated, and evicts their outdated weights from the device."""
        for entry in (self.entries[unit] for unit in units):
            self.set_updating(entry, True)
            if entry.reading_in_place:
                # The read of outdated bytes ends. Unlike the real pager, this one does not wait for the rest.
                entry.reading = None
                del self._reading[entry.index]
                self.move(entry, Residency.DEVICE)
            if entry.residency is Residency.DEVICE and not entry.size.device_resident:
                self.drop(entry)

    def buffer_for_update(self, entry: Entry) -> Acting[bool]:
        """Allocates a host buffer for updated weights if there is room. Returns True if the update may write to one."""
        yield from until(entry.copied)
        while entry.residency is Residency.READING:
            yield from self.finish_read(entry)
        if not entry.at_hand and not self.waiting_for_buffer:
            beyond = -1 if entry.index in self.wanted else self.access_order.distance(entry.index)
            entry.host_buffer = yield from self.take_host_buffer(entry.index, entry.size.shard_nbytes, beyond)
        entry.in_update = entry.at_hand
        self._note(entry)
        return entry.in_update

    def delivers(self, unit: int) -> bool:
        """Returns True if an update can leave the new weights in a host buffer."""
        return self.entries[unit].size.tier is not Tier.DEVICE and not self.streams(unit)

    def holds_weights(self, unit: int) -> bool:
        """Returns True if HOST holds the unit's weights, so that an update need not read them."""
        entry = self.entries[unit]
        return entry.residency is Residency.HOST or (entry.size.device_resident and entry.size.tier is Tier.HOST)

    def publish(self, unit: int, has_buffer: bool, unwritten: bool) -> None:
        """Ends a unit's update for the model's thread."""
        entry = self.entries[unit]
        if has_buffer:
            entry.unwritten = unwritten
            fresh = Residency.WRITING if unwritten else Residency.HOST
            if entry.residency is not fresh and not entry.size.device_resident:
                self.move(entry, fresh)
        entry.in_update = False
        self.set_updating(entry, False)
        self.notify()

    def written(self, unit: int) -> None:
        """Marks a unit's new weights as flushed to DISK."""
        entry = self.entries[unit]
        entry.unwritten = False
        if entry.residency is Residency.WRITING:
            self.move(entry, Residency.HOST)
        self._note(entry)
        self.notify()
