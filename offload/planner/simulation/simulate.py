"""A simulation of the pager and the update worker, without data, threads or drives.

    simulate(steps, sizes, updates, budgets)            peaks of both budgets, hits, bytes
    simulate(steps, sizes, updates, budgets, rates=…)   also seconds, waits by cause, and the timeline

The functions of `policy` make every decision over an `AccessOrder` and two `Allocator`s, as in the real pager, and
every move is one of `residency.ARROWS`. Three actors take turns: the model's thread, the update worker, and the thread
that runs the callbacks of the I/O queue. Without rates all work ends at once: while the model computes, the worker runs
as far ahead as host buffers allow, and prefetched weights are ready at their use.

The simulation leaves out other ranks, evaluations, edits and the commit. It leaves out windows of spilled gradients:
their writes never make the backward wait. It also leaves out reads of tiles before `step()` for updates that must wait
for the norm. The host waits for the end of each use, so a GPU's host never runs ahead of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.aio import Priority
from offload.layout.placement import Placement
from offload.layout.tiers import Partitions, tier_nbytes
from offload.planner.simulation.machine import (
    Acting,
    Moved,
    SimulatedMachine,
    SimulatedRates,
    Waited,
    Work,
    Worked,
    until,
)
from offload.planner.simulation.pager import Event, Expected, SimulatedPager
from offload.planner.simulation.updater import SimulatedUpdater, UpdateCost
from offload.states import State, Tier
from offload.swapper.memory.allocator import Allocator
from offload.swapper.policy import Limits
from offload.swapper.table import UnitSize


class Input(NamedTuple):
    """Bytes of a block's input, and whether they wait on a drive for the backward."""

    nbytes: int = 0
    on_disk: bool = False


class Use(NamedTuple):
    """A use of a unit: acquire, compute, release."""

    unit: int
    seconds: float = 0.0
    """Seconds of compute at full speed."""
    held: int = 1
    """Number of uses after which the unit is released; 1 releases the unit before the next use starts."""
    sends: Input = Input()
    """The input whose copy from the device starts with the use."""
    receives: Input = Input()
    """The input that has to be on the device before the use computes."""
    completes: tuple[int, ...] = ()
    """Units whose gradients of the step are complete after the use; by default after a unit's last use."""
    expects: Expected = Expected()
    """Units whose uses, starting here, are known before this use."""
    lookup: int | None = None
    """Bytes of the rows that a lookup needs, if it reads them from DISK; None for a use that fetches the unit."""
    period: int = 0
    """Number of uses of a micro-batch that begins here, if others that are alike may follow; else 0."""


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
    """Updates without a host buffer. The next use reads the weights of such an update again."""
    speculated: tuple[int, ...]
    """Units whose updates began under the backward, before `step()` of the last step."""
    seconds: float
    waited: Waited
    worked: Worked
    busy: Mapping[str, float]
    """Seconds of the work that ended in the last step, by kind: "model", "kernel", "weight read" and so on."""


def simulate(
    steps: Sequence[Sequence[Use]],
    sizes: Sequence[UnitSize],
    updates: Sequence[UpdateCost | None],
    budgets: Budgets,
    limits: Limits | None = None,
    rates: SimulatedRates | None = None,
    overlap: bool = True,
    tile_numel: int | None = None,
    speculate: bool = False,
    counted: int = 1,
    tile_buffers: int | None = None,
) -> Simulation:
    """Simulates steps and returns the mean of the last `counted` ones.

    With speculation a step does work of the next one. The first step starts with empty buffers and no access order;
    from the third on, steps hardly differ. At each position all steps send and receive the same inputs. Without `rates`
    all work ends at once. Without `overlap` a step waits for its updates. `tile_numel` None makes a unit one tile;
    `tile_buffers` None is the number that most optimizers use.
    """
    machine = SimulatedMachine(rates or SimulatedRates())
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
        busy=after.busy,
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
    busy: Mapping[str, float]
    """Of the step."""


class _Boundary(NamedTuple):
    """The end of one micro-batch and begin of another."""

    position: int
    events: list[Event]
    """Uses and moves of the micro-batch that has ended."""
    pending: object
    """Rest of the work that is under way."""
    figures: _Figures


