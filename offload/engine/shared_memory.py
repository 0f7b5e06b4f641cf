"""Refuses models whose tensors share memory in a way that an engine would silently break.

An engine moves each parameter into storage of its own, and its updates write there. If another parameter, a buffer or
an attribute shares the parameter's memory, it follows the parameter in plain PyTorch. Under an engine it would keep its
first values, so the model is refused. Sharing is allowed if one parameter object has several names, or if the parameter
is frozen. If a tensor outside of the model, such as a script's state dict, shares memory, a notice reports it later.

    every tensor ─► interval of addresses ─► sorted ─► two that overlap, one of them a parameter that trains: an error
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from offload.engine.params import handle_of
from offload.errors import ConfigError
from offload.quantized.paged_tensor import PagedTensor
from offload.torch_internals import StorageReference, inner_tensors, storage_key

_DEPTH = 8
"""Largest number of references that are followed from an attribute to a tensor."""


class _Interval(NamedTuple):
    """Addresses of a tensor's elements."""

    device: str
    first: int
    stop: int
    name: str
    """Name of the tensor in words, such as "buffer lookup"."""
    tensor: torch.Tensor

    @property
    def trains(self) -> bool:
        """True if updates write the tensor."""
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad


def check_shared_memory(model: nn.Module) -> None:
    """Raises `ConfigError` if another tensor shares a parameter's memory and would miss the parameter's updates."""
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if (same := parameters.get(id(buffer))) is not None:
            raise ConfigError(
                f"buffer {name} is the parameter {same} itself, which an engine cannot store as both: leave out "
                "register_buffer, and read the parameter in its place, by a property for one"
            )
    intervals = sorted(_intervals(model), key=lambda key: (key.device, key.first))
    before: list[_Interval] = []
    for interval in intervals:
        # Of the earlier intervals, only those that reach into this one may reach into later ones.
        before = [earlier for earlier in before if earlier.device == interval.device and earlier.stop > interval.first]
        for earlier in before:
            if (
                (interval.trains or earlier.trains)
                and interval.tensor is not earlier.tensor
                and _overlap(earlier, interval)
            ):
                raise _untied(earlier, interval, parameters)
        before.append(interval)


def memory_of(model: nn.Module) -> dict[str, StorageReference]:
    """Returns a weak reference to the memory of each parameter that trains, by name.

    Memory with buffers is left out.
    """
    buffers = {storage_key(buffer) for buffer in model.buffers() if _has_memory(buffer)}
    return {
        name: StorageReference(parameter.untyped_storage())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and _has_memory(parameter) and storage_key(parameter) not in buffers
    }


def line_on_users(memory: Mapping[str, StorageReference]) -> tuple[str, ...]:
    """Returns a notice if a tensor uses memory from which an engine has taken weights: no update reaches it.

    `memory` is the result of `memory_of` before the engine took over.
    """
    if all(reference.expired() for reference in memory.values()):
        return ()
    gc.collect()  # a cycle may hold tensors that nobody can use any more
    used = [name for name, reference in memory.items() if not reference.expired()]
    if not used:
        return ()
    more = f" (and of {len(used) - 1} more)" if len(used) > 1 else ""
    return (
        f"a tensor outside of the model uses the memory of parameter {used[0]}{more}: it keeps the first values, and "
        "RAM. Take state_dict() and views of weights after offload.initialize, or clone() them",
    )


def _untied(one: _Interval, other: _Interval, parameters: Mapping[int, str]) -> ConfigError:
    """Returns the error about two tensors that share memory; at least one of them is a parameter that trains."""
    owners = [interval for interval in (one, other) if id(interval.tensor) in parameters]
    if len(owners) == 2:
        names = [parameters[id(interval.tensor)] for interval in owners]
        first, second = sorted(names, key=list(parameters.values()).index)
        return ConfigError(
            f"parameters {first} and {second} share memory without being one parameter, so they would be untied; "
            "tie them by one object (head.weight = embedding.weight, without .data), take slices of one parameter in "
            "the forward, or clone() one"
        )
    other = next(interval for interval in (one, other) if interval is not owners[0])
    return ConfigError(
        f"{other.name} lies in the memory of parameter {parameters[id(owners[0].tensor)]}, which trains, so it would "
        "keep the first values; compute it from the parameter in the forward, or clone() it before offload.initialize"
    )


