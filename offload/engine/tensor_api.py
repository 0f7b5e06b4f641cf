"""Functions that users call with a parameter: DeepSpeed's names to read and set its values, and to announce its uses.

Each function finds the engine that owns the parameter; `param_access` reads and writes the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.engine.param_access import ParamAccess, engines
from offload.engine.params.module_hooks import external_parameters, set_external_parameters
from offload.engine.params.paged_parameter import ParamHandle, handle_of
from offload.errors import UsageError
from offload.states import State


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a copy of a parameter's fp32 master, or of the weight if the parameter is frozen.

    In bf16 the master is the weight together with the low bits of the master, bit for bit.

    All functions of this module that read or set values are called between forwards and backwards, by every rank with
    the same parameter. They allocate memory for that one parameter outside of all budgets.

    Args:
        param: a parameter of a model under an engine.

    Returns:
        The copy, of the parameter's shape, on the compute device.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    looking, handle = _find(param, "safe_get_full_fp32_param")
    return looking.read(handle, State.WEIGHT)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a copy in fp32 of the gradient that the next step will use, as accumulated so far.

    The gradient is the mean over the ranks, divided by the accumulation, before the clip, in the precision in which the
    engine keeps gradients (`data_types.grad_accum_dtype`).

    Args:
        param: a parameter of a model under an engine.

    Returns:
        The copy, of the parameter's shape, on the compute device. None before a backward, after `step()`, and if the
        parameter received no gradient.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    looking, handle = _find(param, "safe_get_full_grad")
    return looking.read(handle, State.GRAD)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Returns a copy in fp32 of an optimizer state such as "exp_avg".

    Args:
        param: a parameter of a model under an engine.
        optim_state_key: name of the state.

    Returns:
        The copy, of the parameter's shape, on the compute device; zeros before the first step, None if the parameter is
        frozen. A state of an optimizer without a kernel has the shape that torch gives it, and is None before the first
        step.

    Raises:
        UsageError: if the optimizer keeps no such state, with the names that exist; if `param` belongs to no engine, is
            gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    looking, handle = _find(param, "safe_get_full_optimizer_state")
    return looking.read_state(handle, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces a parameter's fp32 master; the weight is rounded from the master.

    Args:
        param: a parameter of a model under an engine.
        value: of the parameter's shape, in fp32, bf16 or fp16, on any device; copied. With several ranks all of them
            call, and the value of rank 0 counts.

    Raises:
        UsageError: if `value` has another shape or dtype; if `param` belongs to no engine, is gathered, or the model
            runs.
        BudgetError: if the RAM has no room for a copy.
    """
    looking, handle = _find(param, "safe_set_full_fp32_param")
    looking.write(handle, State.WEIGHT, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces the gradient that the next step will use. Later backwards add to it.

    Args:
        param: a trainable parameter of a model under an engine.
        value: of the parameter's shape, in fp32, bf16 or fp16, on any device; copied. With several ranks all of them
            call, and the value of rank 0 counts.

    Raises:
        UsageError: if `param` is frozen; if `value` has another shape or dtype; if `param` belongs to no engine, is
            gathered, or the model runs.
        BudgetError: if the RAM has no room for a copy.
    """
    looking, handle = _find(param, "safe_set_full_grad")
    looking.write(handle, State.GRAD, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replaces an optimizer state such as "exp_avg". The number of updates of the parameter stays.

    Args:
        param: a trainable parameter of a model under an engine.
        value: of the parameter's shape, in fp32, bf16 or fp16, on any device; copied. With several ranks all of them
            call, and the value of rank 0 counts.
        optim_state_key: name of the state.

    Raises:
        UsageError: if the optimizer keeps no such state, or one without a kernel; if `param` is frozen; if `value` has
            another shape or dtype; if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for a copy.
    """
    looking, handle = _find(param, "safe_set_full_optimizer_state")
    looking.write(handle, looking.state(handle, optim_state_key), value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's partition of the result of `safe_get_full_fp32_param`. A rank may call it alone.

    Partitions are consecutive elements; those of all ranks, in the order of the ranks, are the parameter. They may
    differ in length, because ranks divide units, not parameters.

    Args:
        param: a parameter of a model under an engine.

    Returns:
        (n,) fp32 on the compute device; no elements if this rank holds none.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    looking, handle = _find(param, "safe_get_local_fp32_param")
    return looking.read_local(handle, State.WEIGHT)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's partition of the result of `safe_get_full_grad`. Every rank calls it with the same parameter.

    Args:
        param: a parameter of a model under an engine.

    Returns:
        (n,) fp32 on the compute device, or None if the parameter has no gradient.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    looking, handle = _find(param, "safe_get_local_grad")
    # All ranks must know whether a gradient exists, so this call is a collective, unlike those for other states.
    return looking.read_local(handle, State.GRAD)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Returns this rank's partition of the result of `safe_get_full_optimizer_state`. A rank may call it alone.

    Args:
        param: a parameter of a model under an engine.
        optim_state_key: name of the state.

    Returns:
        (n,) fp32 on the compute device, or None if the parameter is frozen.

    Raises:
        UsageError: if the optimizer keeps no such state; if `param` belongs to no engine, is gathered, or the model
            runs.
        BudgetError: if the RAM has no room for the copy.
    """
    looking, handle = _find(param, "safe_get_local_optimizer_state")
    return looking.read_state_local(handle, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces this rank's partition of a parameter's fp32 master. Every rank calls it with its own partition.

    Args:
        param: a parameter of a model under an engine.
        value: (n,), the elements of this rank, in fp32, bf16 or fp16; copied.

    Raises:
        UsageError: if `value` has another shape or dtype; if `param` belongs to no engine, is gathered, or the model
            runs.
        BudgetError: if the RAM has no room for two copies of the parameter.
    """
    looking, handle = _find(param, "safe_set_local_fp32_param")
    looking.write_local(handle, State.WEIGHT, value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces this rank's partition of the gradient that the next step will use.

    Every rank calls it with its own partition.

    Args:
        param: a trainable parameter of a model under an engine.
        value: (n,), the elements of this rank, in fp32, bf16 or fp16; copied.

    Raises:
        UsageError: if `param` is frozen; if `value` has another shape or dtype; if `param` belongs to no engine, is
            gathered, or the model runs.
        BudgetError: if the RAM has no room for two copies of the parameter.
    """
    looking, handle = _find(param, "safe_set_local_grad")
    looking.write_local(handle, State.GRAD, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replaces this rank's partition of an optimizer state. Every rank calls it with its own partition.

    Args:
        param: a trainable parameter of a model under an engine.
        value: (n,), the elements of this rank, in fp32, bf16 or fp16; copied.
        optim_state_key: name of the state, such as "exp_avg".

    Raises:
        UsageError: if the optimizer keeps no such state, or one without a kernel; if `param` is frozen; if `value` has
            another shape or dtype; if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for two copies of the parameter.
    """
    looking, handle = _find(param, "safe_set_local_optimizer_state")
    looking.write_local(handle, looking.state(handle, optim_state_key), value)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declares that the forward of `module` uses `parameter`, which belongs to another module.

    Seldom needed: a use of a parameter is detected if a function of torch receives it, or if its `data_ptr()` is read.
    Functions that torch does not see, such as those of a C++ extension that is called directly, read memory; parameters
    that they receive must be registered. Registering twice has no further effect.

    Args:
        module: the module whose forward uses the parameter. Before `offload.initialize` or after it; before only for
            modules of the model.
        parameter: the parameter.

    Raises:
        UsageError: if an argument has another type.
    """
    _check_external("register_external_parameter", module, parameter)
    if not _is_in(parameter, external_parameters(module)):
        # The list stays on the module, for an engine that is built later.
        set_external_parameters(module, [*external_parameters(module), parameter])
        owner = _owner(parameter)
        if owner is not None:
            # The engine has placed its hooks already; a later `initialize` reads the list of the module.
            owner[0].use_in(module, owner[1])


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Reverts `register_external_parameter`.

    Args:
        module: the module that was registered.
        parameter: the parameter that was registered with it.

    Raises:
        UsageError: if the parameter is not registered with the module, or an argument has another type.
    """
    _check_external("unregister_external_parameter", module, parameter)
    if not _is_in(parameter, external_parameters(module)):
        raise UsageError(f"this parameter was not registered with this {type(module).__name__}")
    # By identity: `list.remove` would compare tensors by value.
    set_external_parameters(module, [other for other in external_parameters(module) if other is not parameter])
    owner = _owner(parameter)
    if owner is not None:
        owner[0].end_use_in(module, owner[1])


def _find(parameter: Any, call: str) -> tuple[ParamAccess, ParamHandle]:
    """Returns the engine and the handle of a parameter, for a call between forwards and backwards.

    Args:
        parameter: the argument of the user.
        call: name of the public function, for the error.

    Raises:
        UsageError: if the parameter belongs to no engine, is gathered, or the model runs.
    """
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"{call} expects a parameter of a model under an engine, got {type(parameter).__name__}")
    owner = _owner(parameter)
    if owner is None:
        # A parameter that keeps its placeholder class outlived its engine.
        handle = handle_of(parameter)
        if handle is not None:
            _ = handle.engine  # raises, since the engine was destroyed
        raise UsageError(
            f"{call} expects a parameter of a model under an engine; this parameter, of shape "
            f"{list(parameter.shape)}, belongs to no engine: take the parameter from engine.module"
        )
    # A running model uses the parameter's device buffer, and a gathered one has memory that the user may be changing.
    owner[0].check_idle(owner[1], call)
    return owner


def _owner(parameter: nn.Parameter) -> tuple[ParamAccess, ParamHandle] | None:
    """Returns the engine that owns a parameter now and the parameter's handle; None if no engine does."""
    # A bound parameter is an ordinary parameter without a handle, so each engine looks it up in its own table.
    for looking in engines():
        handle = looking.handle(parameter)
        if handle is not None and handle.owner is not None:
            return looking, handle
    return None


def _check_external(call: str, module: Any, parameter: Any) -> None:
    """Raises `UsageError` if the arguments are not a module and a parameter."""
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise UsageError(
            f"{call} expects a module and a parameter, got {type(module).__name__} and {type(parameter).__name__}"
        )


def _is_in(parameter: nn.Parameter, parameters: list[nn.Parameter]) -> bool:
    """Returns True if `parameters` contains this very object.

    Tensors compare element by element, so `in` does not work.
    """
    return any(other is parameter for other in parameters)
