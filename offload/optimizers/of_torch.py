"""Optimizers of torch without a kernel here, run by their own code: parameter by parameter, on masters in host memory.

    states of a unit, read as one tile ─► each parameter: master, gradient, states ─► step() ─► packed again

`step` runs on a clone of the user's optimizer that contains one parameter, with the numbers of its group at the time of
the optimizer step. A dry run finds the states of a parameter, and `layout.flat_layout.pack` packs them. An optimizer
is refused if its parameters depend on each other, or if a step changes numbers that are no parameter's state: it would
give other results this way.

A tile is an entire unit. With several ranks, each rank's tile contains all of the rank's elements of a unit. A
parameter that several ranks divide steps on one rank, its home (see `matrices.ParameterExchange`), which keeps all
states of the parameter.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import itertools
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.engine.optimizer import Rule, is_finite, numbers_of
from offload.engine.update_strategy import ParameterStep, TileContent, UnitSteps, UnitUpdate, UpdateSetting
from offload.errors import ConfigError, UsageError
from offload.layout.flat_layout import ParameterSegment, StateField, describe_state, pack, unpack
from offload.layout.modes import TORCH
from offload.layout.optimizer_states import join, split
from offload.optimizers.fused import InOnePass, Undivided
from offload.optimizers.matrices import ParameterExchange, carve
from offload.states import State

# -- rule ----------------------------------------------------------------------------------------------


class TorchStep(NamedTuple):
    """Arguments of one step of one parameter."""

    options: Mapping[str, Any]
    """Numbers and flags of the parameter's group."""
    grad_scale: float
    """Factor of the gradient."""
    attributes: Mapping[str, Any]
    """Attributes that the user has set on the parameter, such as `lr_mult`."""
    optimizer: Mapping[str, Any]
    """Attributes of the optimizer, which a script may set between steps too."""


@dataclass(frozen=True, kw_only=True)
class TorchRule(Rule):
    """The rule of an optimizer of torch, which runs by its own code."""

    optimizer: torch.optim.Optimizer
    """The user's optimizer, cloned for each step."""

    @property
    def required(self) -> tuple[str, ...]:
        return self.defaults

    def refused(self, group: Mapping[str, Any]) -> str | None:
        """Returns None: its own code implements its options."""
        return None

    def is_valid(self, key: str, value: Any) -> bool:
        # Its own code knows how many numbers it reads, and None may be one of them (Adafactor's eps).
        items = list(value) if isinstance(value, list | tuple) else [value]
        return all(item is None or is_finite(item) for item in items) and (key != "betas" or len(items) >= 2)

    def plain(self, value: Any) -> Any:
        """Returns a group's number as a float; an integer, with which its own code may count, stays one."""
        return value if type(value) is int else super().plain(value)

    def packed(self, names: Mapping[int, str]) -> dict[str, tuple[StateField, ...]]:
        """Returns the states that its own code keeps, found by a dry run, which may draw random numbers."""
        return find_kept(self.optimizer, names)

    def notices(self) -> tuple[str, ...]:
        return (
            f"{self.known_as} has no kernel for these options: its own code updates parameter by parameter on the CPU",
        )

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> TorchStep:
        # Copies: the user may change the group and the optimizer while the update is in flight.
        return TorchStep(numbers_of(group), grad_scale, attributes_of(parameter), dict(vars(self.optimizer)))

    def steps_whole(self, step: Any) -> bool:
        return True

    def strategy(self, setting: UpdateSetting) -> TorchUpdates:
        return TorchUpdates(self.optimizer, setting)


def by_itself(optimizer: torch.optim.Optimizer) -> TorchRule:
    """Returns the rule of an optimizer without a kernel.

    Any number of a group may change between steps, also one that is an integer now, such as torch's `weight_decay=0`.
    Flags do not count as numbers.
    """
    scheduled = sorted(
        {
            key
            for group in optimizer.param_groups
            for key, value in group.items()
            if key not in ("params", "param_names") and (type(value) is int or _is_float(value))
        }
    )
    defaults = [key for key in optimizer.defaults if all(key in group for group in optimizer.param_groups)]
    return TorchRule(
        name=TORCH,
        scheduled=tuple(scheduled),
        known_as=type(optimizer).__name__,
        defaults=tuple(defaults),
        optimizer=optimizer,
    )


