"""Inputs of a simulation that follow from a plan."""

from __future__ import annotations

from collections.abc import Mapping

from offload.layout.placement import Placement
from offload.layout.tiers import Partitions, home_nbytes
from offload.planner.simulation.simulate import Budgets
from offload.planner.simulation.updater import UpdateCost
from offload.sizes import align_up
from offload.states import State, Tier
from offload.swapper.modes import Mode


def update_costs(parts: Partitions, placement: Placement, slots: int, mode: Mode) -> list[UpdateCost | None]:
    """What each unit's update moves; None for units that nothing trains."""
    stored = placement.stored(parts, slots) or ({},) * len(parts.nbytes)
    rows = zip(parts.nbytes, placement.homes, stored, parts.trainable_numel, strict=True)
    return [_update_cost(*row, mode) if row[-1] else None for row in rows]


def _update_cost(
    nbytes: Mapping[State, int], homes: Mapping[State, Tier], stored: Mapping[State, int], numel: int, mode: Mode
) -> UpdateCost:
    weight = numel * mode.weight_dtype.itemsize if State.WEIGHT in stored else 0
    beside = {state: each for state, each in stored.items() if state is not State.WEIGHT}
    return UpdateCost(
        numel,
        weight,
        sum(each for state, each in beside.items() if homes[state] is Tier.DISK),
        weight + sum(beside.values()),
        nbytes[State.GRAD] if homes[State.GRAD] is Tier.DISK else 0,
    )


def lease_budgets(parts: Partitions, placement: Placement) -> Budgets:
    """Room for leases of weights, and for units that come to the device and go."""
    raised = sum(align_up(parts.nbytes[unit][state]) for unit, state in placement.raised)
    return Budgets(
        placement.classes.weights + placement.classes.cache - raised,
        placement.moving_nbytes - home_nbytes(parts, placement.homes, Tier.DEVICE),
    )
