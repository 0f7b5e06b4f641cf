"""Inputs of a simulation, derived from a placement."""

from __future__ import annotations

from collections.abc import Mapping

from offload.layout.placement import Placement
from offload.layout.tiers import Partitions, tier_nbytes
from offload.planner.simulation.simulate import Budgets
from offload.planner.simulation.updater import UpdateCost
from offload.sizes import align_up
from offload.states import State, Tier


def update_costs(parts: Partitions, placement: Placement, slots: int) -> list[UpdateCost | None]:
    """Returns the cost of each unit's update; None for units without trainable parameters."""
    stored = placement.stored(parts, slots) or ({},) * len(parts.nbytes)
    frozen = parts.frozen or (0,) * len(parts.nbytes)
    rows = zip(parts.nbytes, placement.tiers, stored, frozen, parts.trainable_numel, strict=True)
    return [_update_cost(*row, slots) if row[-1] else None for row in rows]


def _update_cost(
    nbytes: Mapping[State, int],
    tiers: Mapping[State, Tier],
    stored: Mapping[State, int],
    frozen: int,
    numel: int,
    slots: int,
) -> UpdateCost:
    """Returns the cost of one unit's update. `stored` contains the states that a commit writes."""
    on_disk = all(tier is Tier.DISK for state, tier in tiers.items() if state is not State.GRAD)
    weight = nbytes[State.WEIGHT] - frozen if State.WEIGHT in stored else 0
    beside = {state: each for state, each in stored.items() if state is not State.WEIGHT}
    return UpdateCost(
        numel,
        weight,
        sum(each for state, each in beside.items() if tiers[state] is Tier.DISK),
        weight + sum(beside.values()),
        nbytes[State.GRAD] if tiers[State.GRAD] is Tier.DISK else 0,
        # States in memory are updated in place, and so are those of a store with one slot. A gradient on DISK would
        # have to be written and read first.
        revocable=on_disk and slots == 2 and tiers[State.GRAD] is not Tier.DISK,
    )


def buffer_budgets(parts: Partitions, placement: Placement) -> Budgets:
    """Returns the bytes for host buffers of weights, and for units that move to the device and are evicted."""
    promoted = sum(align_up(parts.nbytes[unit][state]) for unit, state in placement.promoted)
    return Budgets(
        placement.classes.weights + placement.classes.cache - promoted,
        placement.moving_nbytes - tier_nbytes(parts, placement.tiers, Tier.DEVICE),
    )


def staying(parts: Partitions, placement: Placement) -> frozenset[int]:
    """Returns the units whose parameters keep their memory on the device."""
    return frozenset(unit for unit, row in enumerate(placement.tiers) if parts.device_resident(unit, row))
