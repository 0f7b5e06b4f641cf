"""The groups of an optimizer with a rule for matrices: each group contains matrices alone, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from offload.config import OptimizerBlock
from offload.engine.optim.algorithms import RULES
from offload.engine.optim.optimizer import Optimizer
from offload.errors import ConfigError
from offload.layout.optimizer_states import MARK, checked_mark, matrices_of


def no_rate() -> ConfigError:
    """Returns the error about a missing learning rate."""
    return ConfigError('the learning rate is "auto" or absent; give optimizer.params.lr a number')


def matrix_optimizer(
    groups: Sequence[Mapping[str, Any]], block: OptimizerBlock, rule: str, model: nn.Module
) -> Optimizer:
    """Returns the optimizer Muon or SinkGD of the config's block.

    Args:
        groups: groups of parameters. A group's `use_muon` decides for all its parameters, before their own marks.
        block: the config's optimizer block.
        rule: name of the rule.
        model: the model.

    Raises:
        ConfigError: a learning rate is missing, or a parameter is marked as a matrix and is none.
    """
    settings = block.settings
    matrix_lr, adam_lr = settings.pop(f"{rule}_lr"), settings.pop("adam_lr")
    settings.pop("ns_method", None)  # there is one
    rates = {True: _first(matrix_lr, block.params.lr), False: _first(adam_lr, block.params.lr)}
    divided = [part for group in groups for part in _divided(group, model)] or [{"params": [], MARK: False}]
    for group in divided:
        if "lr" not in group:
            rate = rates[group[MARK]]
            if rate is None:
                raise no_rate()
            group["lr"] = rate
    defaults = {"lr": _first(block.params.lr, adam_lr, matrix_lr), MARK: False, **settings}
    return Optimizer(divided, defaults, RULES[rule])


def _divided(group: Mapping[str, Any], model: nn.Module) -> list[dict[str, Any]]:
    """Returns a group as one of its matrices and one of its other parameters, without those that are empty."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inner = matrices_of(model)
    found: dict[bool, list[Any]] = {True: [], False: []}
    for parameter in group["params"]:
        # A parameter of another model has no name here, and is refused later.
        name = names.get(id(parameter), "a parameter")
        if group.get(MARK) is None:
            mark = name in inner
        else:
            mark = checked_mark(group[MARK], name, tuple(parameter.shape))
        found[mark].append(parameter)
    return [{**group, "params": params, MARK: mark} for mark, params in found.items() if params]


def _first(*rates: float | None) -> float | None:
    """Returns the first rate that is given, or None."""
    return next((rate for rate in rates if rate is not None), None)