def _intervals(model: nn.Module) -> Iterator[_Interval]:
    """Yields the interval of every tensor with memory: parameters, buffers, and tensors in attributes of modules.

    Raises `ConfigError` if a parameter that trains has elements that share memory with each other.
    """
    seen: set[int] = set()

    def interval(name: str, tensor: torch.Tensor) -> Iterator[_Interval]:
        if id(tensor) not in seen and _has_memory(tensor):
            seen.add(id(tensor))
            first, strides = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in strides)  # elements, with the gaps between them
            yield _Interval(str(tensor.device), first, first + extent * tensor.itemsize, name, tensor)

    for name, parameter in model.named_parameters():
        if parameter.requires_grad and _has_memory(parameter) and _folded(parameter):
            raise ConfigError(
                f"elements of parameter {name} share memory with each other, as after expand(), so they cannot train "
                "apart; clone() it, or keep the small parameter and expand it in the forward"
            )
        yield from interval(f"parameter {name}", parameter)
    for name, buffer in model.named_buffers():
        yield from interval(f"buffer {name}", buffer)
    for name, tensor in _reached(model):
        yield from interval(name, tensor)


def _reached(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that attributes of modules and parameters reach, each with the name of the first attribute.

    An attribute reaches tensors through containers, fields of objects, variables of functions and hooks, and modules
    outside of the model.
    """
    modules = {id(module) for module in model.modules()}
    waiting: deque[tuple[str, Any, int]] = deque()
    for path, module in model.named_modules():
        computed = {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)}
        for attribute, value in vars(module).items():
            # The hook computes the attribute anew before each forward.
            if attribute not in _TABLES and attribute not in computed:
                waiting.append((f"attribute {attribute} of {path or 'the model'}", value, _DEPTH))
    for name, parameter in model.named_parameters():
        for attribute, value in vars(parameter).items():
            waiting.append((f"attribute {attribute} of parameter {name}", value, _DEPTH))
    seen: dict[int, Any] = {}  # by id, which is unique as long as the object lives
    while waiting:
        name, value, depth = waiting.popleft()
        kind = type(value)  # isinstance would ask a proxy for its __class__
        if kind in _ATOMS or id(value) in seen:
            continue
        seen[id(value)] = value
        if issubclass(kind, torch.Tensor):
            yield name, value
        elif issubclass(kind, nn.Module):
            if id(value) not in modules:
                yield from ((name, tensor) for tensor in (*value.parameters(), *value.buffers()))
        elif depth:
            waiting.extend((name, inner, depth - 1) for inner in _referents(value))


_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module whose contents are checked separately."""
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
"""Classes whose objects refer to no other objects. A vocabulary contains many such objects."""


def _referents(value: Any) -> Iterable[Any]:
    """Returns the objects to which `value` refers. Classes, Python modules and frames are left out."""
    kind = type(value)
    if kind is FunctionType:
        cells = (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*cells, vars(value))
    if issubclass(kind, type | ModuleType | FrameType):
        return ()
    # Python's collector does not see that an array keeps the tensor whose memory the array uses.
    array = getattr(sys.modules.get("numpy"), "ndarray", ())
    return (value.base,) if issubclass(kind, array) else gc.get_referents(value)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor has elements at an address of its own."""
    # Wrappers of other tensors, sparse tensors, tensors on meta and placeholders of an engine have none.
    wraps = isinstance(tensor, PagedTensor) or handle_of(tensor) is not None or inner_tensors(tensor) is not None
    return not wraps and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _folded(tensor: torch.Tensor) -> bool:
    reach = 0
    # Elements are apart if each stride is longer than the reach of all smaller strides.
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _overlap(one: _Interval, other: _Interval) -> bool:
    """Returns True if two tensors share an element. Their intervals overlap, as those of two columns of a matrix do."""
    pair = (one.tensor, other.tensor)
    if all(tensor.is_contiguous() for tensor in pair) or one.tensor.itemsize != other.tensor.itemsize:
        return True
    start, itemsize = one.first, one.tensor.itemsize
    if (other.first - start) % itemsize:
        return True
    used = torch.zeros((max(one.stop, other.stop) - start) // itemsize, dtype=torch.bool, device="cpu")
    elements, other_elements = (
        used.as_strided(tensor.shape, tensor.stride(), (first - start) // itemsize)
        for tensor, first in zip(pair, (one.first, other.first), strict=True)
    )
    elements.fill_(True)
    return bool(other_elements.any())
