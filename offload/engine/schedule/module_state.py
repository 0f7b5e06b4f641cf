"""Values that modules keep on themselves between two blocks of a forward, where other micro-batches would find them.

A model may store a value on a module and read it later in the same forward: a depth, a mask, the auxiliary loss of each
block. Where micro-batches take turns, one would read what another has stored. So one forward is watched: assignments
to attributes of modules, and changes in their dictionaries, lists, other plain objects, and buffers. A value that a
module changes in place and only another run of the same module reads, such as the statistics of a norm, does no harm:
the micro-batches pass through each module in their order.

The first micro-batch is not watched, since many models set something up in their first forward. What a hook of the user
stores elsewhere cannot be seen: `foreign_hook` finds the hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.provenance import foreign_hooks

_INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of each module that hold its parts and hooks."""
_LIBRARIES = ("torch", "transformers", "accelerate", "peft")
"""Packages whose hooks keep nothing, or keep it by thread."""


class ModuleState:
    """Watches the modules of a model during one forward. Belongs to the thread that runs the step."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._names = {id(module): name for name, module in modules.items()}
        self._modules = modules
        self._assigned: str | None = None
        self._before: dict[str, Any] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notes assignments to attributes of the modules while the context is open."""
        self._before = self._contents()
        # A class of the user that has its own `__setattr__` calls this one, else nothing would be set.
        own = nn.Module.__setattr__

        def noted(module: nn.Module, key: str, value: Any) -> None:
            name = self._names.get(id(module))
            if name is not None and key not in _INTERNAL:
                self._assigned = self._assigned or (f"{name}.{key}" if name else key)
            own(module, key, value)

        nn.Module.__setattr__ = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = own  # type: ignore[method-assign]

    def changed(self) -> str | None:
        """Returns the name of an attribute that was assigned or whose content has changed, or None."""
        if self._assigned is not None:
            return self._assigned
        now = self._contents()
        return next((key for key, value in now.items() if self._before.get(key) != value), None)

    def _contents(self) -> dict[str, Any]:
        """Returns what tells the contents of all attributes from others. Values, perhaps activations, are not kept."""
        found = {}
        for name, module in self._modules.items():
            for key, value in vars(module).items():
                if key not in _INTERNAL and (content := _content(value)) is not None:
                    found[f"{name}.{key}" if name else key] = content
            if not isinstance(module, nn.modules.batchnorm._NormBase):
                for key, buffer in module._buffers.items():
                    found[f"{name}.{key}" if name else key] = (id(buffer), getattr(buffer, "_version", 0))
        return found


def _content(value: Any) -> Any:
    """Returns the identities of what a container or a plain object holds; None for any other value."""
    if isinstance(value, dict):
        return {key: id(each) for key, each in value.items() if isinstance(key, str | int)}
    if isinstance(value, list | tuple | set):
        return [id(each) for each in value]
    if isinstance(value, torch.Tensor | nn.Module | type) or callable(value):
        return None
    held = getattr(value, "__dict__", None)
    return None if held is None else {key: id(each) for key, each in held.items()}


def foreign_hook(modules: Mapping[str, nn.Module]) -> str | None:
    """Returns the name of a module with a forward hook of the user, or None."""
    for name, module in modules.items():
        if any(kind.startswith("forward") for kind, _ in foreign_hooks(module, *_LIBRARIES)):
            return name or "the model"
    return None