class _Loop:
    """The model's thread, and the scheduler of all actors."""

    def __init__(
        self,
        steps: Sequence[Sequence[Use]],
        overlap: bool,
        pager: SimulatedPager,
        updater: SimulatedUpdater,
        machine: SimulatedMachine,
    ) -> None:
        self._steps, self._overlap = steps, overlap
        self._pager, self._updater, self._machine = pager, updater, machine
        self._inputs = SimulatedInputs([(use.unit, use.sends, use.receives) for use in steps[0]], machine)
        self._computing = False
        self._boundary: _Boundary | None = None
        """The last one of the step."""
        self.marks = [self._figures()]
        """Counters at the start and at each return of `step()`."""

    def run(self) -> None:
        """Runs all steps. The other actors run while the model's thread computes or waits."""
        model, worker, callbacks = self._model(), self._updater.act(), self._pager.deliver()
        ready: Callable[[], bool] | None = next(model, None)
        worker_ready, read_ended = next(worker), next(callbacks)
        while ready is not None:
            if worker_ready():
                # The model's thread starts first, even if a worker could continue.
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
            machine.clock.busy.copy(),
        )

    def _model(self) -> Acting[None]:
        """Acts as the model's thread: uses, releases and `step()`."""
        before: Sequence[Use] = ()
        completed: Mapping[int, tuple[int, ...]] = {}
        for uses in self._steps:
            if uses is not before:
                completed, before = _completed(uses), uses
            # Units to release, by the position of the use before which they are released.
            ends: dict[int, list[int]] = {}
            self._boundary, position = None, 0
            while position < len(uses):
                use = uses[position]
                self._release(ends.pop(position, ()))
                if use.period and (skipped := self._skip(uses, position, not ends)):
                    position += skipped
                    continue
                if use.expects.units:
                    self._pager.expect(use.expects)
                    yield from self._pager.prefetch()
                if use.lookup is not None and (not position or uses[position - 1].lookup is None):
                    yield from self._pager.prefetch()  # as `Pager.expect`, before all lookups in a table
                if use.lookup is not None and self._pager.looks_up(use.unit, use.lookup):
                    yield from self._pager.look_up(use.unit, use.lookup)
                else:
                    yield from self._pager.acquire(use.unit)
                    ends.setdefault(position + use.held, []).append(use.unit)
                yield from self._inputs.before(position)
                yield from self._compute(use)
                for unit in completed.get(position, ()):
                    yield from self._machine.counted("update", self._updater.await_gradient(unit))
                    self._updater.complete(unit)
                position += 1
            self._release([unit for units in ends.values() for unit in units])
            yield from self._step()
            self.marks.append(self._figures())
            self._machine.clock.begin_step()

    def _skip(self, uses: Sequence[Use], position: int, all_released: bool) -> int:
        """Passes over micro-batches that would all take the state of the simulation to itself, as the last one did.

        If two micro-batches made the same moves, each unit is where it was. If also the same work is under way and no
        update is, the next micro-batch repeats the last one, as long as its uses and those after it are the same: the
        moves depend on the order of the next uses alone, not on their distances. Returns the number of uses passed.
        """
        period, before, events = uses[position].period, self._boundary, self._pager.take_events()
        if not (all_released and self._updater.idle):
            self._boundary = None
            return 0
        pending = (self._machine.clock.pending(), self._inputs.pending(position))
        now = self._boundary = _Boundary(position, events, pending, self._figures())
        if before is None or before.position + period != position:
            return 0
        if (before.events, before.pending) != (now.events, now.pending):
            return 0
        last, times = uses[before.position : position], -1
        # The last of equal micro-batches is not passed over: other uses follow it.
        while uses[position + (times + 1) * period : position + (times + 2) * period] == last:
            times += 1
        if times < 1:
            return 0
        for event in now.events * times:
            self._pager.repeat(event)
        old, new = before.figures, now.figures
        self._pager.uses += times * (new.uses - old.uses)
        self._pager.hits += times * (new.hits - old.hits)
        self._machine.skip(
            times,
            new.now - old.now,
            Moved(*(more - less for more, less in zip(new.moved, old.moved, strict=True))),
            Waited(*(more - less for more, less in zip(new.waited, old.waited, strict=True))),
            {row: seconds - old.busy.get(row, 0.0) for row, seconds in new.busy.items()},
        )
        self._inputs.skip(times * period)
        self._boundary = None
        return times * period

    def _release(self, units: Sequence[int]) -> None:
        self._pager.release(units)
        # Most releases make no update possible, and waking the worker after each use would take most of the time.
        if self._updater.awaits(units):
            self._pager.notify()

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
        self._updater.schedule((*self._pager.end_lookups(), *self._pager.access_order.order))
        yield from self._pager.prefetch()
        if not self._overlap:
            yield from self._machine.counted("update", self._updater.finish())


