"""The least that a step can take: what its order allows, and what any one thing has to do. No order of moves is faster.

order    max over k of (updates up to the k-th use + the first forward from the k-th use on) + the other passes, each
         the larger of its compute and the reads of weights that cannot be in memory when it begins
work     all that the drives move; all compute, and where that is the CPU the optimizer's kernel on the same cores

An update comes before its unit's next use. Not counted are weights that may be in a lease when the step begins, and the
writes of the last few tiles, which may go on while the unit is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.planner.memory import Memory
from offload.planner.simulation.inputs import lease_budgets
from offload.planner.simulation.machine import Rates
from offload.planner.simulation.simulate import Use
from offload.planner.simulation.updater import UpdateCost
from offload.states import State, Tier
from offload.swapper.memory.host_arena import TILE_BUFFERS


class _Updates(NamedTuple):
    """What some updates come to, together."""

    numel: int = 0
    weights: int = 0
    """Bytes that are read unless leases hold them."""
    read: int = 0
    written: int = 0
    spilled: int = 0
    """Bytes of gradients that were written in the backward, and are among what is read."""

    def plus(self, cost: UpdateCost | None) -> _Updates:
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
    """Seconds of a step whose first forward uses `first`, and whose other forwards and backwards use `others`."""
    costs = _as_read(costs, memory)
    leased = lease_budgets(memory.parts, memory.placement).host
    tiles = TILE_BUFFERS * tile_numel
    unwritten = max((tiles * cost.written_nbytes / cost.numel for cost in costs if cost is not None), default=0.0)
    again = max(0, _weights_on_disk(memory) - leased - memory.placement.moving_nbytes)
    seen: set[int] = set()
    done = _Updates()
    left = order = sum(use.seconds for use in first)
    for use in first:
        if use.unit not in seen:
            seen.add(use.unit)
            done = done.plus(costs[use.unit])
        read = done.read + max(0, done.weights - leased)
        before = _drive_seconds(read, max(0.0, done.written - unwritten), rates)
        if not rates.on_cpu:
            before = max(before, done.numel / rates.kernel)
        order = max(order, before + left)
        left -= use.seconds
    order += sum(max(sum(use.seconds for use in one), again / rates.read) for one in others)
    return max(order, _work(first, others, costs, rates, leased, again))


def _as_read(costs: Sequence[UpdateCost | None], memory: Memory) -> list[UpdateCost | None]:
    """Without weights that are at home above DISK: they are written for a commit, and never read."""
    return [
        cost if cost is None or homes[State.WEIGHT] is Tier.DISK else cost._replace(weight_nbytes=0)
        for cost, homes in zip(costs, memory.placement.homes, strict=True)
    ]


def _work(
    first: Sequence[Use],
    others: Sequence[Sequence[Use]],
    costs: Sequence[UpdateCost | None],
    rates: Rates,
    leased: int,
    again: int,
) -> float:
    every = _Updates()
    for cost in costs:
        every = every.plus(cost)
    read = every.read + max(0, every.weights - leased) + again * len(others)
    compute, kernel = sum(use.seconds for one in (first, *others) for use in one), every.numel / rates.kernel
    cores = compute + kernel if rates.on_cpu else max(compute, kernel)
    return max(cores, _drive_seconds(read, every.written + every.spilled, rates))


def _drive_seconds(read: float, written: float, rates: Rates) -> float:
    """So many bytes, both at once or one after the other, whatever is faster."""
    if not read + written:
        return 0.0
    return min(read / rates.read + written / rates.written, rates.drive_seconds(read, written))


def _weights_on_disk(memory: Memory) -> int:
    """Bytes at home on DISK."""
    homes = zip(memory.parts.nbytes, memory.placement.homes, strict=True)
    return sum(row[State.WEIGHT] for row, home in homes if home[State.WEIGHT] is Tier.DISK)
