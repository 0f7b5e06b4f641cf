"""Construction of an engine's learning-rate schedule: the one that the user passed, or the config's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from offload.config import SchedulerBlock
from offload.config.blocks.values import spelled_number
from offload.errors import ConfigError
from offload.schedules import MADE_BY
from offload.schedules.base import Schedule


class Chosen(NamedTuple):
    """The schedule of an engine, or None, and notices for the user."""

    schedule: Any
    notices: tuple[str, ...]


def choose(block: SchedulerBlock | None, given: Any, optimizer: torch.optim.Optimizer) -> Chosen:
    """Returns the engine's schedule.

    Args:
        block: the config's scheduler block; None if the config has none.
        given: a schedule, a function that makes one from the optimizer, or None.
        optimizer: the engine's optimizer.

    Raises:
        ConfigError: the schedule cannot be made, or does not fit the optimizer.
    """
    if given is not None:
        lines = (
            ()
            if block is None
            else (f"the schedule {block.type} of the config is not used, because lr_scheduler= was passed",)
        )
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
    """Returns True if `given` makes a schedule: a class, or a function that cannot be stepped itself."""
    return isinstance(given, type) or (callable(given) and not hasattr(given, "step"))


def _check_given(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raises `ConfigError` if a schedule needs arguments, cannot be stepped, or belongs to another optimizer."""
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric at each step, which engine.step() cannot supply; call step(metric) of "
            "the schedule yourself and do not pass the schedule as lr_scheduler"
        )
    if not callable(getattr(schedule, "step", None)):
        raise ConfigError(
            "lr_scheduler= expects a schedule, an object with step(), or a function that makes a schedule from the "
            f'optimizer, got {type(schedule).__name__}; to choose a schedule by name, use the block "scheduler" of '
            "the config"
        )
    # Groups are compared and not optimizers: a replaced torch optimizer shares its groups with the engine's.
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    if groups and groups[0] is not optimizer.param_groups[0]:
        raise ConfigError(
            f"the {type(schedule).__name__} that was passed as lr_scheduler= moves the learning rates of another "
            "optimizer than the engine's; pass its optimizer as optimizer= too, or pass as lr_scheduler= a function "
            "that makes the schedule from the optimizer that the function receives"
        )


def _of_torch(block: SchedulerBlock, optimizer: torch.optim.Optimizer) -> Any:
    """Returns the schedule of torch that the block names."""
    params = {name: value for name, value in block.params.items() if not (value is None or value == "auto")}
    arguments = {name: _argument(value) for name, value in params.items()}
    try:
        return getattr(torch.optim.lr_scheduler, block.type)(optimizer, **arguments)
    except Exception as error:  # constructors raise any class
        raise ConfigError(f"scheduler.params {params} do not make a torch {block.type}: {error}") from error


def _argument(value: Any) -> Any:
    """Returns a value of the file as torch's schedules expect it; they check no types until they are stepped."""
    if isinstance(value, list):
        return [_argument(each) for each in value]
    number = spelled_number(value)
    # JSON may spell a number of steps as 1e3, which is a float.
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _unused_rates(schedule: Schedule) -> tuple[str, ...]:
    """Returns a notice if the optimizer's learning rate has no effect under the schedule."""
    if not schedule.peaks:
        return ()
    both = (schedule.peaks, schedule.base_lrs)
    mine, theirs = (", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)) for rates in both)
    return (
        (
            f"the learning rate follows the schedule, whose {schedule.PEAK} is {mine}; the optimizer's {theirs} is not "
            "used"
        ),
    )