def _completed(uses: Sequence[Use]) -> dict[int, tuple[int, ...]]:
    """Returns the units whose gradients are complete after each use, by the use's position."""
    named = {unit for use in uses for unit in use.completes}
    completed = {position: use.completes for position, use in enumerate(uses) if use.completes}
    last_use = {use.unit: position for position, use in enumerate(uses)}
    for unit, position in last_use.items():
        if unit not in named:
            completed[position] = (*completed.get(position, ()), unit)
    return completed


# -- inputs of blocks ----------------------------------------------------------------------------------
#
# Inputs leave the device in the forward and return for the backward:
#
#     forward     device ──download──► host ──write──► drive     from the start of the next block on
#     backward    device ◄──upload─── host ◄──read──── drive     one block ahead, reads two more
#
# An input waits for the download of the previous input, and for a buffer if it goes to a drive. A CPU makes no copies:
# its device memory is host memory.

_BUFFERS = 4
"""Inputs that may be on their way to a drive at a time."""
_READ_AHEAD = 2
"""Inputs to read ahead of the backward, in addition to the one in its upload."""


class SimulatedInputs:
    """Moves of the inputs, in the order of the uses of one step."""

    def __init__(self, uses: Sequence[tuple[int, Input, Input]], machine: SimulatedMachine) -> None:
        self._uses, self._machine = uses, machine
        self._next: dict[int, int] = {}
        """For each use that needs an input the next such use of the same backward."""
        before: int | None = None
        for position, (_, sends, receives) in enumerate(uses):
            if sends.nbytes:  # another forward, whose inputs do not exist yet
                before = None
            if receives.nbytes:
                if before is not None:
                    self._next[before] = position
                before = position
        self._reads: dict[int, Work] = {}
        self._uploads: dict[int, Work] = {}
        """Reads and copies that were started, by the position of the use that needs them."""
        self._download: Work | None = None
        self._unwritten: deque[tuple[int, int, Work | None]] = deque()
        """Inputs on their way to a drive: unit, bytes, and the copy to the host buffer if there is one to make."""
        self._writes: deque[Work] = deque()

    def pending(self, position: int) -> object:
        """Returns the moves that have begun before the use at `position`, in which equal states agree."""
        ahead = [
            sorted((needed - position, work.done) for needed, work in works.items())
            for works in (self._reads, self._uploads)
        ]
        unwritten = [(unit, nbytes, copied is None or copied.done) for unit, nbytes, copied in self._unwritten]
        return ahead, unwritten, [work.done for work in self._writes], self._download is None or self._download.done

    def skip(self, count: int) -> None:
        """Passes over so many uses; those after them need what was started for the first ones."""
        self._reads = {position + count: work for position, work in self._reads.items()}
        self._uploads = {position + count: work for position, work in self._uploads.items()}

    def before(self, position: int) -> Acting[None]:
        """Starts the moves that begin with a use, and waits for the moves that the use needs."""
        unit, sends, receives = self._uses[position]
        self._write_copied()
        if sends.nbytes:
            yield from self._send(unit, sends)
        if receives.nbytes:
            yield from self._receive(position)

    def _send(self, unit: int, input_: Input) -> Acting[None]:
        """Starts the move of an input from the device, once there is room for it."""
        if not self._machine.on_cpu:
            yield from self._machine.counted("upload", until(self._download))
            self._download = self._machine.download("input download", unit, input_.nbytes)
        if input_.on_disk:
            self._unwritten.append((unit, input_.nbytes, self._download))
            self._write_copied()
            while len(self._writes) >= _BUFFERS:
                yield from self._machine.counted("read", until(self._writes.popleft()))

    def _write_copied(self) -> None:
        while self._unwritten and ((copied := self._unwritten[0][2]) is None or copied.done):
            unit, nbytes, _ = self._unwritten.popleft()
            self._writes.append(self._machine.write("input write", "inputs_written", unit, nbytes))
        while self._writes and self._writes[0].done:
            self._writes.popleft()

    def _receive(self, position: int) -> Acting[None]:
        if position not in self._uploads:
            self._read(position)
            yield from self._machine.counted("read", until(self._reads.get(position)))
            self._upload(position)
        ahead: int | None = position
        for count in range(1 + _READ_AHEAD):
            ahead = self._next.get(ahead) if ahead is not None else None
            if ahead is not None:
                self._read(ahead)
                work = self._reads.get(ahead)
                if count == 0 and (work is None or work.done):
                    self._upload(ahead)
        yield from self._machine.counted("upload", until(self._uploads.pop(position)))
        self._reads.pop(position, None)

    def _read(self, position: int) -> None:
        """Starts to read an input that waits on a drive, unless it is read already."""
        unit, _, input_ = self._uses[position]
        if input_.on_disk and position not in self._reads:
            self._reads[position] = self._machine.read(
                "input read", "inputs_read", unit, input_.nbytes, Priority.NORMAL
            )

    def _upload(self, position: int) -> None:
        """Starts to copy an input to the device, unless it is on its way already. A CPU has nothing to copy."""
        unit, _, input_ = self._uses[position]
        if position not in self._uploads:
            nbytes = 0 if self._machine.on_cpu else input_.nbytes
            self._uploads[position] = self._machine.upload(unit, nbytes, "input upload")


