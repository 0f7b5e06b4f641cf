"""A step before it is made: played by `simulate` with a machine's rates, and from how many tokens on all I/O can hide.

compute of a use  =  flops / matmul + bytes of weights / weights + bytes / elementwise, once more where recomputed,
                     + what it takes to hand the weights over where the CPU computes
its backward      =  products again for what comes in, and once more for weights that train, + 2 bytes / elementwise
of an embedding   =  bytes of its gradient / fresh, and as much again for each other use of it, to sum them
gradient of a unit:  beside the backward's compute on a GPU, after it where the CPU computes
added up on a GPU:   (2 * bytes of its total + bytes of its gradient) / elementwise; the total leaves with the last
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from offload.layout.pager_inputs import limits, unit_sizes
from offload.planner.bound import least
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory
from offload.planner.model_shape import Shape
from offload.planner.simulation import machine as simulate_machine
from offload.planner.simulation.inputs import lease_budgets, update_costs
from offload.planner.simulation.machine import Moved, Waited
from offload.planner.simulation.simulate import Simulation, simulate
from offload.planner.simulation.simulate import Use as TimedUse
from offload.planner.simulation.updater import UpdateCost
from offload.report import phases
from offload.sizes import MIB
from offload.states import State, Tier

_NEAR = 1.05
"""Of a bound: a step within it has reached it."""
_LIBRARIES = 32 * MIB
"""That come with the first step, and stacks of threads."""
_TILES_OF_A_UNIT = 16
"""Played at most, for the time that playing takes."""


class Load(NamedTuple):
    """What a step computes."""

    batch: int
    """Sequences of a micro-batch."""
    accumulation: int = 1
    recompute: bool = False

    def tokens(self, shape: Shape) -> int:
        """Of a step."""
        return self.batch * self.accumulation * shape.sequence


class Pass(NamedTuple):
    """A use of a unit: what it computes, in seconds."""

    unit: int
    seconds: float
    backward: float = 0.0
    """Of its backward, where it is a use of a forward."""
    lookup: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """A step, from one return of `step()` to the next."""

    seconds: float
    compute_seconds: float
    formula_seconds: float
    """The least that it can take, see `bound`."""
    busy: dict[str, float]
    """Seconds of work by what does it: compute, PCIe, NVMe, DRAM (the optimizer's kernel)."""
    limit: str
    """Which of them most of the step's seconds are spent on, computing or waiting; or "budget"."""
    limit_seconds: float
    """Those of it."""
    waited: Waited
    moved: Moved
    tokens: int
    simulation: Simulation

    @property
    def hidden(self) -> bool:
        """Whether all I/O is, but for a twentieth."""
        return self.seconds <= _NEAR * self.compute_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part of a step, as a run will measure them.

        Uploads are in "compute": the device's own queue waits for them, or the thread that computes makes them.
        """
        waited, worked = self.waited, self.simulation.worked
        return phases.parts(
            {
                "seconds": self.seconds,
                "forward_seconds": self.seconds,  # and backward, and the step: their sum is what counts
                "wait_for_updates_seconds": waited.update,
                "wait_for_reads_seconds": waited.read,
                "wait_for_memory_seconds": waited.room,
                "update_kernels_seconds": worked.kernels,
                "update_waits_for_reads_seconds": worked.reads,
                "update_waits_for_writes_seconds": worked.writes,
            }
        )


def forward(shape: Shape, hardware: Hardware, batch: int) -> list[Pass]:
    """The uses of one micro-batch's forward."""
    found, times = [], Counter(use.unit for use in shape.uses)
    for use in shape.uses:
        layout = shape.layouts[use.unit]
        learning, nbytes = layout.trainable_stop / layout.numel, hardware.itemsize * layout.numel
        products = batch * use.flops / hardware.matmul + (nbytes / hardware.weights if use.flops else 0.0)
        other = batch * use.nbytes / hardware.elementwise
        made = times[use.unit] * learning * nbytes / hardware.fresh if use.lookup else 0.0
        back = (1 + learning) * products + 2 * other + made
        handed = hardware.handed_seconds
        found.append(Pass(use.unit, products + other + handed, back + handed, use.lookup))
    return found


def backwards(first: Sequence[Pass], memory: Memory, hardware: Hardware, load: Load) -> list[list[Pass]]:
    """The uses of the backward of each micro-batch of a step."""
    numels, totals = memory.parts.trainable_numel, dict(memory.placement.added)
    last = backward(first, numels, hardware, load.recompute, totals)
    if load.accumulation == 1:
        return [last]
    return [backward(first, numels, hardware, load.recompute, totals, leave=False)] * (load.accumulation - 1) + [last]


def backward(
    first: Sequence[Pass],
    parts_numel: Sequence[int],
    hardware: Hardware,
    recompute: bool,
    totals: Mapping[int, int] = {},
    leave: bool = True,
) -> list[Pass]:
    """The uses of its backward; a gradient leaves with the last use of its unit.

    `totals` are bytes of those that are added up on the device, by unit; they `leave` with the last micro-batch.
    """
    last = {each.unit: position for position, each in reversed(list(enumerate(first)))}
    found: list[Pass] = []
    for position, each in reversed(list(enumerate(first))):
        seconds = each.backward + (each.seconds if recompute else 0.0)
        if last[each.unit] == position and each.unit in totals:
            nbytes = totals[each.unit]
            seconds += (2 * nbytes + hardware.itemsize * parts_numel[each.unit]) / hardware.elementwise
            seconds = max(seconds, nbytes / hardware.download) if leave else seconds
        elif last[each.unit] == position:
            seconds = _with_gradient(seconds, parts_numel[each.unit], hardware)
        if each.lookup and found:  # its weights are not fetched for it
            found[-1] = found[-1]._replace(seconds=found[-1].seconds + seconds)
        else:
            found.append(Pass(each.unit, seconds))
    return found


def _with_gradient(seconds: float, numel: int, hardware: Hardware) -> float:
    kept = numel / hardware.gradient
    return seconds + kept if hardware.on_cpu else max(seconds, kept, hardware.itemsize * numel / hardware.download)


def rates_of(memory: Memory, hardware: Hardware) -> simulate_machine.Rates:
    """What `simulate` counts with."""
    return simulate_machine.Rates(
        hardware.read or math.inf,  # without drives nothing is read or written
        hardware.written or math.inf,
        hardware.mixed or math.inf,
        hardware.upload,
        hardware.optimizer if hardware.on_cpu else _updated(memory, hardware),
        hardware.on_cpu,
    )


def _updated(memory: Memory, hardware: Hardware) -> float:
    """Parameters that are updated in a second, where each unit's update runs on the GPU or on the host.

    What lives on the GPU is updated there if its gradient stays there too; else it goes to the host and back.
    """
    seconds = 0.0
    for row, nbytes, numel in zip(
        memory.placement.homes, memory.parts.nbytes, memory.parts.trainable_numel, strict=True
    ):
        there = sum(nbytes[state] for state in row if state is not State.GRAD and row[state] is Tier.DEVICE)
        if numel and all(home is Tier.DEVICE for home in row.values()):
            seconds += numel / hardware.device_optimizer
        elif numel:
            seconds += numel / hardware.optimizer + there / hardware.download + there / hardware.upload
    return sum(memory.parts.trainable_numel) / seconds if seconds else hardware.optimizer


def predict(memory: Memory, shape: Shape, hardware: Hardware, load: Load, steps: int = 3) -> Timing:
    """Play a step. Raises `BudgetError` where what is in use at a time has no room on the device."""
    first = forward(shape, hardware, load.batch)
    second = backwards(first, memory, hardware, load)
    passes = [TimedUse(each.unit, each.seconds) for back in second for each in (*first, *back)]
    shares = tuple((layout.trainable(0, 1), layout.frozen(0, 1)) for layout in memory.layouts)
    costs = update_costs(memory.parts, memory.placement, memory.slots, memory.mode)
    rates = rates_of(memory, hardware)
    tile = _tile_numel(memory)
    found = simulate(
        passes,
        unit_sizes(memory.layouts, memory.placement, shares, memory.mode),
        costs,
        lease_budgets(memory.parts, memory.placement),
        limits(memory.config, memory.mode),
        rates,
        memory.config.offload.debug.overlap,
        tile,
        steps,
    )
    compute = sum(each.seconds for each in passes)
    busy = _busy(found, costs, rates, compute, hardware)
    bound = min(_least(first, second, memory, costs, rates), found.seconds)  # where both are one sum, by its rounding
    limit, limit_seconds = _limit(found, compute, hardware.on_cpu)
    return Timing(
        seconds=found.seconds,
        compute_seconds=compute,
        formula_seconds=bound,
        busy=busy,
        limit=limit,
        limit_seconds=limit_seconds,
        waited=found.waited,
        moved=found.moved,
        tokens=load.tokens(shape),
        simulation=found,
    )


def _busy(
    found: Simulation,
    costs: Sequence[UpdateCost | None],
    rates: simulate_machine.Rates,
    compute: float,
    hardware: Hardware,
) -> dict[str, float]:
    uploads = sum(span.end - max(span.start, 0.0) for span in found.spans if span.row == "upload")
    moved = found.moved
    kernel = sum(cost.numel for cost in costs if cost is not None) / rates.kernel
    return {
        "compute": compute,
        "PCIe": 0.0 if hardware.on_cpu else uploads,
        "NVMe": rates.drive_seconds(moved.read, moved.written) if moved.read + moved.written else 0.0,
        "DRAM": max(kernel, (moved.read + moved.written) / hardware.memory),
    }


def _limit(found: Simulation, compute: float, on_cpu: bool) -> tuple[str, float]:
    """The step's seconds are those of compute, of waits, and on a CPU of what else its cores do meanwhile."""
    waited, worked = found.waited, found.worked
    updates = "DRAM" if worked.kernels > worked.reads + worked.writes else "NVMe"
    rest = max(0.0, found.seconds - compute - sum(waited)) + waited.upload
    spent: dict[str, float] = defaultdict(float, {"compute": compute, "budget": waited.room, "NVMe": waited.read})
    spent[updates] += waited.update
    spent["DRAM" if on_cpu else "PCIe"] += rest  # copies, beside the kernel where that takes the same cores
    return max(spent.items(), key=lambda each: each[1])


def _tile_numel(memory: Memory) -> int:
    """Elements of an update that are read, computed and written at a time, as it is played."""
    return max(memory.placement.tile_numel, max(memory.parts.trainable_numel) // _TILES_OF_A_UNIT)


def _least(
    first: Sequence[Pass],
    second: Sequence[Sequence[Pass]],
    memory: Memory,
    costs: Sequence[UpdateCost | None],
    rates: simulate_machine.Rates,
) -> float:
    """What `bound` says of a step of these passes."""
    opening, *others = ([TimedUse(each.unit, each.seconds) for each in one] for back in second for one in (first, back))
    return least(opening, others, memory, costs, rates, _tile_numel(memory))


def hiding_tokens(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> int | None:
    """Tokens of a micro-batch from which a step can hide all but a twentieth; None where no number does."""
    costs = update_costs(memory.parts, memory.placement, memory.slots, memory.mode)
    rates = rates_of(memory, hardware)

    def hidden(batch: int) -> bool:
        first = forward(shape, hardware, batch)
        second = backwards(first, memory, hardware, load)
        compute = sum(each.seconds for each in (*first * load.accumulation, *chain(*second)))
        return _least(first, second, memory, costs, rates) <= _NEAR * compute

    batch = 1
    while not hidden(batch):
        batch *= 2
        if batch * shape.sequence > 1 << 24:
            return None
    low = batch // 2
    while batch - low > 1:
        middle = (low + batch) // 2
        low, batch = (low, middle) if hidden(middle) else (middle, batch)
    return batch * shape.sequence


# -- memory of a step ---------------------------------------------------------------------------------


def activations(shape: Shape, load: Load) -> int:
    """Bytes that a micro-batch keeps for its backward, and the largest that it makes, with a gradient as large."""
    kept = sum(use.saved for use in shape.uses)
    if load.recompute:
        layers = [use.saved for use in shape.uses[:-1]]
        kept = sum(use.boundary for use in shape.uses) + max(layers, default=0) + shape.uses[-1].saved
    return load.batch * (kept + 2 * shape.temporary)


def beside_weights(memory: Memory, shape: Shape, load: Load) -> int:
    """Bytes of a GPU that activations take, and gradients until they have left it: at most those of one unit."""
    leave = any(homes.get(State.GRAD, Tier.DEVICE) is not Tier.DEVICE for homes in memory.placement.homes)
    return activations(shape, load) + (memory.parts.largest_gradient if leave else 0)


def host_peak(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> int:
    """Bytes of RAM above what the process has before: the host arena, and where the CPU computes all of its own.

    There the arena has what was touched: not the tiles, where states are updated in their homes. Beside activations
    torch has a gradient, of a layer's weights a copy in the order in which its products want them, and the first of two
    gradients where weights are tied.
    """
    if not hardware.on_cpu:
        return memory.host  # pinned at the start, all of it
    touched = memory.host - (0 if memory.slots or memory.spilled else memory.placement.classes.tiles)
    parts = memory.parts
    tied = len({use.unit for use in shape.uses}) < len(shape.uses)
    beside = (1 + tied) * parts.largest_gradient + parts.largest_unit + _LIBRARIES
    return touched + memory.device + activations(shape, load) + beside
