"""Hooks for saved tensors, and what they leave in a graph. Only `engine.params.saved_tensors` makes the hooks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

class Plain:
    @staticmethod
    def of(tensor: torch.Tensor, /) -> Plain: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def version(self) -> int: ...

class Handle:
    @staticmethod
    def of(unit: int, updates: int, view: torch.Tensor, /) -> Handle: ...
    def from_flat(self, flat: torch.Tensor, /) -> torch.Tensor: ...
    @property
    def unit(self) -> int: ...
    @property
    def updates(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...

class Pack:
    def __init__(
        self,
        tensor: type,
        parameter: type,
        bindings: dict[int, Any],
        placeholders: dict[int, str],
        arena: Sequence[tuple[int, int]],
        innermost: bool,
        other: Callable[[torch.Tensor], Any],
        /,
    ) -> None: ...
    def pack(self, tensor: torch.Tensor, /) -> Any: ...
    @property
    def other(self) -> Any: ...

class Unpack:
    def __init__(self, view: Callable[[Handle], torch.Tensor], other: Callable[[Any], torch.Tensor], /) -> None: ...
    def unpack(self, packed: Any, /) -> torch.Tensor: ...
