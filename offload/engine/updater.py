"""The update worker: one thread that reads states, runs the kernel and writes states, tile by tile.

A few tile buffers make the pipeline: while one tile is computed, the next are read and those before are
written, across the borders of units. `step()` schedules; whoever needs a unit's weights waits in the pager.

    schedule ─► queue ─► reading ─► compute ─► writing ─► written ─► (last one) commit
                  ▲ wanted units first        │
                                              └ last tile of a unit: publish, its weights may be used

`updated` comes before `written`: weights are used from their lease while the write is in flight, and a read of
a slot waits for the slot's last write, because a unit's newest slot changes only then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from offload import kernels
from offload.engine.gradients import Gradients
from offload.engine.lamb import Trust
from offload.engine.masters import put_weight, split
from offload.engine.step_values import Edit
from offload.engine.torch_steps import Stepper, TorchSegment
from offload.kernels import cuda
from offload.sizes import align_up
from offload.swapper.device import Device
from offload.swapper.entry import UnitSize
from offload.swapper.host import HostArena, Lease
from offload.swapper.modes import LAMB, Mode
from offload.swapper.pager import Pager
from offload.swapper.residency import Tier
from offload.swapper.states import State
from offload.swapper.store import Future, Store
from offload.swapper.timeline import OFF, Row, Timeline


class UnitUpdate(NamedTuple):
    """One unit's part of an optimizer step. Elements outside of all segments are copied unchanged."""

    unit: int
    numel: int
    """Elements of the trainable part of this rank's partition."""
    segments: tuple[kernels.Segment | TorchSegment, ...]
    edits: tuple[Edit, ...] = ()
    """What a user has set; an update has either segments or edits, or neither where other ranks have them all."""
    parameters: tuple[int, ...] = ()
    """The number in the unit of each segment's parameter."""
    ratios: tuple[float, ...] = ()
    """Of LAMB on several ranks: each segment's trust ratio; see `weighing`."""


class Resident(NamedTuple):
    """A partition whose home is not DISK: (numel,) of its dtype, and its bytes where they lie in the host arena."""

    tensor: torch.Tensor
    buffer: memoryview | None
    spare: Lease | None = None
    """The lease of a partition that lies on DISK as well, and may be given back between steps."""


class _Piece(NamedTuple):
    """One state of one tile: the memory that the kernel works on and what must be moved to and from it."""

    state: State
    work: torch.Tensor
    away: torch.Tensor | None
    """The partition's own memory where the kernel cannot work on it, copied in before and out after. Where it is the
    device's kernel, memory on the host that what is to be written is copied to."""
    buffer: memoryview | None
    """The bytes of `work` as the I/O queue takes them, where the state has slots."""


class _Job:
    """A unit's update under way."""

    def __init__(self, update: UnitUpdate, lease: Lease | None, delivered: bool) -> None:
        self.update = update
        self.lease = lease
        self.delivered = delivered
        self.next_start = 0
        self.trust: Trust | None = None
        """The norms of LAMB."""
        self.weighing = False
        """Whether the tiles that are begun are of a pass that comes first, and only makes norms."""
        self.weighed = False
        """Whether there was such a pass."""
        self.unwritten_tiles = 0
        self.computed = False
        self.written: dict[State, list[tuple[int, Future]]] = {}
        """Start and future of each write that has ended, tile after tile."""


class _Tile(NamedTuple):
    job: _Job
    start: int
    stop: int
    buffer: Lease
    pieces: dict[State, _Piece]
    gradient: torch.Tensor | None
    reads: list[Future]
    writes: dict[State, tuple[int, Future]]
    """Each with the byte of its slot at which it starts."""
    weighing: bool
    on_device: bool
    """Whether the kernel is the device's: all that it works on, but for copies to be written, is there."""


