"""The schedule of learning rates that an engine has: the one that it was given, or the config's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from offload.config import SchedulerBlock
from offload.errors import ConfigError
from offload.schedules import MADE_BY
from offload.schedules.base import Schedule


class Chosen(NamedTuple):
    """The schedule of an engine, or None, and what a user should know of it."""

    schedule: Any
    notices: tuple[str, ...]


def choose(block: SchedulerBlock | None, given: Any, optimizer: torch.optim.Optimizer) -> Chosen:
    """What was `given` to initialize (a schedule, or what makes one of the optimizer), or else the config's."""
    if given is not None:
        lines = () if block is None else (f"the schedule {block.type} of the config is not used: lr_scheduler= is",)
        schedule = given(optimizer) if _is_factory(given) else given
        _check_given(schedule, optimizer)
        return Chosen(schedule, lines)
    if block is None:
        return Chosen(None, ())
    if block.type not in MADE_BY:
        return Chosen(_of_torch(block, optimizer), ())
    params = {name: value for name, value in block.params.items() if value is not None}
    made = MADE_BY[block.type](optimizer, **params)
    return Chosen(made, _unused_rates(made))


def _is_factory(given: Any) -> bool:
    return isinstance(given, type) or (callable(given) and not hasattr(given, "step"))


def _check_given(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric at each step, which engine.step() has not; call its step(metric) "
            "yourself and do not pass it as lr_scheduler"
        )
    if not callable(getattr(schedule, "step", None)):
        raise ConfigError(
            f"lr_scheduler= expects a schedule, an object with step(), or a function that makes one of the optimizer, "
            f'got {type(schedule).__name__}; one by name is made by the config\'s block "scheduler"'
        )
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    if groups and groups[0] is not optimizer.param_groups[0]:
        raise ConfigError(
            f"the {type(schedule).__name__} that was passed as lr_scheduler= moves the learning rates of another "
            f"optimizer than the engine's; pass its optimizer as optimizer= too, or as lr_scheduler= a function that "
            f"makes the schedule of the optimizer that it gets"
        )


def _of_torch(block: SchedulerBlock, optimizer: torch.optim.Optimizer) -> Any:
    params = {name: value for name, value in block.params.items() if not (value is None or value == "auto")}
    whole = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in params.items()
    }
    try:
        return getattr(torch.optim.lr_scheduler, block.type)(optimizer, **whole)
    except Exception as error:  # they raise what their first line stumbles on
        raise ConfigError(f"scheduler.params {params} do not make a torch {block.type}: {error}") from error


def _unused_rates(schedule: Schedule) -> tuple[str, ...]:
    """A line where the optimizer's learning rate has no effect."""
    if not schedule.peaks:
        return ()
    both = (schedule.peaks, schedule.base_lrs)
    mine, theirs = (", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)) for rates in both)
    return (
        f"the learning rate is that of the schedule, whose {schedule.PEAK} is {mine}, not the optimizer's {theirs}",
    )
