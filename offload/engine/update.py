"""The update worker: one thread that reads states, runs the kernel and writes states, tile by tile.

A few tile buffers form the pipeline. While one tile is computed, the next ones are read and earlier ones are written,
across the borders of units. `step()` schedules updates; a thread that needs a unit's weights waits in the pager.

    schedule ─┬► queue ─► reading ─┬► compute ─► writing ─► flushed ─► (last one) commit
     STREAMED │    ▲ awaited first │      │
              └► queue ─► begun  ──┘      └ last tile of a unit: publish_weights, its weights may be used
     MEMORY        ▲ awaited first

Updates go in two lanes (`layout.update_order`), so that no drive is idle while states in memory are updated, and no
core while others are read. Tiles in memory are computed until the next streamed tile has been read. In each lane units
keep the order of their next use, and the tiles of a unit their own order.

Under the backward the worker takes *offers*: updates of units whose gradients are complete, before their step is
decided. They are written to a slot that is not the newest and that no commit names, and become the newest states if the
step confirms them. The backward never waits for offers. Offers wait for the updates and the commit of the step before.
What may follow from an update depends on its status:

                    all tiles computed                                all writes ended
    CONFIRMED   ─►  gradient is free; weights in memory are ready ─►  the slot is the newest; all weights are ready
    SPECULATIVE ─►  nothing                                       ─►  fresh weights in memory may be evicted
    DISCARDED   ─►  nothing                                       ─►  nothing

An update of states in host memory alone may take two passes. The first writes the weights, which are published. The
second writes the moments, and frees the gradient. Second passes begin when no weights are queued, the unit that the
backward reaches first before the others, and at once if a gradient waits for one.

When the step confirms a speculative update, the worker runs the actions that the update skipped. Weights are used from
their host buffer while the write is in flight. Without a host buffer they may be used only after the last write, which
also makes the written slot the unit's newest one. So no read sees bytes that are being written.

Threads. The caller's thread fills the queue, the blob and the flags; the worker empties them. The pager's lock guards
every change that the other side must see at once. Three accesses need no lock: the worker's removal of an update from
its queue, since no other thread removes any, the reads of `wants_blob`, and those of `Offers.draining`, a tuple that is
replaced as a whole. Jobs and tiles belong to the worker alone.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offload.aio import Priority
from offload.aio.protocols import Future, wait_for_all
from offload.engine.commits import Commits
from offload.engine.gradients import GradientAccumulator
from offload.engine.shards import LocalShards
from offload.engine.update_strategy import EditSteps, TileContent, UnitSteps, UnitUpdate, UpdateStrategy
from offload.kernels import Writes
from offload.layout.update_order import Lane, SecondPasses, next_lane
from offload.sizes import align_up
from offload.states import State, Tier
from offload.swapper.memory.host_arena import HostArena, HostBuffer
from offload.swapper.memory.lock import InterruptibleLock
from offload.threads import Thread
from offload.timeline import Row, Timeline

# -- one unit in flight --------------------------------------------------------------------------------


class UpdateStatus(enum.Enum):
    """The step's decision about an update."""

    CONFIRMED = "confirmed"
    """The results become the newest states."""
    SPECULATIVE = "speculative"
    """Made under the backward, before the step is decided. Nobody sees the results."""
    DISCARDED = "discarded"
    """The results are of no use."""


class UnitJob:
    """The update of one unit in flight: its tiles begin in order, pass after pass."""

    def __init__(
        self,
        *,
        update: UnitUpdate,
        steps: UnitSteps,
        host_buffer: HostBuffer | None,
        delivered: bool,
        lane: Lane,
        tile_numel: int,
        status: UpdateStatus = UpdateStatus.CONFIRMED,
        part: Writes = Writes.ALL,
    ) -> None:
        self.unit, self.update, self.steps, self.status = update.unit, update, steps, status
        self.lane, self.part = lane, part
        self.speculative = status is UpdateStatus.SPECULATIVE
        """True for an update that began under the backward, also once it is confirmed."""
        self.host_buffer = host_buffer
        """The host buffer of the unit's weights, or None. In a speculative update it contains the old weights."""
        self.delivered = delivered
        """True if the weights may be used once computed, before they are written."""
        self.computed = self.written = False
        """True once all tiles of the last pass are computed, or all their writes have ended."""
        self.needs_buffer = False
        """True if each tile takes a tile buffer, for reads or copies."""
        self.writes: dict[State, list[tuple[int, Future]]] = {}
        """Start and future of each write that has ended, tile after tile."""
        self._next = self._passed = self._unwritten = 0
        self.cut(tile_numel)

    def cut(self, tile_numel: int) -> None:
        """Divides the unit into tiles, before the first begins. The arithmetic may ask for borders of its own."""
        numel = self.update.numel
        even = tuple(range(start, min(start + tile_numel, numel)) for start in range(0, numel, tile_numel))
        self._cuts = self.steps.cuts or even

    @property
    def all_begun(self) -> bool:
        """True if all tiles of all passes have begun."""
        return self._passed == self.steps.passes

    def begin_tile(self) -> tuple[range, int]:
        """Advances to the next tile; returns its elements, and the number of completed passes over the unit."""
        elements, passed = self._cuts[self._next], self._passed
        # Only tiles of the last pass are written.
        self._unwritten += passed == self.steps.passes - 1
        self._next += 1
        if self._next == len(self._cuts):
            self._next, self._passed = 0, passed + 1
        return elements, passed

    def end_writes(self, writes: Mapping[State, tuple[int, Future]]) -> bool:
        """Takes over the writes of a tile, which have ended; returns True if they were the last of the unit."""
        for state, write in writes.items():
            self.writes.setdefault(state, []).append(write)
        self._unwritten -= 1
        # update thread: writes of all begun tiles may end before the last tile begins, so the count does not suffice.
        self.written = self.computed and self._unwritten == 0
        return self.written


