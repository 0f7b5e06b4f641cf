"""Predicted seconds of a step: `simulate` plays the step with a machine's rates.

input of a block     leaves for HOST or DISK beside the forward of the next block, and returns one block ahead
update of a unit     beside the uses that `step_order` lists: under the next forward, and with speculation under the
                     backward too

The module also predicts from how many tokens per micro-batch all I/O hides behind compute, and what it costs if the
updates under the backward have to be done again.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from offload.errors import ConfigError
from offload.layout.memory_plan import limits, unit_sizes
from offload.layout.modes import LAMB
from offload.layout.optimizer_states import cuts, product_flops
from offload.planner.activations.load import Load
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory
from offload.planner.model_shape import Shape, drawn
from offload.planner.simulation import machine as simulate_machine
from offload.planner.simulation.inputs import buffer_budgets, staying, update_costs
from offload.planner.simulation.machine import Moved, Waited
from offload.planner.simulation.simulate import Simulation, Use, simulate
from offload.planner.simulation.updater import UpdateCost
from offload.planner.step_time.bound import least
from offload.planner.step_time.passes import forward
from offload.planner.step_time.step_order import step_of
from offload.report import phases
from offload.states import State, Tier

MOST_MICRO_BATCHES = 4096
"""Most micro-batches of a step that is predicted: the time of a prediction grows with them, to a minute here."""
_NEAR = 1.05
"""Factor within which a step counts as having reached a bound."""
_STEPS = 3
"""Steps to simulate. The last one is reported, since the first ones start without an access order."""
_SPECULATIVE_STEPS, _COUNTED = 5, 2
"""The same with updates under the backward, where the mean of the last steps is reported: each does work of others."""
_TILES_OF_A_UNIT = 16
"""Most tiles that are simulated per unit: a simulation of the real, smaller tiles would take too long."""
# A search for the best plan, the advice beside it and its report ask for the same steps more than once.
_simulated = functools.lru_cache(maxsize=64)(simulate)


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
    miss_seconds: float
    """Most seconds that a step takes longer if its gradients are clipped, and updates under the backward repeat."""
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


def rates_of(memory: Memory, hardware: Hardware) -> simulate_machine.Rates:
    """Returns the rates for `simulate`."""
    return simulate_machine.Rates(
        hardware.read or math.inf,  # without drives nothing is read or written
        hardware.written or math.inf,
        hardware.mixed or math.inf,
        hardware.upload,
        _kernel_rate(memory, hardware),
        hardware.on_cpu,
        hardware.download,
    )


def _kernel_rate(memory: Memory, hardware: Hardware) -> float:
    """Returns the parameters updated per second, with the products of Muon, which the compute device makes.

    The products are in bf16, and the rate is that of the weights' dtype.
    """
    rate = hardware.optimizer if hardware.on_cpu else _updated(memory, hardware)
    optimizer = memory.config.optimizer
    flops = 0.0
    if optimizer is not None:
        flops = product_flops(memory.layouts, memory.mode.optimizer, optimizer.settings.get("ns_steps", 0))
    numel = sum(memory.parts.trainable_numel)
    return numel / (numel / rate + flops / hardware.matmul) if flops else rate


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
        ConfigError: the step has more micro-batches than are simulated.
    """
    if load.accumulation > MOST_MICRO_BATCHES:
        raise ConfigError(
            f"a plan simulates at most {MOST_MICRO_BATCHES} micro-batches a step, got {load.accumulation}; lower "
            "--accumulation, or raise --batch-size"
        )
    shares = tuple((layout.trainable(0, 1), layout.frozen(0, 1)) for layout in memory.layouts)
    rates = rates_of(memory, hardware)
    early = speculates(memory, load)
    number = _SPECULATIVE_STEPS if early else _STEPS
    # Only the choice of experts differs from step to step.
    each = [_passes(memory, shape, hardware, load, step) for step in range(number if shape.experts else 1)]
    steps = tuple(tuple(use for one in passes for use in one) for passes in each)
    passes, costs = each[-1], _costs(memory, shape)
    found = _simulated(
        steps if shape.experts else steps * number,
        tuple(unit_sizes(memory.layouts, memory.placement, shares, memory.mode)),
        tuple(costs),
        buffer_budgets(memory.parts, memory.placement),
        limits(memory.config, memory.mode),
        rates,
        memory.placement.overlaps_updates(
            memory.config.offload.debug.overlap,
            on_cpu=hardware.on_cpu,
            alone=memory.parts.alone,
            slots=memory.slots,
        ),
        _tile_numel(memory),
        early,
        _COUNTED if early else 1,
        memory.placement.tile_buffers,
    )
    costs = _of_step(costs, passes)
    compute = sum(use.seconds for one in passes for use in one)
    # If both are the same sum, rounding may differ.
    bound = min(_least(passes, memory, costs, rates, load), found.seconds)
    limit, limit_seconds = _limit(found, compute, hardware.on_cpu)
    return Timing(
        seconds=found.seconds,
        compute_seconds=compute,
        formula_seconds=bound,
        busy=_busy(found, costs, rates, compute, hardware),
        limit=limit,
        limit_seconds=limit_seconds,
        waited=found.waited,
        moved=found.moved,
        tokens=load.tokens(shape),
        miss_seconds=_miss_seconds(found, costs, rates),
        simulation=found,
    )


