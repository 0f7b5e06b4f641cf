"""The update worker: one thread that reads states, runs the kernel and writes states, tile by tile.

A few tile buffers form the pipeline. While one tile is computed, the next ones are read and earlier ones are written,
across the borders of units. `step()` schedules updates; a thread that needs a unit's weights waits in the pager.

    schedule ─► queue ─► reading ─► compute ─► writing ─► flushed ─► (last one) commit
                  ▲ awaited unit first        │
                                              └ last tile of a unit: publish_weights, its weights may be used

Under the backward the worker takes *offers*: updates of units whose gradients are complete, before their step is
decided (`speculation`). They are written to the slot that no commit names, and become the newest states if the step
confirms them. The backward never waits for them, and they wait for the updates and the commit of the step before.

`publish_weights` precedes `flushed`: weights are used from their host buffer while the write is in flight. Without a
host buffer they may be used only after the last write, which also makes the written slot the unit's newest one. So no
read sees bytes that are being written.

Threads. The caller's thread fills the queue, the blob and the flags; the worker empties them. The pager's lock guards
every change that the other side must see at once. Two accesses need no lock: the worker's removal of an update from the
queue, since no other thread removes any, and the reads of `wants_blob`. Tiles and jobs belong to the worker alone.
"""

from __future__ import annotations

import contextlib
import enum
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from offload.aio import Priority
from offload.aio.protocols import Future, wait_for_all
from offload.engine.gradients import GradientAccumulator
from offload.engine.shards import LocalShards, ResidentShard
from offload.engine.update_strategy import EditSteps, TileContent, UnitSteps, UnitUpdate, UpdateStrategy
from offload.sizes import align_up
from offload.states import State, Tier
from offload.swapper.memory.host_arena import HostArena, HostBuffer
from offload.swapper.memory.lock import InterruptibleLock
from offload.timeline import Row, Timeline

# -- update tiles --------------------------------------------------------------------------------------
#
# Tiles of an update: the order of their elements, the memory of each state, and the reads from disk.
#
# A tile takes at most one buffer of the host arena. A state whose tier is above DISK takes nothing of the buffer, with
# three exceptions: the kernel cannot work on the tier's memory, a pass whose results are dropped would change that
# memory, or a state on the device is also written to the store. A tile that takes nothing has no buffer at all, so its
# unit is computed at the speed of memory: its writes hold up no other tile.
#
# Threads. Everything in this module belongs to the update worker.


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTile:
    """One state of one tile: the memory for the kernel, and the copies before and after it."""

    state: State
    first: int
    """First byte of the elements in the partition."""
    work: torch.Tensor
    away: torch.Tensor | None
    """The partition's own memory if the kernel cannot work on it: copied to `work` before, and from `work` afterwards.

    For the device's kernel it is memory on the host instead, which receives the values for the store.
    """
    buffer: memoryview | None
    """The bytes of `work`, or of `away` on the host, in the form of the I/O queue.

    None for a state without a slot in the store, and for the copy of a resident state in a pass before the last.
    """


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements [start, stop) of one tile, in one pass."""

    start: int
    stop: int
    passed: int
    """Number of passes over the unit before this one."""


def even_cuts(numel: int, tile_numel: int) -> tuple[range, ...]:
    """Returns the elements of tiles that are all of one size, but the last."""
    return tuple(range(start, min(start + tile_numel, numel)) for start in range(0, numel, tile_numel))


class Fate(enum.Enum):
    """What is known about the use of an update's results."""

    CERTAIN = "certain"
    """Its step was decided: the results become the newest states."""
    OPEN = "open"
    """Made under the backward, before its step is decided. Nobody sees the results."""
    DROPPED = "dropped"
    """The results are of no use."""


class Job:
    """The update of one unit in flight."""

    def __init__(
        self,
        *,
        update: UnitUpdate,
        steps: UnitSteps,
        host_buffer: HostBuffer | None,
        delivered: bool,
        tile_numel: int,
        fate: Fate = Fate.CERTAIN,
    ) -> None:
        """Starts at the first tile of the first pass.

        Args:
            update: segments or edits of the unit.
            steps: the arithmetic.
            host_buffer: host buffer of the unit's weights, or None.
            delivered: True if the weights may be used once computed, before they are written.
            tile_numel: largest number of elements of a tile, where the arithmetic asks for no other tiles.
            fate: OPEN for an update under the backward. Then `host_buffer` contains the unit's old weights.
        """
        self.fate = fate
        self.speculative = fate is Fate.OPEN
        """True for an update that began under the backward, also once it is certain."""
        self.computed = self.written = False
        """True once all tiles are computed, or all writes have ended."""
        self.update, self.steps, self.host_buffer = update, steps, host_buffer
        self.delivered = delivered
        """True if the weights may be used once computed, before they are written."""
        self.writes: dict[State, list[tuple[int, Future]]] = {}
        """Start and future of each write that has ended, tile after tile."""
        self._cuts = steps.cuts or even_cuts(update.numel, tile_numel)
        self._next = self._passed = self._unwritten = 0

    def widen(self, tile_numel: int) -> None:
        """Cuts the unit into larger tiles, before the first, where the arithmetic asks for no other tiles."""
        self._cuts = self.steps.cuts or even_cuts(self.update.numel, tile_numel)

    @property
    def unit(self) -> int:
        """Index of the unit."""
        return self.update.unit

    def cut(self) -> Cut:
        """Advances to the next tile, and returns its elements."""
        elements = self._cuts[self._next]
        cut = Cut(elements.start, elements.stop, self._passed)
        self._next += 1
        # Tiles of the last pass alone are written.
        if self.is_last(cut):
            self._unwritten += 1
        if self._next == len(self._cuts):
            self._next, self._passed = 0, self._passed + 1
        return cut

    def is_last(self, cut: Cut) -> bool:
        """Returns True if a tile belongs to the last pass, whose results are kept."""
        return cut.passed == self.steps.passes - 1

    @property
    def all_begun(self) -> bool:
        """True if all tiles of all passes have begun."""
        return self._passed == self.steps.passes

    def mark_computed(self) -> None:
        """Records that the last tile of the last pass is computed."""
        self.computed = True

    def end_writes(self, writes: dict[State, tuple[int, Future]]) -> bool:
        """Takes over the writes of a tile, which have ended; returns True if they were the last of the unit."""
        for state, write in writes.items():
            self.writes.setdefault(state, []).append(write)
        self._unwritten -= 1
        # Writes of all begun tiles may end before the last tile begins, so the count alone does not suffice.
        self.written = self.computed and self._unwritten == 0
        return self.written


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Elements of a unit in flight in the worker: read, computed, written."""

    job: Job
    cut: Cut
    last: bool
    """True if the results are kept: the tile belongs to the last pass."""
    buffer: HostBuffer | None
    """None for a tile all of whose memory is elsewhere."""
    states: dict[State, StateTile]
    gradient: torch.Tensor | None
    reads: list[Future]
    writes: dict[State, tuple[int, Future]] = field(default_factory=dict)
    """For each state the first byte of its write in the slot, and the write's future."""

    @property
    def content(self) -> TileContent:
        """Memory for the arithmetic, valid once the reads have ended."""
        states = {state: tile_state.work for state, tile_state in self.states.items()}
        return TileContent(start=self.cut.start, stop=self.cut.stop, states=states, gradient=self.gradient)


