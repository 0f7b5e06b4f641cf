"""The update worker: one thread that reads states, runs the kernel and writes states, tile by tile.

A few tile buffers form the pipeline. While one tile is computed, the next ones are read and earlier ones are written,
across the borders of units. `step()` schedules updates; a thread that needs a unit's weights waits in the pager.

    schedule ─► queue ─► reading ─► compute ─► writing ─► flushed ─► (last one) commit
                  ▲ awaited unit first        │
                                              └ last tile of a unit: weights_ready, its weights may be used

Under the backward the worker takes *offers*: updates of units whose gradients are complete, before their step is
decided (`speculation`). They are written to the slot that no commit names, and become the newest states if the step
confirms them. The backward never waits for them, and they wait for the updates and the commit of the step before.

`weights_ready` precedes `flushed`: weights are used from their host buffer while the write is in flight. Without a host
buffer they may be used only after the last write, which also makes the written slot the unit's newest one. So no read
sees bytes that are being written.

Threads. The caller's thread fills the queue, the blob and the flags; the worker empties them. The pager's lock guards
every change that the other side must see at once. Two accesses need no lock: the worker's removal of an update from the
queue, since no other thread removes any, and the reads of `wants_blob`. Tiles and jobs belong to the worker alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.optim.pipeline.results import UpdateResults
from offload.engine.optim.pipeline.tile_pipeline import TilePipeline
from offload.engine.optim.pipeline.update_tiles import Fate, Job, TileReader
from offload.engine.optim.speculation.offers import Offers
from offload.engine.optim.speculation.rules import UnitFacts, unit_may_begin
from offload.engine.optim.unit_updates import UnitUpdate
from offload.engine.optim.update_strategy import EditSteps, UnitSteps, UpdateStrategy
from offload.engine.params.local_shards import LocalShards
from offload.states import Tier
from offload.swapper.memory.host_arena import HostArena, HostBuffer
from offload.swapper.memory.lock import InterruptibleLock
from offload.timeline import Row, Timeline

_IN_MEMORY = 1 << 26
"""Elements of a tile all of whose memory is elsewhere, and of which nothing is written.

A small one saves nothing, and between two of them Python takes a tenth of a millisecond and more, in which sixteen
cores compute half a million elements. Its time is the one after which an error of another thread is seen.
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
        tile_buffers: int,
        commit_every: int,
        timeline: Timeline,
    ) -> None:
        """Takes the memory of the tiles and starts the thread.

        Args:
            shards: this rank's partitions, which the worker alone changes while an update is in flight.
            arena: host arena, whose class of tiles has room for all tiles beside the strategy's scratch memory.
            gradients: the gradients of the units.
            strategy: the arithmetic of an update.
            tile_numel: largest number of elements of a tile.
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
        buffer_nbytes = (arena.classes.tiles - strategy.scratch_nbytes) // tile_buffers
        self._tile_numel = tile_numel
        host_buffers = [arena.tiles.take(buffer_nbytes) for _ in range(tile_buffers)]
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
        mine = [update for update in updates if update.changes]
        self._gradients.give([update.unit for update in mine if update.segments])
        for update in updates:
            if not update.changes:  # all changes of the unit are on other ranks
                self._pager.weight_updates.weights_ready(update.unit, False, False)
        # What no update concerns, such as frozen weights, comes back now, before updates take host buffers. The
        # rest comes as it is updated.
        self._pager.prefetch()
        with self._pager.lock:
            assert not self._queue and self._commit_step is None, "one step in flight at most"
            self._queue.extend(self.offers.settle(mine))
            due = step is not None and self._commit_every and step % self._commit_every == 0
            self._commit_step = step if due else None
            self._blob = None
            self._busy = True
            self._wake()

    def deliver_blob(self, blob: Mapping[str, torch.Tensor]) -> None:
        """Passes the state blob for which the commit of the scheduled step waits."""
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
            # From here on the worker does not wait for a host buffer: perhaps only this thread could free one.
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
        # The version is read before all checks: a change after any of them makes it differ, so this thread does not
        # sleep through the change.
        seen = self._pager.version
        self._pager.check()  # after an error anywhere no work may begin, and no commit
        # Tiles first: a dropped update ends with its last tile, and nobody tells this thread of it later.
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
                # Without work, no change of the pager matters: each use of a unit would wake this thread in vain.
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
            # The next update of the same unit writes the bytes of one that was dropped. Looked up under the lock under
            # which `schedule` drops the one and queues the other.
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
            steps = EditSteps(update.edits, self._shards.mode)
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
            # Otherwise both could wait: the thread for an update, and the worker for a buffer that the thread uses.
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
            # All three are read under one lock: since the worker last saw an empty queue, `schedule` may have filled
            # it, and the blob may belong to that step, whose updates have not begun.
            if self._queue or self.offers.unsettled or self._commit_step is None or self._blob is None:
                return False
            step, blob = self._commit_step, self._blob
        assert self._store is not None
        # Outside the lock: a commit waits for the drives, and threads that only read weights must not wait with it.
        self._store.commit(step, blob)
        with self._pager.lock:
            self._commit_step = self._blob = None
            self._pager.notify()
        return True
