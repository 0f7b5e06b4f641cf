"""Builds an engine's optimizer and learning-rate schedule, from the user's objects or from the config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.config import OptimizerBlock, SchedulerBlock
from offload.config.blocks import spelled_number
from offload.engine.optimizer import Optimizer, no_rate
from offload.errors import ConfigError
from offload.layout.memory_plan import rule_name
from offload.layout.modes import ADAM
from offload.layout.optimizer_states import make
from offload.optimizers.registry import RULES, rule_of
from offload.schedules import MADE_BY, Schedule
from offload.sizes import count_of

# -- optimizer -----------------------------------------------------------------------------------------


def choose(block: OptimizerBlock | None, model: nn.Module, optimizer: Any, model_parameters: Any) -> Optimizer:
    """Returns the engine's optimizer, which contains all trainable parameters of `model`.

    `optimizer` is a torch optimizer, or a function that makes one from a list of parameters. If it is None, the
    optimizer is made from `block` of the config. `model_parameters` are the parameters or groups for the function or
    the block; None means all trainable parameters. Raises `ConfigError` if no optimizer is given or configured; the
    given optimizer has stepped already, or is no torch optimizer; the config's optimizer has no learning rate;
    `model_parameters` contains objects that are no parameters; or the optimizer lacks a trainable parameter or contains
    a parameter of another model.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # DeepSpeed accepts a function of the parameters in place of an optimizer. A torch optimizer may be callable too.
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model_parameters) if model_parameters is not None else trainable)
        if optimizer is None:
            raise ConfigError("the function that was passed as optimizer= returned None; it should return an optimizer")
    if optimizer is not None:
        chosen = from_torch(optimizer)
    elif not trainable:
        # One empty group, because torch refuses an optimizer without groups.
        numbers = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
        return Optimizer([{"params": []}], numbers, RULES[ADAM])
    elif block is None:
        raise ConfigError(
            f"{count_of(len(trainable), 'parameter is', 'parameters are')} trainable, but there is no optimizer; add "
            f'to the config "optimizer": {{"type": "AdamW", "params": {{"lr": 3e-4}}}}, or pass optimizer='
        )
    else:
        chosen = from_config(_trainable_only(model_parameters, trainable), block, model)
    _check_covers(chosen, model)
    return chosen


def _trainable_only(parameters: Iterable[Any] | None, trainable: Sequence[nn.Parameter]) -> list[Any]:
    """Returns the given parameters or groups without frozen parameters, or all of `trainable` if `parameters` is None.

    Raises `ConfigError` if `parameters` contains objects that are no parameters.
    """
    if parameters is None:
        return list(trainable)
    items = _listed(parameters)
    if items and all(isinstance(group, Mapping) and "params" in group for group in items):
        groups = [{**group, "params": _listed(group["params"])} for group in items]
        inner = [p for group in groups for p in group["params"]]
    else:
        groups, inner = [], items
    wrong = [p for p in inner if not isinstance(p, torch.Tensor)]
    if wrong:
        kind = "a dict without them" if isinstance(wrong[0], Mapping) else f"a {type(wrong[0]).__name__}"
        pairs = "; named_parameters() gives pairs, parameters() does not" if isinstance(wrong[0], tuple) else ""
        raise ConfigError(
            "model_parameters= expects parameters, as model.parameters() gives them, or groups of them, dicts with "
            f'"params", but contains {kind}{pairs}; leave this argument out to train all that require '
            "gradients"
        )
    if groups:
        return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    return [p for p in items if p.requires_grad]


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) or not isinstance(value, Iterable) else list(value)


def from_config(params: Iterable[Any], block: OptimizerBlock, model: nn.Module) -> Optimizer:
    """Returns the optimizer that the config's block describes. `params` are parameters or groups, as torch takes them.

    Raises `ConfigError` if the learning rate is missing, a parameter is marked as a matrix but is not one, or a class
    of torch does not exist, cannot be used, or does not take the params.
    """
    settings = block.settings
    items = list(params)
    groups = items if items and isinstance(items[0], Mapping) else [{"params": items}]
    if block.of_torch:
        if "lr" not in settings:
            raise no_rate()
        return from_torch(make(block.type, [dict(group) for group in groups], settings))
    return RULES[rule_name(block, groups)].configured(groups, block, model)


