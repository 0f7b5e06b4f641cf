"""What the pager and the update worker would do, played on numbers: no bytes, no threads, no drive.

    simulate(uses, sizes, updates, budgets)            peaks of both budgets, hits, bytes
    simulate(uses, sizes, updates, budgets, rates=…)   also seconds, what was waited for, and the time line

Every decision is made by the functions of `policy` over a `Trace` and two `Space`s, as in the pager, and every move is
one of `residency.ARROWS`. Two actors take turns: the thread that runs the model, and the update worker. Without rates
all work ends at once: while the model computes the worker goes as far ahead as its leases allow, and what is read ahead
is there at the next use.

What is left out: other ranks, evaluations and edits; the commit; windows of gradients that spill (their writes never
make the backward wait). A use computes until it ends, so on a GPU the host is taken to go in step with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.planner.simulation.clock import Span
from offload.planner.simulation.machine import Acting, Machine, Moved, Rates, Waited, Worked
from offload.planner.simulation.pager import SimulatedPager
from offload.planner.simulation.updater import SimulatedUpdater, UpdateCost
from offload.swapper.memory.allocator import Space
from offload.swapper.policy import Limits
from offload.swapper.unit_table import UnitSize


class Use(NamedTuple):
    """A unit is acquired, and something is computed with it."""

    unit: int
    seconds: float = 0.0
    """Of compute, where nothing disturbs it."""
    held: int = 1
    """It is released before the use that comes so many later begins."""


class Budgets(NamedTuple):
    """Bytes in which units come and go."""

    host: int
    """For leases of weights: the classes weights and cache, without states that were raised into the cache."""
    device: int
    """Of the device's arena without what is at home there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What a step comes to, from one return of `step()` to the next."""

    host_peak: int
    """Bytes of leases of weights, the most since the first step."""
    device_peak: int
    """Bytes of units on the device, the most since the first step."""
    uses: int
    hits: int
    """Uses that found the unit on the device."""
    moved: Moved
    undelivered: int
    """Updates that found no lease, so that their weights are read once more."""
    seconds: float
    waited: Waited
    worked: Worked
    spans: tuple[Span, ...]
    """The time line, from the step's beginning; of work that began before it, the start is negative."""


def simulate(
    uses: Sequence[Use],
    sizes: Sequence[UnitSize],
    updates: Sequence[UpdateCost | None],
    budgets: Budgets,
    limits: Limits | None = None,
    rates: Rates | None = None,
    overlap: bool = True,
    tile_numel: int | None = None,
    steps: int = 3,
) -> Simulation:
    """Play `steps` steps that all make the same uses, and tell of the last.

    The first begins with empty leases and without a trace; the third is about what all further ones are. `updates` has
    None for units that nothing trains; a tile has `tile_numel` elements, by default a whole unit. Raises `BudgetError`
    where what is in use leaves no room on the device, as the pager does.
    """
    machine = Machine(rates or Rates())
    pager = SimulatedPager(sizes, Space(budgets.host), Space(budgets.device), limits or Limits(), machine)
    updater = SimulatedUpdater(updates, tile_numel, pager, machine)
    loop = _Loop(uses, overlap, pager, updater, machine)
    loop.run(steps)
    before, after = loop.marks[-2:]
    return Simulation(
        host_peak=pager.host.peak_bytes,
        device_peak=pager.device.peak_bytes,
        uses=after.uses - before.uses,
        hits=after.hits - before.hits,
        moved=Moved(*(new - old for new, old in zip(after.moved, before.moved, strict=True))),
        undelivered=after.undelivered - before.undelivered,
        seconds=after.now - before.now,
        waited=Waited(*(new - old for new, old in zip(after.waited, before.waited, strict=True))),
        worked=Worked(*(new - old for new, old in zip(after.worked, before.worked, strict=True))),
        spans=tuple(
            span._replace(start=span.start - before.now, end=span.end - before.now)
            for span in machine.clock.spans
            if before.now < span.end <= after.now
        ),
    )


class _Figures(NamedTuple):
    """All that was counted, at one moment."""

    now: float
    uses: int
    hits: int
    undelivered: int
    moved: Moved
    waited: Waited
    worked: Worked


class _Loop:
    """The thread that runs the model, and who has the next turn."""

    def __init__(
        self, uses: Sequence[Use], overlap: bool, pager: SimulatedPager, updater: SimulatedUpdater, machine: Machine
    ) -> None:
        self._uses, self._overlap = uses, overlap
        self._pager, self._updater, self._machine = pager, updater, machine
        self._last_use = {use.unit: position for position, use in enumerate(uses)}
        self._computing = False
        self.marks = [self._figures()]
        """What was counted at the beginning and at each return of `step()`."""

    def run(self, steps: int) -> None:
        """Whoever can go on does. A thread that has waited goes first, one that computes last."""
        model, worker = self._model(steps), self._updater.act()
        ready: Callable[[], bool] | None = next(model, None)
        worker_ready = next(worker)
        while ready is not None:
            if worker_ready() and (self._computing or not ready()):
                worker_ready = next(worker)
            elif ready():
                ready = next(model, None)
            else:
                going_on = self._machine.clock.advance()
                assert going_on, "both wait for each other"

    def _figures(self) -> _Figures:
        machine, pager = self._machine, self._pager
        counted = (machine.moved, machine.waited, machine.worked)
        return _Figures(machine.clock.now, pager.uses, pager.hits, self._updater.undelivered, *counted)

    def _model(self, steps: int) -> Acting[None]:
        for _ in range(steps):
            ends: dict[int, list[int]] = {}
            for position, use in enumerate(self._uses):
                self._pager.release(ends.pop(position, ()))
                yield from self._pager.acquire(use.unit)
                ends.setdefault(position + use.held, []).append(use.unit)
                yield from self._compute(use)
                if position == self._last_use[use.unit]:
                    self._updater.spill(use.unit)
            self._pager.release(unit for units in ends.values() for unit in units)
            yield from self._step()
            self.marks.append(self._figures())

    def _compute(self, use: Use) -> Acting[None]:
        computed = self._machine.compute(use.unit, use.seconds)
        self._computing = True
        yield lambda: computed.done  # also where that is so already: the worker has a turn
        self._computing = False

    def _step(self) -> Acting[None]:
        yield from self._machine.counted("update", self._updater.finish())
        self._pager.trace.finish()
        self._updater.schedule(self._pager.trace.order)
        if not self._overlap:
            yield from self._machine.counted("update", self._updater.finish())
