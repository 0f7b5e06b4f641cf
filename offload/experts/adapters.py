"""Adapters of peft that target whole parameters, such as stacks of experts (`target_parameters`).

In each forward peft registers a parametrization of the parameter, where torch calls `parameter.set_(parameter)`. No
byte changes, but torch counts a change in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from offload.engine.callbacks import Extension
from offload.engine.params import ParamHandle
from offload.layout.experts import is_parameter_adapter
from offload.torch_internals import outside_of_compiled_code


class TargetedParameters(Extension):
    """Modules with parameters that adapters target: changes by peft before a forward do not count."""

    def __init__(self, model: nn.Module, handles: Iterable[Iterable[ParamHandle]]) -> None:
        """Hooks the modules; `handles` are the parameters of each unit."""
        self._removers: list[Callable[[], None]] = []
        known = {id(handle.parameter): handle for unit in handles for handle in unit}
        wrappers: list[Any] = [module for module in model.modules() if is_parameter_adapter(module)]
        for wrapper in wrappers:
            module = wrapper.get_base_layer()
            handle = known.get(id(getattr(module, wrapper.parameter_name)))
            if handle is not None:
                self._hook(module, handle)

    def _hook(self, module: nn.Module, handle: ParamHandle) -> None:
        def before(called: nn.Module, args: tuple[Any, ...]) -> None:
            if called is module:
                handle.forgive_changes()

        self._removers.append(module.register_forward_pre_hook(outside_of_compiled_code(before)).remove)

    def remove(self) -> None:
        """Removes the hooks."""
        while self._removers:
            self._removers.pop()()
