"""A plan's step in each order of micro-batches, with and without updates under the backward."""

from __future__ import annotations

from typing import NamedTuple

from offload.errors import BudgetError
from offload.layout.schedule import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.planner.recommend import Planned, plan


class Ordered(NamedTuple):
    """A step in one order."""

    schedule: str
    speculate: bool
    """True if units are updated under the backward."""
    planned: Planned | None
    """The plan of the step; None if its activations do not fit."""


def compare(planned: Planned) -> list[Ordered]:
    """Returns the plan's step in each order that its model allows, the oldest one first.

    A step that moves nothing, or has one micro-batch, has fewer orders; a single one is no comparison, and left out.
    """
    found = [
        Ordered(schedule, speculate, _plan(planned, schedule, speculate))
        for schedule in (MICRO_BATCH_MAJOR, LAYER_MAJOR)
        for speculate in (False, True)
    ]
    shown = [each for each in found if each.planned is None or _differs(each, each.planned)]
    return shown if len(shown) > 1 else []


def _differs(each: Ordered, planned: Planned) -> bool:
    """Returns True if a step has the order that it was asked for, and one that no other step of the table has."""
    # A model that is no chain has one order. Without a unit that can be updated early both steps are the same.
    return planned.load.schedule == each.schedule and bool(not each.speculate or planned.timing.simulation.speculated)


def _plan(planned: Planned, schedule: str, speculate: bool) -> Planned | None:
    """Returns the plan with another order; None if its activations do not fit."""
    load = planned.given._replace(schedule=schedule, speculate=speculate)
    try:
        return plan(planned.shape, planned.hardware, load, planned.content)
    except BudgetError:
        return None
