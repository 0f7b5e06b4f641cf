"""`deepspeed.runtime.zero.parameter_offload`: the hooks that trl takes away while all weights are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class DeepSpeedZeRoOffload:
    """The hooks of an engine's model, for libraries that remove them around a generation and register them again.

    There is nothing to remove: the engine's own hooks rest by themselves while all parameters are gathered.
    """

    def __init__(self) -> None:
        """Makes the attributes that such a library walks through."""
        self.module = self
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that are marked as used by a module: none.

        Args:
            recurse: without effect.
        """
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of other modules: none."""
        return iter(())

    def _register_deepspeed_module(self, module: Any) -> None:
        """Does nothing: no hook was removed."""