def _is_float(value: Any) -> bool:
    """Returns True for a float, a floating-point tensor of one element, or a sequence that contains one of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float) or (isinstance(value, tuple | list) and any(map(_is_float, value)))


# -- updates -------------------------------------------------------------------------------------------


class TorchUpdates(Undivided):
    """Strategy of torch's optimizers. Belongs to the update worker, on whose thread alone it runs."""

    def __init__(self, optimizer: torch.optim.Optimizer, setting: UpdateSetting) -> None:
        """Divides the scratch memory: gradient and master of the largest parameter, and exchanges."""
        mode, whole, ranks = setting.mode, setting.whole, setting.ranks
        self._optimizer, self.layouts, self._rank = optimizer, setting.layouts, ranks.shard
        # A master with memory of its own needs no scratch memory, except where ranks assemble a divided one.
        copied = State.MASTER_LOW_BITS in mode.weights or ranks.size > 1
        sizes = (whole.parameter, whole.parameter if copied else 0, 2 * whole.traded)
        self.gradient, self.master, traded = carve(setting.scratch, *sizes)
        self.exchange = ParameterExchange(ranks=ranks, layouts=setting.layouts, mode=mode, memory=traded)
        """Exchange of divided parameters."""

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        """Returns the same elements of every state but PACKED; a tile contains all words of PACKED."""
        return range(self.layouts[unit].packed_numel(self._rank)) if state is State.PACKED else range(start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        return _TorchSteps(self, update)

    def step(
        self,
        segment: ParameterSegment,
        master: torch.Tensor,
        gradient: torch.Tensor,
        words: torch.Tensor,
        step: TorchStep,
    ) -> torch.Tensor:
        """Steps one parameter.

        Args:
            master: (numel,) fp32, which the step may change.
            gradient: (numel,) fp32, unscaled, which the step may change.
            words: the parameter's packed states, changed in place.
            step: options of the parameter's group, and the factor of the gradient.

        Returns:
            The new master, (numel,): in the memory of `master`, or of the tensor that the optimizer put in its place.
        """
        packed = words.view(torch.uint8)
        parameter = nn.Parameter(master.view(segment.shape))
        # Optimizers may read such attributes, for example a learning-rate factor for each layer.
        parameter.__dict__.update(step.attributes)
        parameter.grad = gradient.mul_(step.grad_scale).view(segment.shape)
        states: dict[torch.Tensor, dict[str, Any]] = {parameter: unpack(segment.kept, packed)}
        alone = likeness(type(self._optimizer), step.optimizer, step.options, states)
        try:
            type(self._optimizer).step(alone)
            pack(segment.kept, alone.state[parameter], packed)
        except Exception as error:
            raise UsageError(
                f"the step of {type(self._optimizer).__name__} failed for {segment.name}: {cause(error)}"
            ) from error
        return parameter.detach().reshape(-1)


class _TorchSteps(InOnePass):
    def __init__(self, updates: TorchUpdates, update: UnitUpdate) -> None:
        self._updates, self._update = updates, update
        self._segments = updates.layouts[update.unit].segments

    def run(self, tile: TileContent, last: bool) -> None:
        steps = {segment.parameter: segment for segment in self._update.segments}
        for index, segment in steps.items():
            if index not in self._update.shared:
                parameter = self._segments[index]
                states, gradient = _content(tile, segment)
                # A copy of the gradient, because an optimizer may write into it. In fp32 the master is the weight.
                own = self._updates.gradient[: len(gradient)].copy_(gradient)
                master = join(states, self._updates.master[: len(gradient)])
                after = self._updates.step(parameter, master, own, _words(tile, parameter, own), segment.step)
                # An fp32 weight that was changed in place is stored already. An optimizer may also replace
                # `parameter.data`.
                if after.data_ptr() != states[State.WEIGHT].data_ptr():
                    split(after, states)
        if self._update.shared:
            self._trade(tile, steps)

    def _trade(self, tile: TileContent, steps: Mapping[int, ParameterStep]) -> None:
        """Steps the parameters that several ranks divide: master and gradient go to a home, the master comes back."""
        exchange, shared = self._updates.exchange, self._update.shared
        masters, gradients = (
            exchange.begin(self._update.unit, shared, torch.float32, number, of=2) for number in range(2)
        )
        away = [index for index in masters.away if index in steps]
        for index in away:
            states, gradient = _content(tile, steps[index])
            place = masters.part(index, exchange.rank)
            place.copy_(join(states, place))
            gradients.part(index, exchange.rank).copy_(gradient)
        masters.go()
        gradients.go()
        for divided in masters.here:
            parameter, segment = self._segments[divided.number], steps[divided.number]
            states, gradient = _content(tile, segment)
            master, whole = (memory[: parameter.numel] for memory in (self._updates.master, self._updates.gradient))
            for rank, position, _, numel in divided.parts:
                here = slice(position, position + numel)
                if rank == exchange.rank:
                    master[here].copy_(join(states, master[here]))
                    whole[here].copy_(gradient)
                else:
                    master[here].copy_(masters.part(divided.number, rank))
                    whole[here].copy_(gradients.part(divided.number, rank))
            after = self._updates.step(parameter, master, whole, _words(tile, parameter, whole), segment.step)
            for rank, position, _, numel in divided.parts:
                here = slice(position, position + numel)
                if rank == exchange.rank:
                    split(after[here], states)
                else:
                    masters.part(divided.number, rank).copy_(after[here])
        masters.back()
        for index in away:
            split(masters.part(index, exchange.rank), _content(tile, steps[index])[0])


def _content(tile: TileContent, segment: ParameterStep) -> tuple[dict[State, torch.Tensor], torch.Tensor]:
    """Returns the states of the master and the gradient, (n,) each, of a parameter's elements in a tile."""
    own = slice(segment.start, segment.stop)
    states: dict[State, torch.Tensor] = {
        state: memory[own] for state, memory in tile.states.items() if state is not State.PACKED
    }
    return states, tile.gradient_of(segment)


def _words(tile: TileContent, parameter: ParameterSegment, absent: torch.Tensor) -> torch.Tensor:
    """Returns the packed states of a parameter in a tile; no elements of `absent` for a parameter without any."""
    return tile.states.get(State.PACKED, absent)[parameter.packed.start : parameter.packed.stop]


# -- a parameter apart from the others -------------------------------------------------------------------


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that a clone must not share: hooks are for the user's step, not for each parameter's."""
_OURS = ("offload_handle", "origin")
"""Attributes that this library sets on parameters."""
_MANY = 12
"""Number of steps after which late states exist too, such as a state that the tenth step creates."""
_SMALL = 8
"""Upper bound of each dimension when two parameters that step together are compared with each alone."""


def likeness(
    kind: type[torch.optim.Optimizer],
    attributes: Mapping[str, Any],
    options: Mapping[str, Any],
    states: Mapping[torch.Tensor, dict[str, Any]],
) -> torch.optim.Optimizer:
    """Returns a clone of an optimizer with `attributes` and one group of `options`, for the keys of `states` alone."""
    # No constructor runs: a user's class may take any arguments, or create states.
    clone: torch.optim.Optimizer = object.__new__(kind)
    clone.__dict__.update(attributes)
    # Instance attributes that lead to the engine, or that a schedule has set.
    for name in ("step", "zero_grad", "state_dict", "load_state_dict"):
        clone.__dict__.pop(name, None)
    clone.__dict__.update({hooks: collections.OrderedDict() for hooks in _HOOKS})
    clone.param_groups = [{**options, "params": list(states)}]
    clone.state = collections.defaultdict(dict, dict(states))
    return clone


# -- the states that an optimizer keeps ---------------------------------------------------------------


def find_kept(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, tuple[StateField, ...]]:
    """Returns the states that `optimizer`, which stays unchanged, keeps for each parameter, by name.

    Only if the optimizer's code does not run on meta tensors, memory of a parameter's size is allocated, for one
    parameter at a time. A dry run may draw from any random generator, and the caller restores them. Parameters whose
    ids `names` lacks are ignored.
    """
    states: dict[str, tuple[StateField, ...]] = {}
    known: dict[str, tuple[StateField, ...]] = {}
    for group in optimizer.param_groups:
        options = numbers_of(group)
        for parameter in (p for p in group["params"] if id(p) in names):
            name, shape, attributes = names[id(parameter)], tuple(parameter.shape), attributes_of(parameter)
            # Layers of a model repeat shapes, so one dry run serves many parameters.
            key = f"{shape} {options} {attributes}"
            if key not in known:
                try:
                    _check_apart(optimizer, options, [min(size, _SMALL) for size in shape], attributes)
                    known[key] = _dry_run(optimizer, options, shape, attributes)
                except Exception as error:  # the user's own code may raise any error
                    kind = type(optimizer)
                    raise ConfigError(
                        f"{kind.__module__}.{kind.__name__} has no kernel here, so its own code would run parameter by "
                        f"parameter. That fails for {name}: {cause(error)}; give another optimizer, or a name in the "
                        "config"
                    ) from error
            states[name] = known[key]
    return states


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes that user code has set on a parameter, which optimizers may read."""
    return {name: value for name, value in vars(parameter).items() if name not in _OURS}


def cause(error: Exception) -> str:
    """Returns the message of an error, for use in a message of ours; a KeyError's own message is a bare key."""
    return f"KeyError: {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def _dry_run(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], shape: Sequence[int], attributes: Mapping[str, Any]
) -> tuple[StateField, ...]:
    """Returns the states that exist after a second step; the parameter is a meta tensor if the code runs on one."""

    def states(device: str) -> tuple[StateField, ...]:
        values = torch.full(shape, 1e-3, dtype=torch.float32, device=device)
        return describe_state(_steps(optimizer, options, [values], attributes)[0][1])

    with contextlib.suppress(Exception):  # the code needs values; a genuine error is raised again below
        return states("meta")
    return states("cpu")


