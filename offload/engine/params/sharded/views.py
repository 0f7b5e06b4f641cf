"""DTensors over this process's shards, for as long as a module runs, and in state dicts.

    pre-forward hook     the unit is on the device     module.weight: DTensor over the parameter's memory
    forward, backward    torch's operators on DTensors communicate, as without an engine
    post-forward hook    module.weight: the ordinary parameter again, a placeholder once the unit is released

The engine knows the ordinary parameter alone. `DTensor.from_local` is a function of autograd: its backward reduces the
gradient to the placements of the weight, so that the engine receives the gradient of this process's shard. Of a
replicated weight whose gradient is a part on each process, as in sequence parallelism, that is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.params.paged_parameter import ParamHandle, handle_of
from offload.engine.params.sharded.find import DTensorForm, is_dtensor
from offload.engine.params.sharded.takeover import Site


class ShardedViews:
    """The hooks on modules that compute with DTensors. Belongs to the thread that runs the model."""

    def __init__(self, sites: Sequence[Site]) -> None:
        """Hooks the modules, whose hooks for weights and for state dicts are there already."""
        self._shown: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []
        """Modules that run now, outermost first, with the parameters that their DTensors stand for."""
        self._removers: list[Callable[[], None]] = []
        for site in sites:
            self._hook(site.module, site.forms)

    def _hook(self, module: nn.Module, forms: Mapping[str, DTensorForm]) -> None:
        """Hooks one module; see the module."""

        def before(called: nn.Module, _: Any) -> None:
            self._show(called, forms)

        def after(called: nn.Module, _: Any, __: Any) -> None:
            self._hide(called)

        def save(saved: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            for name, form in forms.items():
                value = state.get(prefix + name)
                if type(value) is torch.Tensor:  # a copy, where the engine has put one
                    state[prefix + name] = form.over(value)

        def load(loaded: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for name, form in forms.items():
                value = state.get(prefix + name)
                if isinstance(value, torch.Tensor):
                    local = loaded._parameters[name]
                    assert local is not None
                    state[prefix + name] = form.part_of(value, local.shape)

        # The engine's own pre-hook is the first, and this the last. After the forward this one comes first, before the
        # unit is released: a DTensor that lives is a view of its memory.
        self._removers += [
            module.register_forward_pre_hook(before).remove,
            module.register_forward_hook(after, prepend=True, always_call=True).remove,
            module.register_state_dict_post_hook(save).remove,
            module.register_load_state_dict_pre_hook(load).remove,
        ]

    def remove(self) -> None:
        """Removes the hooks."""
        self.abandon()
        while self._removers:
            self._removers.pop()()

    def abandon(self) -> None:
        """Hides the DTensors of modules that a Ctrl-C left open: torch calls no hooks after a `KeyboardInterrupt`."""
        while self._shown:
            module, parameters = self._shown.pop()
            module._parameters.update(parameters)

    def _show(self, module: nn.Module, forms: Mapping[str, DTensorForm]) -> None:
        """Puts DTensors in the places of a module's parameters."""
        held = ((name, module._parameters[name]) for name in forms)
        found = {name: each for name, each in held if each is not None and not is_dtensor(each)}
        # Made first: to read a placeholder is a call of the engine, which hides all that is shown.
        shown: dict[str, Any] = {name: forms[name].over(_memory_of(parameter)) for name, parameter in found.items()}
        self._shown.append((module, found))
        module._parameters.update(shown)

    def _hide(self, module: nn.Module) -> None:
        """Puts the parameters of a module back. A module that was not shown, as a pre-hook has failed, has none."""
        if self._shown and self._shown[-1][0] is module:
            _, parameters = self._shown.pop()
            module._parameters.update(parameters)


def _memory_of(parameter: nn.Parameter) -> torch.Tensor:
    """Returns a parameter that has its weights, or weights in place of a placeholder that a module is called with."""
    handle: ParamHandle | None = handle_of(parameter)
    if handle is None:
        return parameter
    here = handle.here()
    if here is not None:
        return here
    # A layer that is called by itself, while no module of the model runs.
    return handle.read_with_gradient() if torch.is_grad_enabled() and parameter.requires_grad else handle.read()