class TileReader:
    """Factory of tiles: finds the memory of each state, and starts the reads of states on disk."""

    def __init__(self, *, shards: LocalShards, gradients: GradientAccumulator, strategy: UpdateStrategy) -> None:
        self._shards, self._gradients, self._strategy = shards, gradients, strategy

    def needs_buffer(self, job: Job) -> bool:
        """Returns True if a tile of `job` takes any bytes of a buffer."""
        unit = job.unit
        if job.update.segments and not (self._gradients.stays(unit) or self._gradients.is_on_host(unit)):
            return True
        return any(self._takes_room(job, state) for state in self._shards.states(unit))

    def _takes_room(self, job: Job, state: State) -> bool:
        """Returns True if a tile contains a copy of a state, read or copied."""
        resident = self._resident(job, state)
        if resident is None:
            return state is not State.WEIGHT or job.host_buffer is None
        if state in job.steps.drafts and job.steps.passes > 1:
            return True
        return resident.buffer is None and not self._works_in_place(job, state)

    def _works_in_place(self, job: Job, state: State) -> bool:
        """Returns True if the kernel works on a state on the device itself, which is not stored either."""
        in_place = self._shards.device.host_addressable or job.steps.in_place
        return in_place and not self._shards.stored(job.unit, state)

    def begin(self, job: Job, cut: Cut, buffer: HostBuffer | None) -> Tile:
        """Starts the reads of a tile, into `buffer` and the host buffer of the unit's weights.

        Args:
            job: the update of the unit.
            cut: the elements.
            buffer: memory of the tile, owned by the tile until the worker takes it back; None if it needs none.
        """
        reads: list[Future] = []
        try:
            return self._begin(job, cut, buffer, reads)
        except BaseException:
            wait_for_all(reads)  # without a tile the worker cannot find them
            raise

    def _begin(self, job: Job, cut: Cut, buffer: HostBuffer | None, reads: list[Future]) -> Tile:
        """Starts the reads of a tile. `reads` receives each as it starts; for the other arguments see `begin`."""
        states: dict[State, StateTile] = {}
        offset, last = 0, job.is_last(cut)
        for state, dtype in self._shards.mode_of(job.unit).states.items():
            part = self._strategy.part(job.unit, state, cut.start, cut.stop)
            end = offset + len(part) * dtype.itemsize
            if part:
                resident = self._resident(job, state)
                room = _Room(buffer, offset, end)
                if resident is None:
                    states[state] = self._moved_state(job, cut, state, part, room, reads)
                elif not last and state in job.steps.drafts:
                    # The pass works on a copy, which is never copied back.
                    work, away = room.tensor(dtype), resident.tensor[part.start : part.stop]
                    first = part.start * dtype.itemsize
                    states[state] = StateTile(state=state, first=first, work=work, away=away, buffer=None)
                else:
                    states[state] = self._resident_state(job, state, part, room, resident)
            offset = align_up(end)
        gradient = None
        if job.update.segments:
            gradient, more = self._gradients.segment_range(job.unit, cut.start, cut.stop, buffer, offset)
            reads += more
        # Once for each update, so that the host buffer is complete when the weights are published.
        if cut.start == 0 and last:
            self._read_frozen(job, reads)
        return Tile(job=job, cut=cut, last=last, buffer=buffer, states=states, gradient=gradient, reads=reads)

    def _resident_state(self, job: Job, state: State, part: range, room: _Room, resident: ResidentShard) -> StateTile:
        """Returns the memory for the kernel of a state whose tier is above DISK.

        Args:
            job: the update of the unit.
            state: the state.
            part: elements of the state in the tile.
            room: bytes of the tile's buffer for a copy.
            resident: memory of the partition.
        """
        dtype = self._shards.mode_of(job.unit).states[state]
        first, last = part.start * dtype.itemsize, part.stop * dtype.itemsize
        resident_values, slots = resident.tensor[part.start : part.stop], self._shards.stored(job.unit, state)
        away: torch.Tensor | None
        # In HOST the kernel works on the state itself, and writes start from there.
        if resident.buffer is not None:
            work, away, buffer = resident_values, None, resident.buffer[first:last] if slots else None
        elif self._works_in_place(job, state):
            work, away, buffer = resident_values, None, None
        else:
            # The tile takes a copy in host memory: as input of the host's kernel, or as source of the write to the
            # store.
            copy = room.tensor(dtype)
            work, away = (resident_values, copy) if job.steps.in_place else (copy, resident_values)
            buffer = room.memory if slots else None
        return StateTile(state=state, first=first, work=work, away=away, buffer=buffer)

    def _moved_state(
        self, job: Job, cut: Cut, state: State, part: range, room: _Room, reads: list[Future]
    ) -> StateTile:
        """Returns the memory for the kernel of a state on DISK, and starts the read.

        Weights are read into the unit's host buffer if it has one; all other states are read into the tile.

        Args:
            job: the update of the unit.
            cut: elements and pass of the tile.
            state: the state.
            part: elements of the state in the tile.
            room: bytes of the tile's buffer for the state.
            reads: receives the future of the read.
        """
        shards, unit, dtype = self._shards, job.unit, self._shards.mode_of(job.unit).states[state]
        first, last = part.start * dtype.itemsize, part.stop * dtype.itemsize
        if state is State.WEIGHT and job.host_buffer is not None:
            work, memory = job.host_buffer.tensor(dtype)[part.start : part.stop], job.host_buffer.buffer[first:last]
            # Nothing is read if an earlier pass has read the weights, or if the buffer contains those from before the
            # step.
            there = cut.passed > 0 or job.speculative or shards.pager.weight_updates.holds_weights(unit)
        else:
            work, memory, there = room.tensor(dtype), room.memory, False
            if state is State.WEIGHT and job.speculative:
                there = shards.pager.weight_updates.speculative.copy(unit, first, room.tensor(torch.uint8))
        if not there:
            assert shards.store is not None
            # I/O queue: during a backward nobody waits for this update, but autograd waits for weights.
            priority = Priority.NORMAL if job.fate is Fate.CERTAIN else Priority.BACKGROUND
            reads.append(shards.store.read(unit, state, shards.store.newest[unit], first, memory, priority))
        return StateTile(state=state, first=first, work=work, away=None, buffer=memory)

    def _resident(self, job: Job, state: State) -> ResidentShard | None:
        """Returns the memory of a partition whose tier is above DISK, or None."""
        shards, unit = self._shards, job.unit
        if state is not State.WEIGHT:
            return shards.residents.get((unit, state))
        dtype = shards.mode_of(unit).weight_dtype
        if shards.sizes[unit].tier is Tier.DEVICE:
            return ResidentShard(shards.pager.weight_updates.device_tier(unit).view(dtype), None)
        if shards.sizes[unit].tier is Tier.HOST:
            assert job.host_buffer is not None
            return ResidentShard(job.host_buffer.tensor(dtype), job.host_buffer.buffer)
        return None

    def _read_frozen(self, job: Job, reads: list[Future]) -> None:
        """Reads the frozen elements, after the trainable ones, into the unit's host buffer: no tile contains them."""
        shards, unit = self._shards, job.unit
        first = job.update.numel * shards.mode_of(unit).weight_dtype.itemsize
        if (
            job.host_buffer is not None
            and first < job.host_buffer.nbytes
            and shards.sizes[unit].tier is Tier.DISK
            and not job.speculative
            and not shards.pager.weight_updates.holds_weights(unit)
        ):
            assert shards.store is not None
            memory = job.host_buffer.buffer[first:]
            reads.append(shards.store.read(unit, State.WEIGHT, shards.store.newest[unit], first, memory))


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes [start, stop) of a tile's buffer, reserved for one state."""

    host_buffer: HostBuffer | None
    """None if nothing takes the bytes."""
    start: int
    stop: int

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the bytes as elements of `dtype`."""
        assert self.host_buffer is not None
        return self.host_buffer.tensor(torch.uint8)[self.start : self.stop].view(dtype)

    @property
    def memory(self) -> memoryview:
        """The bytes in the form of the I/O queue."""
        assert self.host_buffer is not None
        return self.host_buffer.buffer[self.start : self.stop]


# -- results -------------------------------------------------------------------------------------------
#
# What follows when a unit's update is computed, written, or judged: who may use the result, and from when on.
#
#                     computed                                         written
#     CERTAIN     ─►  the gradient is free; weights in memory ready ─► the slot is the newest; all weights ready
#     OPEN        ─►  nothing                                       ─► fresh weights in memory may be evicted
#     DROPPED     ─►  nothing                                       ─► nothing
#
# When an update becomes CERTAIN, the actions that it skipped run. Threads. The update worker calls everything.


class UpdateResults:
    """Publishes the results of updates."""

    def __init__(self, *, shards: LocalShards, gradients: GradientAccumulator, timeline: Timeline) -> None:
        self._shards, self._gradients, self._timeline = shards, gradients, timeline
        self._updates, self._store = shards.pager.weight_updates, shards.store

    def computed(self, job: Job) -> None:
        """Frees the gradient of a unit whose last tile is computed.

        Weights in a host buffer or on the device may be used from here on, while they are being written.
        """
        job.mark_computed()
        if job.fate is Fate.CERTAIN:
            self._make_ready(job)

    def written(self, job: Job) -> None:
        """Makes the slot of a completely written update the newest one."""
        if job.speculative:
            self._timeline.end(Row.UPDATES, self.early_title(job.unit))
        if job.fate is Fate.OPEN:
            self._updates.speculative.may_evict(job.unit)
        elif job.fate is Fate.CERTAIN:
            self._make_newest(job)

    def confirmed(self, job: Job) -> None:
        """Makes an update under the backward certain."""
        job.fate = Fate.CERTAIN
        if job.computed:
            self._make_ready(job)
        if job.written:
            self._make_newest(job)

    def dropped(self, job: Job) -> None:
        """Frees what a dropped update holds, none of whose tiles is in flight."""
        self._timeline.end(Row.UPDATES, self.early_title(job.unit))
        self._updates.speculative.drop(job.unit)

    def early_title(self, unit: int) -> str:
        """Returns the name of an update under the backward on the timeline."""
        return f"{self._shards.sizes[unit].title} under the backward"

    def is_stored(self, unit: int) -> bool:
        """Returns True if updates of a unit are written to the store, through tiles."""
        return any(self._shards.stored(unit, state) for state in self._shards.mode.states)

    def _make_ready(self, job: Job) -> None:
        # The next backward may now write the gradient: the kernel has read all of it.
        if job.update.segments:
            self._gradients.free(job.unit)
        if job.speculative:
            job.delivered = self._updates.speculative.adopt(job.unit)
        if job.delivered:
            # Unwritten until `_make_newest`, even if the writes have ended: else the buffer could be evicted, and the
            # next read would find the old slot.
            self._updates.publish_weights(job.unit, True, self.is_stored(job.unit))

    def _make_newest(self, job: Job) -> None:
        if self._store is not None and self.is_stored(job.unit):
            self._store.wrote(job.unit, self._store.target(job.unit), job.writes)
        # Without a host buffer the weights can be read only from here on.
        if not job.delivered:
            self._updates.publish_weights(job.unit, False, False)
        self._updates.flushed(job.unit)


# -- tile pipeline -------------------------------------------------------------------------------------
#
# The tiles in flight: read, computed and written, while others are read and written.
#
#     free buffers ─► reading ─► kernel ─► writing ─► free buffers
#
# Tiles whose memory is elsewhere go the same way without a buffer. Tiles keep their order, across the borders of units.
# The pipeline reports the jobs whose last tile was computed or written; the update worker decides what follows from it.
#
# Threads. Everything here belongs to the update worker.


class TilePipeline:
    """A few tile buffers, and the tiles that use them."""

    def __init__(
        self, *, shards: LocalShards, reader: TileReader, buffers: Sequence[HostBuffer], timeline: Timeline
    ) -> None:
        """Takes the buffers.

        Args:
            shards: this rank's partitions.
            reader: starts the reads of a tile.
            buffers: memory of the tiles, whose number limits the tiles in flight that need one.
            timeline: records waits, copies and kernels.
        """
        self._shards, self._reader, self._timeline = shards, reader, timeline
        self._free = list(buffers)
        self._reading, self._writing = deque[Tile](), deque[Tile]()
        self._begun: tuple[Job | None, bool] = None, False
        """The job of the last tile, and whether its tiles need a buffer."""

    @property
    def free_buffers(self) -> tuple[HostBuffer, ...]:
        """Buffers that no tile uses."""
        return tuple(self._free)

    @property
    def reading(self) -> bool:
        """True if a tile is being read, or waits for the kernel."""
        return bool(self._reading)

    @property
    def writing(self) -> bool:
        """True if a tile is being written."""
        return bool(self._writing)

    def holds(self, job: Job) -> bool:
        """Returns True if a tile of `job` is in flight."""
        return any(tile.job is job for tile in (*self._reading, *self._writing))

    def writes(self, job: Job) -> bool:
        """Returns True if bytes of `job` are being written."""
        return any(tile.job is job and tile.writes for tile in self._writing)

    def has_room(self, job: Job) -> bool:
        """Returns True if the next tile of `job` can begin now."""
        # One that needs no buffer gains nothing by an early start: it would only stand before the unit for which a
        # thread waits. The second keeps the reads of the next unit early.
        return bool(self._free) if self.needs_buffer(job) else len(self._reading) < 2

    def needs_buffer(self, job: Job) -> bool:
        """Returns True if a tile of `job` needs a buffer; asked once for each job, for tiny models have tiny tiles."""
        if self._begun[0] is not job:
            self._begun = job, self._reader.needs_buffer(job)
        return self._begun[1]

    def begin(self, job: Job) -> None:
        """Starts the reads of the next tile of `job`. The caller has checked that there is room."""
        buffer = self._free.pop() if self.needs_buffer(job) else None
        self._reading.append(self._reader.begin(job, job.cut(), buffer))

    def compute(self) -> Job | None:
        """Waits for the reads of the oldest tile, runs the arithmetic and starts the writes.

        Returns:
            The job, if the tile was the last of its unit.
        """
        tile = self._reading[0]
        job = tile.job
        with self._timeline.span(Row.WORKER, f"waits for reads of {self._title(job)}"):
            for read in tile.reads:
                read.wait()
        if job.fate is Fate.DROPPED:
            self._reading.popleft()
            self._take_back(tile)
            return None
        for tile_state in tile.states.values():
            if tile_state.away is not None and not job.steps.in_place:
                self._copy(tile_state.work, tile_state.away)
        with self._timeline.span(Row.WORKER, f"kernel of {self._title(job)}"):
            job.steps.run(tile.content, tile.last)
        # An optimizer may pass over a unit several times. Only the last pass writes its tiles; the buffers of tiles of
        # earlier passes are free at once.
        if not tile.last:
            self._reading.popleft()
            self._take_back(tile)
            return None
        for tile_state in tile.states.values():
            if tile_state.away is not None:
                self._copy(tile_state.away, tile_state.work)
            if tile_state.buffer is not None:
                tile.writes[tile_state.state] = (
                    tile_state.first,
                    self._start_write(job.unit, tile_state, tile_state.buffer),
                )
        # Appended before it is removed: a tile is in a queue at any time, so that `drain` finds its requests after an
        # error in between.
        self._writing.append(tile)
        self._reading.popleft()
        return job if tile.cut.stop == job.update.numel else None

    def retire(self, wait: bool) -> list[Job]:
        """Takes back the buffers of tiles whose writes have ended, oldest first; with `wait`, of at least one.

        Returns:
            The jobs all of whose tiles are written.
        """
        ended: list[Job] = []
        while self._writing:
            tile = self._writing[0]
            if not wait and not all(write.done() for _, write in tile.writes.values()):
                return ended
            waits = self._timeline.span(Row.WORKER, f"waits for writes of {self._title(tile.job)}")
            # update thread: `write.wait` raises the error of a failed write; `write.done` does not.
            with waits if wait else contextlib.nullcontext():
                for _, write in tile.writes.values():
                    write.wait()
            wait = False
            self._writing.popleft()
            self._take_back(tile)
            if tile.job.end_writes(tile.writes):
                ended.append(tile.job)
        return ended

    def drain(self) -> None:
        """Waits for every request after an error, so that no buffer is freed while a request uses it."""
        # update thread: its end frees the buffers, but requests in the I/O queue still use them.
        for tile in [*self._reading, *self._writing]:
            wait_for_all([*tile.reads, *(write for _, write in tile.writes.values())])

    def _take_back(self, tile: Tile) -> None:
        """Makes the buffer of a tile free again."""
        if tile.buffer is not None:
            self._free.append(tile.buffer)

    def _start_write(self, unit: int, tile_state: StateTile, buffer: memoryview) -> Future:
        """Starts the write of a state of a tile to the slot that updates may overwrite."""
        store = self._shards.store
        assert store is not None
        return store.write(unit, tile_state.state, store.target(unit), tile_state.first, buffer)

    def _title(self, job: Job) -> str:
        """Returns the unit's name for the timeline."""
        return self._shards.sizes[job.unit].title

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between device and host, and waits for the copy."""
        with self._timeline.span(Row.WORKER, "copy of states", destination.nbytes):
            self._shards.device.copy(destination, source)


# -- offers --------------------------------------------------------------------------------------------
#
# Updates that were made, or may be made, before their step is decided.
#
#     promise ─► offer ─► begin ─► settle: the update of the step is the same     ─► CERTAIN
#                │                 settle: it is another one, or there is none    ─► DROPPED
#                └► withdraw, before or after `begin`: the gradient has changed   ─► DROPPED, if begun
#
# The verdicts wait until the update worker takes them.
#
# Threads. Any thread may promise, offer and withdraw; the thread that calls `step()` settles and drops. The pager's
# lock guards everything.


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationCounts:
    """Counts of updates of units that began under a backward."""

    hits: int = 0
    """Updates that the step confirmed."""
    misses: int = 0
    """Updates that were dropped. If the step updates the unit, the update was made again."""


class Offers:
    """The updates of one step that do not wait for the step."""

    def __init__(self, lock: threading.RLock, wake: Callable[[], None]) -> None:
        """Begins empty.

        Args:
            lock: the pager's lock.
            wake: wakes the update worker; called with the lock.
        """
        self._lock, self._wake = lock, wake
        self.counts = SpeculationCounts()
        """Counts since the start of the engine."""
        self._promised: dict[int, UnitUpdate] = {}
        """Updates whose gradients are on their way to the host, by unit."""
        self._offered: dict[int, UnitUpdate] = {}
        """Updates that may begin, by unit, in the order that their gradients became complete."""
        self._begun: dict[int, Job] = {}
        self._verdicts: list[tuple[Job, Fate]] = []
        self._draining: list[Job] = []
        """Dropped updates whose tiles may still be in flight."""

    # -- the threads of backward and step -------------------------------------------------------------

    def promise(self, update: UnitUpdate) -> None:
        """Announces an update whose gradient is computed; `offer` lets it begin once the gradient has arrived."""
        with self._lock:
            self._promised[update.unit] = update

    def offer(self, update: UnitUpdate) -> None:
        """Lets a promised update begin, unless it was withdrawn meanwhile."""
        with self._lock:
            if self._promised.get(update.unit) is update:
                self._offered[update.unit] = self._promised.pop(update.unit)
                self._wake()

    def withdraw(self, unit: int) -> None:
        """Drops the update of a unit whose gradient changes."""
        with self._lock:
            self._promised.pop(unit, None)
            self._offered.pop(unit, None)
            job = self._begun.pop(unit, None)
            if job is not None:
                self._drop(job)

    def settle(self, updates: Sequence[UnitUpdate]) -> list[UnitUpdate]:
        """Compares all that has begun with the updates of the step, and returns those that are still to be made."""
        with self._lock:
            left = []
            for update in updates:
                job = self._begun.get(update.unit)
                if job is not None and job.update == update:
                    del self._begun[update.unit]
                    self._judge(job, Fate.CERTAIN)
                else:
                    left.append(update)
            self.drop_all()
            return left

    def drop_all(self) -> None:
        """Drops every update."""
        with self._lock:
            self._promised.clear()
            self._offered.clear()
            begun, self._begun = self._begun, {}
            for job in begun.values():
                self._drop(job)

    def _drop(self, job: Job) -> None:
        self._draining.append(job)
        self._judge(job, Fate.DROPPED)

    def _judge(self, job: Job, fate: Fate) -> None:
        """Stores a verdict for the worker."""
        self._verdicts.append((job, fate))
        hit = fate is Fate.CERTAIN
        self.counts = SpeculationCounts(hits=self.counts.hits + hit, misses=self.counts.misses + (not hit))
        self._wake()

    # -- the update worker ----------------------------------------------------------------------------

    def take(self) -> UnitUpdate | None:
        """Removes and returns the latest offer, whose weights are most likely still in memory; None without one.

        The caller holds the lock until it has called `begin`, or given the update up.
        """
        return self._offered.popitem()[1] if self._offered else None

    def begin(self, job: Job) -> None:
        """Records that the update of a unit has begun. The caller holds the lock."""
        self._begun[job.unit] = job

    def take_verdicts(self) -> list[tuple[Job, Fate]]:
        """Removes and returns the verdicts that were not carried out yet."""
        with self._lock:
            verdicts, self._verdicts = self._verdicts, []
            return verdicts

    @property
    def draining(self) -> tuple[Job, ...]:
        """Dropped updates whose tiles may still be in flight."""
        return tuple(self._draining)

    def drained(self, job: Job) -> None:
        """Records that nothing of a dropped update is in flight any more."""
        with self._lock:
            self._draining.remove(job)
            self._wake()

    @property
    def unsettled(self) -> bool:
        """True if a verdict was not carried out, or a dropped update is in flight. The caller holds the lock."""
        return bool(self._verdicts or self._draining)


# -- rules ---------------------------------------------------------------------------------------------
#
# Pure decisions about updates under the backward.
#
# An update under the backward is a guess: that no further gradient of its unit arrives, that the norm clips nothing,
# and that no number of the optimizer changes before `step()`. It writes the slot that the last commit does not name. So
# the guess costs time and bytes if it fails, and never a bit of the result.


HELD_IN_A_ROW = 8
"""Steps that must hold in a row, after a miss, before `auto` guesses again.

