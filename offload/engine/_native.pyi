"""What is called dozens of times in each use of a unit: hooks of autograd."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch

class Plain:
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def version(self) -> int: ...

class Handle:
    @property
    def unit(self) -> int: ...
    @property
    def updates(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...

def plain_of(tensor: torch.Tensor, /) -> Plain: ...
def handle_of(unit: int, updates: int, view: torch.Tensor, /) -> Handle: ...
def view_of(handle: Handle, flat: torch.Tensor, /) -> torch.Tensor: ...

class Pack:
    def __init__(
        self,
        tensor: type,
        parameter: type,
        bindings: dict[int, Any],
        placeholders: dict[int, str],
        arena: list[tuple[int, int]],
        innermost: bool,
        other: Callable[[torch.Tensor], Any],
        /,
    ) -> None: ...
    def pack(self, tensor: torch.Tensor, /) -> Any: ...
    @property
    def other(self) -> Any: ...

class Unpack:
    def __init__(
        self,
        view: Callable[[Handle], torch.Tensor],
        other: Callable[[Any], torch.Tensor],
        views: Any,
        under_modes: Callable[[], bool],
        /,
    ) -> None: ...
    def unpack(self, packed: Any, /) -> torch.Tensor: ...

class DirectAdd:
    def __init__(
        self,
        take: Callable[[torch.Tensor, bool], float | None],
        other: Callable[[torch.Tensor, bool], None],
        lock: AbstractContextManager[Any],
        reading: Collection[int],
        watched: Collection[int],
        squares: list[dict[tuple[int, int], float | torch.Tensor | None]],
        unit: int,
        segment: int,
        /,
    ) -> None: ...
    def add(self, gradient: torch.Tensor, alone: bool, /) -> None: ...

class GradientHook:
    def __init__(
        self,
        passes: Any,
        plain_tensors: Callable[[], AbstractContextManager[Any]],
        add: Callable[[torch.Tensor, bool], None],
        /,
    ) -> None: ...
    def take(self, parameter: torch.Tensor, /) -> None: ...
