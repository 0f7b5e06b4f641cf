"""Tiles of an update: the order of their elements, the memory of each state, and the reads from disk.

A tile takes at most one buffer of the host arena. A state whose tier is above DISK takes nothing of the buffer, with
three exceptions: the kernel cannot work on the tier's memory, a pass whose results are dropped would change that
memory, or a state on the device is also written to the store. A tile that takes nothing has no buffer at all, so its
unit is computed at the speed of memory: its writes hold up no other tile.

Threads. Everything in this module belongs to the update worker.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from offload.aio import Priority
from offload.aio.protocols import Future, wait_for_all
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import TileContent, UnitSteps, UpdateStrategy
from offload.engine.params.local_shards import LocalShards, ResidentShard
from offload.sizes import align_up
from offload.states import State, Tier
from offload.swapper.memory.host_arena import HostBuffer


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTile:
    """One state of one tile: the memory for the kernel, and the copies before and after it."""

    state: State
    first: int
    """Byte of the partition at which the elements begin."""
    work: torch.Tensor
    away: torch.Tensor | None
    """The partition's own memory if the kernel cannot work on it: copied to `work` before, and from `work` afterwards.

    For the device's kernel it is memory on the host instead, to which values for the store are copied.
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
        found = Cut(elements.start, elements.stop, self._passed)
        self._next += 1
        # Tiles of the last pass alone are written.
        if self.is_last(found):
            self._unwritten += 1
        if self._next == len(self._cuts):
            self._next, self._passed = 0, self._passed + 1
        return found

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
    """For each state the byte of the slot at which its write starts, and the write's future."""

    @property
    def content(self) -> TileContent:
        """Memory for the arithmetic, valid once the reads have ended."""
        states = {state: tile_state.work for state, tile_state in self.states.items()}
        return TileContent(start=self.cut.start, stop=self.cut.stop, states=states, gradient=self.gradient)


class TileReader:
    """Factory of tiles: finds the memory of each state, and starts the reads of states on disk."""

    def __init__(self, *, shards: LocalShards, gradients: GradientAccumulator, strategy: UpdateStrategy) -> None:
        """Stores the owners of states and gradients.

        Args:
            shards: this rank's partitions.
            gradients: the gradients of the units.
            strategy: decides which elements of a state a tile contains.
        """
        self._shards, self._gradients, self._strategy = shards, gradients, strategy

    def needs_buffer(self, job: Job) -> bool:
        """Returns True if a tile of `job` takes any bytes of a buffer."""
        unit = job.unit
        if job.update.segments and not (self._gradients.stays(unit) or self._gradients.is_on_host(unit)):
            return True
        return any(self._takes_room(job, state) for state in self._shards.states(unit))

    def _takes_room(self, job: Job, state: State) -> bool:
        """Returns True if a tile has a copy of a state, read or copied."""
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
            wait_for_all(reads)  # no tile exists by which the worker could find them
            raise

    def _begin(self, job: Job, cut: Cut, buffer: HostBuffer | None, reads: list[Future]) -> Tile:
        """Starts the reads of a tile. `reads` receives each as it starts; for the other arguments see `begin`."""
        states: dict[State, StateTile] = {}
        offset, last = 0, job.is_last(cut)
        for state, dtype in self._shards.mode.states.items():
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
        dtype = self._shards.mode.states[state]
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
        shards, unit, dtype = self._shards, job.unit, self._shards.mode.states[state]
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
            # Under the backward nobody waits for the update, but autograd waits for weights.
            priority = Priority.NORMAL if job.fate is Fate.CERTAIN else Priority.BACKGROUND
            reads.append(shards.store.read(unit, state, shards.store.newest[unit], first, memory, priority))
        return StateTile(state=state, first=first, work=work, away=None, buffer=memory)

    def _resident(self, job: Job, state: State) -> ResidentShard | None:
        """Returns the memory of a partition whose tier is above DISK, or None."""
        shards, unit = self._shards, job.unit
        if state is not State.WEIGHT:
            return shards.residents.get((unit, state))
        if shards.sizes[unit].tier is Tier.DEVICE:
            return ResidentShard(shards.pager.weight_updates.device_tier(unit).view(shards.mode.weight_dtype), None)
        if shards.sizes[unit].tier is Tier.HOST:
            assert job.host_buffer is not None
            return ResidentShard(job.host_buffer.tensor(shards.mode.weight_dtype), job.host_buffer.buffer)
        return None

    def _read_frozen(self, job: Job, reads: list[Future]) -> None:
        """Reads the frozen elements behind the trainable ones into the unit's host buffer: no tile contains them."""
        shards, unit = self._shards, job.unit
        first = job.update.numel * shards.mode.weight_dtype.itemsize
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
