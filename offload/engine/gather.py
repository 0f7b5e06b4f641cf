"""`state_dict()` of a model under an engine: real weights in ordinary CPU memory, never placeholders."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.engine.layout import UnitLayout
from offload.swapper.pager import Pager


class Gatherer:
    """Replaces placeholders in every state dict, also a submodule's, by copies of the weights.

    Copies of a tied parameter are one tensor for as long as somebody holds it, as in an ordinary model.
    """

    def __init__(self, model: nn.Module, layouts: tuple[UnitLayout, ...], pager: Pager, dtype: torch.dtype) -> None:
        self._pager, self._layouts, self._dtype = pager, layouts, dtype
        self._places = {
            id(model.get_parameter(segment.name)): (unit, position)
            for unit, layout in enumerate(layouts)
            for position, segment in enumerate(layout.segments)
        }
        self._held: weakref.WeakValueDictionary[tuple[int, int, int], torch.Tensor] = weakref.WeakValueDictionary()
        self.entered: Callable[[], None] = lambda: None
        """Called before weights are read."""

        def replace(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            self._replace(module, state, prefix)

        self._removers = [
            module.register_state_dict_post_hook(replace).remove
            for module in model.modules()
            if any(True for _ in module.parameters(recurse=False))
        ]

    def remove(self) -> None:
        for remover in self._removers:
            remover()

    def weight(self, unit: int, position: int) -> torch.Tensor:
        """A CPU copy of one parameter as it is after the last step, in the mode's dtype."""
        segment = self._layouts[unit].segments[position]
        key = (unit, position, self._pager.updates(unit))
        held = self._held.get(key)
        if held is not None and held._version == 0:
            return held
        copies: list[torch.Tensor] = []

        def receive(memory: torch.Tensor) -> None:
            flat = memory.view(self._dtype)[segment.start : segment.stop]
            copies.append(flat.detach().to("cpu", copy=True).view(segment.shape))

        self._pager.read_weights(unit, receive)
        self._held[key] = copies[0]
        return copies[0]

    def _replace(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        self.entered()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            place = self._places.get(id(parameter))
            if place is not None and prefix + name in state:
                state[prefix + name] = self.weight(*place)
