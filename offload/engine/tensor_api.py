"""Functions, named as in DeepSpeed, that read and set the values of a parameter or declare that a module uses it.

Each function finds the engine that owns the parameter; `param_access` reads and writes the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.engine.param_access import ParamAccess, engines
from offload.engine.params.paged_parameter import ParamHandle, handle_of
from offload.errors import UsageError
from offload.layout.units import external_parameters, set_external_parameters
from offload.states import State


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a copy of a parameter's fp32 master, or of the weight if the parameter is frozen.

    In bf16 the stored weight and the stored low bits are together the master, bit for bit.

    All functions of this module that read or set values are called between forwards and backwards, and by every rank
    with the same parameter, unless the function says that a rank may call it alone. They allocate memory for that one
    parameter outside of all budgets.

    Args:
        param: a parameter of a model under an engine.

    Returns:
        The copy, of the parameter's shape, on the compute device.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_full_fp32_param")
    return access.read(handle, State.WEIGHT)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a copy in fp32 of the gradient that the next step will use, as accumulated so far.

    The gradient is the mean over the ranks, divided by the number of micro-batches of a step, before the clip. Its
    values have the precision in which the engine keeps gradients (`data_types.grad_accum_dtype`).

    Args:
        param: a parameter of a model under an engine.

    Returns:
        The copy, of the parameter's shape, on the compute device. None before a backward, after `step()`, and if the
        parameter is frozen or received no gradient.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_full_grad")
    return access.read(handle, State.GRAD)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Returns a copy in fp32 of an optimizer state such as "exp_avg".

    Args:
        param: a parameter of a model under an engine.
        optim_state_key: name of the state.

    Returns:
        The copy, of the parameter's shape, on the compute device. Before the first step the copy is zeros. None if the
        parameter is frozen. A state of an optimizer without a kernel has the shape that torch gives the state, and is
        None before the first step.

    Raises:
        UsageError: if the optimizer keeps no such state (the message names those that exist); if `param` belongs to no
            engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_full_optimizer_state")
    return access.read_state(handle, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces a parameter's fp32 master; the weight is rounded from the master.

    Args:
        param: a parameter of a model under an engine.
        value: of the parameter's shape, in fp32, bf16 or fp16, on any device; copied. Every rank passes a value, and
            that of rank 0 counts.

    Raises:
        UsageError: if `param` is frozen and `value` differs from the weight; if `value` has another shape or dtype; if
            `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for a copy.
    """
    access, handle = _find(param, "safe_set_full_fp32_param")
    access.write(handle, State.WEIGHT, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces the gradient that the next step will use. Later backwards add to the new gradient.

    Args:
        param: a trainable parameter of a model under an engine.
        value: of the parameter's shape, in fp32, bf16 or fp16, on any device; copied. Every rank passes a value, and
            that of rank 0 counts.

    Raises:
        UsageError: if `param` is frozen; if `value` has another shape or dtype; if `param` belongs to no engine, is
            gathered, or the model runs.
        BudgetError: if the RAM has no room for a copy.
    """
    access, handle = _find(param, "safe_set_full_grad")
    access.write(handle, State.GRAD, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replaces an optimizer state such as "exp_avg". The parameter's number of updates does not change.

    Args:
        param: a trainable parameter of a model under an engine.
        value: of the parameter's shape, in fp32, bf16 or fp16, on any device; copied. Every rank passes a value, and
            that of rank 0 counts.
        optim_state_key: name of the state.

    Raises:
        UsageError: if the optimizer keeps no such state or has no kernel; if `param` is frozen; if `value` has another
            shape or dtype; if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for a copy.
    """
    access, handle = _find(param, "safe_set_full_optimizer_state")
    access.write(handle, access.state(handle, optim_state_key), value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's partition of the result of `safe_get_full_fp32_param`.

    A rank may call this function alone, unless the parameter was set since the last forward or step. All ranks write
    such an edit together: the call then waits until the other ranks call this function too, or use the model again.

    A partition is a range of consecutive elements. Joined in the order of the ranks, the partitions are the parameter.
    Partitions may differ in length, because ranks divide units, not parameters.

    Args:
        param: a parameter of a model under an engine.

    Returns:
        (n,) fp32 on the compute device; n is 0 if this rank holds no element of the parameter.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_local_fp32_param")
    return access.read_local(handle, State.WEIGHT)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's partition of the result of `safe_get_full_grad`.

    Every rank calls this function with the same parameter.

    Args:
        param: a parameter of a model under an engine.

    Returns:
        (n,) fp32 on the compute device, or None if the parameter has no gradient.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_local_grad")
    # All ranks must know whether a gradient exists, so this is always a collective, unlike the call for other states.
    return access.read_local(handle, State.GRAD)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Returns this rank's partition of the result of `safe_get_full_optimizer_state`.

    A rank may call this function alone, unless the state was set since the last forward or step. All ranks write such
    an edit together: the call then waits until the other ranks call this function too, or use the model again.

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
    access, handle = _find(param, "safe_get_local_optimizer_state")
    return access.read_state_local(handle, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces this rank's partition of a parameter's fp32 master.

    Every rank calls this function, with its own partition.

    Args:
        param: a parameter of a model under an engine.
        value: (n,), the elements of this rank, in fp32, bf16 or fp16; copied.

    Raises:
        UsageError: if `param` is frozen and the values differ from the weight; if `value` has another shape or dtype;
            if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for two copies of the parameter.
    """
    access, handle = _find(param, "safe_set_local_fp32_param")
    access.write_local(handle, State.WEIGHT, value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces this rank's partition of the gradient that the next step will use.

    Every rank calls this function, with its own partition.

    Args:
        param: a trainable parameter of a model under an engine.
        value: (n,), the elements of this rank, in fp32, bf16 or fp16; copied.

    Raises:
        UsageError: if `param` is frozen; if `value` has another shape or dtype; if `param` belongs to no engine, is
            gathered, or the model runs.
        BudgetError: if the RAM has no room for two copies of the parameter.
    """
    access, handle = _find(param, "safe_set_local_grad")
    access.write_local(handle, State.GRAD, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replaces this rank's partition of an optimizer state.

    Every rank calls this function, with its own partition.

    Args:
        param: a trainable parameter of a model under an engine.
        value: (n,), the elements of this rank, in fp32, bf16 or fp16; copied.
        optim_state_key: name of the state, such as "exp_avg".

    Raises:
        UsageError: if the optimizer keeps no such state or has no kernel; if `param` is frozen; if `value` has another
            shape or dtype; if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for two copies of the parameter.
    """
    access, handle = _find(param, "safe_set_local_optimizer_state")
    access.write_local(handle, access.state(handle, optim_state_key), value)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declares that the forward of `module` uses `parameter`, which belongs to another module.

    Seldom needed: a use of a parameter is detected if a function of torch receives it, or if its `data_ptr()` is read.
    A parameter must be registered if a function that torch does not see reads its memory, such as a function of a C++
    extension that is called directly. Registering twice has no further effect.

    Args:
        module: the module whose forward uses the parameter. A module of the model may be registered before or after
            `offload.initialize`, any other module only after it.
        parameter: the parameter.

    Raises:
        UsageError: if `module` is not a module, or `parameter` not a parameter.
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
        UsageError: if the parameter is not registered with the module, or if an argument is not of the annotated type.
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
    """Returns the accessor of the engine that owns a parameter, and the parameter's handle.

    Args:
        parameter: the argument that the user passed, of any type.
        call: name of the public function, for the error.

    Raises:
        UsageError: if `parameter` is not a parameter, belongs to no engine or is gathered, or if the model runs.
    """
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"{call} expects a parameter of a model under an engine, got {type(parameter).__name__}")
    owner = _owner(parameter)
    if owner is None:
        # A parameter that still has a handle has outlived its engine.
        handle = handle_of(parameter)
        if handle is not None:
            _ = handle.engine  # raises, since the engine was destroyed
        raise UsageError(
            f"{call} expects a parameter of a model under an engine; this parameter, of shape "
            f"{list(parameter.shape)}, belongs to no engine: take the parameter from engine.module"
        )
    # A running model uses the parameter's device buffer; a gathered parameter has memory that the user may be changing.
    owner[0].check_idle(owner[1], call)
    return owner


def _owner(parameter: nn.Parameter) -> tuple[ParamAccess, ParamHandle] | None:
    """Returns the accessor of the engine that owns a parameter, and the handle; None if no engine owns it."""
    # A bound parameter is an ordinary parameter without a handle, so each engine looks it up in its own table.
    for access in engines():
        handle = access.handle(parameter)
        if handle is not None and handle.owner is not None:
            return access, handle
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
