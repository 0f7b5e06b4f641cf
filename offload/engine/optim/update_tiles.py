"""Tiles of an update: which elements come next, where each state of them lies, and the reads that bring them.

A tile is one buffer of the host arena at most; a state whose home is above DISK needs none of it, unless the kernel
cannot work on that home, or a pass that is not kept would change it. Belongs to the update worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offload.aio.protocols import Future
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import TileContent, UnitSteps, UpdateStrategy
from offload.engine.params.local_shards import LocalShards, ResidentShard
from offload.sizes import align_up
from offload.states import State, Tier
from offload.swapper.memory.host_arena import HostBuffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One state of one tile: the memory that the kernel works on and what must be moved to and from it."""

    state: State
    first: int
    """The byte of the partition at which it begins."""
    work: torch.Tensor
    away: torch.Tensor | None
    """The partition's own memory where the kernel cannot work on it, copied in before and out after. Where it is the
    device's kernel, memory on the host that what is to be written is copied to."""
    buffer: memoryview | None
    """The bytes of `work`, or of `away` on the host, as the I/O queue takes them, where the state has slots."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements [start, stop) of one tile, in one pass."""

    start: int
    stop: int
    passed: int
    """Passes over the unit before this one."""


class Job:
    """A unit's update under way."""

    def __init__(
        self, *, update: UnitUpdate, steps: UnitSteps, lease: HostBuffer | None, delivered: bool, tile_numel: int
    ) -> None:
        self.update, self.steps, self.lease = update, steps, lease
        self.delivered = delivered
        """Whether the weights may be used as soon as they are computed, before they are written."""
        self.writes: dict[State, list[tuple[int, Future]]] = {}
        """Start and future of each write that has ended, tile after tile."""
        self._tile_numel = tile_numel
        self._next = self._passed = self._unwritten = 0
        self._computed = False

    @property
    def unit(self) -> int:
        """The unit's number."""
        return self.update.unit

    def cut(self) -> Cut:
        """Returns the elements of the next tile."""
        start, stop = self._next, min(self._next + self._tile_numel, self.update.numel)
        found = Cut(start, stop, self._passed)
        self._next = stop
        if self.is_last(found):
            self._unwritten += 1
        if stop == self.update.numel:
            self._next, self._passed = 0, self._passed + 1
        return found

    def is_last(self, cut: Cut) -> bool:
        """Returns whether a tile is of the last pass, whose results are kept."""
        return cut.passed == self.steps.passes - 1

    @property
    def all_begun(self) -> bool:
        """Whether no tile of it is left to begin."""
        return self._passed == self.steps.passes

    def mark_computed(self) -> None:
        """Notes that the last tile of the last pass is computed."""
        self._computed = True

    def end_writes(self, writes: dict[State, tuple[int, Future]]) -> bool:
        """Takes the writes of a tile, which are done; returns whether they were the last."""
        for state, write in writes.items():
            self.writes.setdefault(state, []).append(write)
        self._unwritten -= 1
        return self._computed and self._unwritten == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Elements of a unit on their way through the worker: read, computed, written."""

    job: Job
    cut: Cut
    last: bool
    """Whether its results are kept: it is of the last pass."""
    buffer: HostBuffer
    pieces: dict[State, Piece]
    gradient: torch.Tensor | None
    reads: list[Future]
    writes: dict[State, tuple[int, Future]] = field(default_factory=dict)
    """Each with the byte of its slot at which it starts."""

    @property
    def content(self) -> TileContent:
        """The memory that arithmetic works on, once the reads are done."""
        states = {state: piece.work for state, piece in self.pieces.items()}
        return TileContent(start=self.cut.start, stop=self.cut.stop, states=states, gradient=self.gradient)


class TileReader:
    """Begins tiles: finds the memory of each state and starts the reads of those on disk."""

    def __init__(self, *, held: LocalShards, gradients: GradientAccumulator, strategy: UpdateStrategy) -> None:
        self._held, self._gradients, self._strategy = held, gradients, strategy

    def begin(self, job: Job, cut: Cut, buffer: HostBuffer) -> Tile:
        """Starts the reads of a tile, into `buffer` and the homes of its states."""
        reads: list[Future] = []
        pieces: dict[State, Piece] = {}
        offset, last = 0, job.is_last(cut)
        for state, dtype in self._held.mode.states.items():
            part = self._strategy.part(job.unit, state, cut.start, cut.stop)
            end = offset + len(part) * dtype.itemsize
            if part:
                resident = self._resident(job, state)
                room = _Room(buffer, offset, end)
                if resident is None:
                    pieces[state] = self._moved(job, cut, state, part, room, reads)
                elif not last and state in job.steps.drafts:  # it stays as it is
                    work, away = room.tensor(dtype), resident.tensor[part.start : part.stop]
                    first = part.start * dtype.itemsize
                    pieces[state] = Piece(state=state, first=first, work=work, away=away, buffer=None)
                else:
                    pieces[state] = self._at_home(job, state, part, room, resident)
            offset = align_up(end)
        gradient = None
        if job.update.segments:
            gradient, more = self._gradients.stretch(job.unit, cut.start, cut.stop, buffer, offset)
            reads += more
        if cut.start == 0 and last:
            self._read_frozen(job, reads)
        return Tile(job=job, cut=cut, last=last, buffer=buffer, pieces=pieces, gradient=gradient, reads=reads)

    def _at_home(self, job: Job, state: State, part: range, room: _Room, resident: ResidentShard) -> Piece:
        """Returns where the kernel finds elements of a state whose home is above DISK."""
        dtype = self._held.mode.states[state]
        first, last = part.start * dtype.itemsize, part.stop * dtype.itemsize
        home, slots = resident.tensor[part.start : part.stop], self._held.stored(job.unit, state)
        away: torch.Tensor | None
        if resident.buffer is not None:
            work, away, buffer = home, None, resident.buffer[first:last] if slots else None
        elif not slots and (self._held.device.host_addressable or job.steps.in_place):
            work, away, buffer = home, None, None
        else:
            copy = room.tensor(dtype)
            work, away = (home, copy) if job.steps.in_place else (copy, home)
            buffer = room.memory if slots else None
        return Piece(state=state, first=first, work=work, away=away, buffer=buffer)

    def _moved(self, job: Job, cut: Cut, state: State, part: range, room: _Room, reads: list[Future]) -> Piece:
        """Returns where the kernel finds elements of a state on DISK: the weight's lease, or the tile; reads them."""
        held, unit, dtype = self._held, job.unit, self._held.mode.states[state]
        first, last = part.start * dtype.itemsize, part.stop * dtype.itemsize
        if state is State.WEIGHT and job.lease is not None:
            work, memory = job.lease.tensor(dtype)[part.start : part.stop], job.lease.buffer[first:last]
            there = cut.passed > 0 or held.pager.weight_updates.holds_weights(unit)
        else:
            work, memory, there = room.tensor(dtype), room.memory, False
        if not there:
            assert held.store is not None
            reads.append(held.store.read(unit, state, held.store.newest[unit], first, memory))
        return Piece(state=state, first=first, work=work, away=None, buffer=memory)

    def _resident(self, job: Job, state: State) -> ResidentShard | None:
        """Returns the partition's memory where its home is not DISK."""
        held, unit = self._held, job.unit
        if state is not State.WEIGHT:
            return held.residents.get((unit, state))
        if held.sizes[unit].tier is Tier.DEVICE:
            return ResidentShard(held.pager.weight_updates.device_tier(unit).view(held.mode.weight_dtype), None)
        if held.sizes[unit].tier is Tier.HOST:
            assert job.lease is not None
            return ResidentShard(job.lease.tensor(held.mode.weight_dtype), job.lease.buffer)
        return None

    def _read_frozen(self, job: Job, reads: list[Future]) -> None:
        """Reads the rest of a lease, which is read whole: the frozen elements behind the trainable part, in no tile."""
        held, unit = self._held, job.unit
        first = job.update.numel * held.mode.weight_dtype.itemsize
        if (
            job.lease is not None
            and first < job.lease.nbytes
            and held.sizes[unit].tier is Tier.DISK
            and not held.pager.weight_updates.holds_weights(unit)
        ):
            assert held.store is not None
            memory = job.lease.buffer[first:]
            reads.append(held.store.read(unit, State.WEIGHT, held.store.newest[unit], first, memory))


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes [start, stop) of a tile's buffer, set aside for one state."""

    lease: HostBuffer
    start: int
    stop: int

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns them as elements."""
        return self.lease.tensor(torch.uint8)[self.start : self.stop].view(dtype)

    @property
    def memory(self) -> memoryview:
        """The same bytes as the I/O queue takes them."""
        return self.lease.buffer[self.start : self.stop]
