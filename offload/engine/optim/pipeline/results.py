"""What follows when a unit's update is computed, written, or judged: who may use the result, and from when on.

                    computed                                         written
    CERTAIN     ─►  the gradient is free; weights in memory ready ─► the slot is the newest; all weights ready
    OPEN        ─►  nothing                                       ─► fresh weights in memory may be evicted
    DROPPED     ─►  nothing                                       ─► nothing

An update that becomes CERTAIN makes up for the steps that it has passed. Threads. The update worker calls everything.
"""

from __future__ import annotations

from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.optim.pipeline.update_tiles import Fate, Job
from offload.engine.params.local_shards import LocalShards
from offload.timeline import Row, Timeline


class UpdateResults:
    """Publishes the results of updates."""

    def __init__(self, *, shards: LocalShards, gradients: GradientAccumulator, timeline: Timeline) -> None:
        """Stores the owners of states and gradients.

        Args:
            shards: this rank's partitions.
            gradients: the gradients of the units.
            timeline: records the ends of updates.
        """
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
            self._updates.weights_ready(job.unit, True, self.is_stored(job.unit))

    def _make_newest(self, job: Job) -> None:
        if self._store is not None and self.is_stored(job.unit):
            self._store.wrote(job.unit, self._store.target(job.unit), job.writes)
        # Without a host buffer the weights can be read only from here on.
        if not job.delivered:
            self._updates.weights_ready(job.unit, False, False)
        self._updates.flushed(job.unit)
