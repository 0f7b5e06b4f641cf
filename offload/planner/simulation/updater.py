"""The simulated update worker: a few tiles are read, computed and written at a time, in two lanes, as in the real one.

With speculation, the worker also updates units before `step()`, during the rest of the backward. Before such an update,
the unit's gradients must be complete, and the previous step's updates must be written. Every such update is kept:
clipped steps are not simulated.

Updates take two passes as in the real worker. A gradient waits for the second pass of its unit when it is complete.
Gradients that leave the device in earlier micro-batches are taken to wait until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from offload.aio import Priority
from offload.kernels import Writes
from offload.layout.update_order import Lane, SecondPasses, next_lane
from offload.planner.simulation.machine import Acting, SimulatedMachine, Work
from offload.planner.simulation.pager import SimulatedPager
from offload.states import Tier
from offload.swapper.memory.host_arena import TILE_BUFFERS


class UpdateCost(NamedTuple):
    """Elements and bytes of a unit's update. Only states whose tier is DISK are read."""

    numel: int
    """Elements that the kernel updates."""
    weight_nbytes: int = 0
    """Bytes of trainable weights, read unless a host buffer holds them."""
    state_nbytes: int = 0
    """Bytes of other states, read."""
    written_nbytes: int = 0
    """Bytes of weights and states written, including those whose tier is above DISK."""
    gradient_nbytes: int = 0
    """Bytes of a gradient that spills: written after the unit's last use, read by the update."""
    revocable: bool = False
    """True if the store keeps the states from before the update, so that the update may be done again or dropped."""
    stops: tuple[int, ...] = ()
    """Ends of tiles, in elements; empty for tiles of one size. Each element counts with the mean bytes per element."""
    if_used: bool = False
    """True if a step that does not use the unit does not update it either."""
    passes: tuple[float, float] | None = None
    """Seconds of a pass that writes the weights, and of one that writes the moments; a pass that writes both takes 1.

    None if the update must write both at once.
    """

    @property
    def lane(self) -> Lane:
        return Lane.STREAMED if self.written_nbytes or self.gradient_nbytes else Lane.MEMORY


class _Update:
    def __init__(
        self,
        unit: int,
        tier: Tier,
        cost: UpdateCost,
        has_buffer: bool,
        delivered: bool,
        priority: Priority,
        part: Writes = Writes.ALL,
    ) -> None:
        self.part = part
        self.unit, self.cost, self.has_buffer, self.delivered = unit, cost, has_buffer, delivered
        self.lane = cost.lane
        read = cost.state_nbytes or cost.gradient_nbytes or (tier is Tier.DISK and not has_buffer)
        self.buffered = bool(read or (tier is Tier.DEVICE and cost.written_nbytes))
        """True if the update's tiles take a buffer, for a read or a copy."""
        self.priority = priority
        """Urgency of its reads."""
        self.next_start = 0
        self.unwritten_tiles = 0
        self.computed = False


class _Tile(NamedTuple):
    job: _Update
    start: int
    stop: int
    reads: list[Work]
    writes: list[Work]
    """The write of the tile, once it has begun; empty before, and for a tile that is not stored."""


