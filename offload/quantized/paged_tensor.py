"""Tensors without memory that stand for bytes of a frozen parameter, in any tier.

A module of bitsandbytes, torchao, GPTQ or AWQ keeps its codes and scales where it likes: in attributes of the
parameter, in a state that an `autograd.Function` holds from forward to backward, in the module. A view of a device
buffer, kept there, would pin the unit. So such code receives `PagedTensor`s for good. Operations that need no element
(shape, dtype, views) work on the `PagedTensor` itself. Every other operation receives a view of the unit's device
buffer in place of the `PagedTensor`, and the view ends when the operation returns. The unit is fetched if it is not on
the device, in a backward too.

Between forwards and backwards an operation receives a copy. An operation that would write is refused.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import UsageError
from offload.torch_internals import NO_TORCH_FUNCTION, make_subclass, make_wrapper, tree_map

_OURS = ("source", "geometry")
"""Own attributes of a paged tensor; all others come from the parameter that it replaces."""


class PagedBytes(Protocol):
    """The bytes of paged tensors."""

    @property
    def name(self) -> str:
        """Name of the parameter, for messages."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors, if they report one."""

    def read(self, geometry: torch.Tensor) -> torch.Tensor:
        """Returns elements as an ordinary tensor, with the shape, strides, dtype and offset of `geometry`, on meta."""


class PagedTensor(torch.Tensor):
    """A tensor that stands for all or some bytes of a frozen parameter."""

    source: PagedBytes
    geometry: torch.Tensor
    """Shape, strides, dtype and offset in the unit, as a tensor on meta."""
    original: type[nn.Parameter] | None = None
    """Class of the parameter that a paged tensor replaces; None for any other."""

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else None
        if func.is_view and isinstance(tensor, PagedTensor):
            # When the code of another subclass calls it, torch does not decompose functions that may copy, such as
            # `to`.
            made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
            source, made = tensor.source, func(tensor.geometry, *args[1:], **kwargs)
            return tree_map(
                lambda value: paged(PagedTensor, source, value) if isinstance(value, torch.Tensor) else value, made
            )
        if func._schema.is_mutable:
            _check_unwritten(func, args, kwargs)
        args, kwargs = tree_map(
            lambda value: value.values() if isinstance(value, PagedTensor) else value, (args, kwargs)
        )
        return func(*args, **kwargs)

    def values(self) -> torch.Tensor:
        """Returns an ordinary tensor with the elements: a view of a device buffer in a forward or a backward."""
        return self.source.read(self.geometry)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = made = self._ordinary()
            for name, value in vars(self).items():
                if name not in _OURS:
                    # A module that is being copied is in the memo; a parameter that is copied alone keeps its module.
                    is_module = isinstance(value, nn.Module)
                    made.__dict__[name] = memo.get(id(value), value) if is_module else copy.deepcopy(value, memo)
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"PagedTensor({self.source.name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            "requires_grad=False)"
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Converts as `torch.Tensor.to` does; a parameter stays on its device, where the engine's config puts it."""
        made = torch.Tensor.to(self, *args, **kwargs)
        if self.original is not None and made.device != self.device:
            raise UsageError(
                f"parameter {self.source.name} is on {self.device} while an engine manages it, and cannot become one "
                f"on {made.device}; precision and device are set in the config"
            )
        return made

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Converts as `torch.Tensor.cpu` does, with the error of `to`."""
        return self.to("cpu", *args, **kwargs)

    def cuda(self, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Converts as `torch.Tensor.cuda` does, with the error of `to`."""
        return self.to("cuda" if device is None else device, *args, **kwargs)

    def _ordinary(self) -> torch.Tensor:
        """Returns a copy of the elements, of the class that the tensor had before, without its other attributes."""
        values = self.values().detach().clone()
        return values if self.original is None else make_subclass(self.original, values, False)


def paged(kind: type[PagedTensor], source: PagedBytes, geometry: torch.Tensor) -> PagedTensor:
    """Returns a paged tensor. `geometry`, on meta, has shape, strides and dtype, and the offset in the unit."""
    made = make_wrapper(kind, geometry, source.device)
    made.source, made.geometry = source, geometry
    return made


@functools.cache
def paged_kind(original: type[nn.Parameter]) -> type[PagedTensor]:
    """Returns a class of paged tensors that passes for the parameter class `original`, also by its name."""
    return type(original.__name__, (PagedTensor, original), {"original": original, "__module__": original.__module__})


def _check_unwritten(func: Any, args: Any, kwargs: Any) -> None:
    """Raises `UsageError` if `func` would write a paged tensor."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = kwargs.get(argument.name, args[position] if position < len(args) else None)
        if isinstance(target, PagedTensor):
            raise UsageError(
                f"parameter {target.source.name} is frozen: its weights are stored once and never written again; "
                "change them before offload.initialize"
            )
