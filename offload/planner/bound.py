"""A lower bound of the seconds of a step. No order of moves is faster.

The bound is the larger of two:

order    max over k of (updates up to the k-th use + the first forward from the k-th use on) + the other passes, each
         the larger of its compute and the reads of weights that cannot be in memory when the pass starts
work     the larger of all traffic of the drives and all compute; on a CPU, compute includes the optimizer's kernel,
         which runs on the same cores

A unit's update ends before the unit's next use. The bound leaves out weights that may be in a host buffer when the step
starts, and the writes of the last few tiles, which may overlap the use of the unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.planner.memory import Memory
from offload.planner.simulation.inputs import buffer_budgets
from offload.planner.simulation.machine import Rates
from offload.planner.simulation.simulate import Use
from offload.planner.simulation.updater import UpdateCost
from offload.states import State, Tier
from offload.swapper.memory.host_arena import TILE_BUFFERS


class _Updates(NamedTuple):
    """Elements and bytes of several updates together."""

    numel: int = 0
    weights: int = 0
    """Bytes that are read unless host buffers already hold them."""
    read: int = 0
    written: int = 0
    spilled: int = 0
    """Bytes of gradients written during the backward; `read` includes the same bytes."""

    def plus(self, cost: UpdateCost | None) -> _Updates:
        """Returns the sums with one more update; None stands for a unit without trainable parameters."""
        if cost is None:
            return self
        return _Updates(
            self.numel + cost.numel,
            self.weights + cost.weight_nbytes,
            self.read + cost.state_nbytes + cost.gradient_nbytes,
            self.written + cost.written_nbytes,
            self.spilled + cost.gradient_nbytes,
        )


def least(
    first: Sequence[Use],
    others: Sequence[Sequence[Use]],
    memory: Memory,
    costs: Sequence[UpdateCost | None],
    rates: Rates,
    tile_numel: int,
) -> float:
    """Returns the lower bound of a step's seconds.

    Args:
        first: uses of the step's first forward, in order.
        others: uses of each other forward and of each backward.
        memory: the placement and the budgets.
        costs: one entry per unit; None for a unit without trainable parameters.
        rates: bytes and elements per second.
        tile_numel: elements of a tile of the update worker.
    """
    costs = _as_read(costs, memory)
    buffer_nbytes = buffer_budgets(memory.parts, memory.placement).host
    tiles = TILE_BUFFERS * tile_numel
    # The last tiles of an update may still be written while its unit is used, so `order` must not wait for them.
    unwritten = max((tiles * cost.written_nbytes / cost.numel for cost in costs if cost is not None), default=0.0)
    # Weights that neither host buffers nor the device can keep from one pass to the next.
    again = max(0, _weights_on_disk(memory) - buffer_nbytes - memory.placement.moving_nbytes)
    seen: set[int] = set()
    done = _Updates()
    left = order = sum(use.seconds for use in first)
    # The k-th use starts after the updates of all units used so far; the rest of the forward follows the k-th use.
    for use in first:
        # Only the first use of a unit waits for its update.
        if use.unit not in seen:
            seen.add(use.unit)
            done = done.plus(costs[use.unit])
        read = done.read + max(0, done.weights - buffer_nbytes)
        before = _drive_seconds(read, max(0.0, done.written - unwritten), rates)
        if not rates.on_cpu:
            # On a CPU the kernel shares the cores with compute, so `_work` counts both instead.
            before = max(before, done.numel / rates.kernel)
        order = max(order, before + left)
        left -= use.seconds
    order += sum(max(sum(use.seconds for use in one), again / rates.read) for one in others)
    return max(order, _work(first, others, costs, rates, buffer_nbytes, again))


def _as_read(costs: Sequence[UpdateCost | None], memory: Memory) -> list[UpdateCost | None]:
    """Returns `costs` without reads of weights whose tier is above DISK: a commit writes them, nothing reads them."""
    return [
        cost if cost is None or tiers[State.WEIGHT] is Tier.DISK else cost._replace(weight_nbytes=0)
        for cost, tiers in zip(costs, memory.placement.tiers, strict=True)
    ]


def _work(
    first: Sequence[Use],
    others: Sequence[Sequence[Use]],
    costs: Sequence[UpdateCost | None],
    rates: Rates,
    buffer_nbytes: int,
    again: int,
) -> float:
    """Returns the seconds of the busiest resource: the drives, or the processors.

    Args:
        first: uses of the step's first forward.
        others: uses of each other forward and of each backward.
        costs: one entry per unit; None for a unit without trainable parameters.
        rates: bytes and elements per second.
        buffer_nbytes: bytes of host buffers for weights.
        again: bytes of weights that each pass must read again, since no memory holds them.
    """
    every = _Updates()
    for cost in costs:
        every = every.plus(cost)
    read = every.read + max(0, every.weights - buffer_nbytes) + again * len(others)
    compute, kernel = sum(use.seconds for one in (first, *others) for use in one), every.numel / rates.kernel
    cores = compute + kernel if rates.on_cpu else max(compute, kernel)
    return max(cores, _drive_seconds(read, every.written + every.spilled, rates))


def _drive_seconds(read: float, written: float, rates: Rates) -> float:
    """Returns the seconds to read and write these bytes, both at once or one after the other, whichever is faster."""
    if not read + written:
        return 0.0
    return min(read / rates.read + written / rates.written, rates.drive_seconds(read, written))


def _weights_on_disk(memory: Memory) -> int:
    """Returns the bytes of all weights whose tier is DISK."""
    tiers = zip(memory.parts.nbytes, memory.placement.tiers, strict=True)
    return sum(row[State.WEIGHT] for row, by_state in tiers if by_state[State.WEIGHT] is Tier.DISK)
