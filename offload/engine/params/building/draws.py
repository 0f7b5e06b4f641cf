"""Equality of values that do not exist yet: which parameters without values begin as copies of others."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.engine.params.building.writes import Initializer

_calls = itertools.count()


class Draw:
    """Values that an initializer will make. All parameters of one draw begin with equal values.

    Attributes:
        copied: True once a parameter was copied, so that the draw may be that of several.
        writers: the initializers that have written the values, each with the number of its last write.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        """Stores where a parameter was created.

        Args:
            module: the module that initializes the parameter.
            name: the parameter's name in the module.
        """
        self._module, self._class, self._name = weakref.ref(module), type(module), name
        self.copied = False
        self.writers: dict[Initializer, int] = {}

    def anew(self, by: Initializer | None) -> Draw:
        """Returns the draw of the same parameter after an initializer has run once more, None for an unknown one."""
        other: Draw = object.__new__(Draw)
        other._module, other._class, other._name, other.copied = self._module, self._class, self._name, False
        other.writers = self.writers if by is None else {**self.writers, by: next(_calls)}
        return other

    def is_made_in(self, module: nn.Module, name: str) -> int:
        """Returns 2 if `module` is the one that makes the values, 1 if it makes such values in the same way, else 0."""
        if name != self._name or type(module) is not self._class:
            return 0
        return 2 if self._module() is module else 1


class Copied(NamedTuple):
    """What a copy of a parameter without values knows about the parameter, at the time of the copy."""

    origin: Any
    draw: Draw | None


_MARK = "offload_copied"


def mark_copy(tensor: torch.Tensor, copied: Copied) -> None:
    """Notes on a tensor without values that it is a copy of a whole parameter."""
    tensor.__dict__[_MARK] = (copied, tensor._version)


def marked_copy(tensor: torch.Tensor) -> Copied | None:
    """Returns what `mark_copy` has noted; None for another tensor, and for one that was changed since."""
    copied, version = tensor.__dict__.get(_MARK, (None, 0))
    return copied if version == tensor._version else None
