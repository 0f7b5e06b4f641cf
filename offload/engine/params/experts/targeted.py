"""Adapters of peft that target whole parameters, such as stacks of experts (`target_parameters`).

In each forward peft registers a parametrization of the parameter, where torch calls `parameter.set_(parameter)`. No
byte changes, but torch counts a change in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from offload.engine.params.paged_parameter import ParamHandle
from offload.layout.experts import is_parameter_adapter
from offload.torch_internals import outside_of_compiled_code


def forgive_parametrizations(
    modules: Mapping[str, nn.Module], handles: Iterable[Iterable[ParamHandle]]
) -> list[Callable[[], None]]:
    """Hooks the modules of parameters that adapters target: what peft did before they run is no change.

    Args:
        modules: all modules of the model, by name.
        handles: the parameters of each unit.

    Returns:
        Functions that remove the hooks.
    """
    known = {id(handle.parameter): handle for unit in handles for handle in unit}
    found: list[tuple[nn.Module, ParamHandle]] = []
    wrappers: list[Any] = [module for module in modules.values() if is_parameter_adapter(module)]
    for wrapper in wrappers:
        inner = wrapper.get_base_layer()
        handle = known.get(id(getattr(inner, wrapper.parameter_name)))
        if handle is not None:
            found.append((inner, handle))
    return [_hook(module, handle) for module, handle in found]


def _hook(module: nn.Module, handle: ParamHandle) -> Callable[[], None]:
    """Hooks one module and returns the function that removes the hook."""

    def before(called: nn.Module, args: tuple[Any, ...]) -> None:
        if called is module:
            handle.forgive_changes()

    return module.register_forward_pre_hook(outside_of_compiled_code(before)).remove