# -- tiles ---------------------------------------------------------------------------------------------
#
# A tile takes at most one buffer of the host arena. A state whose tier is above DISK takes nothing of the buffer, with
# three exceptions: the kernel cannot work on the tier's memory, a pass whose results are dropped would change that
# memory, or a state on the device is also written to the store. A tile that takes nothing has no buffer at all, so its
# unit is computed at the speed of memory: its writes hold up no other tile.
#
#     free buffers ─► reading ─► kernel ─► writing ─► free buffers
#
# The tiles of a lane keep their order, across the borders of units. Threads. Everything here belongs to the update
# worker.


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTile:
    """One state of one tile: the memory for the kernel, and the copies before and after it."""

    first: int
    """First byte of the elements in the partition."""
    work: torch.Tensor
    away: torch.Tensor | None = None
    """The partition's own memory if the kernel cannot work on it: copied to `work` before, and from `work` afterwards.

    For the device's kernel `away` is host memory instead, which receives the values for the store.
    """
    buffer: memoryview | None = None
    """The bytes of `work`, or of `away` on the host, in the form of the I/O queue.

    None for a state without a slot in the store, and for the copy of a resident state in a pass before the last.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateTile:
    """Elements of a unit in flight in the worker: read, computed, written."""

    job: UnitJob
    elements: range
    last: bool
    """True if the results are kept: the tile belongs to the last pass."""
    buffer: HostBuffer | None
    """The tile's buffer; None if all memory of the tile is elsewhere."""
    states: Mapping[State, StateTile]
    gradient: torch.Tensor | None
    """None for a tile of edits."""
    kept: Mapping[int, torch.Tensor]
    """See `TileContent`."""
    reads: Sequence[Future]
    writes: dict[State, tuple[int, Future]] = field(default_factory=dict)
    """For each state the first byte of its write in the slot, and the write's future."""


