"""A lower bound of the seconds of a step. No order of moves is faster.

The bound is the larger of two:

order    max over k of (updates up to the k-th use + the first forward from the k-th use on) + the other passes, each
         the larger of its compute and the reads of weights that cannot be in memory when the pass starts
work     the larger of all traffic of the drives and all compute; on a CPU, compute includes the optimizer's kernel,
         which runs on the same cores

With updates under the backward, the k-th term adds no whole passes, but only their compute up to the moment at which
the first of these updates may begin.

A unit's update ends before the unit's next use. The bound leaves out weights that may be in a host buffer when the step
starts, and the writes of the last few tiles, which may overlap the use of the unit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from offload.planner.memory import Memory
from offload.planner.simulation.inputs import buffer_budgets
from offload.planner.simulation.machine import Rates
from offload.planner.simulation.simulate import Use
from offload.planner.simulation.updater import UpdateCost
from offload.states import State, Tier


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
    speculates: bool = False,
) -> float:
    """Returns the lower bound of a step's seconds.

    Args:
        first: uses of the step's first forward, in order.
        others: uses of each other forward and of each backward.
        memory: the placement and the budgets.
        costs: one entry per unit; None for a unit without trainable parameters.
        rates: bytes and elements per second.
        tile_numel: elements of a tile of the update worker.
        speculates: True if a unit may be updated as soon as its gradient is complete.
    """
    costs, used = _as_read(costs, memory), {use.unit for use in first}
    again, buffer_nbytes = _again(memory, used), _buffers_of_updates(memory, speculates)
    # The last tiles of an update may still be written while its unit is used, so `order` must not wait for them.
    tiles = memory.placement.tile_buffers * max(tile_numel, memory.parts.whole.tile)
    unwritten = max((tiles * cost.written_nbytes / cost.numel for cost in costs if cost is not None), default=0.0)
    whole = sum(max(sum(use.seconds for use in one), again / rates.read) for one in others)
    elapsed = _completed(others) if speculates else {}
    left = sum(use.seconds for use in first)
    order = left + whole
    # The k-th use starts after the updates of all units used so far; the rest of the forward follows the k-th use.
    seen: set[int] = set()
    done = _Updates()
    for use in first:
        # Only the first use of a unit waits for its update.
        if use.unit not in seen:
            seen.add(use.unit)
            done = done.plus(costs[use.unit])
            if speculates:
                whole = min(whole, elapsed.get(use.unit, 0.0))
        read = done.read + max(0, done.weights - buffer_nbytes)
        before = _drive_seconds(read, max(0.0, done.written - unwritten), rates)
        if not rates.on_cpu:
            # On a CPU the kernel shares the cores with compute, so `_work` counts both instead.
            before = max(before, done.numel / rates.kernel)
        order = max(order, before + left + whole)
        left -= use.seconds
    compute = sum(use.seconds for one in (first, *others) for use in one)
    return max(order, _work(compute, least_moved(memory, costs, 1 + len(others), speculates, used), costs, rates))


def _completed(others: Sequence[Sequence[Use]]) -> dict[int, float]:
    """Returns for each unit the compute of the passes after the first one up to its complete gradient, in seconds."""
    found: dict[int, float] = {}
    elapsed = 0.0
    for use in (use for one in others for use in one):
        elapsed += use.seconds
        found |= dict.fromkeys((use.unit, *use.completes), elapsed)
    return found


def _as_read(costs: Sequence[UpdateCost | None], memory: Memory) -> list[UpdateCost | None]:
    """Returns `costs` without reads of weights whose tier is above DISK: a commit writes them, nothing reads them."""
    return [
        cost if cost is None or tiers[State.WEIGHT] is Tier.DISK else cost._replace(weight_nbytes=0)
        for cost, tiers in zip(costs, memory.placement.tiers, strict=True)
    ]


def least_moved(
    memory: Memory,
    costs: Sequence[UpdateCost | None],
    passes: int,
    speculates: bool = False,
    used: Collection[int] | None = None,
) -> tuple[int, int]:
    """Returns the fewest bytes that the drives read and write in a step, but for inputs of blocks.

    With all states on disk in bf16 and little memory these are 24 bytes of each parameter for its update, and 2 for
    each pass but the first, whose weights come from the update.

    Args:
        memory: the placement and the budgets.
        costs: one entry per unit; None for a unit without trainable parameters.
        passes: times that all weights have to be on the device: forwards and backwards, or 2 if layer-major.
        speculates: True if a unit may be updated as soon as its gradient is complete.
        used: units that each pass uses; None for all.
    """
    every = _Updates()
    for cost in _as_read(costs, memory):
        every = every.plus(cost)
    weights = max(0, every.weights - _buffers_of_updates(memory, speculates))
    return every.read + weights + _again(memory, used) * (passes - 1), every.written + every.spilled


def _again(memory: Memory, used: Collection[int] | None) -> int:
    """Returns the bytes of weights that neither host buffers nor the device can keep from one pass to the next."""
    kept = buffer_budgets(memory.parts, memory.placement).host + memory.placement.moving_nbytes
    return max(0, _weights_on_disk(memory, used) - kept)


def _buffers_of_updates(memory: Memory, speculates: bool) -> int:
    """Returns the bytes of weights that updates need not read, or whose read spares one for the next use."""
    # An update under the backward finds the weights of a use; for the next use they may have to be read again.
    more = memory.placement.moving_nbytes if speculates else 0
    return buffer_budgets(memory.parts, memory.placement).host + more


def _work(compute: float, moved: tuple[int, int], costs: Sequence[UpdateCost | None], rates: Rates) -> float:
    """Returns the seconds of the busiest resource: the drives, or the processors.

    Args:
        compute: seconds of the model.
        moved: bytes that the drives read and write.
        costs: one entry per unit; None for a unit without trainable parameters.
        rates: bytes and elements per second.
    """
    kernel = sum(cost.numel for cost in costs if cost is not None) / rates.kernel
    cores = compute + kernel if rates.on_cpu else max(compute, kernel)
    return max(cores, _drive_seconds(*moved, rates))


def _drive_seconds(read: float, written: float, rates: Rates) -> float:
    """Returns the seconds to read and write these bytes, both at once or one after the other, whichever is faster."""
    if not read + written:
        return 0.0
    return min(read / rates.read + written / rates.written, rates.drive_seconds(read, written))


def _weights_on_disk(memory: Memory, used: Collection[int] | None) -> int:
    """Returns the bytes of all weights whose tier is DISK, of units that are `used`; None for all."""
    rows = enumerate(zip(memory.parts.nbytes, memory.placement.tiers, strict=True))
    return sum(
        nbytes[State.WEIGHT]
        for unit, (nbytes, tiers) in rows
        if tiers[State.WEIGHT] is Tier.DISK and (used is None or unit in used)
    )