def _check_apart(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: Sequence[int], attributes: Mapping[str, Any]
) -> None:
    """Checks that parameters step apart as they do together, and that no state appears or disappears in later steps."""
    options = {**group, "lr": 1e-3} if "lr" in group and group["lr"] is not None else group  # schedules may begin at 0
    line = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float32, device="cpu").reshape(shape)
    values = [line * factor for factor in (1.0, 0.1)]
    others = [{**group, "params": []} for group in optimizer.param_groups]  # empty, before the group under test
    results = _steps(optimizer, options, values, attributes)
    for value, (together, _) in zip(values, results, strict=True):
        # Bits are compared: parameters that step together must get the same values as each alone.
        alone, _ = _steps(optimizer, options, [value], attributes)[0]
        if not torch.equal(alone, together):
            raise ValueError("the new value of a parameter depends on other parameters, or on random numbers")
        if value.numel() and torch.equal(alone, value):
            raise ValueError("a parameter with a gradient does not change; does this optimizer wrap another one?")
        with_others = _steps(optimizer, options, [value], attributes, others)[0][0]
        if not torch.equal(with_others, alone):
            raise ValueError("the new value of a parameter depends on the number of its group, or on other groups")
    # The memory of the states is laid out once, so no state may appear after the second step.
    early, late = (
        {state.name for state in describe_state(_steps(optimizer, options, values[:1], attributes, count=count)[0][1])}
        for count in (2, _MANY)
    )
    if early != late:
        raise ValueError(f"the state {min(early ^ late)} exists after some steps only")