class TilePipeline:
    """A few tile buffers, and the tiles that use them."""

    def __init__(
        self,
        *,
        shards: LocalShards,
        gradients: GradientAccumulator,
        strategy: UpdateStrategy,
        buffers: Sequence[HostBuffer],
        timeline: Timeline,
    ) -> None:
        """Takes the buffers, whose number limits the tiles in flight that need one."""
        self._shards, self._gradients, self._strategy, self._timeline = shards, gradients, strategy, timeline
        self._weights = shards.pager.weight_updates
        self.free = list(buffers)
        """Buffers that no tile uses."""
        self.reading: Mapping[Lane, deque[UpdateTile]] = {lane: deque() for lane in Lane}
        """Tiles that are read or wait for the kernel, oldest first."""
        self.writing = deque[UpdateTile]()
        """Tiles that are written, of both lanes, oldest first: the I/O queue serves writes in this order."""

    @property
    def in_flight(self) -> tuple[UpdateTile, ...]:
        return (*itertools.chain.from_iterable(self.reading.values()), *self.writing)

    def has_room(self, job: UnitJob) -> bool:
        """Returns True if the next tile of `job` can begin now."""
        begun = len(self.reading[job.lane])
        # update thread: nothing of a tile in memory is read, so an early start would only delay an awaited unit.
        if job.lane is Lane.MEMORY and begun:
            return False
        # A second tile without a buffer is allowed, so that its reads start early.
        return bool(self.free) if job.needs_buffer else begun < 2

    def needs_buffer(self, job: UnitJob) -> bool:
        """Returns True if a tile of `job` needs a buffer."""
        unit = job.unit
        gradient = job.update.segments and not (self._gradients.stays(unit) or self._gradients.is_on_host(unit))
        return bool(gradient) or any(self._takes_room(job, state) for state in self._shards.states(unit))

    # -- begin --------------------------------------------------------------------------------------

    def begin(self, job: UnitJob) -> None:
        """Starts the reads of the next tile of `job`. The caller has checked that there is room."""
        buffer = self.free.pop() if job.needs_buffer else None
        elements, passed = job.begin_tile()
        last = passed == job.steps.passes - 1
        states: dict[State, StateTile] = {}
        gradient: torch.Tensor | None = None
        kept: Mapping[int, torch.Tensor] = {}
        reads, offset = list[Future](), 0
        try:
            for state, dtype in self._shards.mode_of(job.unit).states.items():
                part = self._strategy.part(job.unit, state, elements.start, elements.stop)
                room = range(offset, offset + len(part) * dtype.itemsize)
                if part:
                    states[state] = self._state_tile(job, state, part, passed, buffer, room, reads)
                offset = align_up(room.stop)
            if job.update.segments:
                start, stop = elements.start, elements.stop
                gradient, gradient_reads = self._gradients.segment_range(job.unit, start, stop, buffer, offset)
                reads += gradient_reads
                kept = self._gradients.kept(job.unit, start, stop)
            # Once for each update, so that the host buffer is complete when the weights are published.
            if elements.start == 0 and last:
                self._read_frozen(job, reads)
        except BaseException:
            wait_for_all(reads)  # without a tile `drain` cannot find them
            raise
        self.reading[job.lane].append(
            UpdateTile(
                job=job,
                elements=elements,
                last=last,
                buffer=buffer,
                states=states,
                gradient=gradient,
                kept=kept,
                reads=reads,
            )
        )

    def _state_tile(
        self,
        job: UnitJob,
        state: State,
        part: range,
        passed: int,
        buffer: HostBuffer | None,
        room: range,
        reads: list[Future],
    ) -> StateTile:
        """Returns the kernel's memory for elements `part` of a state, and appends a read from DISK to `reads`.

        The bytes `room` of the tile's buffer are for this state. A state that the kernel updates elsewhere leaves them
        unused.
        """
        shards, unit, dtype = self._shards, job.unit, self._shards.mode_of(job.unit).states[state]
        first, stop = part.start * dtype.itemsize, part.stop * dtype.itemsize

        def own() -> tuple[torch.Tensor, memoryview]:
            assert buffer is not None, "`needs_buffer` asks for each state that comes here"
            bytes_in_tile = buffer.tensor(torch.uint8)[room.start : room.stop]
            return bytes_in_tile.view(dtype), buffer.buffer[room.start : room.stop]

        resident = shards.resident_of(unit, state)
        if resident is not None:
            values, stored = resident.tensor.view(dtype)[part.start : part.stop], shards.stored(unit, state)
            if passed < job.steps.passes - 1 and state in job.steps.drafts:
                # The pass works on a copy, which is never copied back.
                return StateTile(first=first, work=own()[0], away=values)
            # In HOST the kernel works on the state itself, and writes start from there.
            if resident.buffer is not None:
                return StateTile(first=first, work=values, buffer=resident.buffer[first:stop] if stored else None)
            if self._works_in_place(job, state):
                return StateTile(first=first, work=values)
            # A copy in host memory: the input of the host's kernel, or the source of the write to the store.
            copy, memory = own()
            work, away = (values, copy) if job.steps.in_place else (copy, values)
            return StateTile(first=first, work=work, away=away, buffer=memory if stored else None)
        # Weights are read into the unit's host buffer if it has one; all other states are read into the tile.
        if state is State.WEIGHT and job.host_buffer is not None:
            work, memory = job.host_buffer.tensor(dtype)[part.start : part.stop], job.host_buffer.buffer[first:stop]
            # Nothing is read if an earlier pass has read the weights, or if the buffer contains the weights from before
            # the step.
            there = passed > 0 or job.speculative or self._weights.holds_weights(unit)
        else:
            work, memory = own()
            # update thread: under the backward the model still uses old weights in memory, so they are copied from
            # there.
            there = (
                state is State.WEIGHT
                and job.speculative
                and self._weights.speculative.copy(unit, first, work.view(torch.uint8))
            )
        if not there:
            # I/O queue: during a backward nobody waits for this update, but autograd waits for weights.
            priority = Priority.NORMAL if job.status is UpdateStatus.CONFIRMED else Priority.BACKGROUND
            reads.append(shards.store.read(unit, state, shards.store.newest[unit], first, memory, priority))
        return StateTile(first=first, work=work, buffer=memory)

    def _takes_room(self, job: UnitJob, state: State) -> bool:
        """Returns True if a tile's buffer holds a state, read from DISK or copied from the state's tier."""
        resident = self._shards.resident_of(job.unit, state)
        if resident is None:
            return state is not State.WEIGHT or job.host_buffer is None
        if state in job.steps.drafts and job.steps.passes > 1:
            return True
        return resident.buffer is None and not self._works_in_place(job, state)

    def _works_in_place(self, job: UnitJob, state: State) -> bool:
        """Returns True if the kernel works on a state in its own device memory, and the store has no slot for it."""
        in_place = self._shards.device.host_addressable or job.steps.in_place
        return in_place and not self._shards.stored(job.unit, state)

    def _read_frozen(self, job: UnitJob, reads: list[Future]) -> None:
        """Reads the frozen elements, which follow the trainable ones and are in no tile, into the host buffer."""
        shards, unit = self._shards, job.unit
        first = job.update.numel * shards.mode_of(unit).weight_dtype.itemsize
        if (
            job.host_buffer is not None
            and first < job.host_buffer.nbytes
            and shards.sizes[unit].tier is Tier.DISK
            and not job.speculative
            and not self._weights.holds_weights(unit)
        ):
            memory = job.host_buffer.buffer[first:]
            reads.append(shards.store.read(unit, State.WEIGHT, shards.store.newest[unit], first, memory))

    # -- compute and write --------------------------------------------------------------------------

    def reads_ended(self, lane: Lane) -> bool:
        """Returns True if the oldest tile of a lane, if there is one, waits for the kernel alone."""
        tiles = self.reading[lane]
        return not tiles or all(read.done() for read in tiles[0].reads)

    def compute(self, lane: Lane) -> UnitJob | None:
        """Waits for the reads of the oldest tile of a lane, runs the arithmetic and starts the writes.

        Returns the job if the tile was the last of its unit.
        """
        reading = self.reading[lane]
        tile = reading[0]
        job, title = tile.job, self._shards.sizes[tile.job.unit].title
        with self._timeline.span(Row.WORKER, f"waits for reads of {title}"):
            for read in tile.reads:
                read.wait()
        if job.status is not UpdateStatus.DISCARDED:
            for state_tile in tile.states.values():
                if state_tile.away is not None and not job.steps.in_place:
                    self._copy(state_tile.work, state_tile.away)
            memory = {state: state_tile.work for state, state_tile in tile.states.items()}
            start, stop = tile.elements.start, tile.elements.stop
            content = TileContent(start=start, stop=stop, states=memory, gradient=tile.gradient, kept=tile.kept)
            with self._timeline.span(Row.WORKER, f"kernel of {title}"):
                job.steps.run(content, tile.last)
        # An optimizer may pass over a unit several times. Only the last pass writes its tiles; the buffers of tiles of
        # earlier passes are free at once.
        if job.status is UpdateStatus.DISCARDED or not tile.last:
            reading.popleft()
            self._take_back(tile)
            return None
        store = self._shards.store
        for state, state_tile in tile.states.items():
            if state_tile.away is not None:
                self._copy(state_tile.away, state_tile.work)
            self._shards.record_sum(job.unit, state, state_tile.first, state_tile.work)
            if state_tile.buffer is not None:
                target, first = store.target(job.unit), state_tile.first
                tile.writes[state] = first, store.write(job.unit, state, target, first, state_tile.buffer)
        # update thread: appended before it is removed. A tile is in a queue at any time, so that `drain` finds its
        # requests after an error in between.
        self.writing.append(tile)
        reading.popleft()
        return job if tile.elements.stop == job.update.numel else None

    def retire(self, wait: bool) -> list[UnitJob]:
        """Takes back the buffers of tiles whose writes have ended, oldest first; `wait` waits for at least one tile.

        Returns the jobs whose tiles are all written.
        """
        ended: list[UnitJob] = []
        while self.writing:
            tile = self.writing[0]
            if not wait and not all(write.done() for _, write in tile.writes.values()):
                return ended
            waits = self._timeline.span(Row.WORKER, f"waits for writes of {self._shards.sizes[tile.job.unit].title}")
            # update thread: `write.wait` raises the error of a failed write; `write.done` does not.
            with waits if wait else contextlib.nullcontext():
                for _, write in tile.writes.values():
                    write.wait()
            wait = False
            self.writing.popleft()
            self._take_back(tile)
            if tile.job.end_writes(tile.writes):
                ended.append(tile.job)
        return ended

    def drain(self) -> None:
        """Waits for every request after an error, so that no buffer is freed while a request uses it."""
        # update thread: its end frees the buffers, but requests in the I/O queue still use them.
        for tile in self.in_flight:
            wait_for_all([*tile.reads, *(write for _, write in tile.writes.values())])

    def _take_back(self, tile: UpdateTile) -> None:
        if tile.buffer is not None:
            self.free.append(tile.buffer)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self._timeline.span(Row.WORKER, "copy of states", destination.nbytes):
            self._shards.device.copy(destination, source)