# -- placement -----------------------------------------------------------------------------------------
#
# Arguments of a simulation, derived from a placement.


def update_costs(
    parts: Partitions, placement: Placement, slots: int, early_units: Collection[int] = (), commit_every: int = 1
) -> list[UpdateCost | None]:
    """Returns the cost of each unit's update; None for units without trainable parameters.

    `early_units` are those whose update may begin under the backward. Of `commit_every` steps one is committed; bytes
    that are written at commits alone count for each step in equal parts.
    """
    stored = placement.stored(parts, slots) or ({},) * len(parts.nbytes)
    frozen = parts.frozen or (0,) * len(parts.nbytes)
    rows = zip(parts.nbytes, placement.tiers, stored, frozen, parts.trainable_numel, strict=True)
    costs: list[UpdateCost | None] = []
    for unit, (nbytes, tiers, in_store, frozen_nbytes, numel) in enumerate(rows):
        if not numel:
            costs.append(None)
            continue
        weight = nbytes[State.WEIGHT] - frozen_nbytes if State.WEIGHT in in_store else 0
        beside = {state: size for state, size in in_store.items() if state is not State.WEIGHT}
        read = sum(size for state, size in beside.items() if tiers[state] is Tier.DISK)
        spilled = nbytes[State.GRAD] if tiers[State.GRAD] is Tier.DISK else 0
        written = weight + sum(beside.values())
        costs.append(UpdateCost(numel, weight, read, written, spilled, revocable=unit in early_units))
    for unit in placement.deferred(parts, slots, commit_every):
        cost = costs[unit]
        assert cost is not None, "a unit without trainable parameters is never written"
        costs[unit] = cost._replace(written_nbytes=cost.written_nbytes // commit_every)
    return costs


def buffer_budgets(parts: Partitions, placement: Placement) -> Budgets:
    """Returns the bytes for host buffers of weights, and for units that move to the device and are evicted."""
    promoted = parts.pages_nbytes(placement.promoted)
    return Budgets(
        placement.classes.weights + placement.classes.cache - promoted,
        placement.moving_nbytes - tier_nbytes(parts, placement.tiers, Tier.DEVICE),
    )


def staying(parts: Partitions, placement: Placement) -> frozenset[int]:
    """Returns the units whose parameters keep their memory on the device."""
    return frozenset(unit for unit, row in enumerate(placement.tiers) if parts.device_resident(unit, row))
