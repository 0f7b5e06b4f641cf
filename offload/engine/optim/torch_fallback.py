"""Optimizers of torch that have no kernel here, run as they are: parameter by parameter, on masters in host memory.

    states of a unit, read as one tile ─► each parameter: master, gradient, its state ─► step() ─► packed again

`step` is called on a likeness of the user's optimizer that has one parameter, with the numbers of its group as they
were at the boundary. What it keeps of a parameter is found by a dry run, and packed (see `packed`). An optimizer whose
parameters depend on each other, or that keeps numbers elsewhere, gives other results that way, and is refused.
The steps of a unit are in `torch_update`.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError
from offload.layout.opaque_state import Kept, describe_state

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OURS = ("offload_place", "origin")
_MANY = 12
"""Steps after which states are there that come later, such as those of every tenth."""
_SMALL = 8
"""Of each dimension, where two parameters are compared with each of them alone."""


class TorchStep(NamedTuple):
    """One step of one parameter."""

    options: Mapping[str, Any]
    """Those of its group."""
    grad_scale: float
    attributes: Mapping[str, Any]
    """What the user has set on the parameter, such as `lr_mult`."""


class TorchSegment(NamedTuple):
    """What to do to a parameter, elements [start, stop) of its unit."""

    start: int
    stop: int
    step: TorchStep


def likeness(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], states: Mapping[torch.Tensor, dict[str, Any]]
) -> torch.optim.Optimizer:
    """Returns an optimizer that is as `optimizer` is, but has only these parameters and their states."""
    found: torch.optim.Optimizer = object.__new__(type(optimizer))
    found.__dict__.update(optimizer.__dict__)
    for taken in ("step", "zero_grad"):  # ours lead to the engine, and a schedule wraps it, to count steps
        found.__dict__.pop(taken, None)
    found.__dict__.update({hooks: collections.OrderedDict() for hooks in _HOOKS})
    found.param_groups = [{**options, "params": list(states)}]
    found.state = collections.defaultdict(dict, dict(states))
    return found


# -- what it keeps ------------------------------------------------------------------------------------


def find_kept(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, tuple[Kept, ...]]:
    """What `optimizer` keeps of each parameter, by the `names` of their ids; of other ids, nothing.

    Raises `ConfigError` where it cannot be run parameter by parameter. Takes memory for one parameter at a time,
    where its code does not run without.
    """
    found: dict[str, tuple[Kept, ...]] = {}
    known: dict[str, tuple[Kept, ...]] = {}
    with torch.random.fork_rng(devices=[]):
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for parameter in (p for p in group["params"] if id(p) in names):
                name, shape, attributes = names[id(parameter)], tuple(parameter.shape), attributes_of(parameter)
                key = f"{shape} {options} {attributes}"
                if key not in known:
                    with _explained(optimizer, name):
                        _check_apart(optimizer, options, [min(size, _SMALL) for size in shape], attributes)
                        known[key] = _dry_run(optimizer, options, shape, attributes)
                found[name] = known[key]
    return found


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """What somebody has set on a parameter, which optimizers may look at."""
    return {name: value for name, value in vars(parameter).items() if name not in _OURS}


@contextlib.contextmanager
def _explained(optimizer: torch.optim.Optimizer, name: str) -> Iterator[None]:
    """Whatever goes wrong in the user's optimizer is a `ConfigError`."""
    try:
        yield
    except Exception as error:
        kind = type(optimizer)
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} has no kernel here, so it would be run by itself, parameter by "
            f"parameter; with {name} that does not go: {cause(error)}; give another optimizer, or a name "
            f"in the config"
        ) from error


def cause(error: Exception) -> str:
    """Returns the words of an error for a message of ours; those of a KeyError are a bare key."""
    return f"KeyError: {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def _dry_run(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], shape: Sequence[int], attributes: Mapping[str, Any]
) -> tuple[Kept, ...]:
    """What is there after a second step, of a parameter that has no memory where that goes."""
    with contextlib.suppress(Exception):  # then its code needs values, and says what is wrong below
        return describe_state(_steps(optimizer, options, [torch.full(shape, 1e-3, device="meta")], attributes)[0][1])
    return describe_state(_steps(optimizer, options, [torch.full(shape, 1e-3, device="cpu")], attributes)[0][1])


def _check_apart(
    optimizer: torch.optim.Optimizer, given: Mapping[str, Any], shape: Sequence[int], attributes: Mapping[str, Any]
) -> None:
    """Raise `ValueError` where parameters together do not do what each does alone, or states come and go."""
    options = {**given, "lr": 1e-3} if "lr" in given and given["lr"] is not None else given  # a schedule begins with 0
    values = [torch.linspace(-1, 1, math.prod(shape), device="cpu").reshape(shape) * factor for factor in (1.0, 0.1)]
    both = _steps(optimizer, options, values, attributes)
    for value, (together, _) in zip(values, both, strict=True):
        alone, _ = _steps(optimizer, options, [value], attributes)[0]
        if not torch.equal(alone, together):
            raise ValueError("what a parameter becomes depends on others, or on random numbers")
        if value.numel() and torch.equal(alone, value):
            raise ValueError("a parameter that has a gradient stays as it is; does it step for another optimizer?")
        others = _steps(optimizer, options, [value], attributes, _other_groups(optimizer))[0][0]
        if not torch.equal(others, alone):
            raise ValueError("what a parameter becomes depends on the number of its group, or on other groups")
    early, late = (
        {each.name for each in describe_state(_steps(optimizer, options, values[:1], attributes, count=count)[0][1])}
        for count in (2, _MANY)
    )
    if early != late:
        raise ValueError(f"it keeps {min(early ^ late)} in some steps only")


def _other_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Groups without parameters, as many as there are, for those before the one that is looked at."""
    return [{**group, "params": []} for group in optimizer.param_groups]


def _steps(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    values: Sequence[torch.Tensor],
    attributes: Mapping[str, Any],
    before: Sequence[dict[str, Any]] = (),
    count: int = 2,
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """So many steps of parameters of such values: what they become, and what is kept of each.

    They are in one group, which comes after those of `before`.

    Raises `ValueError` where the optimizer keeps anything elsewhere.
    """
    parameters = [nn.Parameter(value.clone()) for value in values]
    for parameter in parameters:
        parameter.__dict__.update(attributes)
    alone = likeness(optimizer, options, {parameter: {} for parameter in parameters})
    group, then = alone.param_groups[0], copy.deepcopy(dict(options))
    alone.param_groups[:0] = before
    mine = dict(alone.__dict__)
    for key, value in mine.items():  # what it adds to, it adds to a copy
        if isinstance(value, dict | list | set) and key not in ("state", "param_groups"):
            alone.__dict__[key] = mine[key] = copy.copy(value)
    added = (dict, list, set)
    sizes = {key: len(value) for key, value in mine.items() if key != "state" and isinstance(value, added)}
    for number in range(count):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = value * (1.0, 0.5, -0.25)[number % 3]
        type(optimizer).step(alone)
    others = [key for key, value in group.items() if key != "params" and _differs(value, then.get(key))]
    others += [key for key, value in alone.__dict__.items() if value is not mine.get(key)]
    others += [key for key, size in sizes.items() if len(mine[key]) != size]
    others += [str(key) for key in alone.state if not any(key is parameter for parameter in parameters)]
    if others:
        raise ValueError(f"it keeps {others[0]} for all parameters together, which changes in a step")
    return [(parameter.detach(), alone.state[parameter]) for parameter in parameters]


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one, other)
    return type(one) is not type(other) or bool(one != other)
