"""What the pager and the update worker would do, played on numbers: no bytes, no threads, no drive.

    simulate(uses, sizes, updates, budgets)            peaks of both budgets, hits, bytes
    simulate(uses, sizes, updates, budgets, rates=…)   also seconds, what was waited for, and the time line

Every decision is made by the functions of `policy` over a `Trace` and two `Space`s, as in the pager, and every move is
one of `residency.ARROWS`. Two actors take turns: the thread that runs the model, and the update worker. Without rates
all work ends at once: while the model computes the worker goes as far ahead as its leases allow, and what is read ahead
is there at the next use.

What is left out: other ranks, evaluations and edits; the commit; windows of gradients that spill (their writes never
make the backward wait). A use computes until it ends, so on a GPU the host is taken to go in step with the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from offload.aio import Priority
from offload.errors import BudgetError
from offload.sizes import PAGE, align_up, format_size
from offload.swapper.clock import Clock, Span, Work
from offload.swapper.pager import UnitSize
from offload.swapper.policy import Block, Floor, Limits, find_place, keeps, next_to_bring, victims
from offload.swapper.residency import ARROWS, Residency, Tier
from offload.swapper.space import Space
from offload.swapper.trace import Trace

_TILES = 3

_T = TypeVar("_T")
_Acting = Generator[Callable[[], bool], None, _T]
"""An actor, or a part of what it does: yields what it waits for."""


class Use(NamedTuple):
    """A unit is acquired, and something is computed with it."""

    unit: int
    seconds: float = 0.0
    """Of compute, where nothing disturbs it."""
    held: int = 1
    """It is released before the use that comes so many later begins."""


class UpdateCost(NamedTuple):
    """What a unit's update moves and computes. Bytes are of what is at home on DISK."""

    numel: int
    """Elements that the kernel works on."""
    weight_nbytes: int = 0
    """Trainable weights: read, unless a lease holds them."""
    state_nbytes: int = 0
    """Other states: read."""
    written_nbytes: int = 0
    """Weights and states that are written, also where they have their home above DISK."""
    gradient_nbytes: int = 0
    """A gradient that spills: written after the unit's last use, read by the update."""


class Budgets(NamedTuple):
    """Bytes in which units come and go."""

    host: int
    """For leases of weights: the classes weights and cache, without states that were raised into the cache."""
    device: int
    """Of the device's arena without what is at home there."""


class Rates(NamedTuple):
    """How fast everything is; infinite where it is not said."""

    read: float = math.inf
    """Bytes in a second from the drives, which do one thing at a time: reads before writes."""
    written: float = math.inf
    """Bytes in a second to the drives."""
    upload: float = math.inf
    """Bytes in a second to the device."""
    kernel: float = math.inf
    """Elements updated in a second."""
    on_cpu: bool = False
    """The device is the CPU: compute and kernel share its cores, and the thread that runs the model copies itself."""


class Moved(NamedTuple):
    """Bytes between HOST and DISK."""

    weights_read: int = 0
    """Brought for a use."""
    updates_read: int = 0
    updates_written: int = 0
    gradients_read: int = 0
    gradients_written: int = 0

    @property
    def read(self) -> int:
        return self.weights_read + self.updates_read + self.gradients_read

    @property
    def written(self) -> int:
        return self.updates_written + self.gradients_written


class Waited(NamedTuple):
    """Seconds in which the thread that runs the model stood still."""

    update: float = 0.0
    read: float = 0.0
    upload: float = 0.0
    room: float = 0.0
    """For a lease of weights."""


class Simulation(NamedTuple):
    """What a step comes to, from one return of `step()` to the next."""

    host_peak: int
    """Bytes of leases of weights, the most since the first step."""
    device_peak: int
    """Bytes of units on the device, the most since the first step."""
    uses: int
    hits: int
    """Uses that found the unit on the device."""
    moved: Moved
    undelivered: int
    """Updates that found no lease, so that their weights are read once more."""
    seconds: float
    waited: Waited
    spans: tuple[Span, ...]
    """The time line, from the step's beginning; of work that began before it, the start is negative."""


