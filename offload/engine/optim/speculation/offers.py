"""Updates that were made, or may be made, before their step is decided.

    promise ─► offer ─► begin ─► settle: the update of the step is the same     ─► CERTAIN
               │                 settle: it is another one, or there is none    ─► DROPPED
               └► withdraw, before or after `begin`: the gradient has changed   ─► DROPPED, if begun

The verdicts wait until the update worker takes them.

Threads. Any thread may promise, offer and withdraw; the thread that calls `step()` settles and drops. The pager's lock
guards everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.engine.optim.pipeline.update_tiles import Fate, Job
from offload.engine.optim.unit_updates import UnitUpdate


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
        """Updates that may begin, by unit, in the order in which the gradients were complete."""
        self._begun: dict[int, Job] = {}
        self._verdicts: list[tuple[Job, Fate]] = []
        self._draining: list[Job] = []
        """Dropped updates of which tiles may still be in flight."""

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
        """Dropped updates of which tiles may still be in flight."""
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