def from_torch(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Returns the engine's optimizer in place of a torch optimizer, which must not have stepped.

    Both optimizers share their groups, so a user or a schedule that changes the torch optimizer's groups still changes
    the engine's optimizer. If no kernel computes the same, the torch optimizer's own code runs. Raises `ConfigError` if
    the argument is no optimizer, or has stepped already.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer= expects a torch.optim.Optimizer, got {type(optimizer).__name__}")
    _check_kept(optimizer)
    rule = rule_of(optimizer)
    for group in optimizer.param_groups:
        for key, value in rule.beside(optimizer, group).items():
            group.setdefault(key, value)
        for key in rule.scheduled:
            # A tensor stays in the group, because the script may fill it. Each step reads its number.
            if key in group and not isinstance(group[key], torch.Tensor):
                value = rule.plain(group[key])
                group[key] = tuple(value) if isinstance(value, list) else value
    groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
    engine_optimizer = Optimizer(groups, optimizer.defaults, rule)
    # The constructor has checked copies of the groups. From here on the list of groups itself is shared.
    engine_optimizer.param_groups = optimizer.param_groups
    engine_optimizer.replaced = optimizer
    # Hooks of the torch optimizer are shared too, because schedules and profilers may have registered hooks.
    engine_optimizer._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
    engine_optimizer._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
    return engine_optimizer


_STATE_HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


def _check_kept(optimizer: torch.optim.Optimizer) -> None:
    """Checks that a torch optimizer is new, and keeps its data only in states of parameters and in its groups.

    Raises `ConfigError` if the optimizer has stepped, or keeps something that no commit would contain.
    """
    kind = type(optimizer)
    for key, state in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            raise ConfigError(
                f"{kind.__name__} keeps state[{key!r}], which is no parameter's, so no commit would contain it; give "
                "an optimizer that keeps states by parameter"
            )
        # Adagrad creates its states, with step 0, at construction. `attach` drops these states. If somebody has looked
        # up a parameter's state, an empty dict is left.
        if state and (not isinstance(state, Mapping) or float(state.get("step", 1))):
            names = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ConfigError(
                f"the optimizer contains states already ({names}), which would be lost; give a new optimizer that has "
                "not stepped, and whose class makes states in step()"
            )
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        raise ConfigError(
            f"{kind.__name__} has two modes, train() and eval(), between which it moves all weights outside of "
            "step(), as schedule-free optimizers do; an engine moves weights in step() alone: use AdamW and a schedule"
        )
    step = vars(optimizer).get("step")
    step = getattr(step, "__func__", step)
    # A schedule of torch wraps `step` to count its calls.
    if getattr(step, "_wrapped_by_lr_sched", False):
        step = getattr(step, "__wrapped__", None)
    if step is not None and step is not getattr(kind, "step", None):
        raise ConfigError(
            f"step of this {kind.__name__} was replaced on the object, and an engine would not call it: override step "
            "in a subclass, or use register_step_pre_hook and register_step_post_hook"
        )
    hooks = [name for name in _STATE_HOOKS if getattr(optimizer, f"_optimizer_{name}_hooks", None)]
    more = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
    if hooks or more:
        what = f"hooks on its state dict ({hooks[0]})" if hooks else f"{', '.join(more)} in its state_dict()"
        raise ConfigError(
            f"{kind.__name__} has {what}, which commits and checkpoints would not contain; keep numbers in the "
            "optimizer's groups, and objects in engine.register_for_checkpointing"
        )


def matrices_by(optimizer: Optimizer, model: nn.Module) -> frozenset[str] | None:
    """Returns the names of the parameters that the optimizer steps as matrices; None if it has no rule for matrices."""
    mark = optimizer.rule.mark
    if not mark:
        return None
    names, groups = trainable_names(model), optimizer.param_groups
    marked = (id(parameter) for group in groups if group[mark] for parameter in group["params"])
    return frozenset(names[key] for key in marked if key in names)


def trainable_names(model: nn.Module) -> dict[int, str]:
    """Returns the name of each parameter that trains, by id."""
    return {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _check_covers(optimizer: Optimizer, model: nn.Module) -> None:
    """Raises `ConfigError` if the groups lack a trainable parameter of `model`, or contain another model's parameter.

    Frozen parameters of the model may be in the groups.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = optimizer.settings()
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strangers:
        raise ConfigError(
            f"the optimizer has {count_of(len(strangers), 'parameter that is', 'parameters that are')} not the "
            "model's: make the optimizer from the parameters of the given model, in the form in which it will be "
            "trained"
        )
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in grouped]
    if left:
        raise ConfigError(
            f"{count_of(len(left), 'parameter that requires gradients is', 'parameters that require gradients are')} "
            f"in no group of the optimizer, the first is {left[0]}; add the parameters that shall train, and call "
            "requires_grad_(False) on the others"
        )


# -- schedule ------------------------------------------------------------------------------------------


class ChosenSchedule(NamedTuple):
    """The schedule of an engine, or None, and notices for the user."""

    schedule: Any
    notices: tuple[str, ...]


def choose_scheduler(block: SchedulerBlock | None, scheduler: Any, optimizer: torch.optim.Optimizer) -> ChosenSchedule:
    """Returns the engine's schedule: the user's, the result of the user's function, or the config's.

    Raises `ConfigError` if the schedule cannot be made, or does not fit the optimizer.
    """
    if scheduler is not None:
        # A class, or a function without `step`, makes the schedule.
        if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
            scheduler = scheduler(optimizer)
        _check_given(scheduler, optimizer)
        if block is None:
            return ChosenSchedule(scheduler, ())
        line = f"the schedule {block.type} of the config is not used, because lr_scheduler= was passed"
        return ChosenSchedule(scheduler, (line,))
    if block is None:
        return ChosenSchedule(None, ())
    if block.type not in MADE_BY:
        return ChosenSchedule(_of_torch(block, optimizer), ())
    params = {name: value for name, value in block.params.items() if value is not None}
    schedule: Schedule = MADE_BY[block.type](optimizer, **params)
    if not schedule.peaks:
        return ChosenSchedule(schedule, ())
    rates = (schedule.peaks, schedule.base_lrs)
    peaks, unused = (", ".join(f"{rate:g}" for rate in dict.fromkeys(group_rates)) for group_rates in rates)
    follows = f"the learning rate follows the schedule, whose {schedule.PEAK} is {peaks}"
    line = f"{follows}; the optimizer's {unused} is not used"
    return ChosenSchedule(schedule, (line,))


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
    # Groups are compared instead of optimizers, because a replaced torch optimizer shares its groups with the engine's
    # optimizer.
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    if groups and groups[0] is not optimizer.param_groups[0]:
        raise ConfigError(
            f"the {type(schedule).__name__} that was passed as lr_scheduler= moves the learning rates of another "
            "optimizer than the engine's; pass its optimizer as optimizer= too, or pass as lr_scheduler= a function "
            "that makes the schedule from the optimizer that the function receives"
        )


def _of_torch(block: SchedulerBlock, optimizer: torch.optim.Optimizer) -> Any:
    params = {name: value for name, value in block.params.items() if not (value is None or value == "auto")}
    arguments = {name: _argument(value) for name, value in params.items()}
    try:
        return getattr(torch.optim.lr_scheduler, block.type)(optimizer, **arguments)
    except Exception as error:  # constructors raise any class
        raise ConfigError(f"scheduler.params {params} do not make a torch {block.type}: {error}") from error


def _argument(value: Any) -> Any:
    """Returns a config value in the type that torch's schedules expect. They check types only in `step`."""
    if isinstance(value, list):
        return [_argument(item) for item in value]
    number = spelled_number(value)
    # JSON may spell a number of steps as 1e3, which is a float.
    return int(number) if isinstance(number, float) and number.is_integer() else number
