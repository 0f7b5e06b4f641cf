"""Optimizers of torch that have no kernel here, run as they are: parameter by parameter, on masters in host memory.

    states of a unit, read as one tile ─► each parameter: master, gradient, its state ─► step() ─► packed again

`step` is called on a likeness of the user's optimizer that has one parameter, with the numbers of its group as they
were at the boundary. What it keeps of a parameter is found by a dry run, and packed (see `packed`). An optimizer whose
parameters depend on each other, or that keeps numbers elsewhere, gives other results that way, and is refused.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.engine.layout import Segment, UnitLayout
from offload.engine.masters import join, split
from offload.engine.packed import Kept, describe_state, pack, unpack
from offload.errors import ConfigError
from offload.swapper.states import State

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SMALL = 8
"""Of each dimension, where two parameters are compared with each of them alone."""


class TorchStep(NamedTuple):
    """One step of one parameter."""

    options: Mapping[str, Any]
    """Those of its group."""
    grad_scale: float


class TorchSegment(NamedTuple):
    """What to do to a parameter, elements [start, stop) of its unit."""

    start: int
    stop: int
    step: TorchStep


class Stepper:
    """Does the steps of all parameters of a unit. Belongs to the update worker."""

    def __init__(self, optimizer: torch.optim.Optimizer, layouts: Sequence[UnitLayout], scratch: torch.Tensor) -> None:
        self._optimizer, self._layouts = optimizer, layouts
        self.nbytes = scratch.nbytes
        """Of the memory for a gradient and a master, (n,) fp32, where a master has none of its own."""
        largest = max(s.numel for layout in layouts for s in layout.segments if s.trainable)
        self._gradient, self._master = scratch[:largest], scratch[len(scratch) - largest :]

    def packed_numel(self, unit: int) -> int:
        """Words of the unit's PACKED partition."""
        return self._layouts[unit].packed_numel

    def step(
        self,
        unit: int,
        states: Mapping[State, torch.Tensor],
        gradient: torch.Tensor,
        steps: Mapping[int, TorchSegment],
    ) -> None:
        """Update parameters of a unit, by their positions in it, in place; `states` and `gradient` are of all of it."""
        for position, (start, stop, step) in steps.items():
            self._step(self._layouts[unit].segments[position], states, gradient[start:stop], step)

    def _step(
        self, segment: Segment, states: Mapping[State, torch.Tensor], gradient: torch.Tensor, step: TorchStep
    ) -> None:
        mine = {state: memory[segment.start : segment.stop] for state, memory in states.items()}
        packed = states.get(State.PACKED, gradient)[segment.packed.start : segment.packed.stop].view(torch.uint8)
        # A gradient is given away: an optimizer may write into it. The master of fp32 is the weight itself.
        grad = self._gradient[: segment.numel].copy_(gradient).mul_(step.grad_scale)
        master = join(mine, self._master[: segment.numel])
        parameter = nn.Parameter(master.view(segment.shape))
        parameter.grad = grad.view(segment.shape)
        likeness = _likeness(self._optimizer, step.options, {parameter: unpack(segment.kept, packed)})
        type(self._optimizer).step(likeness)
        pack(segment.kept, likeness.state[parameter], packed)
        after = parameter.detach().reshape(-1)
        if after.data_ptr() != mine[State.WEIGHT].data_ptr():
            split(after, mine)


def _likeness(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], states: Mapping[torch.Tensor, dict[str, Any]]
) -> torch.optim.Optimizer:
    """An optimizer that is as `optimizer` is, but has only these parameters and their states."""
    likeness: torch.optim.Optimizer = object.__new__(type(optimizer))
    likeness.__dict__.update(optimizer.__dict__)
    likeness.__dict__.pop("step", None)  # a schedule wraps it, to count steps
    likeness.__dict__.update({hooks: collections.OrderedDict() for hooks in _HOOKS})
    likeness.param_groups = [{**options, "params": list(states)}]
    likeness.state = collections.defaultdict(dict, dict(states))
    return likeness


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
            shapes = {tuple(p.shape): names[id(p)] for p in group["params"] if id(p) in names}
            with _explained(optimizer, next(iter(shapes.values()), "")):
                for shape in list(shapes)[:1]:
                    _check_apart(optimizer, options, [min(size, _SMALL) for size in shape])
            for shape, name in shapes.items():
                with _explained(optimizer, name):
                    known[f"{shape} {options}"] = _dry_run(optimizer, options, shape)
            for parameter in group["params"]:
                if id(parameter) in names:
                    found[names[id(parameter)]] = known[f"{tuple(parameter.shape)} {options}"]
    return found


@contextlib.contextmanager
def _explained(optimizer: torch.optim.Optimizer, name: str) -> Iterator[None]:
    """Whatever goes wrong in the user's optimizer is a `ConfigError`."""
    try:
        yield
    except Exception as error:
        kind = type(optimizer)
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} has no kernel here, so it would be run by itself, parameter by "
            f"parameter; with {name} that does not go: {_cause(error)}; give another optimizer, or a name "
            f"in the config"
        ) from error


def _cause(error: Exception) -> str:
    return f"KeyError: {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def _dry_run(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], shape: Sequence[int]) -> tuple[Kept, ...]:
    """What is there after a second step, of a parameter that has no memory where that goes."""
    with contextlib.suppress(Exception):  # then its code needs values, and says what is wrong below
        return describe_state(_steps(optimizer, options, [torch.full(shape, 1e-3, device="meta")])[0][1])
    return describe_state(_steps(optimizer, options, [torch.full(shape, 1e-3, device="cpu")])[0][1])


def _check_apart(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Raise `ValueError` where two parameters together do not do what each does alone."""
    values = [
        torch.linspace(-1, 1, torch.Size(shape).numel(), device="cpu").reshape(shape) * factor for factor in (1.0, 0.1)
    ]
    both = _steps(optimizer, options, values)
    for value, (together, _) in zip(values, both, strict=True):
        if not torch.equal(_steps(optimizer, options, [value])[0][0], together):
            raise ValueError("what a parameter becomes depends on others")


def _steps(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], values: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Two steps of parameters of such values: what they become, and what is kept of each.

    Raises `ValueError` where the optimizer keeps anything elsewhere.
    """
    parameters = [nn.Parameter(value.clone()) for value in values]
    likeness = _likeness(optimizer, options, {parameter: {} for parameter in parameters})
    group, mine, before = likeness.param_groups[0], dict(likeness.__dict__), copy.deepcopy(dict(options))
    for factor in (1.0, -0.5):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = value * factor
        type(optimizer).step(likeness)
    others = [key for key, value in group.items() if key != "params" and _differs(value, before.get(key))]
    others += [key for key, value in likeness.__dict__.items() if value is not mine.get(key)]
    if others:
        raise ValueError(f"it keeps {others[0]} for all parameters together, which changes in a step")
    return [(parameter.detach(), likeness.state[parameter]) for parameter in parameters]


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one, other)
    return type(one) is not type(other) or bool(one != other)