def simulate(
    uses: Sequence[Use],
    sizes: Sequence[UnitSize],
    updates: Sequence[UpdateCost | None],
    budgets: Budgets,
    limits: Limits | None = None,
    rates: Rates | None = None,
    overlap: bool = True,
    tile_numel: int | None = None,
    steps: int = 3,
) -> Simulation:
    """Play `steps` steps that all make the same uses, and tell of the last.

    The first begins with empty leases and without a trace; the third is about what all further ones are. `updates` has
    None for units that nothing trains; a tile has `tile_numel` elements, by default a whole unit. Raises `BudgetError`
    where what is in use leaves no room on the device, as the pager does.
    """
    return _Play(uses, sizes, updates, budgets, limits or Limits(), rates or Rates(), overlap, tile_numel).run(steps)


@dataclass
class _Entry:
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
    gradient: Work | None = None
    """The write of a gradient that spills."""
    pins: int = 0
    updating: bool = False
    in_update: bool = False
    unwritten: bool = False

    @property
    def at_hand(self) -> bool:
        """Whether HOST has the newest weights, or will have them when a read is done."""
        return self.lease is not None or self.size.home is not Tier.DISK


class _Job:
    """A unit's update under way."""

    def __init__(self, unit: int, cost: UpdateCost, leased: bool, delivered: bool) -> None:
        self.unit, self.cost, self.leased, self.delivered = unit, cost, leased, delivered
        self.next_start = 0
        self.unwritten_tiles = 0
        self.computed = False


class _Tile(NamedTuple):
    job: _Job
    start: int
    stop: int
    reads: list[Work]
    writes: list[Work]


class _Figures(NamedTuple):
    """All that was counted, at one moment."""

    now: float
    uses: int
    hits: int
    undelivered: int
    moved: Moved
    waited: Waited


