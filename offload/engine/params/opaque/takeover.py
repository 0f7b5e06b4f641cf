"""The move of a quantized parameter into a unit: its inner tensors are copied, and paged tensors take their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.engine.params.opaque.paged_tensor import PagedTensor, ParameterBytes, paged, paged_kind
from offload.layout.flat_layout import Segment
from offload.layout.frozen import OWN, first_names, holders, inner_starts, inner_tensors_of, tensors_of
from offload.torch_internals import inner_tensors

_PACKS = "support_avx512bf16_for_cpu"
"""Attribute of a Linear4bit: True if it packs its weight for the CPU."""


def write_bytes(model: nn.Module, segment: Segment, memory: torch.Tensor) -> None:
    """Copies the inner tensors of a parameter, or reads them from their file.

    Args:
        model: the model, with the parameter.
        segment: the parameter.
        memory: uint8 on the CPU that begin with the parameter's bytes; written.
    """
    starts = inner_starts(segment.inner)
    for name, tensor in _inner(model, segment).items():
        if name not in starts:
            continue
        nbytes = tensor.numel() * tensor.element_size()
        place = memory[starts[name] : starts[name] + nbytes].view(tensor.dtype)
        place = place.as_strided(tensor.size(), _stride(tensor), place.storage_offset())
        place.copy_(tensor.values() if isinstance(tensor, PagedTensor) else _plain(tensor))


def page_out(model: nn.Module, segment: Segment, source: ParameterBytes, in_place: bool = False) -> None:
    """Replaces the inner tensors of a parameter by paged ones, which frees their memory. Identity and ties stay.

    Args:
        model: the model, with the parameter.
        segment: the parameter.
        source: its bytes.
        in_place: True if those are read from the model's own files. What is in memory already, such as a code book,
            then moves to the device and stays there.
    """
    parameter, owner = model.get_parameter(segment.name), _owner(model, segment)
    tensors, starts = _inner(model, segment), inner_starts(segment.inner)
    first = first_names(tensors)

    def made(name: str, kind: type[PagedTensor] = PagedTensor) -> torch.Tensor:
        if in_place and not isinstance(tensors[name], PagedTensor):
            return tensors[name].to(source.device)
        return paged(kind, source, _geometry(tensors[name], source.start + starts[first[name]]))

    if inner_tensors(parameter) is not None:
        wrapper = _rewrapped(parameter, "", made)
        wrapper.__dict__.update({name: value for name, value in vars(parameter).items() if name not in vars(wrapper)})
        wrapper.requires_grad_(False)
        torch.utils.swap_tensors(parameter, wrapper)
        return
    for prefix, holder in list(holders(parameter, owner)):
        for name in tensors_of(holder):
            setattr(holder, name, made(f"{prefix}{name}"))
    standin = made(OWN, paged_kind(getattr(parameter, "original", None) or type(parameter)))
    standin.__dict__.update({name: value for name, value in vars(parameter).items() if name not in vars(standin)})
    torch.utils.swap_tensors(parameter, standin)


def keep_unpacked(model: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Stops modules of bitsandbytes from packing weights anew for the CPU, as a Linear4bit does that evaluates there.

    Args:
        model: the model.
        names: names of parameters of the modules.

    Returns:
        A function that lets the modules pack again that did before.
    """
    owners: list[Any] = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    packing = [owner for owner in owners if getattr(owner, _PACKS, False)]

    def switch(on: bool) -> None:
        for owner in packing:
            setattr(owner, _PACKS, on)

    switch(False)
    return partial(switch, True)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` on the CPU with copies of what is paged out of it, of torch's or the wrapper's class.

    Each inner tensor moves by itself: not every wrapper's class keeps its format when the wrapper is moved.
    """

    def made(name: str) -> torch.Tensor:
        inner = tensor
        for each in filter(None, name.split(".")):
            inner = getattr(inner, each)
        return (inner.values() if isinstance(inner, PagedTensor) else inner).to("cpu")

    return _rewrapped(tensor, "", made)


def _rewrapped(tensor: torch.Tensor, prefix: str, made: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Returns a wrapper like `tensor` around other tensors, or one of those if `tensor` is no wrapper.

    Args:
        tensor: the wrapper.
        prefix: prefix of the names of its inner tensors.
        made: returns the tensor in place of an inner one, by name.
    """
    found = inner_tensors(tensor)
    if found is None:
        return made(prefix[:-1])
    inner: Mapping[str, Any] = {
        name: _rewrapped(value, f"{prefix}{name}.", made) if isinstance(value, torch.Tensor) else value
        for name, value in found[0].items()
    }
    kind: Any = type(tensor)
    wrapper: torch.Tensor = kind.__tensor_unflatten__(inner, found[1], tensor.size(), tensor.stride())
    return wrapper


def _inner(model: nn.Module, segment: Segment) -> dict[str, torch.Tensor]:
    return inner_tensors_of(model.get_parameter(segment.name), _owner(model, segment))


def _owner(model: nn.Module, segment: Segment) -> nn.Module:
    """Returns the module that owns a parameter, under the parameter's first name."""
    return model.get_submodule(segment.name.rpartition(".")[0])


def _geometry(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """Returns a tensor on meta with the shape and dtype of `tensor`, at byte `start`."""
    offset = start // tensor.dtype.itemsize
    memory = torch.empty(offset + tensor.numel(), dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.size(), _stride(tensor), offset)


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides with which a tensor is stored: its own, if those leave no gaps."""
    if isinstance(tensor, PagedTensor):
        return tensor.stride()
    return torch.empty_like(_plain(tensor), device="meta").stride()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory, of torch's own class."""
    return tensor.detach().as_subclass(torch.Tensor)
