"""`ZeroGrad`, the `zero_grad` of a model whose gradients an engine holds."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn


class ZeroGrad:
    """`model.zero_grad()` under an engine, which holds the gradients.

    A deep copy of the model receives the method of its class again.
    """

    def __init__(self, module: nn.Module, forget: Callable[[], None]) -> None:
        self._module, self._forget = module, forget

    def __call__(self, set_to_none: bool = True) -> None:
        """Drops the engine's gradients. `set_to_none` has no effect, since `.grad` is always None."""
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns the class's own `zero_grad`, bound to the copied module."""
        return types.MethodType(type(self._module).zero_grad, memo[id(self._module)])
