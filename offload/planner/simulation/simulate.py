"""A simulation of the pager and the update worker, without data, threads or drives.

    simulate(steps, sizes, updates, budgets)            peaks of both budgets, hits, bytes
    simulate(steps, sizes, updates, budgets, rates=…)   also seconds, waits by cause, and the timeline

The functions of `policy` make every decision over an `AccessOrder` and two `Allocator`s, as in the real pager, and
every move is one of `residency.ARROWS`. Three actors take turns: the model's thread, the update worker, and the thread
that runs the callbacks of the I/O queue. Without rates all work ends at once: while the model computes, the worker runs
as far ahead as host buffers allow, and prefetched weights are ready at their use.

The simulation leaves out other ranks, evaluations, edits, the commit, windows of gradients that spill (their writes
never make the backward wait), and tiles that are read before `step()` for updates that must wait for the norm. The host
waits for the end of each use, so a GPU's host never runs ahead of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.planner.simulation.clock import Span
from offload.planner.simulation.kept_inputs import Input, SimulatedInputs
from offload.planner.simulation.machine import Acting, Machine, Moved, Rates, Waited, Worked
from offload.planner.simulation.pager import SimulatedPager
from offload.planner.simulation.updater import SimulatedUpdater, UpdateCost
from offload.swapper.memory.allocator import Allocator
from offload.swapper.policy import Limits
from offload.swapper.table import UnitSize


class Expected(NamedTuple):
    """Units of a group that are used next, one after the other; see `AccessOrder.expect`."""

    units: tuple[int, ...] = ()
    """Empty if nothing is known."""
    group: Collection[int] = ()


class Use(NamedTuple):
    """A use of a unit: acquire, compute, release."""

    unit: int
    seconds: float = 0.0
    """Seconds of compute at full speed."""
    held: int = 1
    """Number of uses after which the unit is released; 1 releases the unit before the next use starts."""
    sends: Input = Input()
    """An input that leaves the device from the start of the use on."""
    receives: Input = Input()
    """An input that has to be on the device when the use computes."""
    completes: tuple[int, ...] = ()
    """Units whose gradients of the step are complete after the use. A unit that no use names has its last use."""
    expects: Expected = Expected()
    """Units that are known before the use to be used from here on."""


class Budgets(NamedTuple):
    """Bytes of memory in which units are cached."""

    host: int
    """Bytes for host buffers of weights: the classes weights and cache, without states promoted into the cache."""
    device: int
    """Bytes of the device arena beyond the states whose tier is DEVICE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Result for one step, from one return of `step()` to the next, or for the mean of several."""

    host_peak: int
    """Peak bytes of host buffers of weights since the first step."""
    device_peak: int
    """Peak bytes of units on the device since the first step."""
    uses: int
    hits: int
    """Uses that found the unit on the device."""
    moved: Moved
    undelivered: int
    """Updates that found no host buffer, so that their weights are read again for the next use."""
    speculated: tuple[int, ...]
    """Units whose updates began under the backward, before `step()` of the last step."""
    seconds: float
    waited: Waited
    worked: Worked
    spans: tuple[Span, ...]
    """Timeline of the last step, from its start; work that started earlier has a negative start."""


def simulate(
    steps: Sequence[Sequence[Use]],
    sizes: Sequence[UnitSize],
    updates: Sequence[UpdateCost | None],
    budgets: Budgets,
    limits: Limits | None = None,
    rates: Rates | None = None,
    overlap: bool = True,
    tile_numel: int | None = None,
    speculate: bool = False,
    counted: int = 1,
    tile_buffers: int | None = None,
) -> Simulation:
    """Simulates steps and returns the result for the last ones.

    Args:
        steps: uses of each step, in order. The first step starts with empty buffers and no access order; the third is
            close to all later ones. At each position all steps send and receive the same inputs.
        sizes: one entry per unit.
        updates: cost of each unit's update; None for a unit without trainable parameters.
        budgets: bytes for cached units.
        limits: limits of the policy.
        rates: speeds; by default all work ends at once.
        overlap: False to wait for all updates at the end of each step.
        tile_numel: elements of a tile of the update worker; by default an entire unit.
        speculate: True to update units under the backward, where such an update can be undone; only with `overlap`.
        tile_buffers: most tiles of the update worker in flight; None for those of most optimizers.
        counted: last steps whose mean is the result. With updates under the backward a step may do work of the next.

    Raises:
        BudgetError: units in use leave no room on the device, as in the real pager.
    """
    machine = Machine(rates or Rates())
    pager = SimulatedPager(sizes, Allocator(budgets.host), Allocator(budgets.device), limits or Limits(), machine)
    updater = SimulatedUpdater(updates, tile_numel, pager, machine, speculate and overlap, tile_buffers)
    loop = _Loop(steps, overlap, pager, updater, machine)
    loop.run()
    # Counters only grow, so the last steps are the differences of the last marks.
    *_, before, after = loop.marks
    first = loop.marks[-1 - counted]
    return Simulation(
        host_peak=pager.host.peak_bytes,
        device_peak=pager.device.peak_bytes,
        uses=after.uses - before.uses,
        hits=after.hits - before.hits,
        moved=Moved(*(round((new - old) / counted) for new, old in zip(after.moved, first.moved, strict=True))),
        undelivered=after.undelivered - before.undelivered,
        speculated=tuple(updater.speculated[before.speculated : after.speculated]),
        seconds=(after.now - first.now) / counted,
        waited=Waited(*((new - old) / counted for new, old in zip(after.waited, first.waited, strict=True))),
        worked=Worked(*((new - old) / counted for new, old in zip(after.worked, first.worked, strict=True))),
        spans=tuple(
            span._replace(start=span.start - before.now, end=span.end - before.now)
            # A span belongs to the step in which it ends.
            for span in machine.clock.spans(before.now, after.now)
        ),
    )


class _Figures(NamedTuple):
    """Values of all counters at one time."""

    now: float
    uses: int
    hits: int
    undelivered: int
    speculated: int
    moved: Moved
    waited: Waited
    worked: Worked


class _Loop:
    """The model's thread, and the scheduler of all actors."""

    def __init__(
        self,
        steps: Sequence[Sequence[Use]],
        overlap: bool,
        pager: SimulatedPager,
        updater: SimulatedUpdater,
        machine: Machine,
    ) -> None:
        self._steps, self._overlap = steps, overlap
        self._pager, self._updater, self._machine = pager, updater, machine
        self._inputs = SimulatedInputs([(use.unit, use.sends, use.receives) for use in steps[0]], machine)
        self._computing = False
        self.marks = [self._figures()]
        """Counters at the start and at each return of `step()`."""

    def run(self) -> None:
        """Runs all steps. The turn of the other actors comes while the model's thread computes or waits."""
        model, worker, callbacks = self._model(), self._updater.act(), self._pager.deliver()
        ready: Callable[[], bool] | None = next(model, None)
        worker_ready, read_ended = next(worker), next(callbacks)
        while ready is not None:
            if worker_ready():
                # A worker that could go on lets the model's thread begin first.
                if self._computing or not ready():
                    worker_ready = next(worker)
                else:
                    ready = next(model, None)
            elif ready():
                ready = next(model, None)
            elif read_ended():
                read_ended = next(callbacks)
            else:  # all wait for work: only the clock can make a condition true
                advanced = self._machine.clock.advance()
                assert advanced, "all wait for each other"

    def _figures(self) -> _Figures:
        machine, pager, updater = self._machine, self._pager, self._updater
        return _Figures(
            machine.clock.now,
            pager.uses,
            pager.hits,
            updater.undelivered,
            len(updater.speculated),
            machine.moved,
            machine.waited,
            machine.worked,
        )

    def _model(self) -> Acting[None]:
        """Acts as the model's thread: uses, releases and `step()`."""
        for uses in self._steps:
            completed = _completed(uses)
            # Units to release, by the position of the use before which they are released.
            ends: dict[int, list[int]] = {}
            for position, use in enumerate(uses):
                self._pager.release(ends.pop(position, ()))
                if use.expects.units:
                    self._pager.access_order.expect(*use.expects)
                    yield from self._pager.prefetch()
                yield from self._pager.acquire(use.unit)
                ends.setdefault(position + use.held, []).append(use.unit)
                yield from self._inputs.before(position)
                yield from self._compute(use)
                for unit in completed.get(position, ()):
                    self._updater.complete(unit)
            self._pager.release(unit for units in ends.values() for unit in units)
            yield from self._step()
            self.marks.append(self._figures())

    def _compute(self, use: Use) -> Acting[None]:
        """Computes a use. The worker runs meanwhile, even if the use takes no time."""
        computed = self._machine.compute(use.unit, use.seconds)
        self._computing = True
        # Yields even if done already, to give the worker a turn.
        yield lambda: computed.done
        self._computing = False

    def _step(self) -> Acting[None]:
        yield from self._machine.counted("update", self._updater.finish())
        # The recorded order of this step determines the updates and prefetches of the next one.
        self._pager.access_order.finish()
        self._updater.schedule(self._pager.access_order.order)
        yield from self._pager.prefetch()
        if not self._overlap:
            yield from self._machine.counted("update", self._updater.finish())


def _completed(uses: Sequence[Use]) -> dict[int, tuple[int, ...]]:
    """Returns the units whose gradients are complete after each use, by its position."""
    named = {unit for use in uses for unit in use.completes}
    found = {position: use.completes for position, use in enumerate(uses) if use.completes}
    last_use = {use.unit: position for position, use in enumerate(uses)}
    for unit, position in last_use.items():
        if unit not in named:
            found[position] = (*found.get(position, ()), unit)
    return found