def _passes(memory: Memory, shape: Shape, hardware: Hardware, load: Load, step: int = 0) -> tuple[list[Use], ...]:
    """Returns the uses of a step, pass by pass; the step's number decides which experts each micro-batch visits."""
    stay, count = staying(memory.parts, memory.placement), load.accumulation
    # Without experts all micro-batches are alike.
    draws = range(step * count, (step + 1) * count) if shape.experts else range(1)
    shapes = [drawn(shape, load.batch * shape.sequence, draw) for draw in draws]
    firsts = [forward(each, hardware, load, stay) for each in shapes]
    return step_of(shapes[0], firsts if shape.experts else firsts * count, memory, hardware, load)


def _of_step(costs: Sequence[UpdateCost | None], passes: Sequence[Sequence[Use]]) -> list[UpdateCost | None]:
    """Returns the costs of the updates that a step of these uses makes; None for all other units."""
    used = {use.unit for one in passes for use in one}
    return [None if cost is None or (cost.if_used and unit not in used) else cost for unit, cost in enumerate(costs)]


def speculates(memory: Memory, load: Load) -> bool:
    """Returns True if some unit may be updated before `step()`: its rule needs one pass, and nothing else waits."""
    one_pass = memory.mode.optimizer != LAMB and not memory.mode.whole_units
    return load.speculate and memory.parts.alone and one_pass and memory.config.offload.debug.overlap


def _miss_seconds(found: Simulation, costs: Sequence[UpdateCost | None], rates: simulate_machine.Rates) -> float:
    """Returns the most seconds that a step takes longer if it clips: updates under its backward are made once more."""
    again = [cost for cost in (costs[unit] for unit in found.speculated) if cost is not None]
    read = sum(cost.weight_nbytes + cost.state_nbytes for cost in again)
    written = sum(cost.written_nbytes for cost in again)
    return max(rates.drive_seconds(read, written), sum(cost.numel for cost in again) / rates.kernel) if again else 0.0


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


def _costs(memory: Memory, shape: Shape) -> list[UpdateCost | None]:
    """Returns the cost of each unit's update, with the ends of tiles where these are borders of matrices."""
    costs = update_costs(memory.parts, memory.placement, memory.slots, memory.mode)
    if memory.config.offload.experts == "visited":
        for unit in (unit for each in shape.experts for unit in each.units):
            cost = costs[unit]
            costs[unit] = None if cost is None else cost._replace(if_used=True)
    if not memory.mode.matrix_rule:
        return costs
    tiles = (cuts(layout, memory.mode, layout.trainable(0, 1), True, _tile_numel(memory)) for layout in memory.layouts)
    return [
        None if cost is None else cost._replace(stops=tuple(tile.stop for tile in each))
        for cost, each in zip(costs, tiles, strict=True)
    ]


def _tile_numel(memory: Memory) -> int:
    """Returns the elements of a simulated tile, which may be larger than a real one."""
    return max(memory.placement.tile_numel, max(memory.parts.trainable_numel) // _TILES_OF_A_UNIT)


def _least(
    passes: Sequence[Sequence[Use]],
    memory: Memory,
    costs: Sequence[UpdateCost | None],
    rates: simulate_machine.Rates,
    load: Load,
) -> float:
    """Returns the lower bound of a step of these passes."""
    opening, *others = passes
    return least(opening, others, memory, costs, rates, _tile_numel(memory), speculates(memory, load))


def lower_bound(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> float:
    """Returns the lower bound of a step's seconds; arguments as of `predict`."""
    passes = _passes(memory, shape, hardware, load)
    return _least(passes, memory, _of_step(_costs(memory, shape), passes), rates_of(memory, hardware), load)


def hiding_tokens(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> int | None:
    """Returns the tokens of a micro-batch from which I/O can add at most a twentieth to compute.

    The placement stays that of `memory`. Returns None if no number up to 2**24 tokens suffices.
    """
    every, rates = _costs(memory, shape), rates_of(memory, hardware)

    def hidden(batch: int) -> bool:
        passes = _passes(memory, shape, hardware, load._replace(batch=batch))
        costs = _of_step(every, passes)
        compute = sum(use.seconds for one in passes for use in one)
        # The bound spares most simulations.
        least = _least(passes, memory, costs, rates, load)
        return least <= _NEAR * compute and predict(memory, shape, hardware, load._replace(batch=batch)).hidden

    # Double until I/O hides, then bisect.
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