# -- offers --------------------------------------------------------------------------------------------
#
# Updates that were made, or may be made, before their step is decided.
#
#     promise ─► offer ─► begin ─► settle: the update of the step is the same     ─► CONFIRMED
#                │                 settle: it is another one, or there is none    ─► DISCARDED
#                └► withdraw, before or after `begin`: the gradient has changed   ─► DISCARDED, if begun
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
        """Begins empty. `wake` wakes the update worker, and is called with the pager's `lock`."""
        self._lock, self._wake = lock, wake
        self.counts = SpeculationCounts()
        """Counts since the start of the engine."""
        self._promised: dict[int, UnitUpdate] = {}
        """Updates whose gradients are on their way to the host, by unit."""
        self._offered: dict[int, UnitUpdate] = {}
        """Updates that may begin, by unit, in the order that their gradients became complete."""
        self._begun: dict[int, UnitJob] = {}
        self._verdicts: list[tuple[UnitJob, UpdateStatus]] = []
        self.draining: tuple[UnitJob, ...] = ()
        """Discarded updates whose tiles may still be in flight."""

    # -- the threads of backward and step -------------------------------------------------------------

    def promise(self, update: UnitUpdate) -> None:
        """Announces an update whose gradient is computed; `offer` lets it begin once the gradient has arrived."""
        with self._lock:
            self._promised[update.unit] = update

    def offer(self, update: UnitUpdate) -> None:
        """Lets a promised update begin, unless it was withdrawn meanwhile."""
        with self._lock:
            # receiving thread: the gradient arrives late, and another one may have changed the unit since the promise.
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
                self._judge(job, UpdateStatus.DISCARDED)

    def settle(self, updates: Sequence[UnitUpdate]) -> list[UnitUpdate]:
        """Compares the begun updates with the step's updates; returns the step's updates that are still missing."""
        with self._lock:
            left = []
            for update in updates:
                job = self._begun.get(update.unit)
                if job is not None and job.update == update:
                    del self._begun[update.unit]
                    self._judge(job, UpdateStatus.CONFIRMED)
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
                self._judge(job, UpdateStatus.DISCARDED)

    def _judge(self, job: UnitJob, status: UpdateStatus) -> None:
        """Stores a verdict for the worker, the only thread that changes a job."""
        self._verdicts.append((job, status))
        hits, misses = self.counts.hits, self.counts.misses
        if status is UpdateStatus.CONFIRMED:
            hits += 1
        else:
            misses += 1
            self.draining += (job,)
        self.counts = SpeculationCounts(hits=hits, misses=misses)
        self._wake()

    # -- the update worker ----------------------------------------------------------------------------

    def take(self) -> UnitUpdate | None:
        """Removes and returns the latest offer, whose weights are most likely still in memory; None without one.

        The caller holds the lock until it has called `begin`, or given the update up.
        """
        return self._offered.popitem()[1] if self._offered else None

    def begin(self, job: UnitJob) -> None:
        """Records that the update of a unit has begun. The caller holds the lock."""
        self._begun[job.unit] = job

    def take_verdicts(self) -> list[tuple[UnitJob, UpdateStatus]]:
        """Removes and returns the verdicts that the worker has not carried out yet."""
        with self._lock:
            verdicts, self._verdicts = self._verdicts, []
            return verdicts

    def drained(self, job: UnitJob) -> None:
        """Records that nothing of a discarded update is in flight any more."""
        with self._lock:
            self.draining = tuple(other for other in self.draining if other is not job)
            self._wake()

    @property
    def unsettled(self) -> bool:
        """True if a verdict was not carried out, or a discarded update is in flight. The caller holds the lock."""
        return bool(self._verdicts or self.draining)


# -- update worker -------------------------------------------------------------------------------------


_IN_MEMORY = 1 << 26
"""Elements of a tile that needs no buffer and writes nothing to the store, while no update is streamed.

A small tile saves nothing: between two tiles Python takes a tenth of a millisecond and more, and sixteen cores compute
half a million elements in that time. The worker sees an error of another thread after one such tile.
"""