class Updater:
    """Owns the update worker. `schedule`, `deliver_blob`, `finish` and `close` belong to the caller's thread."""

    def __init__(
        self,
        mode: Mode,
        sizes: Sequence[UnitSize],
        pager: Pager,
        arena: HostArena,
        device: Device,
        store: Store | None,
        residents: dict[tuple[int, State], Resident],
        gradients: Gradients,
        tile_numel: int,
        tile_buffers: int,
        commit_every: int,
        stepper: Stepper | None = None,
    ) -> None:
        self._mode, self._sizes, self._pager, self._device, self._store = mode, sizes, pager, device, store
        self._residents, self._gradients, self._commit_every = residents, gradients, commit_every
        self._stepper = stepper
        self.timeline: Timeline = OFF
        self._queue: deque[UnitUpdate] = deque()
        self._job: _Job | None = None
        self._reading: deque[_Tile] = deque()
        self._writing: deque[_Tile] = deque()
        self._commit_epoch: int | None = None
        self._blob: Mapping[str, torch.Tensor] | None = None
        self._busy = False
        self._flushing = 0
        self._closing = False
        buffer_nbytes = (arena.classes.tiles - (0 if stepper is None else stepper.nbytes)) // tile_buffers
        self._tile_numel = tile_numel
        leases = [arena.tiles.take(buffer_nbytes) for _ in range(tile_buffers)]
        self._free: list[Lease] = [lease for lease in leases if lease is not None]
        assert len(self._free) == tile_buffers > 0 and tile_numel > 0
        self._thread = threading.Thread(target=self._run, name="offload-update", daemon=True)
        self._thread.start()

    # -- the caller's thread ------------------------------------------------------------------------

    def schedule(self, updates: Sequence[UnitUpdate], epoch: int | None) -> None:
        """Enqueue the updates of a step, in the order of their next use. The step before must be finished.

        `epoch` is the step, of which every `commit_every`th is committed; None for edits, which the next commit holds.
        """
        self._pager.begin_updates([update.unit for update in updates])
        mine = [update for update in updates if update.segments or update.edits]
        self._gradients.give([update.unit for update in mine if update.segments])
        for update in updates:
            if not update.segments and not update.edits:  # all that changes of it is on other ranks
                self._pager.publish(update.unit, False, False)
        with self._pager.lock:
            assert not self._queue and self._commit_epoch is None, "one step in flight at most"
            self._queue.extend(mine)
            due = epoch is not None and self._commit_every and epoch % self._commit_every == 0
            self._commit_epoch = epoch if due else None
            self._blob = None
            self._busy = True
            self._pager.notify()

    def deliver_blob(self, blob: Mapping[str, torch.Tensor]) -> None:
        """Give the state blob that the commit of the scheduled step waits for."""
        with self._pager.lock:
            self._blob = blob
            self._pager.notify()

    @property
    def wants_blob(self) -> bool:
        """Whether a scheduled step that will be committed has no blob yet."""
        return self._commit_epoch is not None and self._blob is None

    def finish(self, commit: bool = True) -> None:
        """Wait until every scheduled update is written and, with `commit`, the step is durable."""
        with self._pager.lock:
            self._flushing += 1
            self._pager.notify()
            try:
                while self._busy or (commit and self._commit_epoch is not None):
                    self._pager.check()
                    with self.timeline.span(Row.WAITS, f"waits for {'all updates' if self._busy else 'the commit'}"):
                        self._pager.changed.wait()
                self._pager.check()
            finally:
                self._flushing -= 1

    @property
    def tile_numel(self) -> int:
        """Elements of a tile at most."""
        return self._tile_numel

    def idle_tiles(self) -> tuple[Lease, ...]:
        """The buffers of the tiles, for who needs memory while no update is under way, on the caller's thread."""
        with self._pager.lock:
            assert not self._busy, "an update is under way"
            return tuple(self._free)

    def drop_spare(self) -> None:
        """Give back the memory of states that lie on DISK as well: from now on they are read from there.

        The pager's lock is held, and no update is under way.
        """
        for key, resident in list(self._residents.items()):
            if resident.spare is not None:
                del self._residents[key]
                resident.spare.release()

    def close(self) -> None:
        """Finish what is scheduled, or what an error left of it, and join the thread."""
        with self._pager.lock:
            self._closing = True
            self._pager.notify()
        self._thread.join()

    # -- the worker ---------------------------------------------------------------------------------

    def _run(self) -> None:
        self._device.enter_thread()
        try:
            while self._work():
                pass
        except BaseException as error:
            self._pager.fail(error)
            self._drain()

    def _work(self) -> bool:
        """Do the next thing there is to do, or wait for one; False when the worker shall end."""
        seen = self._pager.version
        self._pager.check()  # after an error anywhere nothing more is begun, and nothing committed
        self._retire(wait=False)
        while self._free and (tile := self._next_tile()) is not None:
            self._reading.append(tile)
        if self._reading:
            self._compute(self._reading.popleft())
            return True
        if self._writing:
            with self.timeline.span(Row.WORKER, f"waits for writes of {self._title(self._writing[0].job)}"):
                self._retire(wait=True)
            return True
        if self._job is None and self._commit():
            return True
        with self._pager.lock:
            idle = self._job is None and not self._queue
            if self._busy and idle:
                self._busy = False
                self._pager.notify()
                return True
            if self._closing and idle:
                return False
            if self._pager.version == seen:
                self._pager.changed.wait()
        return True

    def _next_tile(self) -> _Tile | None:
        """Begin the next tile of the unit under way, or of the next unit; None where there is none to begin."""
        if self._job is None:
            self._job = self._next_job()
            if self._job is None:
                return None
        job = self._job
        numel = self._tile_numel if self._writes(job) or not self._on_device(job) else job.update.numel
        start, stop = job.next_start, min(job.next_start + numel, job.update.numel)
        job.next_start = stop
        tile = self._begin(job, start, stop)
        job.unwritten_tiles += not tile.weighing
        if stop == job.update.numel:
            if tile.weighing:
                job.next_start, job.weighing, job.weighed = 0, False, True
            else:
                self._job = None
        return tile

    def _next_job(self) -> _Job | None:
        """Take the unit that somebody waits for, else the first; None where it needs a lease worth waiting for."""
        with self._pager.lock:
            if not self._queue:
                return None
            wanted = self._pager.wanted()
            update = next((u for u in self._queue if u.unit == wanted), self._queue[0])
        lease = None
        if self._pager.delivers(update.unit):
            lease = self._pager.lease_for_update(update.unit)
            if lease is None and (self._reading or self._writing or not self._goes_on_without()):
                return None  # what is in flight ends by itself and may free a lease
        self._queue.remove(update)
        self.timeline.begin(Row.UPDATES, self._sizes[update.unit].title)
        delivered = lease is not None or self._sizes[update.unit].home is Tier.DEVICE
        job = _Job(update, lease, delivered)
        if self._mode.optimizer == LAMB and update.segments:
            known = bool(update.ratios)
            job.trust, job.weighing = Trust(update.ratios), not known and update.numel > self._tile_numel
        return job

    def _goes_on_without(self) -> bool:
        """Whether somebody waits for this worker, who must then not wait for a lease."""
        with self._pager.lock:
            return bool(self._flushing or self._closing or self._pager.starved or self._pager.wanted() is not None)

    def _begin(self, job: _Job, start: int, stop: int) -> _Tile:
        """Start the reads of elements [start, stop)."""
        buffer = self._free.pop()
        reads: list[Future] = []
        pieces: dict[State, _Piece] = {}
        offset = 0
        for state, dtype in self._mode.states.items():
            part = self._part(job, state, start, stop)
            end = offset + len(part) * dtype.itemsize
            if part:
                pieces[state] = self._piece(job, state, part.start, part.stop, buffer, offset, end, reads)
            if job.weighing and state in self._mode.moments:
                resident = self._resident(job, state)
                if resident is not None:  # it stays as it is
                    work = buffer.tensor(torch.uint8)[offset:end].view(dtype)
                    pieces[state] = _Piece(state, work, resident.tensor[start:stop], None)
            offset = align_up(end)
        gradient = None
        if job.update.segments:
            gradient, more = self._gradients.stretch(job.update.unit, start, stop, buffer, offset)
            reads += more
        if start == 0 and not job.weighing:
            self._read_frozen(job, reads)
        return _Tile(job, start, stop, buffer, pieces, gradient, reads, {}, job.weighing, self._on_device(job))

    def _on_device(self, job: _Job) -> bool:
        """Whether the unit is updated where it lives, by the device's own kernel."""
        return bool(job.update.segments) and self._gradients.stays(job.update.unit)

    def _writes(self, job: _Job) -> bool:
        """Whether what is updated is written to the store, through tiles."""
        return self._store is not None and any(self._store.keeps(job.update.unit, state) for state in self._mode.states)

    def _part(self, job: _Job, state: State, start: int, stop: int) -> range:
        """What a tile of the elements [start, stop) has of a state: those, or all that an optimizer of torch keeps."""
        if state is not State.PACKED:
            return range(start, stop)
        assert self._stepper is not None
        return range(self._stepper.packed_numel(job.update.unit))

    def _piece(
        self,
        job: _Job,
        state: State,
        start: int,
        stop: int,
        tile: Lease,
        offset: int,
        end: int,
        reads: list[Future],
    ) -> _Piece:
        """Where the kernel finds elements [start, stop) of `state`; starts their read where they are on disk."""
        unit, dtype = job.update.unit, self._mode.states[state]
        first, last = start * dtype.itemsize, stop * dtype.itemsize
        slots = self._store is not None and self._store.keeps(unit, state)
        resident = self._resident(job, state)
        if resident is not None:
            part = resident.tensor[start:stop]
            if resident.buffer is not None:
                return _Piece(state, part, None, resident.buffer[first:last] if slots else None)
            if not slots and (self._device.host_addressable or self._on_device(job)):
                return _Piece(state, part, None, None)
            copy = tile.tensor(torch.uint8)[offset:end].view(dtype)
            work, away = (part, copy) if self._on_device(job) else (copy, part)
            return _Piece(state, work, away, tile.buffer[offset:end] if slots else None)
        if state is State.WEIGHT and job.lease is not None:
            work, memory = job.lease.tensor(dtype)[start:stop], job.lease.buffer[first:last]
        else:
            work, memory = tile.tensor(torch.uint8)[offset:end].view(dtype), tile.buffer[offset:end]
        there = job.weighed or self._pager.holds_weights(unit)
        if not (state is State.WEIGHT and job.lease is not None and there):
            assert self._store is not None
            reads.append(self._store.read(unit, state, self._store.newest[unit], first, memory))
        return _Piece(state, work, None, memory)

    def _resident(self, job: _Job, state: State) -> Resident | None:
        """The partition's memory where its home is not DISK."""
        unit = job.update.unit
        if state is not State.WEIGHT:
            return self._residents.get((unit, state))
        if self._sizes[unit].home is Tier.DEVICE:
            return Resident(self._pager.device_home(unit).view(self._mode.weight_dtype), None)
        if self._sizes[unit].home is Tier.HOST:
            assert job.lease is not None
            return Resident(job.lease.tensor(self._mode.weight_dtype), job.lease.buffer)
        return None

    def _read_frozen(self, job: _Job, reads: list[Future]) -> None:
        """A lease is read whole: also what lies behind the trainable part, which no tile covers."""
        unit, itemsize = job.update.unit, self._mode.weight_dtype.itemsize
        first = job.update.numel * itemsize
        if (
            job.lease is not None
            and first < job.lease.nbytes
            and self._sizes[unit].home is Tier.DISK
            and not self._pager.holds_weights(unit)
        ):
            assert self._store is not None
            memory = job.lease.buffer[first:]
            reads.append(self._store.read(unit, State.WEIGHT, self._store.newest[unit], first, memory))

    def _compute(self, tile: _Tile) -> None:
        """Wait for a tile's reads, run the kernel on each segment in it, start its writes."""
        job = tile.job
        with self.timeline.span(Row.WORKER, f"waits for reads of {self._title(job)}"):
            for read in tile.reads:
                read.wait()
        for piece in tile.pieces.values():
            if piece.away is not None and not tile.on_device:
                self._copy(piece.work, piece.away)
        with self.timeline.span(Row.WORKER, f"kernel of {self._title(job)}"):
            self._kernel(tile)
        if tile.weighing:
            self._free.append(tile.buffer)
            return
        for edit in job.update.edits:
            start, stop = max(edit.start, tile.start), min(edit.stop, tile.stop)
            if start < stop:
                self._set(tile, start, stop, edit.state, edit.values[start - edit.start : stop - edit.start])
        for piece in tile.pieces.values():
            if piece.away is not None:
                self._copy(piece.away, piece.work)
            if piece.buffer is not None:
                tile.writes[piece.state] = self._write(tile, piece)
        self._writing.append(tile)
        if tile.stop == job.update.numel:
            if tile.gradient is not None:
                self._gradients.free(job.update.unit)
            job.computed = True
            if job.delivered:
                self._pager.publish(job.update.unit, True, any(t.job is job and t.writes for t in self._writing))

    def _title(self, job: _Job) -> str:
        return self._sizes[job.update.unit].title

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self.timeline.span(Row.WORKER, "copy of states", destination.nbytes):
            self._device.copy(destination, source)

    def _kernel(self, tile: _Tile) -> None:
        """Do the steps of all segments in the tile, in one pass."""
        if self._stepper is not None and tile.gradient is not None:
            update = tile.job.update
            found = zip(update.parameters, update.segments, strict=True)
            steps = {position: segment for position, segment in found if isinstance(segment, TorchSegment)}
            states = {state: piece.work for state, piece in tile.pieces.items()}
            self._stepper.step(update.unit, states, tile.gradient, steps)
            return
        segments = [
            (
                number,
                kernels.Segment(max(each.start - tile.start, 0), min(each.stop, tile.stop) - tile.start, each.step),
            )
            for number, each in enumerate(tile.job.update.segments)
            if isinstance(each, kernels.Segment) and each.start < tile.stop and each.stop > tile.start
        ]
        if not segments:
            return
        assert tile.gradient is not None
        work = {state: piece.work[: tile.stop - tile.start] for state, piece in tile.pieces.items()}
        partition = kernels.Partition(
            work[State.WEIGHT],
            tile.gradient,
            tuple(work[state] for state in self._mode.moments),
            work.get(State.RESIDUAL),
            work.get(State.MASTER),
        )
        trust = tile.job.trust
        if tile.on_device:
            self._step_on_device(partition, [segment for _, segment in segments])
        elif trust is None:
            kernels.update(partition, [segment for _, segment in segments])
        elif tile.weighing:
            trust.weigh(partition, segments, tile.start)
        else:
            trust.move(partition, segments, tile.start, tile.job.weighed)

    def _step_on_device(self, partition: kernels.Partition, segments: Sequence[kernels.Segment]) -> None:
        """Nothing on the device reads or writes any of this: the norm is known, so the gradient is there, and whoever
        needs the unit waits for its update."""
        with self._device.updating():
            (cuda.update if partition.weight.is_cuda else kernels.update)(partition, segments)
            done = self._device.updated()
        done.wait()  # blocks this thread alone

    def _set(self, tile: _Tile, start: int, stop: int, state: State, values: torch.Tensor) -> None:
        """Give elements [start, stop) of a state the values of an edit; see `Edit.values`."""
        part = slice(start - tile.start, stop - tile.start)
        if state is not State.WEIGHT:
            tile.pieces[state].work[part].copy_(values)
            return
        states = {state: tile.pieces[state].work[part] for state in self._mode.weights}
        if values.dtype is torch.float32:
            split(values, states)
        else:
            put_weight(values, states)

    def _write(self, tile: _Tile, piece: _Piece) -> tuple[int, Future]:
        assert self._store is not None and piece.buffer is not None
        unit = tile.job.update.unit
        part = self._part(tile.job, piece.state, tile.start, tile.stop)
        start = part.start * self._mode.states[piece.state].itemsize
        return start, self._store.write(unit, piece.state, self._store.target(unit), start, piece.buffer)

    def _retire(self, wait: bool) -> None:
        """Take back the buffers of tiles whose writes are done, oldest first; with `wait`, of one at least."""
        while self._writing:
            tile = self._writing[0]
            if not wait and not all(write.done() for _, write in tile.writes.values()):
                return
            wait = False
            for state, (start, write) in tile.writes.items():
                write.wait()
                tile.job.written.setdefault(state, []).append((start, write))
            self._writing.popleft()
            self._free.append(tile.buffer)
            tile.job.unwritten_tiles -= 1
            if tile.job.computed and tile.job.unwritten_tiles == 0:
                self._written(tile.job)

    def _written(self, job: _Job) -> None:
        """The whole update lies in its slot: from now on that is the newest."""
        unit = job.update.unit
        if self._store is not None and any(self._store.keeps(unit, state) for state in self._mode.states):
            self._store.wrote(unit, self._store.target(unit), job.written)
        if not job.delivered:
            self._pager.publish(unit, False, False)
        self._pager.written(unit)

    def _commit(self) -> bool:
        """Make the step durable if all of it is written and its blob is there; whether it was done."""
        with self._pager.lock:
            # All three under one lock: an empty queue that was seen before may have been filled since, and the blob
            # be that of the step that has not begun.
            if self._queue or self._commit_epoch is None or self._blob is None:
                return False
            epoch, blob = self._commit_epoch, self._blob
        assert self._store is not None
        self._store.commit(epoch, blob)
        with self._pager.lock:
            self._commit_epoch = self._blob = None
            self._pager.notify()
        return True

    def _drain(self) -> None:
        """After an error: wait for every request, so that no buffer is freed under one."""
        for tile in [*self._reading, *self._writing]:
            for future in [*tile.reads, *(write for _, write in tile.writes.values())]:
                try:
                    future.wait()
                except OSError:
                    pass  # the first error is the one that is told
