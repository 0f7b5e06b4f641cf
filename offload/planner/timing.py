"""Predicted seconds of a step: `simulate` plays the step with a machine's rates.

compute of a use     flops / matmul + bytes of weights / weights + bytes / elementwise, once more if recomputed,
                     + `handed_seconds` if the CPU computes; on a GPU at least `handed_seconds`, since the host
                     prepares a use while the GPU computes the one before
backward of a use    the products once for the gradient of the input, and once more for that of trainable weights,
                     + 2 * bytes / elementwise
of a tiled MLP       its products once more, and sums of its gradients for each tile; a loss in chunks has sums alone
input of a block     leaves for HOST or DISK beside the forward of the next block, and returns one block ahead
of an embedding      bytes of its gradient / fresh, and the same for each other use of the unit, to sum the gradients
gradient of a unit   copied beside the backward's compute on a GPU, after the compute on a CPU
accumulated on a GPU (2 * bytes of the total + bytes of the gradient) / elementwise; the last micro-batch copies the
                     total to the host

Only repeated blocks are recomputed, not the head. The module also predicts from how many tokens per micro-batch all
I/O hides behind compute.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from offload.layout.pager_inputs import limits, unit_sizes
from offload.planner.activations.formulas import Moving, moving, recomputed
from offload.planner.activations.load import Load
from offload.planner.activations.seconds import of_chunks, of_tiles
from offload.planner.bound import least
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory
from offload.planner.model_shape import Shape
from offload.planner.simulation import machine as simulate_machine
from offload.planner.simulation.inputs import buffer_budgets, staying, update_costs
from offload.planner.simulation.kept_inputs import Input
from offload.planner.simulation.machine import Moved, Waited
from offload.planner.simulation.simulate import Simulation, simulate
from offload.planner.simulation.simulate import Use as TimedUse
from offload.planner.simulation.updater import UpdateCost
from offload.report import phases
from offload.states import State, Tier

_NEAR = 1.05
"""Factor within which a step counts as having reached a bound."""
_STEPS = 3
"""Steps to simulate. The last one is reported, since the first ones start without an access order."""
_TILES_OF_A_UNIT = 16
"""Most tiles that are simulated per unit: a simulation of the real, smaller tiles would take too long."""


class Pass(NamedTuple):
    """A use of a unit and its seconds of compute."""

    unit: int
    seconds: float
    backward: float = 0.0
    """Seconds of the backward, for a use in a forward."""
    lookup: bool = False
    block: bool = False
    """True for a use in a block that is computed again if there is recomputation."""
    sends: Moving = Moving()
    """Input of the block before, which leaves the device in the forward meanwhile."""
    receives: Moving = Moving()
    """Input of the use's block, which has to be on the device before the backward of the use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Prediction of a step, from one return of `step()` to the next."""

    seconds: float
    compute_seconds: float
    formula_seconds: float
    """Lower bound of `seconds`, see `bound`."""
    busy: dict[str, float]
    """Seconds of work by resource: compute, PCIe, NVMe, DRAM (the optimizer's kernel)."""
    limit: str
    """Resource that takes most of the step's seconds, by work or by waits for the resource; or "budget"."""
    limit_seconds: float
    """Seconds of the step that `limit` takes."""
    waited: Waited
    moved: Moved
    tokens: int
    simulation: Simulation

    @property
    def hidden(self) -> bool:
        """Returns True if I/O adds at most a twentieth to the compute."""
        return self.seconds <= _NEAR * self.compute_seconds

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens per second."""
        return self.tokens / self.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Returns the seconds of each phase of a step, under the names by which a run measures them.

        "compute" includes uploads: the device's stream waits for them, or the computing thread copies itself.
        """
        waited, worked = self.waited, self.simulation.worked
        return phases.parts(
            {
                "seconds": self.seconds,
                "forward_seconds": self.seconds,  # includes backward and step: only the sum counts
                "wait_for_updates_seconds": waited.update,
                "wait_for_reads_seconds": waited.read,
                "wait_for_memory_seconds": waited.room,
                "update_kernels_seconds": worked.kernels,
                "update_waits_for_reads_seconds": worked.reads,
                "update_waits_for_writes_seconds": worked.writes,
            }
        )


def forward(shape: Shape, hardware: Hardware, load: Load, stay: Collection[int] = ()) -> list[Pass]:
    """Returns the uses of one micro-batch's forward, in order; units in `stay` never leave the device."""
    found, times = [], Counter(use.unit for use in shape.uses)
    blocks = recomputed(shape, load._replace(recompute=True))
    batch, inside = load.batch, {position for block in blocks for position in block.uses}
    for position, use in enumerate(shape.uses):
        layout = shape.layouts[use.unit]
        learning, nbytes = layout.trainable_stop / layout.numel, hardware.itemsize * layout.numel
        # The time to read weights is paid once per use, for any batch.
        products = batch * use.flops / hardware.matmul + (nbytes / hardware.weights if use.flops else 0.0)
        other = batch * use.nbytes / hardware.elementwise
        # A tied embedding receives a gradient from each of its uses, and all of them are summed.
        made = times[use.unit] * learning * nbytes / hardware.fresh if use.lookup else 0.0
        # One product for the gradient of the input, one for that of the weights if these train.
        back = (1 + learning) * products + 2 * other + made + of_tiles(shape, use, load, hardware)
        if position == len(shape.uses) - 1:
            back += of_chunks(shape, load, hardware)
        handed = hardware.handed(use.unit in stay)
        seconds, back = (_with_host(each, handed, hardware.on_cpu) for each in (products + other, back))
        found.append(Pass(use.unit, seconds, back, use.lookup, position in inside))
    return _with_inputs(found, shape, load)