class Updates:
    """The updates of an engine that trains nothing: none is ever under way, so nothing waits."""

    trains = False
    tile_numel = 0
    """Largest number of elements of a tile; 0 without tiles."""
    commits = Commits(0)
    """Which steps are committed."""

    @property
    def wants_blob(self) -> bool:
        """True if the scheduled step will be committed and lacks its blob."""
        return False

    def schedule(self, updates: Sequence[UnitUpdate], step: int | None) -> None:
        """Enqueues the updates of an optimizer step, in the order of their units' next use.

        Updates and commit of the step before must be finished. `Commits.due` decides whether the step is committed;
        None is for edits, which the next commit contains.
        """
        raise AssertionError("an engine that trains nothing refuses steps and edits earlier")

    def deliver_blob(self, blob: Mapping[str, torch.Tensor]) -> None:
        """Passes the state blob that the commit of the scheduled step waits for."""

    def await_gradient(self, unit: int) -> None:
        """Waits until the update of `unit` has read its gradient, whose memory may then receive the next one.

        Raises `EngineFailed` if the worker or another background thread has failed.
        """

    def finish(self, commit: bool = True) -> None:
        """Waits until every scheduled update is written and, with `commit`, until a commit that is due is made.

        Raises `EngineFailed` if the worker or another background thread has failed.
        """

    def come_to_rest(self, commit: bool = True) -> None:
        """Drops all offers and waits as `finish` does: until the next call nothing changes states.

        Without `commit` a commit may still read states that memory alone has.
        """

    def drop_spare(self, stop: int) -> bool:
        """Frees the host copies of promoted states, those that DISK stores too, that end beyond byte `stop` of weights.

        From now on DISK serves their reads. Returns False, and frees nothing, if an update is under way. The caller
        holds the pager's lock.
        """
        return True

    def close(self) -> None:
        """Waits until all updates are written, or an error has stopped them, and joins the thread; idempotent.

        A commit whose blob was never delivered is not made.
        """