By Laplace's rule of succession the next step fails with a chance of 1 in n + 2 after n that held: 1 in 10. A miss reads
and writes the states of a unit once more, so the expected extra traffic stays below a tenth of an update's. A smaller
number would guess within the bursts of large gradients that bring clipped steps, and a larger one would give up more
steps that hold than it saves.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Properties of a run that decide whether any update may be made during the backward."""

    wanted: bool
    """True if the config allows them."""
    ranks: int
    one_pass: bool
    """True if the update rule is one of ours, and needs one pass."""
    commits: bool
    """True if the store has two slots of each state, and commits them."""
    on_disk: bool
    """True if all states of some unit are on DISK."""


def run_may_speculate(facts: RunFacts) -> bool:
    """Returns True if updates of the run may be made under the backward."""
    # Ranks would have to agree on every guess. A rule of two passes needs norms first, and a tile of torch's optimizers
    # is an entire unit, without room for a copy of its old states.
    return facts.wanted and facts.ranks == 1 and facts.one_pass and facts.commits and facts.on_disk


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFacts:
    """A unit with complete gradients, at the moment when its update could begin."""

    on_disk: bool
    """True if every state is on DISK. Above it, an update changes the state in place."""
    gradient_on_host: bool
    """True if the gradient is in host memory. A window of one on DISK would have to be written and read first."""
    newest: int
    """The slot of the newest copy."""
    target: int
    """The slot that an update writes."""


def unit_may_begin(facts: UnitFacts) -> bool:
    """Returns True if the update of a unit can be made now and dropped later without a loss.

    Both slots are the same if no commit is durable, and within the steps between two commits.
    """
    return facts.on_disk and facts.gradient_on_host and facts.newest != facts.target


def reason_to_clip(norm: float, clip: float, scale: float, loss_scale: float) -> str | None:
    """Returns why a step does not apply its gradients as they are; None if it does.

    Args:
        norm: the norm of the gradient.
        clip: the largest norm.
        scale: the factor of every gradient.
        loss_scale: the factor of the loss.
    """
    if not math.isfinite(norm):
        return f"the gradient norm is {norm}"
    if scale != 1.0 / loss_scale:
        return f"the gradient of norm {norm:.4g} was clipped to {clip:g}"
    return None


@dataclass(frozen=True, slots=True)
class AutoSpeculation:
    """The state of `"speculate"` between steps: whether the next backward may guess."""

    speculate: Literal["auto"] | bool
    held: int = HELD_IN_A_ROW
    """Steps in a row that held, or would have; at most `HELD_IN_A_ROW`."""

    @property
    def on(self) -> bool:
        """True if the next backward may guess."""
        return self.speculate is True or (self.speculate == "auto" and self.held == HELD_IN_A_ROW)

    def after(self, held: bool) -> AutoSpeculation:
        """Returns the state after a step.

        Args:
            held: True if every guess of the step was right, or would have been.
        """
        return replace(self, held=min(self.held + 1, HELD_IN_A_ROW) if held else 0)


# -- update worker -------------------------------------------------------------------------------------


_IN_MEMORY = 1 << 26
"""Elements of a tile that reads no memory of its own and writes nothing.