def _with_inputs(passes: list[Pass], shape: Shape, load: Load) -> list[Pass]:
    """Returns the uses of a forward with the inputs of blocks that they send and receive."""
    blocks, moves = shape.blocks, moving(shape, load)
    for block, after, each in zip(blocks, blocks[1:], moves, strict=False):
        # An input leaves once the next one has come. In the backward the last use of a block is its first one.
        passes[after.uses[0]] = passes[after.uses[0]]._replace(sends=each)
        passes[block.uses[-1]] = passes[block.uses[-1]]._replace(receives=each)
    return passes


def _with_host(seconds: float, handed: float, on_cpu: bool) -> float:
    """Returns a use's seconds with the host's `handed`: after the compute on a CPU, beside it on a GPU."""
    return seconds + handed if on_cpu else max(seconds, handed)


def backwards(first: Sequence[Pass], memory: Memory, hardware: Hardware, load: Load) -> list[list[Pass]]:
    """Returns the uses of the backward of each micro-batch of a step."""
    numels, totals = memory.parts.trainable_numel, dict(memory.placement.added)
    last = backward(first, numels, hardware, load.recompute, totals)
    if load.accumulation == 1:
        return [last]
    return [backward(first, numels, hardware, load.recompute, totals, copies_out=False)] * (load.accumulation - 1) + [
        last
    ]


def backward(
    first: Sequence[Pass],
    parts_numel: Sequence[int],
    hardware: Hardware,
    recompute: bool,
    totals: Mapping[int, int] = {},
    copies_out: bool = True,
) -> list[Pass]:
    """Returns the uses of one backward. A gradient is copied to the host with the last use of its unit.

    Args:
        first: uses of the micro-batch's forward.
        parts_numel: trainable elements of this rank's partition, per unit.
        hardware: the machine.
        recompute: True if the backward computes the forward again.
        totals: bytes of gradients that accumulate on the device, by unit.
        copies_out: True if the totals are copied to the host in this backward, as in the last micro-batch.
    """
    # The backward runs in reverse, so the last use of a unit is its first one in the forward.
    last = {each.unit: position for position, each in reversed(list(enumerate(first)))}
    found: list[Pass] = []
    for position, each in reversed(list(enumerate(first))):
        seconds = each.backward + (each.seconds if recompute and each.block else 0.0)
        if last[each.unit] == position and each.unit in totals:
            nbytes = totals[each.unit]
            seconds += (2 * nbytes + hardware.itemsize * parts_numel[each.unit]) / hardware.elementwise
            seconds = max(seconds, nbytes / hardware.download) if copies_out else seconds
        elif last[each.unit] == position:
            seconds = _with_gradient(seconds, parts_numel[each.unit], hardware)
        # The weights of an embedding are not fetched for the backward.
        if each.lookup and found:
            found[-1] = found[-1]._replace(seconds=found[-1].seconds + seconds)
        else:
            found.append(Pass(each.unit, seconds, receives=each.receives))
    return found


def _with_gradient(seconds: float, numel: int, hardware: Hardware) -> float:
    """Returns the seconds of a backward with the copy of its gradient: after compute on a CPU, beside it on a GPU."""
    kept = numel / hardware.gradient
    return seconds + kept if hardware.on_cpu else max(seconds, kept, hardware.itemsize * numel / hardware.download)


def rates_of(memory: Memory, hardware: Hardware) -> simulate_machine.Rates:
    """Returns the rates for `simulate`."""
    return simulate_machine.Rates(
        hardware.read or math.inf,  # without drives nothing is read or written
        hardware.written or math.inf,
        hardware.mixed or math.inf,
        hardware.upload,
        hardware.optimizer if hardware.on_cpu else _updated(memory, hardware),
        hardware.on_cpu,
        hardware.download,
    )


def _updated(memory: Memory, hardware: Hardware) -> float:
    """Returns the parameters updated per second, averaged over units updated on the GPU and on the host.

    A unit whose states and gradient are all on DEVICE is updated on the GPU. Otherwise its states on DEVICE are copied
    to the host and back.
    """
    seconds = 0.0
    for row, nbytes, numel in zip(
        memory.placement.tiers, memory.parts.nbytes, memory.parts.trainable_numel, strict=True
    ):
        there = sum(nbytes[state] for state in row if state is not State.GRAD and row[state] is Tier.DEVICE)
        if numel and all(tier is Tier.DEVICE for tier in row.values()):
            seconds += numel / hardware.device_optimizer
        elif numel:
            seconds += numel / hardware.optimizer + there / hardware.download + there / hardware.upload
    return sum(memory.parts.trainable_numel) / seconds if seconds else hardware.optimizer