class UpdateWorker(Updates):
    """Owner of the update thread.

    `schedule`, `deliver_blob`, `finish` and `close` belong to the caller's thread.
    """

    trains = True

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
        commits: Commits,
        second_passes: SecondPasses | None,
        timeline: Timeline,
    ) -> None:
        """Takes the memory of the tiles and starts the thread, which alone changes `shards` during an update.

        The arena's class of tiles has room for all tiles and the strategy's scratch memory. `second_passes` is None if
        every update writes all states at once.
        """
        self._shards, self._pager, self._store = shards, shards.pager, shards.store
        self._gradients, self._strategy, self.commits = gradients, strategy, commits
        self._weights, self._timeline = shards.pager.weight_updates, timeline
        self._queues: Mapping[Lane, deque[UnitUpdate]] = {lane: deque() for lane in Lane}
        self._jobs: dict[Lane, UnitJob] = {}
        """The job of each lane whose next tile begins, until all its tiles have begun."""
        self._second_passes = second_passes
        self._moments: dict[int, UnitUpdate] = {}
        """Updates whose weights are published and whose moments are not begun, by unit, in the order of the former."""
        self._second_pass_began = 0.0
        """Time at which the last second pass began."""
        self._awaited_gradients: list[int] = []
        """Units for whose gradient a thread waits."""
        self._waits = 0
        """Number of waits for an update when the worker last began one."""
        self._commit_step: int | None = None
        self._blob: Mapping[str, torch.Tensor] | None = None
        self._busy, self._closing, self._committing, self._flushing = False, False, False, 0
        self._work_arrived = InterruptibleLock(shards.pager.lock)
        """Notified of changes that give an idle worker work."""
        self.offers = Offers(shards.pager.lock, self._wake)
        """Updates that may be made before their step is decided."""
        self.tile_numel = tile_numel
        """Largest number of elements of a tile."""
        self._beside_reads = tile_numel * max(1, tile_buffers // 2)
        """Elements of a tile in memory beside streamed ones; the drives fill half of the buffers meanwhile."""
        host_buffers = [arena.tiles.take(tile_nbytes) for _ in range(tile_buffers)]
        buffers = [host_buffer for host_buffer in host_buffers if host_buffer is not None]
        assert len(buffers) == tile_buffers > 0 and tile_numel > 0
        self._pipeline = TilePipeline(
            shards=shards, gradients=gradients, strategy=strategy, buffers=buffers, timeline=timeline
        )
        self._thread = Thread(target=self._run, name="offload-update", daemon=True)
        # Started last: the thread uses every attribute above.
        self._thread.start()

    # -- the caller's thread ------------------------------------------------------------------------

    def schedule(self, updates: Sequence[UnitUpdate], step: int | None) -> None:
        # calling thread: ranks that decide together meet here, before anything of the step is under way.
        due = step is not None and self.commits.due(step)
        # calling thread: done before the rest. The worker may begin as soon as it sees an update, and no thread may use
        # the units then. No copy of old weights for an early update may begin either: `begin_updates` drops the device
        # buffer that the copy reads.
        with self._weights.speculative.paused():
            self._pager.begin_updates([update.unit for update in updates])
        changing = [update for update in updates if update.changes]
        self._gradients.give([update.unit for update in changing if update.segments])
        for update in updates:
            if not update.changes:  # all changes of the unit are on other ranks
                self._weights.publish_weights(update.unit, False, False)
        # Units without an update, such as frozen ones, are prefetched now, before updates take host buffers. Other
        # units follow as they are updated.
        self._pager.prefetch()
        with self._pager.lock:
            assert not self._queued and self._commit_step is None, "one step in flight at most"
            # calling thread: verdicts and queue change under one lock. Otherwise the worker could begin the update of a
            # unit before it learns that the speculative one, which writes the same slot, is discarded.
            # Where ranks step a parameter together, their workers meet in each such unit: the order of units must not
            # depend on the drives of a rank.
            together = any(update.shared for update in changing)
            for update in self.offers.settle(changing):
                self._queues[Lane.STREAMED if together else self._lane_of(update.unit)].append(update)
            self._commit_step = step if due else None
            self._blob = None
            if self._second_passes is not None:
                self._second_passes.begin_step()
            self._busy = True
            self._wake()

    def deliver_blob(self, blob: Mapping[str, torch.Tensor]) -> None:
        with self._pager.lock:
            self._blob = blob
            self._wake()

    @property
    def wants_blob(self) -> bool:
        return self._commit_step is not None and self._blob is None

    def await_gradient(self, unit: int) -> None:
        title = f"the gradient of {self._shards.sizes[unit].title} to be read"
        with self._pager.lock:
            self._awaited_gradients.append(unit)
            try:
                self._wait_while(lambda: title if self._gradients.is_read(unit) else "")
            finally:
                self._awaited_gradients.remove(unit)

    def finish(self, commit: bool = True) -> None:
        def pending() -> str:
            if self._busy or self.offers.unsettled:
                return "all updates"
            return "the commit" if commit and self._commit_step is not None else ""

        with self._pager.lock:
            self._wait_while(pending)

    def _wait_while(self, pending: Callable[[], str]) -> None:
        """Waits while `pending` names something to wait for. The caller holds the pager's lock."""
        # calling thread: from here on the worker does not wait for a host buffer, since perhaps only this thread could
        # free one.
        self._flushing += 1
        late = self._second_passes if self._second_passes is not None and self._second_passes.pending else None
        began = time.monotonic()
        self._pager.notify()
        try:
            while title := pending():
                self._pager.check()
                with self._timeline.span(Row.WAITS, f"waits for {title}"):
                    # calling thread: this wait always ends, since the worker notifies after it has read a gradient,
                    # after its last write, after a commit, and when an error stops it.
                    self._pager.changed.wait()
            self._pager.check()
        finally:
            self._flushing -= 1
            if late is not None:
                late.waited(time.monotonic() - began)

    def come_to_rest(self, commit: bool = True) -> None:
        self.offers.drop_all()
        self.finish(commit)

    def idle_tiles(self) -> tuple[HostBuffer, ...]:
        """Returns the tile buffers as scratch memory for the caller's thread, until the next `schedule`."""
        with self._pager.lock:
            assert not self._busy, "an update is under way"
            return tuple(self._pipeline.free)

    def drop_spare(self, stop: int) -> bool:
        # calling thread, maybe that of another engine: a commit reads these partitions without the lock, and ends by
        # itself.
        while self._committing:
            self._pager.changed.wait()
        if self._busy or self.offers.unsettled:
            return False
        self._shards.flush()  # only updates and commits write, and none is under way
        self._shards.drop_spare(stop)
        return True

    def close(self) -> None:
        with self._pager.lock:
            self._closing = True
            self._wake()
        # calling thread: this join always ends: with `_closing` the worker waits for no buffer, and ends when idle.
        self._thread.join()

    def _wake(self) -> None:
        """Wakes the worker, idle or not, and all other waiters. The caller holds the pager's lock."""
        self._pager.notify()
        self._work_arrived.notify_all()

    # -- the worker ---------------------------------------------------------------------------------

    def _run(self) -> None:
        """Runs the worker until `close`. An error fails the pager, so that every waiting thread raises."""
        try:
            self._shards.device.enter_thread()
            while self._work():
                pass
        except BaseException as error:
            # update thread: nobody catches its errors. The pager passes them on to each thread that waits or calls.
            self._pager.fail(error)
            self._pipeline.drain()

    def _work(self) -> bool:
        """Performs the next action, or waits for one; returns False when the worker must end.

        Order: take back written tiles, start reads, compute, wait for a write, commit, sleep.
        """
        # update thread: reads the version before all checks. A change after any check makes the version differ, so the
        # thread does not sleep through the change.
        seen = self._pager.version
        self._pager.check()  # after an error anywhere no work may begin, and no commit
        # Tiles first: a discarded update ends with its last tile, and nothing reports it to this thread later.
        self._retire(wait=False)
        self._carry_out_verdicts()
        self._end_beside_offers()
        for other in Lane:
            self._begin_tiles(other)
        begun = [other for other, tiles in self._pipeline.reading.items() if tiles]
        lane = next_lane(begun, self._pipeline.reads_ended(Lane.STREAMED))
        if lane is not None:
            computed = self._pipeline.compute(lane)
            if computed is not None:
                computed.computed = True
                if computed.status is UpdateStatus.CONFIRMED:
                    self._publish_computed(computed)
            return True
        if self._pipeline.writing:
            self._retire(wait=True)
            return True
        with self._pager.lock:
            idle = not self._jobs and not self._queued and not self.offers.unsettled
            if self._busy and idle:
                self._busy = False
                self._pager.notify()
                return True
        # update thread: who waits for updates alone does not wait for the commit, which writes what memory has changed.
        if not self._jobs and self._commit():
            return True
        with self._pager.lock:
            idle = not self._jobs and not self._queued and not self.offers.unsettled
            if self._closing and idle:
                return False
            if self._pager.version == seen:
                # update thread: without work no change of the pager matters. Each use of a unit would wake the worker
                # in vain.
                (self._work_arrived if idle else self._pager.changed).wait()
        return True

    def _left(self) -> set[Writes]:
        """Returns the parts of the step's updates that have not ended. The caller holds the lock."""
        jobs = (*self._jobs.values(), *(tile.job for tile in self._pipeline.in_flight))
        left = {job.part for job in jobs if job.status is not UpdateStatus.SPECULATIVE}
        return left | {Writes.ALL for queue in self._queues.values() if queue} | {Writes.MOMENTS for _ in self._moments}

    def _end_beside_offers(self) -> None:
        """Ends the updates of a step while others, which began under the backward beside its moments, go on."""
        with self._pager.lock:
            beside = self._busy and (self._jobs or self._pipeline.in_flight)
            if beside and not self.offers.unsettled and not self._left():
                self._busy = False
                self._pager.notify()

    def _begin_tiles(self, lane: Lane) -> None:
        """Puts all free buffers to use before anything is computed, so that the drives stay busy during the kernel."""
        while True:
            # update thread: an update begins only when its first tile can. Until then another unit may become the
            # awaited one.
            room = self._pipeline.free if lane is Lane.STREAMED else not self._pipeline.reading[lane]
            if lane not in self._jobs and room:
                job = self._next_job(lane)
                if job is not None:
                    self._jobs[lane] = job
            if lane not in self._jobs or not self._pipeline.has_room(self._jobs[lane]):
                return
            self._pipeline.begin(self._jobs[lane])
            if self._jobs[lane].all_begun:
                del self._jobs[lane]

    def _retire(self, wait: bool) -> None:
        """Takes back the buffers of written tiles; with `wait`, of at least one. Publishes units that are written."""
        for job in self._pipeline.retire(wait):
            if job.speculative:
                self._timeline.end(Row.UPDATES, self._early_title(job.unit))
            if job.status is UpdateStatus.SPECULATIVE:
                self._weights.speculative.may_evict(job.unit)
            elif job.status is UpdateStatus.CONFIRMED:
                self._publish_written(job)

    def _carry_out_verdicts(self) -> None:
        """Publishes the early updates that the step has confirmed, and ends those that the step has discarded."""
        for job, status in self.offers.take_verdicts():
            job.status = status
            if status is UpdateStatus.CONFIRMED:
                if job.computed:
                    self._publish_computed(job)
                if job.written:
                    self._publish_written(job)
            elif self._jobs.get(job.lane) is job:
                del self._jobs[job.lane]
        for job in self.offers.draining:
            # update thread: a job whose verdict came after the loop above is not DISCARDED yet. Tiles in flight still
            # write to the memory that a discarded update frees.
            if job.status is UpdateStatus.DISCARDED and all(tile.job is not job for tile in self._pipeline.in_flight):
                self._timeline.end(Row.UPDATES, self._early_title(job.unit))
                self._weights.speculative.drop(job.unit)
                self.offers.drained(job)

    # -- results ------------------------------------------------------------------------------------

    def _publish_computed(self, job: UnitJob) -> None:
        """Frees the gradient of a unit whose last tile is computed, unless its moments are still to be written.

        Weights in a host buffer or on the device may be used from here on, while they are being written.
        """
        if job.part is Writes.WEIGHTS:
            with self._pager.lock:
                self._moments[job.unit] = job.update
        elif job.update.segments:
            # autograd thread: may write the gradient of the next backward from here on; the kernel has read all of it.
            self._gradients.free(job.unit)
            with self._pager.lock:
                self._pager.notify()
        if job.part is Writes.MOMENTS:
            assert self._second_passes is not None
            with self._pager.lock:
                self._second_passes.end(job.update.numel, time.monotonic() - self._second_pass_began)
            self._timeline.end(Row.UPDATES, self._moments_title(job.unit))
            return
        if job.speculative:
            job.delivered = self._weights.speculative.adopt(job.unit)
        if job.delivered:
            # update thread: the weights count as unwritten until `_publish_written`, even if the writes have ended.
            # Else the buffer could be evicted, and the next read would find the old slot.
            self._weights.publish_weights(job.unit, True, self._writes_to_store(job.unit))

    def _publish_written(self, job: UnitJob) -> None:
        """Makes the slot of a completely written update the newest one."""
        if job.part is Writes.MOMENTS:  # its weights were published by the first pass, and nothing is stored
            return
        if self._writes_to_store(job.unit):
            self._store.wrote(job.unit, self._store.target(job.unit), job.writes)
        elif job.unit in self._shards.deferred:
            self._shards.stale.add(job.unit)
        # Without a host buffer the weights can be read only from here on.
        if not job.delivered:
            self._weights.publish_weights(job.unit, False, False)
        self._weights.flushed(job.unit)

    def _writes_to_store(self, unit: int) -> bool:
        """Returns True if updates of a unit are written to the store, through tiles."""
        return any(self._shards.stored(unit, state) for state in self._shards.mode.states)

    def _early_title(self, unit: int) -> str:
        return f"{self._shards.sizes[unit].title} under the backward"

    def _moments_title(self, unit: int) -> str:
        return f"moments of {self._shards.sizes[unit].title}"

    # -- the next update ----------------------------------------------------------------------------

    def _lane_of(self, unit: int) -> Lane:
        in_memory = self._gradients.stays(unit) or self._gradients.is_on_host(unit)
        return Lane.MEMORY if in_memory and not self._writes_to_store(unit) else Lane.STREAMED

    @property
    def _queued(self) -> bool:
        return bool(any(self._queues.values()) or self._moments)

    def _next_job(self, lane: Lane) -> UnitJob | None:
        """Takes the update of a lane that a thread waits for, else the first, and returns its job.

        Returns None if no update is queued, or if no host buffer is free yet.
        """
        queue = self._queues[lane]
        with self._pager.lock:
            # update thread: the next update of a unit writes to the same bytes as the unit's discarded update.
            # `schedule` discards the one and queues the other under this same lock.
            if any(job.lane is lane for job in self.offers.draining):
                return None
            wanted = self._weights.awaited_unit()
            if wanted is None and self._awaited_gradients:
                wanted = self._awaited_gradients[0]
            if lane is Lane.MEMORY and self._moments and (wanted in self._moments or not queue):
                # The backward uses units in the reverse order.
                unit = wanted if wanted in self._moments else next(reversed(self._moments))
                update = self._moments.pop(unit)
                self._timeline.begin(Row.UPDATES, self._moments_title(unit))
                self._second_pass_began = time.monotonic()
                return self._job_of(update, None, True, Lane.MEMORY, part=Writes.MOMENTS)
            if not queue:
                return self._take_offer() if lane is Lane.STREAMED else None
            update = next((u for u in queue if u.unit == wanted), queue[0])
            part = Writes.WEIGHTS if lane is Lane.MEMORY and self._takes_two_passes(update) else Writes.ALL
        host_buffer = None
        if self._weights.delivers(update.unit):
            host_buffer = self._weights.buffer_for(update.unit)
            # update thread: tiles in flight need no further buffer, and may free one when they end. Without such tiles
            # the worker goes on without a buffer if a thread waits for it: that thread may hold the missing one. Tiles
            # in memory free none, since their units keep their buffers.
            in_flight = any(tile.job.lane is lane for tile in self._pipeline.in_flight)
            if host_buffer is None and (in_flight or not self._is_awaited()):
                return None
        queue.remove(update)
        self._timeline.begin(Row.UPDATES, self._shards.sizes[update.unit].title)
        delivered = host_buffer is not None or self._shards.sizes[update.unit].tier is Tier.DEVICE
        return self._job_of(update, host_buffer, delivered, lane, part=part)

    def _takes_two_passes(self, update: UnitUpdate) -> bool:
        """Returns True if an update that begins writes the weights first. The caller holds the lock."""
        # update thread: a thread that has waited for the update before this one waits for this one soon, if the model's
        # compute runs on a device. While nobody waits, one pass moves fewer bytes.
        behind = self._weights.waits != self._waits or self._weights.awaited_unit() is not None
        self._waits = self._weights.waits
        if self._second_passes is None or not behind:
            return False
        unit, shards = update.unit, self._shards
        in_memory = all(shards.tier_of(unit, state) is Tier.HOST for state in shards.states(unit))
        # In a store the states of a unit are those of one step.
        if not in_memory or self._writes_to_store(unit) or not self._gradients.is_on_host(unit):
            return False
        divides = update.segments and self._strategy.begin_part(update, Writes.WEIGHTS) is not None
        return bool(divides) and self._second_passes.begin(update.numel)

    def _is_awaited(self) -> bool:
        """Returns True if a thread waits for this worker, or for a host buffer."""
        with self._pager.lock:
            return bool(
                self._flushing
                or self._closing
                or self._weights.waiting_for_buffer
                or self._weights.awaited_unit() is not None
            )

    def _take_offer(self) -> UnitJob | None:
        """Returns the job of an update under the backward, or None if none may begin. The caller holds the lock."""
        # Updates and commit of the step before come first: only then may the slot of the commit before be overwritten.
        # Second passes may be pending: they change no slot.
        if self._closing or self._commit_step is not None or (self._busy and self._left() != {Writes.MOMENTS}):
            return None
        while (update := self.offers.take()) is not None:
            unit, shards, store = update.unit, self._shards, self._store
            # An update of a unit on DISK alone can be dropped later. Above DISK it would change states in place.
            on_disk = shards.sizes[unit].tier is Tier.DISK and all(
                shards.stored(unit, state) and (unit, state) not in shards.residents for state in shards.states(unit)
            )
            # The newest slot is the one to write if the unit has no other slot that no commit names.
            writes_other_slot = store.newest[unit] != store.target(unit)
            # A gradient that spills to DISK would first have to be written out and read back.
            allowed = on_disk and writes_other_slot and self._gradients.is_on_host(unit)
            begun = self._weights.speculative.begin(unit) if allowed else None
            if begun is not None:
                self._timeline.begin(Row.UPDATES, self._early_title(unit))
                job = self._job_of(update, begun.host_buffer, False, Lane.STREAMED, UpdateStatus.SPECULATIVE)
                self.offers.begin(job)
                return job
        return None

    def _job_of(
        self,
        update: UnitUpdate,
        host_buffer: HostBuffer | None,
        delivered: bool,
        lane: Lane,
        status: UpdateStatus = UpdateStatus.CONFIRMED,
        part: Writes = Writes.ALL,
    ) -> UnitJob:
        """Returns the job of an update that begins. `host_buffer` receives the fresh weights; None if there is none."""
        steps: UnitSteps | None
        if update.edits:
            steps = EditSteps(update.edits, self._shards.mode_of(update.unit))
        elif part is Writes.ALL:
            steps = self._strategy.begin(update, self.tile_numel)
        else:
            steps = self._strategy.begin_part(update, part)
            assert steps is not None, "`_takes_two_passes` has asked"
        job = UnitJob(
            update=update,
            steps=steps,
            host_buffer=host_buffer,
            delivered=delivered,
            lane=lane,
            tile_numel=self.tile_numel,
            status=status,
            part=part,
        )
        job.needs_buffer = self._pipeline.needs_buffer(job)
        if not self._writes_to_store(update.unit) and not job.needs_buffer:
            job.cut(self._beside_reads if self._streams else _IN_MEMORY)
        return job

    @property
    def _streams(self) -> bool:
        """True if a unit is streamed, or waits for its turn."""
        lane = Lane.STREAMED
        return bool(self._queues[lane] or self._pipeline.reading[lane] or lane in self._jobs)

    def _commit(self) -> bool:
        """Commits the scheduled step if its updates are written and its blob is there; returns True after a commit."""
        with self._pager.lock:
            # update thread: reads all three under one lock. Since it last saw an empty queue, `schedule` may have
            # filled the queue, and the blob may belong to that step, whose updates have not begun.
            if self._queued or self.offers.unsettled or self._commit_step is None or self._blob is None:
                return False
            step, blob = self._commit_step, self._blob
            self._committing = True
        # update thread: commits outside the lock. A commit waits for the drives, and threads that only read weights
        # must not wait with it.
        self._shards.commit(step, blob)
        with self._pager.lock:
            self._commit_step = self._blob = None
            self._committing = False
            self._pager.notify()
        return True
