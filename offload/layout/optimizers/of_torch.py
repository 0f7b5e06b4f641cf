"""Optimizers of torch by name: their classes, which of them a kernel of ours computes, and the states of the others."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload import kernels
from offload.errors import ConfigError
from offload.layout.flat_layout import UnitLayout, with_kept
from offload.layout.modes import ADAM, TORCH
from offload.layout.opaque_state import StateField, describe_state

WITHOUT_KERNEL = ("amsgrad", "maximize", "capturable", "differentiable", "initial_accumulator_value")
"""Options of torch's optimizers that the kernels do not implement."""
_REFUSED = {
    "LBFGS": "it computes the loss again and again by a closure, and a step of an engine has the gradients alone",
    "SparseAdam": "it takes sparse gradients, and those of an engine are dense",
}
"""Classes of torch that no engine can run, with the reason."""


def kernel_rule(kind: type, groups: Iterable[Mapping[str, Any]]) -> str:
    """Returns the name of the rule whose kernel computes what an optimizer does; TORCH if none does.

    Args:
        kind: the optimizer's class. A subclass may override `step`, so the exact class counts.
        groups: the options of each group.
    """
    options = list(groups)
    # If a single group sets such an option, torch's own code updates all groups.
    if any(group.get(option) for group in options for option in WITHOUT_KERNEL):
        return TORCH
    if kind in (torch.optim.AdamW, torch.optim.Adam, kernels.CPUAdamW):
        return ADAM
    if kind is torch.optim.Adagrad:
        return "adagrad"
    if kind is torch.optim.SGD:
        # One group with momentum gives all units a momentum buffer.
        return "momentum" if any(group.get("momentum") for group in options) else "sgd"
    return TORCH


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Returns a class of `torch.optim` by a name such as "torch.optim.NAdam".

    Raises:
        ConfigError: there is no such class, or an engine cannot run it.
    """
    known = {
        found: each
        for found, each in vars(torch.optim).items()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    short = name.rpartition(".")[2]
    if name != f"torch.optim.{short}" or short not in known:
        usable = ", ".join(sorted(known.keys() - _REFUSED.keys()))
        raise ConfigError(f"optimizer.type {name} is no optimizer of torch {torch.__version__}, which has {usable}")
    if short in _REFUSED:
        raise ConfigError(f"optimizer.type {name} is not supported: {_REFUSED[short]}; use AdamW")
    return known[short]


def make(name: str, params: Sequence[Any], arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Returns a new optimizer of torch.

    Args:
        name: name of the class, such as "torch.optim.NAdam".
        params: parameters, or groups of them.
        arguments: the other arguments of the class; lists become tuples.

    Raises:
        ConfigError: the class does not exist or does not take the arguments.
    """
    kind: Any = optimizer_class(name)
    known = [each for each in inspect.signature(kind).parameters if each != "params"]
    unknown = [key for key in arguments if key not in known]
    if unknown:
        raise ConfigError(f"optimizer.params contains {unknown[0]}, and {name} takes {', '.join(known)}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    try:
        made: torch.optim.Optimizer = kind(params, **given)
    except Exception as error:  # the class checks its numbers, by errors of any type
        raise ConfigError(f"optimizer.params do not make a {name}: {error}") from error
    return made


def with_states_of_torch(
    layouts: Sequence[UnitLayout], name: str, arguments: Mapping[str, Any], world_size: int = 1
) -> tuple[UnitLayout, ...]:
    """Returns the layouts with the states that an optimizer of torch keeps of each trainable parameter.

    For a plan, which has no optimizer: parameters are meta tensors, or real ones of a few elements if the code needs
    values; the states of these are scaled up.

    Args:
        layouts: the layout of each unit.
        name: name of the class.
        arguments: the arguments of the class.
        world_size: number of ranks.
    """
    known: dict[tuple[int, ...], tuple[StateField, ...]] = {}
    found = []
    for layout in layouts:
        trainable = [segment for segment in layout.segments if segment.trainable]
        for segment in trainable:
            if segment.shape not in known:
                known[segment.shape] = _states(name, arguments, segment.shape)
        found.append(with_kept(layout, {segment.name: known[segment.shape] for segment in trainable}, world_size))
    return tuple(found)


def _states(name: str, arguments: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[StateField, ...]:
    """Returns the states after two steps of a parameter of this shape."""
    with contextlib.suppress(RuntimeError):
        return describe_state(_stepped(name, arguments, shape, "meta"))
    # Each dimension of a state is one of the parameter's, or 1: small ones that differ tell which.
    small = tuple(5 + number for number in range(len(shape)))
    sizes = dict(zip(small, shape, strict=True))
    return tuple(
        each._replace(shape=tuple(sizes.get(size, size) for size in each.shape))
        for each in describe_state(_stepped(name, arguments, small, "cpu"))
    )


def _stepped(name: str, arguments: Mapping[str, Any], shape: tuple[int, ...], device: str) -> Mapping[str, Any]:
    """Returns the states of a parameter of ones after two steps."""
    parameter = nn.Parameter(torch.ones(shape, dtype=torch.float32, device=device))
    optimizer: Any = make(name, [parameter], arguments)
    for _ in range(2):
        parameter.grad = torch.ones(shape, dtype=torch.float32, device=device)
        with torch.device("cpu"):  # whatever the default device of the process
            optimizer.step()
    states: Mapping[str, Any] = optimizer.state[parameter]
    return states