def predict(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> Timing:
    """Returns the prediction of a step.

    Args:
        memory: the placement and the budgets.
        shape: the model.
        hardware: the machine.
        load: work of a step.

    Raises:
        BudgetError: units in use at the same time have no room on the device.
    """
    first = forward(shape, hardware, load, staying(memory.parts, memory.placement))
    second = backwards(first, memory, hardware, load)
    passes = [timed for back in second for timed in (*map(_sending, first), *map(_receiving, back))]
    shares = tuple((layout.trainable(0, 1), layout.frozen(0, 1)) for layout in memory.layouts)
    costs = update_costs(memory.parts, memory.placement, memory.slots, memory.mode)
    rates = rates_of(memory, hardware)
    tile = _tile_numel(memory)
    found = simulate(
        passes,
        unit_sizes(memory.layouts, memory.placement, shares, memory.mode),
        costs,
        buffer_budgets(memory.parts, memory.placement),
        limits(memory.config, memory.mode),
        rates,
        memory.config.offload.debug.overlap,
        tile,
        _STEPS,
    )
    compute = sum(each.seconds for each in passes)
    busy = _busy(found, costs, rates, compute, hardware)
    bound = min(
        _least(first, second, memory, costs, rates), found.seconds
    )  # if both are the same sum, rounding may differ
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


def _sending(each: Pass) -> TimedUse:
    """Returns a use of a forward for the simulation."""
    return TimedUse(each.unit, each.seconds, sends=Input(*each.sends))


def _receiving(each: Pass) -> TimedUse:
    """Returns a use of a backward for the simulation."""
    return TimedUse(each.unit, each.seconds, receives=Input(*each.receives))


def _busy(
    found: Simulation,
    costs: Sequence[UpdateCost | None],
    rates: simulate_machine.Rates,
    compute: float,
    hardware: Hardware,
) -> dict[str, float]:
    """Returns the seconds of work of each resource."""
    on_link: dict[str, float] = defaultdict(float)
    for span in found.spans:
        on_link[span.row] += span.end - max(span.start, 0.0)
    # Both directions of the link work at once.
    copies = max(on_link["upload"] + on_link["input upload"], on_link["input download"])
    moved = found.moved
    kernel = sum(cost.numel for cost in costs if cost is not None) / rates.kernel
    return {
        "compute": compute,
        "PCIe": 0.0 if hardware.on_cpu else copies,
        "NVMe": rates.drive_seconds(moved.read, moved.written) if moved.read + moved.written else 0.0,
        "DRAM": max(kernel, (moved.read + moved.written) / hardware.memory),
    }


def _limit(found: Simulation, compute: float, on_cpu: bool) -> tuple[str, float]:
    """Returns the resource that takes most of the step's seconds, and these seconds.

    The step's seconds divide into compute, waits and, on a CPU, other work of the same cores.
    """
    waited, worked = found.waited, found.worked
    # A wait for an update counts for the resource on which the worker spent most of its time.
    updates = "DRAM" if worked.kernels > worked.reads + worked.writes else "NVMe"
    rest = max(0.0, found.seconds - compute - sum(waited)) + waited.upload
    spent: dict[str, float] = defaultdict(float, {"compute": compute, "budget": waited.room, "NVMe": waited.read})
    spent[updates] += waited.update
    # Copies; on a CPU also the kernel, on the same cores.
    spent["DRAM" if on_cpu else "PCIe"] += rest
    return max(spent.items(), key=lambda each: each[1])


def _tile_numel(memory: Memory) -> int:
    """Returns the elements of a simulated tile, which may be larger than a real one."""
    return max(memory.placement.tile_numel, max(memory.parts.trainable_numel) // _TILES_OF_A_UNIT)


def _least(
    first: Sequence[Pass],
    second: Sequence[Sequence[Pass]],
    memory: Memory,
    costs: Sequence[UpdateCost | None],
    rates: simulate_machine.Rates,
) -> float:
    """Returns the lower bound of a step of these passes."""
    opening, *others = ([TimedUse(each.unit, each.seconds) for each in one] for back in second for one in (first, back))
    return least(opening, others, memory, costs, rates, _tile_numel(memory))


def hiding_tokens(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> int | None:
    """Returns the tokens of a micro-batch from which I/O can add at most a twentieth to compute.

    The placement stays that of `memory`. Returns None if no number up to 2**24 tokens suffices.
    """
    costs = update_costs(memory.parts, memory.placement, memory.slots, memory.mode)
    rates = rates_of(memory, hardware)

    stay = staying(memory.parts, memory.placement)

    def hidden(batch: int) -> bool:
        first = forward(shape, hardware, load._replace(batch=batch), stay)
        second = backwards(first, memory, hardware, load)
        compute = sum(each.seconds for each in (*first * load.accumulation, *chain(*second)))
        return _least(first, second, memory, costs, rates) <= _NEAR * compute

    # Double until I/O hides, then bisect. The bound replaces a simulation, which would be too slow for a search.
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