A small tile saves nothing: between two tiles Python takes a tenth of a millisecond and more, and sixteen cores compute
half a million elements in that time. The worker sees an error of another thread after one such tile.
"""


class UpdateWorker:
    """Owner of the update thread.

    `schedule`, `deliver_blob`, `finish` and `close` belong to the caller's thread.
    """

    def __init__(
        self,
        *,
        shards: LocalShards,
        arena: HostArena,
        gradients: GradientAccumulator,
        strategy: UpdateStrategy,
        tile_numel: int,
        tile_nbytes: int,
        tile_buffers: int,
        commit_every: int,
        timeline: Timeline,
    ) -> None:
        """Takes the memory of the tiles and starts the thread.

        Args:
            shards: this rank's partitions, which the worker alone changes while an update is in flight.
            arena: host arena; its class of tiles has room for all tiles and the strategy's scratch memory.
            gradients: the gradients of the units.
            strategy: the arithmetic of an update.
            tile_numel: largest number of elements of a tile.
            tile_nbytes: bytes of the buffer of a tile.
            tile_buffers: largest number of tiles in flight.
            commit_every: steps between two commits; 0 for no commits.
            timeline: records waits, kernels and updates.
        """
        self._shards, self._pager, self._store = shards, shards.pager, shards.store
        self._gradients, self._strategy, self._commit_every = gradients, strategy, commit_every
        self._speculative = shards.pager.weight_updates.speculative
        self._timeline = timeline
        self._queue: deque[UnitUpdate] = deque()

        self._job: Job | None = None
        self._commit_step: int | None = None
        self._blob: Mapping[str, torch.Tensor] | None = None
        self._busy, self._closing, self._flushing = False, False, 0
        self._given = InterruptibleLock(shards.pager.lock)  # changes with which an idle worker is given work
        self.offers = Offers(shards.pager.lock, self._wake)
        """Updates that may be made before their step is decided."""
        self._results = UpdateResults(shards=shards, gradients=gradients, timeline=timeline)
        self._tile_numel = tile_numel
        host_buffers = [arena.tiles.take(tile_nbytes) for _ in range(tile_buffers)]
        buffers = [host_buffer for host_buffer in host_buffers if host_buffer is not None]
        assert len(buffers) == tile_buffers > 0 and tile_numel > 0
        reader = TileReader(shards=shards, gradients=gradients, strategy=strategy)
        self._pipeline = TilePipeline(shards=shards, reader=reader, buffers=buffers, timeline=timeline)
        self._thread = threading.Thread(target=self._run, name="offload-update", daemon=True)
        # Started last: the thread uses every attribute above.
        self._thread.start()

    # -- the caller's thread ------------------------------------------------------------------------

    def schedule(self, updates: Sequence[UnitUpdate], step: int | None) -> None:
        """Enqueues the updates of an optimizer step. Updates and commit of the step before must be finished.

        Args:
            updates: one for each unit, in the order of their next use.
            step: number of the step, which is committed if it is a multiple of `commit_every`; None for edits, which
                the next commit contains.
        """
        # Done first: the worker may begin as soon as it sees an update, and no thread may use the units then.
        with self._speculative.paused():
            self._pager.begin_updates([update.unit for update in updates])
        changing = [update for update in updates if update.changes]
        self._gradients.give([update.unit for update in changing if update.segments])
        for update in updates:
            if not update.changes:  # all changes of the unit are on other ranks
                self._pager.weight_updates.publish_weights(update.unit, False, False)
        # What no update concerns, such as frozen weights, comes back now, before updates take host buffers. The
        # rest comes as it is updated.
        self._pager.prefetch()
        with self._pager.lock:
            assert not self._queue and self._commit_step is None, "one step in flight at most"
            self._queue.extend(self.offers.settle(changing))
            due = step is not None and self._commit_every and step % self._commit_every == 0
            self._commit_step = step if due else None
            self._blob = None
            self._busy = True
            self._wake()

    def deliver_blob(self, blob: Mapping[str, torch.Tensor]) -> None:
        """Passes the state blob that the commit of the scheduled step waits for."""
        with self._pager.lock:
            self._blob = blob
            self._wake()

    @property
    def wants_blob(self) -> bool:
        """True if the scheduled step will be committed and lacks its blob."""
        return self._commit_step is not None and self._blob is None

    def finish(self, commit: bool = True) -> None:
        """Waits until every scheduled update is written and, with `commit`, until a commit that is due has been made.

        Raises:
            EngineFailed: the worker or another background thread has failed.
        """
        with self._pager.lock:
            # caller's thread: from here on the worker does not wait for a host buffer, since perhaps only this thread
            # could free one.
            self._flushing += 1
            self._pager.notify()
            try:
                while self._busy or self.offers.unsettled or (commit and self._commit_step is not None):
                    self._pager.check()
                    updating = self._busy or self.offers.unsettled
                    with self._timeline.span(Row.WAITS, f"waits for {'all updates' if updating else 'the commit'}"):
                        self._pager.changed.wait()
                self._pager.check()
            finally:
                self._flushing -= 1

    def come_to_rest(self, commit: bool = True) -> None:
        """Drops all offers, then does as `finish`: afterwards nothing reads or writes states, until the next call."""
        self.offers.drop_all()
        self.finish(commit)

    @property
    def tile_numel(self) -> int:
        """Largest number of elements of a tile."""
        return self._tile_numel

    def idle_tiles(self) -> tuple[HostBuffer, ...]:
        """Returns the tile buffers as scratch memory for the caller's thread, until the next `schedule`."""
        with self._pager.lock:
            assert not self._busy, "an update is under way"
            return self._pipeline.free_buffers

    def drop_spare(self) -> None:
        """Frees the host memory of promoted states, which are stored on DISK too: from now on they are read from there.

        The caller holds the pager's lock, and no update is in flight.
        """
        for key, resident in list(self._shards.residents.items()):
            if resident.spare is not None:
                del self._shards.residents[key]
                resident.spare.release()

    def close(self) -> None:
        """Waits until all updates are written, or an error has stopped them, and joins the thread; idempotent.

        A commit whose blob was never delivered is not made.
        """
        with self._pager.lock:
            self._closing = True
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        """Wakes the worker, idle or not, and all other waiters. The caller holds the pager's lock."""
        self._pager.notify()
        self._given.notify_all()

    # -- the worker ---------------------------------------------------------------------------------

    def _run(self) -> None:
        """Runs the worker until `close`. An error fails the pager, so that every waiting thread raises."""
        self._shards.device.enter_thread()
        try:
            while self._work():
                pass
        except BaseException as error:
            self._pager.fail(error)
            self._pipeline.drain()

    def _work(self) -> bool:
        """Performs the next action, or waits for one; returns False when the worker must end.

        Order: take back written tiles, start reads, compute, wait for a write, commit, sleep.
        """
        # update thread: reads the version before all checks. A change after any of them makes it differ, so the thread
        # does not sleep through the change.
        seen = self._pager.version
        self._pager.check()  # after an error anywhere no work may begin, and no commit
        # Tiles first: a dropped update ends with its last tile, and nothing reports it to this thread later.
        self._retire(wait=False)
        self._carry_out_verdicts()
        # All free buffers are put to use before anything is computed, so that the drives stay busy during the kernel.
        while (job := self._current_job()) is not None and self._pipeline.has_room(job):
            self._pipeline.begin(job)
            if job.all_begun:
                self._job = None
        if self._pipeline.reading:
            if (computed := self._pipeline.compute()) is not None:
                self._results.computed(computed)
            return True
        if self._pipeline.writing:
            self._retire(wait=True)
            return True
        if self._job is None and self._commit():
            return True
        with self._pager.lock:
            idle = self._job is None and not self._queue and not self.offers.unsettled
            if self._busy and idle:
                self._busy = False
                self._pager.notify()
                return True
            if self._closing and idle:
                return False
            if self._pager.version == seen:
                # update thread: without work no change of the pager matters. Each use of a unit would wake it in vain.
                (self._given if idle else self._pager.changed).wait()
        return True

    def _retire(self, wait: bool) -> None:
        """Takes back the buffers of written tiles; with `wait`, of at least one."""
        for job in self._pipeline.retire(wait):
            self._results.written(job)

    def _current_job(self) -> Job | None:
        """Returns the job whose next tile may begin, or None."""
        if self._job is None and self._pipeline.free_buffers:
            self._job = self._next_job()
        return self._job

    def _next_job(self) -> Job | None:
        """Takes the update that a thread waits for, else the first, and returns its job.

        Returns None if no update is queued, or if no host buffer is free yet.
        """
        with self._pager.lock:
            # The next update of the same unit writes the bytes of one that was dropped. `schedule`
            # drops the one and queues the other under this same lock.
            if self.offers.draining:
                return None
            if not self._queue:
                return self._take_offer()
            wanted = self._pager.weight_updates.awaited_unit()
            update = next((u for u in self._queue if u.unit == wanted), self._queue[0])
        host_buffer = None
        if self._pager.weight_updates.delivers(update.unit):
            host_buffer = self._pager.weight_updates.buffer_for(update.unit)
            if host_buffer is None and (self._pipeline.reading or self._pipeline.writing or not self._must_not_wait()):
                return None  # tiles in flight need no further buffer, and may free one when they end
        self._queue.remove(update)
        self._timeline.begin(Row.UPDATES, self._shards.sizes[update.unit].title)
        delivered = host_buffer is not None or self._shards.sizes[update.unit].tier is Tier.DEVICE
        return self._job_of(update, host_buffer, delivered)

    def _take_offer(self) -> Job | None:
        """Returns the job of an update under the backward, or None if none may begin. The caller holds the lock."""
        # Updates and commit of the step before come first: afterwards the old states are those that the commit names.
        if self._busy or self._closing or self._commit_step is not None:
            return None
        while (update := self.offers.take()) is not None:
            if unit_may_begin(self._facts(update.unit)) and (begun := self._speculative.begin(update.unit)) is not None:
                self._timeline.begin(Row.UPDATES, self._results.early_title(update.unit))
                job = self._job_of(update, begun.host_buffer, delivered=False, fate=Fate.OPEN)
                self.offers.begin(job)
                return job
        return None

    def _facts(self, unit: int) -> UnitFacts:
        """Returns the facts that decide whether an update of `unit` may begin before its step is decided."""
        shards, store = self._shards, self._store
        assert store is not None
        return UnitFacts(
            on_disk=shards.sizes[unit].tier is Tier.DISK
            and all(
                shards.stored(unit, state) and (unit, state) not in shards.residents for state in shards.states(unit)
            ),
            gradient_on_host=self._gradients.is_on_host(unit),
            newest=store.newest[unit],
            target=store.target(unit),
        )

    def _job_of(
        self, update: UnitUpdate, host_buffer: HostBuffer | None, delivered: bool, fate: Fate = Fate.CERTAIN
    ) -> Job:
        """Returns the job of an update that begins.

        Args:
            update: segments or edits of the unit.
            host_buffer: host buffer for the fresh weights; None if the unit has none.
            delivered: True if the weights may be used once computed.
            fate: OPEN before the step is decided.
        """
        steps: UnitSteps
        if update.edits:
            steps = EditSteps(update.edits, self._shards.mode_of(update.unit))
        else:
            steps = self._strategy.begin(update, self._tile_numel)
        job = Job(
            update=update,
            steps=steps,
            host_buffer=host_buffer,
            delivered=delivered,
            tile_numel=self._tile_numel,
            fate=fate,
        )
        if not self._results.is_stored(update.unit) and not self._pipeline.needs_buffer(job):
            job.widen(_IN_MEMORY)
        return job

    def _must_not_wait(self) -> bool:
        """Returns True if a thread waits for this worker, which must then not wait for a host buffer itself."""
        with self._pager.lock:
            # Otherwise both could wait: that thread for an update, and the update thread for a buffer that it uses.
            return bool(
                self._flushing
                or self._closing
                or self._pager.weight_updates.waiting_for_buffer
                or self._pager.weight_updates.awaited_unit() is not None
            )

    def _carry_out_verdicts(self) -> None:
        """Publishes what the step has confirmed of the updates under the backward, and ends what it has dropped."""
        for job, fate in self.offers.take_verdicts():
            if fate is Fate.CERTAIN:
                self._results.confirmed(job)
                continue
            job.fate = fate
            if self._job is job:
                self._job = None
        for job in self.offers.draining:
            # One whose verdict came since then is not DROPPED yet.
            if job.fate is Fate.DROPPED and not self._pipeline.holds(job):
                self._results.dropped(job)
                self.offers.drained(job)

    def _commit(self) -> bool:
        """Commits the scheduled step if its updates are written and its blob is there; returns True after a commit."""
        with self._pager.lock:
            # update thread: reads all three under one lock. Since it last saw an empty queue, `schedule` may have
            # filled the queue, and the blob may belong to that step, whose updates have not begun.
            if self._queue or self.offers.unsettled or self._commit_step is None or self._blob is None:
                return False
            step, blob = self._commit_step, self._blob
        assert self._store is not None
        # update thread: commits outside the lock. A commit waits for the drives, and threads that only read weights
        # must not wait with it.
        self._store.commit(step, blob)
        with self._pager.lock:
            self._commit_step = self._blob = None
            self._pager.notify()
        return True
