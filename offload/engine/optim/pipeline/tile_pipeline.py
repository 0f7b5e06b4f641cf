"""The tiles in flight: read, computed and written, while others are read and written.

    free buffers ─► reading ─► kernel ─► writing ─► free buffers

Tiles whose memory is elsewhere go the same way without a buffer. Tiles keep their order, across the borders of units.
The pipeline reports the jobs whose last tile was computed or written; the update worker decides what follows from it.

Threads. Everything here belongs to the update worker.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

import torch

from offload.aio.protocols import Future, wait_for_all
from offload.engine.optim.pipeline.update_tiles import Fate, Job, StateTile, Tile, TileReader
from offload.engine.params.local_shards import LocalShards
from offload.swapper.memory.host_arena import HostBuffer
from offload.timeline import Row, Timeline


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
        """Starts the reads of the next tile of `job`, for which there is room."""
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
            # `write.wait` raises the error of a failed write; `write.done` does not.
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
        # The buffers are freed once this thread has ended, but the I/O queue would still write into them.
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
