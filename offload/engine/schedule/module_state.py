"""Values that modules keep on themselves between two blocks of a forward, where other micro-batches would find them.

A model may store a value in an attribute or a buffer of a module, and read it later in the same forward: a depth, a
mask, the auxiliary loss of each block. Where micro-batches take turns, one would read what another has stored. So the
attributes of all modules are compared at each border of the first forward. A value that a module stores and another
run of the same module reads, such as the statistics of a norm that change in place, does no harm: the micro-batches
pass through each module in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_INTERNAL = frozenset(vars(nn.Module())) - {"_buffers"}
"""Attributes of each module that hold its parts and hooks."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SIZED = (list, dict, set)


class ModuleState:
    """The attributes of the modules of a model at one moment."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._before = {name: _attributes_of(module) for name, module in modules.items()}

    def changed(self) -> str | None:
        """Returns the name of an attribute that has another value now, or None."""
        for name, before in self._before.items():
            now = _attributes_of(self._modules[name])
            for key in now.keys() | before.keys():
                if key not in now or key not in before or now[key] != before[key]:
                    return f"{name}.{key}" if name else key
        return None


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns what tells the values of a module's attributes from others: the value if it is plain, else its identity.

    The values themselves are not kept, since some of them are activations.
    """
    found = {key: _identity(value) for key, value in vars(module).items() if key not in _INTERNAL}
    found |= {key: _identity(value) for key, value in module._buffers.items()}
    del found["_buffers"]
    return found


def _identity(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return (type(value), value)
    return (id(value), len(value)) if isinstance(value, _SIZED) else id(value)