class _Play:
    """The pager, the worker and a loop that trains. Methods are named as those that they stand for."""

    def __init__(
        self,
        uses: Sequence[Use],
        sizes: Sequence[UnitSize],
        updates: Sequence[UpdateCost | None],
        budgets: Budgets,
        limits: Limits,
        rates: Rates,
        overlap: bool,
        tile_numel: int | None,
    ) -> None:
        self._step_uses, self._updates, self._limits, self._rates = uses, updates, limits, rates
        self._overlap, self._tile_numel = overlap, tile_numel
        self._last_use = {use.unit: position for position, use in enumerate(uses)}
        self._trace = Trace()
        self._host, self._device = Space(budgets.host), Space(budgets.device)
        self._entries = [_Entry(index, size, _start(size)) for index, size in enumerate(sizes)]
        self._clock = Clock()
        self._drive, self._link = self._clock.server("drive"), self._clock.server("cores" if rates.on_cpu else "link")
        self._compute = self._clock.server("cores" if rates.on_cpu else "device")
        self._kernel = self._clock.server("cores")
        self._version = 0
        self._computing = False
        self._uses = self._hits = self._undelivered = self._starved = self._flushing = 0
        self._moved = dict.fromkeys(Moved._fields, 0)
        self._waited = dict.fromkeys(Waited._fields, 0.0)
        self._wanted: list[int] = []
        self._queue: deque[int] = deque()
        self._job: _Job | None = None
        self._reading: deque[_Tile] = deque()
        self._writing: deque[_Tile] = deque()
        self._free = _TILES
        self._busy = False

    def run(self, steps: int) -> Simulation:
        marks = [self._figures()]
        model, worker = self._model(steps, marks), self._worker()
        model_ready, worker_ready = next(model), next(worker)
        while True:
            if worker_ready() and (self._computing or not model_ready()):
                worker_ready = next(worker)
            elif model_ready():
                try:
                    model_ready = next(model)
                except StopIteration:
                    break
            else:
                going_on = self._clock.advance()
                assert going_on, "both wait for each other"
        before, after = marks[-2:]
        return Simulation(
            self._host.peak_bytes,
            self._device.peak_bytes,
            after.uses - before.uses,
            after.hits - before.hits,
            Moved(*(new - old for new, old in zip(after.moved, before.moved, strict=True))),
            after.undelivered - before.undelivered,
            after.now - before.now,
            Waited(*(new - old for new, old in zip(after.waited, before.waited, strict=True))),
            tuple(
                span._replace(start=span.start - before.now, end=span.end - before.now)
                for span in self._clock.spans
                if before.now < span.end <= after.now
            ),
        )

    def _figures(self) -> _Figures:
        moved, waited = Moved(**self._moved), Waited(**self._waited)
        return _Figures(self._clock.now, self._uses, self._hits, self._undelivered, moved, waited)

    def _waits(self, cause: str, acting: _Acting[_T]) -> _Acting[_T]:
        """Let the model's thread do what may wait, and count for how long it does."""
        start = self._clock.now
        result = yield from acting
        self._waited[cause] += self._clock.now - start
        return result

    def _await(self, work: Work | None) -> _Acting[None]:
        while work is not None and not work.done:
            yield lambda: work.done

    def _await_change(self) -> _Acting[None]:
        seen = self._version
        yield lambda: self._version != seen

    def _disk(self, row: str, cause: str, unit: int, nbytes: int, priority: Priority) -> Work:
        """Begin to read or write."""
        self._moved[cause] += nbytes
        rate = self._rates.read if cause.endswith("read") else self._rates.written
        return self._clock.begin(self._drive, row, unit, nbytes / rate, priority)

    # -- the thread that runs the model -------------------------------------------------------------

    def _model(self, steps: int, marks: list[_Figures]) -> _Acting[None]:
        for _ in range(steps):
            ends: dict[int, list[int]] = {}
            for position, use in enumerate(self._step_uses):
                self._release(ends.pop(position, ()))
                yield from self._acquire(use.unit)
                ends.setdefault(position + use.held, []).append(use.unit)
                computed = self._clock.begin(self._compute, "model", use.unit, use.seconds)
                self._computing = True
                yield lambda work=computed: work.done  # type: ignore[misc]  # the default binds this one
                self._computing = False
                self._spill(position, use.unit)
            self._release(unit for units in ends.values() for unit in units)
            yield from self._step()
            marks.append(self._figures())

    def _spill(self, position: int, unit: int) -> None:
        cost = self._updates[unit]
        if cost is not None and cost.gradient_nbytes and position == self._last_use[unit]:
            self._entries[unit].gradient = self._disk(
                "gradient write", "gradients_written", unit, cost.gradient_nbytes, Priority.BACKGROUND
            )

    def _step(self) -> _Acting[None]:
        yield from self._waits("update", self._finish())
        self._trace.finish()
        first_use = {unit: position for position, unit in reversed(list(enumerate(self._trace.order)))}
        units = [unit for unit, cost in enumerate(self._updates) if cost is not None]
        units.sort(key=lambda unit: (first_use.get(unit, len(self._trace.order)), unit))
        for unit in units:
            entry = self._entries[unit]
            entry.updating = True
            if entry.residency is Residency.DEVICE and not entry.size.stays:
                self._drop(entry)
        self._queue.extend(units)
        self._busy = True
        self._notify()
        if not self._overlap:
            yield from self._waits("update", self._finish())

    def _finish(self) -> _Acting[None]:
        self._flushing += 1
        self._notify()
        while self._busy:
            yield from self._await_change()
        self._flushing -= 1

    def _acquire(self, unit: int) -> _Acting[None]:
        entry = self._entries[unit]
        entry.pins += 1
        if entry.pins == 1:
            self._trace.use(unit)
            self._uses += 1
            self._hits += entry.residency is Residency.DEVICE
        yield from self._bring(entry)
        yield from self._look_ahead()
        yield from self._waits("upload", self._await(entry.copied))

    def _release(self, units: Iterable[int]) -> None:
        for entry in (self._entries[unit] for unit in units):
            entry.pins -= 1
            if (
                not entry.pins
                and not entry.size.stays
                and not keeps(self._trace, entry.index, self._nbytes, self._limits)
            ):
                self._drop(entry)
        self._notify()

    def _bring(self, entry: _Entry) -> _Acting[None]:
        while entry.updating or entry.residency is not Residency.DEVICE:
            if entry.updating:
                yield from self._waits("update", self._wait_for_update(entry))
            elif entry.residency is Residency.DISK:
                lease = yield from self._waits("room", self._lease(entry.index, self._lease_nbytes(entry)))
                if lease is None:
                    yield from self._waits("room", self._wait_for_lease())
                elif self._streams(entry.index):
                    yield from self._stream(entry, lease)
                else:
                    self._start_read(entry, lease, Priority.URGENT)
            elif entry.residency is Residency.READING:
                yield from self._waits("read", self._finish_read(entry))
            else:
                place = self._take_slice(entry)
                if place is None:
                    raise self._no_room(entry)
                yield from self._upload(entry, place)

    def _wait_for_update(self, entry: _Entry) -> _Acting[None]:
        self._wanted.append(entry.index)
        self._notify()
        yield from self._await_change()
        self._wanted.remove(entry.index)

    def _wait_for_lease(self) -> _Acting[None]:
        reading = [entry for entry in self._entries if entry.residency is Residency.READING]
        if reading:
            yield from self._finish_read(
                max(reading, key=lambda entry: (self._trace.distance(entry.index), -entry.index))
            )
            return
        self._starved += 1
        self._notify()
        yield from self._await_change()
        self._starved -= 1

    def _start_read(self, entry: _Entry, lease: Block, priority: Priority) -> None:
        entry.lease = lease
        entry.reading = self._disk("weight read", "weights_read", entry.index, entry.size.part_nbytes, priority)
        self._move(entry, Residency.READING)

    def _finish_read(self, entry: _Entry) -> _Acting[None]:
        """Whoever comes first delivers it."""
        work = entry.reading
        yield from self._await(work)
        if entry.reading is work:
            entry.reading = None
            self._move(entry, Residency.HOST)

    def _streams(self, unit: int) -> bool:
        size = self._entries[unit].size
        return size.home is Tier.DISK and 2 * align_up(size.part_nbytes) > self._host.nbytes

    def _lease_nbytes(self, entry: _Entry) -> int:
        return self._host.nbytes // 2 // PAGE * PAGE if self._streams(entry.index) else entry.size.part_nbytes

    def _stream(self, entry: _Entry, lease: Block) -> _Acting[None]:
        """From DISK to the device in pieces: all but the last are copied while the next is read."""
        second = yield from self._waits("room", self._lease(entry.index, lease.nbytes))
        place = self._take_slice(entry)
        if place is None:
            raise self._no_room(entry)
        self._move(entry, Residency.UPLOADING)
        part = entry.size.part_nbytes
        read = self._disk("weight read", "weights_read", entry.index, part, Priority.URGENT)
        yield from self._waits("read", self._await(read))
        entry.copied = self._copy(entry, min(part, lease.nbytes))
        yield from self._waits("upload", self._await(entry.copied))
        for each in (lease, second):
            if each is not None:
                self._host.give(each.offset, each.nbytes)
        entry.slice = place
        self._move(entry, Residency.DEVICE)

    def _upload(self, entry: _Entry, place: Block) -> _Acting[None]:
        self._move(entry, Residency.UPLOADING)
        entry.copied = self._copy(entry, entry.size.part_nbytes)
        if self._rates.on_cpu:
            yield from self._waits("upload", self._await(entry.copied))
        entry.slice = place
        self._move(entry, Residency.DEVICE)

    def _copy(self, entry: _Entry, nbytes: int) -> Work:
        return self._clock.begin(self._link, "upload", entry.index, nbytes / self._rates.upload)

    def _take_slice(self, entry: _Entry, beyond: int = -1) -> Block | None:
        others = (e.size.nbytes for e in self._entries if e is not entry and not e.size.stays)
        floor = Floor(0, self._device.nbytes, max(others, default=0))
        idle = [
            e.slice
            for e in self._entries
            if e.slice is not None and e.residency is Residency.DEVICE and not e.pins and not e.size.stays
        ]
        place = find_place(self._device, entry.size.nbytes, idle, self._trace, floor, beyond)
        if place is None:
            return None
        for unit in place.victims:
            self._drop(self._entries[unit])
        self._device.take_at(place.offset, entry.size.nbytes)
        return Block(entry.index, place.offset, entry.size.nbytes)

    def _no_room(self, entry: _Entry) -> BudgetError:
        return BudgetError(
            f"unit {entry.size.name} needs {format_size(entry.size.nbytes)} in one piece on the device, where units in "
            f"use leave no such room in {format_size(self._device.nbytes)}"
        )

    def _look_ahead(self) -> _Acting[None]:
        for entry in self._entries:
            if entry.reading is not None and entry.reading.done:
                yield from self._finish_read(entry)
        yield from self._read_ahead()
        while (unit := self._next_upload()) is not None:
            entry = self._entries[unit]
            ready = entry.residency in (Residency.HOST, Residency.WRITING) and not entry.updating
            place = self._take_slice(entry, self._trace.distance(unit)) if ready else None
            if place is None:
                return
            yield from self._upload(entry, place)

    def _read_ahead(self) -> _Acting[None]:
        def wanting(unit: int) -> bool:
            entry = self._entries[unit]
            on_disk = entry.residency is Residency.DISK and entry.lease is None
            return on_disk and not entry.updating and not self._streams(unit)

        def nbytes(unit: int) -> int:
            return self._entries[unit].size.part_nbytes

        while (unit := next_to_bring(self._trace, nbytes, wanting, self._limits)) is not None:
            lease = yield from self._waits("room", self._lease(unit, nbytes(unit), self._trace.distance(unit)))
            if lease is None:
                return
            self._start_read(self._entries[unit], lease, Priority.NORMAL)

    def _next_upload(self) -> int | None:
        def wanting(unit: int) -> bool:
            return self._entries[unit].residency is not Residency.DEVICE

        return next_to_bring(self._trace, self._nbytes, wanting, self._limits)

    def _nbytes(self, unit: int) -> int:
        return self._entries[unit].size.nbytes

    def _drop(self, entry: _Entry) -> None:
        assert entry.slice is not None and not entry.pins
        self._device.give(entry.slice.offset, entry.slice.nbytes)
        entry.slice = None
        kept = Residency.WRITING if entry.unwritten else Residency.HOST
        self._move(entry, kept if entry.at_hand else Residency.DISK)

    # -- leases of weights --------------------------------------------------------------------------

    def _lease(self, unit: int, nbytes: int, beyond: int = -1) -> _Acting[Block | None]:
        while True:
            takeable = [e.lease for e in self._entries if e.lease is not None and self._may_take_lease_of(e)]
            going = victims(self._host, nbytes, takeable, self._trace, beyond)
            if going is None:
                return None
            entries = [self._entries[unit] for unit in going]
            copying = next((e.copied for e in entries if e.copied is not None and not e.copied.done), None)
            if copying is None:
                break
            yield from self._await(copying)
        for entry in entries:
            assert entry.lease is not None
            self._host.give(entry.lease.offset, entry.lease.nbytes)
            entry.lease = None
            if entry.residency is Residency.HOST:
                self._move(entry, Residency.DISK)
        offset = self._host.take(nbytes)
        assert offset is not None
        return Block(unit, offset, nbytes)

    def _may_take_lease_of(self, entry: _Entry) -> bool:
        clean = not entry.unwritten and not entry.in_update
        return clean and entry.residency in (Residency.HOST, Residency.DEVICE)

    def _move(self, entry: _Entry, to: Residency) -> None:
        assert (entry.residency, to) in ARROWS, f"{entry.size.name}: {entry.residency} to {to}"
        entry.residency = to
        self._notify()

    def _notify(self) -> None:
        self._version += 1

    # -- the update worker --------------------------------------------------------------------------

    def _worker(self) -> _Acting[None]:
        while True:
            yield lambda: True  # whoever waited for what was done just now goes on first
            seen = self._version
            self._retire()
            while self._free and (tile := (yield from self._next_tile())) is not None:
                self._reading.append(tile)
            if self._reading:
                yield from self._compute_tile(self._reading.popleft())
            elif self._writing:
                for write in self._writing[0].writes:
                    yield from self._await(write)
            elif self._busy and self._job is None and not self._queue:
                self._busy = False
                self._notify()
            else:
                yield lambda seen=seen: self._version != seen  # type: ignore[misc]  # the default binds this one

    def _retire(self) -> None:
        """Take back tiles whose writes are done, oldest first."""
        while self._writing and all(write.done for write in self._writing[0].writes):
            job = self._writing.popleft().job
            self._free += 1
            job.unwritten_tiles -= 1
            if job.computed and job.unwritten_tiles == 0:
                self._written(job)

    def _next_tile(self) -> _Acting[_Tile | None]:
        if self._job is None:
            self._job = yield from self._next_job()
            if self._job is None:
                return None
        job = self._job
        start, stop = job.next_start, job.cost.numel
        if self._tile_numel is not None:
            stop = min(start + self._tile_numel, stop)
        job.next_start = stop
        job.unwritten_tiles += 1
        if stop == job.cost.numel:
            self._job = None
        self._free -= 1
        reads = yield from self._read_tile(job, start, stop)
        return _Tile(job, start, stop, reads, [])

    def _next_job(self) -> _Acting[_Job | None]:
        """The unit that somebody waits for, else the first; None where it needs a lease worth waiting for."""
        if not self._queue:
            return None
        unit = self._wanted[0] if self._wanted and self._wanted[0] in self._queue else self._queue[0]
        entry, cost = self._entries[unit], self._updates[unit]
        assert cost is not None
        leased = False
        if entry.size.home is not Tier.DEVICE and not self._streams(unit):
            leased = yield from self._lease_for_update(entry)
            going_on = bool(self._flushing or self._starved or self._wanted)
            if not leased and (self._reading or self._writing or not going_on):
                return None
        self._queue.remove(unit)
        delivered = leased or entry.size.home is Tier.DEVICE
        self._undelivered += not delivered
        return _Job(unit, cost, leased, delivered)

    def _lease_for_update(self, entry: _Entry) -> _Acting[bool]:
        yield from self._await(entry.copied)
        while entry.residency is Residency.READING:
            yield from self._finish_read(entry)
        if not entry.at_hand and not self._starved:
            beyond = -1 if entry.index in self._wanted else self._trace.distance(entry.index)
            entry.lease = yield from self._lease(entry.index, entry.size.part_nbytes, beyond)
        entry.in_update = entry.at_hand
        return entry.in_update

    def _read_tile(self, job: _Job, start: int, stop: int) -> _Acting[list[Work]]:
        entry, cost = self._entries[job.unit], job.cost
        nbytes = _share(cost.state_nbytes, start, stop, cost.numel)
        if entry.size.home is Tier.DISK and not (job.leased and entry.residency is Residency.HOST):
            nbytes += _share(cost.weight_nbytes, start, stop, cost.numel)
            if job.leased and start == 0:  # a lease is read whole, what is frozen too
                nbytes += entry.size.part_nbytes - cost.weight_nbytes
        reads = [self._disk("update read", "updates_read", job.unit, nbytes, Priority.NORMAL)]
        if cost.gradient_nbytes:
            yield from self._await(entry.gradient)
            nbytes = _share(cost.gradient_nbytes, start, stop, cost.numel)
            reads.append(self._disk("gradient read", "gradients_read", job.unit, nbytes, Priority.NORMAL))
        return reads

    def _compute_tile(self, tile: _Tile) -> _Acting[None]:
        for read in tile.reads:
            yield from self._await(read)
        job, cost = tile.job, tile.job.cost
        seconds = (tile.stop - tile.start) / self._rates.kernel
        yield from self._await(self._clock.begin(self._kernel, "kernel", job.unit, seconds))
        if cost.written_nbytes:
            nbytes = _share(cost.written_nbytes, tile.start, tile.stop, cost.numel)
            tile.writes.append(self._disk("update write", "updates_written", job.unit, nbytes, Priority.BACKGROUND))
        self._writing.append(tile)
        if tile.stop == cost.numel:
            job.computed = True
            if job.delivered:
                self._publish(job, any(t.job is job and t.writes for t in self._writing))

    def _publish(self, job: _Job, unwritten: bool) -> None:
        entry = self._entries[job.unit]
        if job.leased:
            entry.unwritten = unwritten
            fresh = Residency.WRITING if unwritten else Residency.HOST
            if entry.residency is not fresh:
                self._move(entry, fresh)
        entry.updating = entry.in_update = False
        self._notify()

    def _written(self, job: _Job) -> None:
        entry = self._entries[job.unit]
        if not job.delivered:
            self._publish(job, False)
        entry.unwritten = False
        if entry.residency is Residency.WRITING:
            self._move(entry, Residency.HOST)
        self._notify()


def _start(size: UnitSize) -> Residency:
    """Where the weights are before the first use."""
    if size.home is Tier.DISK:
        return Residency.DISK
    return Residency.DEVICE if size.stays else Residency.HOST


def _share(nbytes: int, start: int, stop: int, numel: int) -> int:
    """What elements [start, stop) have of the bytes of `numel`; all shares together are `nbytes`."""
    return nbytes * stop // numel - nbytes * start // numel
