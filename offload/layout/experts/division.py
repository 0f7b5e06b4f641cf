"""The division of a model into units that a config asks for. An engine and a plan both divide by `divide`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from offload.config import Config
from offload.layout.config_request import rule_name
from offload.layout.experts.stacks import cut_stacks, described, other_implementations
from offload.layout.modes import ADAM
from offload.layout.units import Stack, Units, find_units


@dataclass(frozen=True)
class Division:
    """All that decides which parameters of a model move together."""

    named: Sequence[str] = ()
    """Names or classes of modules that are one unit each."""
    experts: str = "each"
    """"each", "visited" or "whole", as in the config."""
    rule: str = ADAM
    """Name of the optimizer's rule."""


class Divided(NamedTuple):
    """The units of a model, the stacks that are cut by expert, and lines on them."""

    units: Units
    stacks: tuple[Stack, ...]
    notices: tuple[str, ...]


def division_of(config: Config | None, rule: str | None = None) -> Division:
    """Returns the division that a config asks for.

    Args:
        config: the config; None for the default.
        rule: name of the optimizer's rule; None for that of the config's optimizer, or Adam without one.
    """
    if config is None:
        return Division()
    if rule is None:
        # Without an optimizer in the config the caller passes one to `initialize`; Adam is assumed.
        rule = ADAM if config.optimizer is None else rule_name(config.optimizer)
    return Division(config.units, config.offload.experts, rule)


def divide(model: nn.Module, by: Division | Sequence[str]) -> Divided:
    """Divides the parameters of `model` into units.

    Args:
        model: the model; its structure must not change afterwards.
        by: the division; names of units stand for one that is the default otherwise.

    Raises:
        ConfigError: a name is that of no module and of no class of a module.
    """
    division = by if isinstance(by, Division) else Division(by)
    cut = cut_stacks(model, division.experts, division.rule)
    units = find_units(model, division.named, cut.stacks)
    # A stack may be inside of a unit that the user has named, or its experts too small.
    stacks = tuple(stack for stack in cut.stacks if stack.module in units.experts)
    lines = described(stacks, other_implementations(model, stacks), division.experts)
    return Divided(units, stacks, (*cut.notices, *lines))