class SimulatedUpdater:
    """The update worker. `act` runs as the worker, all other public methods on the model's thread."""

    def __init__(
        self,
        costs: Sequence[UpdateCost | None],
        tile_numel: int | None,
        pager: SimulatedPager,
        machine: SimulatedMachine,
        speculate: bool,
        tile_buffers: int | None = None,
    ) -> None:
        self._costs, self._tile_numel, self._pager, self._machine = costs, tile_numel, pager, machine
        self._speculate = speculate
        self.undelivered = 0
        self.speculated: list[int] = []
        """Units of all updates that began before their step(), in order."""
        self._complete: deque[int] = deque()
        """Units whose gradients of the present step are complete, and whose update may begin before step()."""
        self._begun: set[int] = set()
        """Units whose update of the present step has begun before step()."""
        self._gradients: dict[int, Work] = {}
        """Writes of spilled gradients, by unit."""
        self._queues: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
        self._jobs: dict[Lane, _Update] = {}
        self._reading: dict[Lane, deque[_Tile]] = {lane: deque() for lane in Lane}
        self._writing: deque[_Tile] = deque()
        self._free = TILE_BUFFERS if tile_buffers is None else tile_buffers
        self._busy = False
        self._flushing = 0
        self._second_passes = SecondPasses(sum(cost.numel for cost in costs if cost is not None and cost.passes))
        self._moments: list[int] = []
        """Units whose weights are published and whose second pass has not begun, in the order of the former."""
        self._unread: set[int] = set()
        """Units whose gradient a second pass will read, or reads."""
        self._second_pass_began = 0.0
        self._awaited_gradient: int | None = None
        self._waits = 0
        """The model's waits for updates when the worker last began one."""

    def await_gradient(self, unit: int) -> Acting[None]:
        """Waits on the model's thread until the last update of a unit has read its gradient."""
        if unit in self._unread:
            self._awaited_gradient = unit
            yield from self._wait_while(lambda: unit in self._unread)
            self._awaited_gradient = None

    def complete(self, unit: int) -> None:
        """Starts the write of a unit's complete gradient if the gradient spills, and allows a speculative update."""
        cost = self._costs[unit]
        if cost is not None and cost.gradient_nbytes:
            nbytes = cost.gradient_nbytes
            self._gradients[unit] = self._machine.write("gradient write", "gradients_written", unit, nbytes)
        if cost is not None and cost.revocable and self._speculate:
            self._complete.append(unit)
            self._pager.notify()

    @property
    def idle(self) -> bool:
        """True if no update is under way, or may begin before `step()`."""
        tiles = (*self._reading.values(), self._writing, *self._queues.values())
        return not (self._busy or self._complete or self._jobs or self._moments or any(tiles))

    def awaits(self, units: Sequence[int]) -> bool:
        """Returns True if the update of one of `units` may begin once the unit is not in use."""
        return any(unit in self._complete for unit in units)

    def schedule(self, order: Sequence[int]) -> None:
        """Enqueues the updates of a step that have not begun yet, in the order of the units' next use."""
        # Reversed, so that the first position of each unit remains.
        first_use = {unit: position for position, unit in reversed(list(enumerate(order)))}
        units = [
            unit
            for unit, cost in enumerate(self._costs)
            if cost is not None and unit not in self._begun and (unit in first_use or not cost.if_used)
        ]
        units.sort(key=lambda unit: (first_use.get(unit, len(order)), unit))
        self._complete.clear()
        self._begun.clear()
        self._pager.begin_updates(units)
        for unit in units:
            cost = self._costs[unit]
            assert cost is not None
            self._queues[cost.lane].append(unit)
        self._second_passes.begin_step()
        self._busy = True
        self._pager.notify()

    def finish(self) -> Acting[None]:
        """Waits on the model's thread until all updates of earlier steps have ended."""
        self._flushing += 1
        yield from self._wait_while(lambda: self._busy)
        self._flushing -= 1

    def _wait_while(self, pending: Callable[[], bool]) -> Acting[None]:
        late, began = self._second_passes.pending, self._machine.clock.now
        self._pager.notify()
        while pending():
            yield from self._pager.change()
        if late:
            self._second_passes.waited(self._machine.clock.now - began)

    def act(self) -> Acting[None]:
        """Runs the worker: read the next tiles, compute one, retire written ones. The coroutine never returns."""
        while True:
            # The model's thread runs first: it may have waited for the finished work.
            yield lambda: True
            # Read before any other state, so that the wait below misses no change.
            seen = self._pager.version
            yield from self._retire()
            self._end_beside_early_updates()
            # Reads of the next tiles start before the kernel of this one, as many as there are buffers.
            for other in Lane:
                while self._may_begin(other) and (tile := (yield from self._next_tile(other))) is not None:
                    self._reading[other].append(tile)
            begun = [other for other, tiles in self._reading.items() if tiles]
            streamed = self._reading[Lane.STREAMED]
            reads_ended = not streamed or all(read.done for read in streamed[0].reads)
            lane = next_lane(begun, reads_ended)
            if lane is not None:
                yield from self._compute_tile(self._reading[lane].popleft())
            elif self._writing:
                for write in self._writing[0].writes:
                    yield from self._machine.spent("writes", write)
            elif self._busy and not self._jobs and not self._moments and not any(self._queues.values()):
                self._busy = False
                self._pager.notify()
            else:
                yield from self._pager.change(seen)

    def _end_beside_early_updates(self) -> None:
        """Ends the updates of a step while others, which began under the backward beside its moments, go on."""
        if not self._busy or not self._begun:
            return
        tiles = (*self._reading[Lane.MEMORY], *self._reading[Lane.STREAMED], *self._writing)
        units = {job.unit for job in (*self._jobs.values(), *(tile.job for tile in tiles))}
        left = self._moments or any(self._queues.values()) or units - self._begun
        if self._busy and units and not left:
            self._busy = False
            self._pager.notify()

    def _retire(self) -> Acting[None]:
        """Frees tiles whose writes have ended, the oldest first."""
        while self._writing and all(write.done for write in self._writing[0].writes):
            tile = self._writing.popleft()
            job = tile.job
            self._free += job.buffered
            job.unwritten_tiles -= 1
            if job.computed and job.unwritten_tiles == 0 and job.part is not Writes.MOMENTS:
                if not job.delivered:
                    # Weights without a host buffer become available only now.
                    self._pager.publish(job.unit, False, False)
                    yield from self._pager.advance()
                self._pager.written(job.unit)
                yield from self._pager.advance()

    def _may_begin(self, lane: Lane) -> bool:
        """Returns False if `_next_tile` returns None for sure. The worker asks after each event."""
        if lane not in self._jobs:
            return bool(self._queues[lane] or (self._complete if lane is Lane.STREAMED else self._moments))
        return bool(self._free if self._jobs[lane].buffered else len(self._reading[lane]) < 2)

    def _next_tile(self, lane: Lane) -> Acting[_Tile | None]:
        """Starts the reads of the next tile and returns the tile; None if there is no room, or no update can start."""
        if lane not in self._jobs and (self._free if lane is Lane.STREAMED else not self._reading[lane]):
            new = yield from self._next_job(lane)
            if new is not None:
                self._jobs[lane] = new
        job, begun = self._jobs.get(lane), len(self._reading[lane])
        if job is None or (lane is Lane.MEMORY and begun):
            return None
        if not self._free if job.buffered else begun >= 2:
            return None
        start, stop = job.next_start, job.cost.numel
        if job.cost.stops:
            stop = next(stop for stop in job.cost.stops if stop > start)
        elif self._tile_numel is not None:
            stop = min(start + self._tile_numel, stop)
        job.next_start = stop
        job.unwritten_tiles += 1
        if stop == job.cost.numel:
            del self._jobs[lane]
        self._free -= job.buffered
        reads = yield from self._read_tile(job, start, stop)
        return _Tile(job, start, stop, reads, [])

    def _next_job(self, lane: Lane) -> Acting[_Update | None]:
        """Starts the next update of a lane: the one for which the model's thread waits, else the first in the queue.

        Returns None if the update should wait for a host buffer: without one, the new weights go to DISK only and are
        read again. If no tile of the lane is in flight and the model's thread waits for updates or for a buffer, the
        update starts without a buffer: otherwise both could wait forever.
        """
        queue = self._queues[lane]
        wanted = self._awaited_gradient
        if lane is Lane.MEMORY and self._moments and (wanted in self._moments or not queue):
            unit = wanted if wanted is not None and wanted in self._moments else self._moments[-1]
            self._moments.remove(unit)
            self._second_pass_began = self._machine.clock.now
            return self._job_of(unit, True, Priority.NORMAL, Writes.MOMENTS)
        if not queue:
            return (yield from self._next_speculative_job()) if lane is Lane.STREAMED else None
        # The model's thread waits for this unit's update, so it comes first.
        wanted = self._pager.wanted_update()
        unit = wanted if wanted is not None and wanted in queue else queue[0]
        part = Writes.WEIGHTS if self._takes_two_passes(unit) else Writes.ALL
        has_buffer = False
        if self._pager.delivers(unit):
            has_buffer = yield from self._pager.buffer_for_update(self._pager.entries[unit])
            must_start = self._flushing or self._pager.waiting_for_buffer or self._pager.wanted_update() is not None
            in_flight = self._reading[lane] or any(tile.job.lane is lane for tile in self._writing)
            if not has_buffer and (in_flight or not must_start):
                return None
        queue.remove(unit)
        return self._job_of(unit, has_buffer, Priority.NORMAL, part)

    def _takes_two_passes(self, unit: int) -> bool:
        """Returns True if the update of a unit writes the weights first: the model waits for updates."""
        behind = self._pager.update_waits != self._waits or self._pager.wanted_update() is not None
        self._waits = self._pager.update_waits
        cost = self._costs[unit]
        assert cost is not None
        return bool(cost.passes) and behind and not self._machine.on_cpu and self._second_passes.begin(cost.numel)

    def _next_speculative_job(self) -> Acting[_Update | None]:
        """Starts the update of a unit whose gradient is complete; None before the last step's updates are written.

        Updates start in the order of the backward. An update starts even without a free host buffer: the next use then
        reads its weights again, but the drives are not idle during the backward.
        """
        if self._busy and (any(self._queues.values()) or not self._unread):
            return None
        unit = next((unit for unit in self._complete if not self._pager.entries[unit].pins), None)
        if unit is None:
            return None
        # Removed before the wait for a buffer: during the wait, step() may enqueue all units that have not begun.
        self._complete.remove(unit)
        self._begun.add(unit)
        self._pager.begin_updates([unit])
        has_buffer = False
        if self._pager.delivers(unit):
            has_buffer = yield from self._pager.buffer_for_update(self._pager.entries[unit])
        self.speculated.append(unit)
        # The backward waits for weights and inputs, but no thread waits for this update: its reads come last.
        return self._job_of(unit, has_buffer, Priority.BACKGROUND)

    def _job_of(self, unit: int, has_buffer: bool, priority: Priority, part: Writes = Writes.ALL) -> _Update:
        """Returns the job of a new update; `has_buffer` is True if a host buffer receives the weights."""
        entry, cost = self._pager.entries[unit], self._costs[unit]
        assert cost is not None
        delivered = has_buffer or entry.size.tier is Tier.DEVICE
        self.undelivered += not delivered
        if part is Writes.WEIGHTS:
            self._unread.add(unit)
        return _Update(unit, entry.size.tier, cost, has_buffer, delivered, priority, part)

    def _read_tile(self, job: _Update, start: int, stop: int) -> Acting[list[Work]]:
        entry, cost = self._pager.entries[job.unit], job.cost
        nbytes = _share(cost.state_nbytes, start, stop, cost.numel)
        if entry.size.tier is Tier.DISK and not (job.has_buffer and self._pager.holds_weights(job.unit)):
            nbytes += _share(cost.weight_nbytes, start, stop, cost.numel)
            # A host buffer needs all weights, frozen ones too.
            if job.has_buffer and start == 0:
                nbytes += entry.size.shard_nbytes - cost.weight_nbytes
        reads = [self._machine.read("update read", "updates_read", job.unit, nbytes, job.priority)]
        if cost.gradient_nbytes:
            # A gradient can be read only after its write in the backward has ended.
            yield from self._machine.spent("writes", self._gradients.get(job.unit))
            nbytes = _share(cost.gradient_nbytes, start, stop, cost.numel)
            reads.append(self._machine.read("gradient read", "gradients_read", job.unit, nbytes, job.priority))
        return reads

    def _compute_tile(self, tile: _Tile) -> Acting[None]:
        """Waits for a tile's reads, runs the kernel, starts the write, and publishes the unit after its last tile."""
        for read in tile.reads:
            yield from self._machine.spent("reads", read)
        job, cost = tile.job, tile.job.cost
        in_passes = None if job.part is Writes.ALL else cost.passes
        share = 1.0 if in_passes is None else in_passes[job.part is Writes.MOMENTS]  # of a pass that writes all
        numel = (tile.stop - tile.start) * share
        yield from self._machine.spent("kernels", self._machine.update(job.unit, numel))
        if cost.written_nbytes:
            nbytes = _share(cost.written_nbytes, tile.start, tile.stop, cost.numel)
            tile.writes.append(self._machine.write("update write", "updates_written", job.unit, nbytes))
        self._writing.append(tile)
        if tile.stop == cost.numel:
            job.computed = True
            if job.part is Writes.MOMENTS:
                self._unread.remove(job.unit)
                self._second_passes.end(cost.numel, self._machine.clock.now - self._second_pass_began)
                self._pager.notify()
                return
            if job.part is Writes.WEIGHTS:
                self._moments.append(job.unit)
            # The model may use the new weights before they are written to DISK.
            if job.delivered:
                unwritten = any(t.job is job and t.writes for t in self._writing)
                self._pager.publish(job.unit, job.has_buffer, unwritten)
                yield from self._pager.advance()


def _share(nbytes: int, start: int, stop: int, numel: int) -> int:
    """Returns the bytes of elements [start, stop) out of `nbytes` for `numel`. All chunks sum to `nbytes` exactly."""
    return nbytes * stop // numel - nbytes * start // numel
