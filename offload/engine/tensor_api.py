"""What users call with a parameter: DeepSpeed's functions to read and set what there is of it, and to announce it.

Each finds the engine whose parameter it is; what is read and set, and how, is in `looking`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.engine.param_access import Looking, engines
from offload.engine.params.module_hooks import external_parameters, set_external_parameters
from offload.engine.params.paged_parameter import Place, place_of
from offload.errors import UsageError
from offload.states import State


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of a parameter's fp32 master, of its shape, on the compute device; of a frozen one, of its weight.

    In bf16 the master is weight and residual together, bit for bit. All functions here take a parameter of a model that
    an engine has, are called between forwards and backwards, by every rank with the same parameter, and take memory
    for that one parameter outside of all budgets. They raise `UsageError` where that does not hold, and `BudgetError`
    where the RAM has no room.
    """
    looking, place = _find(param, "safe_get_full_fp32_param")
    return looking.read(place, State.WEIGHT)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A copy in fp32 of the gradient that the next step will use, as added so far, of the parameter's shape.

    It is the mean over the ranks, divided by the accumulation, before the clip, with the precision in which the engine
    keeps gradients (`data_types.grad_accum_dtype`). None before a backward, after `step()`, and where none came.
    """
    looking, place = _find(param, "safe_get_full_grad")
    return looking.read(place, State.GRAD)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A copy in fp32 of an optimizer state such as "exp_avg", of the parameter's shape; None of a frozen parameter.

    Zeros before the first step. Of an optimizer that has no kernel here it has the shape that it has there, and is None
    before the first step. Raises `UsageError`, with the names that there are, for another one.
    """
    looking, place = _find(param, "safe_get_full_optimizer_state")
    return looking.read_state(place, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make `value`, of the parameter's shape, its fp32 master; the weight is rounded from it.

    Like every value that is set here it is copied; of several ranks, all of which come here, that of rank 0 counts.
    """
    looking, place = _find(param, "safe_set_full_fp32_param")
    looking.write(place, State.WEIGHT, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make `value`, of the parameter's shape, the gradient that the next step will use; later backwards add to it."""
    looking, place = _find(param, "safe_set_full_grad")
    looking.write(place, State.GRAD, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Make `value`, of the parameter's shape, an optimizer state such as "exp_avg". How often the parameter was updated
    stays."""
    looking, place = _find(param, "safe_set_full_optimizer_state")
    looking.write(place, looking.state(place, optim_state_key), value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of what `safe_get_full_fp32_param` gives: flat, of no elements where this rank has none.

    A part is elements one behind the other; those of all ranks, in the order of the ranks, are the parameter. Parts
    need not be equally long: ranks share units, not parameters. A rank may ask for its part alone, but for a
    gradient's.
    """
    looking, place = _find(param, "safe_get_local_fp32_param")
    return looking.read_local(place, State.WEIGHT)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of what `safe_get_full_grad` gives. Every rank calls it, with the same parameter."""
    looking, place = _find(param, "safe_get_local_grad")
    return looking.read_local(place, State.GRAD)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of what `safe_get_full_optimizer_state` gives."""
    looking, place = _find(param, "safe_get_local_optimizer_state")
    return looking.read_state_local(place, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make `value`, flat and as long as this rank's part, that part of the master. Every rank calls it with its own."""
    looking, place = _find(param, "safe_set_local_fp32_param")
    looking.write_local(place, State.WEIGHT, value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """The same for the gradient that the next step will use."""
    looking, place = _find(param, "safe_set_local_grad")
    looking.write_local(place, State.GRAD, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """The same for an optimizer state such as "exp_avg"."""
    looking, place = _find(param, "safe_set_local_optimizer_state")
    looking.write_local(place, looking.state(place, optim_state_key), value)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that the forward of `module` uses `parameter`, which belongs to another module.

    Seldom needed: a parameter that is used anywhere is found when a function of torch is given it, or asked for its
    `data_ptr()`. Functions that torch does not see, such as those of a C++ extension that is called directly, read
    memory; what they are given must be registered, before `offload.initialize` (for modules of the model) or after. A
    second time changes nothing.
    """
    _check_external("register_external_parameter", module, parameter)
    if not _is_in(parameter, external_parameters(module)):
        set_external_parameters(module, [*external_parameters(module), parameter])
        owner = _owner(parameter)
        if owner is not None:
            owner[0].use_in(module, owner[1])


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take `register_external_parameter` back. Raises `UsageError` where there was none."""
    _check_external("unregister_external_parameter", module, parameter)
    if not _is_in(parameter, external_parameters(module)):
        raise UsageError(f"this parameter was not registered with this {type(module).__name__}")
    set_external_parameters(module, [other for other in external_parameters(module) if other is not parameter])
    owner = _owner(parameter)
    if owner is not None:
        owner[0].end_use_in(module, owner[1])


def _find(parameter: Any, call: str) -> tuple[Looking, Place]:
    """Whose `parameter` is, and where it lies. Raises `UsageError` where it cannot be looked at now."""
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"{call} expects a parameter of a model under an engine, got {type(parameter).__name__}")
    owner = _owner(parameter)
    if owner is None:
        place = place_of(parameter)
        if place is not None:
            _ = place.engine  # raises: it was destroyed
        raise UsageError(
            f"{call} expects a parameter of a model under an engine; this one, of shape {list(parameter.shape)}, is of "
            f"none: take it from engine.module"
        )
    owner[0].check_idle(owner[1], call)
    return owner


def _owner(parameter: nn.Parameter) -> tuple[Looking, Place] | None:
    """The engine that has a parameter now; None where there is none, or none any more."""
    for looking in engines():
        place = looking.place(parameter)
        if place is not None and place.keeper is not None:
            return looking, place
    return None


def _check_external(call: str, module: Any, parameter: Any) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise UsageError(
            f"{call} expects a module and a parameter, got {type(module).__name__} and {type(parameter).__name__}"
        )


def _is_in(parameter: nn.Parameter, parameters: list[nn.Parameter]) -> bool:
    """By identity: tensors compare element by element."""
    return any(other is parameter for other in parameters)