def _steps(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    values: Sequence[torch.Tensor],
    attributes: Mapping[str, Any],
    before: Sequence[dict[str, Any]] = (),
    count: int = 2,
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Runs `count` steps on new parameters; returns the new value and the states of each.

    The parameters are in one group, after the groups `before`. With values on meta the run takes no memory.
    """
    parameters = [nn.Parameter(value.clone()) for value in values]
    for parameter in parameters:
        parameter.__dict__.update(attributes)
    alone = likeness(type(optimizer), vars(optimizer), options, {parameter: {} for parameter in parameters})
    alone.param_groups[:0] = before
    for key, value in list(alone.__dict__.items()):  # the step adds to copies, so the user's optimizer stays unchanged
        if isinstance(value, dict | list | set) and key not in ("state", "param_groups"):
            alone.__dict__[key] = copy.copy(value)
    then = _kept_beside(alone, parameters)
    for number in range(count):
        for parameter, value in zip(parameters, values, strict=True):
            # Gradients of several sizes and signs, because some optimizers react to a change of sign.
            parameter.grad = value * (1.0, 0.5, -0.25)[number % 3]
        with torch.device("cpu"):  # as on the update thread, which has no other default device
            type(optimizer).step(alone)
        if number in (0, count - 1):  # after the first one too: a second step may turn a switch back
            now = _kept_beside(alone, parameters)
            if changed := next((key for key in now | then if now.get(key) != then.get(key)), None):
                raise ValueError(f"a step changes {changed}, which all parameters share")
    if foreign := [str(key) for key in alone.state if not any(key is parameter for parameter in parameters)]:
        raise ValueError(f"a step changes {foreign[0]}, which all parameters share")
    return [(parameter.detach(), alone.state[parameter]) for parameter in parameters]


# -- what an optimizer keeps in addition to states -----------------------------------------------------------------


_LARGE = 10_000
"""Most items of a container that are compared."""
_DEPTH = 16
"""Most objects within each other that are compared."""


def _kept_beside(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """Returns images, by name, of all objects that a step could change besides parameters and their states.

    These are entries of the last group; attributes of the optimizer, of its classes and of the parameters; and
    variables that its methods reach: those of an enclosing function, and plain variables of their module.
    """
    seen: set[int] = {id(optimizer.state), id(optimizer.param_groups), *map(id, parameters)}
    images = {key: _image(value, seen) for key, value in optimizer.param_groups[-1].items() if key != "params"}
    own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    images |= {key: _image(value, seen) for key, value in own.items()}
    for kind in type(optimizer).__mro__:
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue
        for key, value in vars(kind).items():
            if isinstance(value, types.FunctionType):
                images |= {name: _image(reached, seen) for name, reached in _reached(value).items()}
            elif not key.startswith("__") and not isinstance(value, property | classmethod | staticmethod):
                images[f"{kind.__name__}.{key}"] = _image(value, seen)
    for parameter in parameters:
        images |= {f"parameter.{key}": _image(value, seen) for key, value in vars(parameter).items()}
    return images


def _reached(function: types.FunctionType) -> dict[str, Any]:
    """Returns the variables of the enclosing function, and plain variables of the module, that a function names."""
    unwrapped = inspect.unwrap(function)  # torch wraps the step of every class, for its profiler
    function = unwrapped if isinstance(unwrapped, types.FunctionType) else function
    code, module = function.__code__, function.__globals__
    variables = {
        name: module[name]
        for name in code.co_names
        if isinstance(module.get(name), bool | int | float | str | list | dict | set | collections.deque | torch.Tensor)
    }
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that is not set yet
            variables[name] = cell.cell_contents
    return variables


def _image(value: Any, seen: set[int], depth: int = 0) -> Any:
    """Returns a value that differs from an earlier call's value if the object or its content has changed.

    `seen` contains the ids of the containers in the image so far; `depth` is the number of objects around this one.
    """
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, torch.Tensor):
        version = None
        with contextlib.suppress(Exception):  # inference tensors, and parameters without values, have none
            version = value._version
        return id(value), version
    if id(value) in seen or depth > _DEPTH or isinstance(value, type | types.ModuleType | nn.Module):
        return id(value)
    seen.add(id(value))

    def images(items: Iterable[Any]) -> list[Any]:
        return [_image(item, seen, depth + 1) for item in itertools.islice(items, _LARGE)]

    if isinstance(value, set | frozenset):
        return len(value), frozenset(item if isinstance(item, int | str) else id(item) for item in value)
    if isinstance(value, Mapping):
        return len(value), images(value.keys()), images(value.values())
    if isinstance(value, list | tuple | collections.deque):
        return len(value), images(value)
    if type(value).__module__ == "numpy":
        return repr(value)
    if isinstance(value, types.FunctionType):
        return id(value), images(_reached(value).values())
    if isinstance(value, types.MethodType):
        return images((value.__func__, value.__self__))
    return id(value), images(getattr(value, "__dict__", {}).values()), images(_slots(value))


def _slots(value: Any) -> list[Any]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    return [getattr(value, name, None) for name in names if name not in ("__dict__", "__weakref__")]
