"""The frozen weights that `"frozen"` of the config stores as blocks of codes.

**The rule.** A parameter is stored as blocks if it is frozen and is

* the weight of a linear layer (2 dimensions), or
* a stack of matrices (3 dimensions, at least 2 x 64 x 64) of a module outside of torch, as experts are stacked,

and if no module uses it as an embedding or as the output layer of a model, and it is not part of an adapter of peft.
Norms, biases, embeddings, convolutions and all that trains stay in the dtype of the model, and what another library has
quantized stays as that library has it (`offload.quantized`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError
from offload.kernels.blocks import BLOCK_FORMATS, dequantize, quantize
from offload.layout.flat_layout import OPAQUE_ALIGNMENT, FrozenStorage, ParameterSegment, StateField, UnitLayout
from offload.notices import Remark
from offload.provenance import is_class_of
from offload.sizes import align_up, count_of, format_size
from offload.torch_internals import inner_tensors

# -- quantized by another library ----------------------------------------------------------------------
#
# Frozen parameters that are stored as the bytes they consist of: weights that another library has quantized.
#
# **The rule.** A parameter counts as quantized by another library if it is frozen and
#
# * its class is one of bitsandbytes (`Params4bit`, `Int8Params`), or
# * its class wraps other tensors, as the tensor subclasses of torchao do (`__tensor_flatten__`), or
# * its dtype is not one that trains, such as integers or float8, or
# * its module also owns a parameter of such a dtype, as with the scales of GPTQ and AWQ.
#
# Only the library that made such a parameter can interpret its bytes. The parameter consists of *inner tensors*: codes,
# scales and other tensors that the library keeps for it. They are stored one after the other, each at a multiple of 64
# bytes:
#
#     [ first inner tensor | second inner tensor | … ]


_VALUES = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
"""Dtypes of ordinary weights."""

OWN = "data"
"""Name of the inner tensor that is the parameter itself, if its class wraps no other tensors."""

_INT8 = "Int8Params"
"""Name of a class of bitsandbytes, which need not be installed."""
_LEFT_OUT = frozenset(("idx", "subB", "geometry"))
"""Attributes with tensors that are no part of a parameter.

A Linear8bitLt keeps the outliers of its last input in `idx` and `subB`. A tensor whose bytes are in a file has a
`geometry`.
"""


def quantized_by_other_library(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are stored as the bytes they consist of, by their first names."""
    ids: set[int] = set()
    for module in model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if not parameter.requires_grad]
        quantized_ids = {
            id(weight) for weight in own if is_of_bitsandbytes(weight) or inner_tensors(weight) is not None
        }
        # Codes of a plain dtype mean nothing without their scales, whose bits must stay too.
        codes = any(weight.dtype not in _VALUES for weight in own if id(weight) not in quantized_ids)
        ids |= {id(weight) for weight in own} if codes else quantized_ids
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ids}


def is_of_bitsandbytes(parameter: nn.Parameter) -> bool:
    """Returns True if bitsandbytes has quantized a parameter, or will."""
    eight = any(kind.__name__ == _INT8 and is_class_of(kind, "bitsandbytes") for kind in type(parameter).__mro__)
    # 4-bit codes may lie in elements of a floating dtype, so `quant_state` identifies them, and the dtype does not.
    return hasattr(parameter, "quant_state") or (eight and not getattr(parameter, "has_fp16_weights", False))


def waits_for_quantization(parameter: nn.Parameter) -> bool:
    """Returns True for a parameter of bitsandbytes that still holds its values: it was never moved to a device."""
    if not is_of_bitsandbytes(parameter):
        return False
    if hasattr(parameter, "quant_state"):
        return parameter.quant_state is None
    return parameter.dtype is not torch.int8


def is_packed(parameter: nn.Parameter) -> bool:
    """Returns True for 4 bits that bitsandbytes has packed for the CPU, as it does in an evaluation there."""
    return bool(getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False))


def inner_tensors_of(parameter: nn.Parameter, owner: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the inner tensors of an opaque parameter by attribute path. Several paths may lead to one tensor.

    After a forward, the owner of `Int8Params` keeps tensors of the parameter.
    """
    if inner_tensors(parameter) is not None:
        return dict(_flattened(parameter, ""))
    tensors: dict[str, torch.Tensor] = {OWN: parameter}
    for prefix, holder in holders(parameter, owner):
        tensors |= {f"{prefix}{name}": value for name, value in tensors_of(holder).items()}
    return tensors


def _flattened(tensor: torch.Tensor, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the inner tensors of a wrapper, including the inner tensors of wrappers inside of it."""
    wrapped = inner_tensors(tensor)
    if wrapped is None:
        yield prefix[:-1], tensor
        return
    for name, value in wrapped[0].items():
        if isinstance(value, torch.Tensor):
            yield from _flattened(value, f"{prefix}{name}.")


def holders(parameter: nn.Parameter, owner: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (prefix of the names, object) for each object whose attributes hold tensors of a parameter."""
    yield "", parameter
    state, prefix = getattr(parameter, "quant_state", None), "quant_state."
    # Double quantization: the scales are quantized too, and have a state of their own.
    while state is not None:
        yield prefix, state
        state, prefix = getattr(state, "state2", None), f"{prefix}state2."
    # The first forward of a Linear8bitLt moves them from the parameter to an attribute of the module.
    if is_of_bitsandbytes(parameter) and hasattr(owner, "state"):
        yield "", owner.state


def tensors_of(holder: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a parameter among the attributes of an object, by name."""
    attributes = vars(holder).items()
    return {name: value for name, value in attributes if isinstance(value, torch.Tensor) and name not in _LEFT_OUT}


def first_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns for each inner tensor the first name of an equal tensor.

    Equal tensors have the same dtype, shape and strides, and the same source or memory.
    """
    seen: dict[tuple[Any, ...], str] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        # A tensor whose bytes are in a file has a source. Others on meta, and empty ones, have neither source nor
        # memory, so such a tensor is equal to itself alone.
        source = getattr(tensor, "source", None)
        if source is None and tensor.numel() and not tensor.is_meta:
            source = tensor.data_ptr()
        form = (tensor.dtype, tensor.shape, tensor.stride())
        key = (id(tensor),) if source is None else (source, *form)
        names[name] = seen.setdefault(key, name)
    return names


def inner_starts(inner: Sequence[StateField]) -> dict[str, int]:
    """Returns the first byte of each inner tensor, counted in the parameter's bytes."""
    starts: dict[str, int] = {}
    end = 0
    for field in inner:
        starts[field.name] = end
        end = align_up(end + field.nbytes, OPAQUE_ALIGNMENT)
    return starts


def stored_as_bytes(model: nn.Module, dtype: torch.dtype) -> dict[str, FrozenStorage]:
    """Returns how each parameter that another library has quantized is stored, by its first name."""
    storage: dict[str, FrozenStorage] = {}
    for name, parameter in quantized_by_other_library(model).items():
        tensors = inner_tensors_of(parameter, model.get_submodule(name.rpartition(".")[0]))
        inner = tuple(
            StateField(own, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for (own, tensor), first in zip(tensors.items(), first_names(tensors).values(), strict=True)
            if own == first
        )
        nbytes = sum(align_up(field.nbytes, OPAQUE_ALIGNMENT) for field in inner)
        # The class alone does not determine the values of the bytes: another code book gives other values.
        book = getattr(getattr(parameter, "quant_state", None), "quant_type", None)
        kind = type(parameter).__name__ + (f" {book}" if isinstance(book, str) else "")
        storage[name] = FrozenStorage("", math.ceil(nbytes / dtype.itemsize), inner, kind)
    return storage


# -- choice --------------------------------------------------------------------------------------------


_LEAST = 64
"""Least rows and columns of a matrix in a stack of experts. A stack of smaller matrices is no stack of experts."""


def stored_weights(
    model: nn.Module, form: str | None, dtype: torch.dtype, parts: Mapping[str, int] = {}, in_fp32: Collection[str] = ()
) -> dict[str, FrozenStorage]:
    """Returns the storage of each frozen parameter that is not stored as values: as blocks, or as a library's bytes.

    Parameters that stay in fp32 are never stored as blocks. Raises `ConfigError` if a parameter of `in_fp32` is stored
    as another library's bytes.
    """
    blocks = {
        name: storage for name, storage in stored_as_blocks(model, form, dtype, parts).items() if name not in in_fp32
    }
    as_bytes = stored_as_bytes(model, dtype)
    if unfit := sorted(as_bytes.keys() & set(in_fp32)):
        raise ConfigError(
            f'"keep_in_fp32" names {unfit[0]}, which another library has quantized: its bytes are no fp32 values; '
            "leave the name out"
        )
    return blocks | as_bytes


def stored_as_blocks(
    model: nn.Module, form: str | None, dtype: torch.dtype, parts: Mapping[str, int] = {}
) -> dict[str, FrozenStorage]:
    """Returns the storage of each parameter that is stored as blocks, by its first name.

    A `form` of None stores no parameter as blocks. A unit is laid out in elements of `dtype`, the dtype of the weights.
    `parts` is the number of equal parts of each stack that is cut, by the parameter's name; the result then describes
    one part.
    """
    if form is None:
        return {}
    blocks = BLOCK_FORMATS[form]
    return {
        name: FrozenStorage(
            form, math.ceil(blocks.stored_nbytes(parameter.numel() // parts.get(name, 1)) / dtype.itemsize)
        )
        for name, parameter in _chosen(model)
        if parameter.numel()
    }


def _chosen(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    modules = dict(model.named_modules())
    excluded = _kept(model, modules) | {id(parameter) for parameter in quantized_by_other_library(model).values()}
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or id(parameter) in excluded:
            continue
        # A tied parameter must be a matrix in every module that owns it.
        if all(_is_matrix(parameter, *_owner(alias, modules)) for alias in owners[id(parameter)]):
            yield name, parameter


def _owner(name: str, modules: Mapping[str, nn.Module]) -> tuple[nn.Module | None, str]:
    """Returns a parameter's owner and its name in the owner.

    The owner is None if `name` contains a second path of a shared module: `modules` lists only the first.
    """
    path, _, own = name.rpartition(".")
    return modules.get(path), own


def _is_matrix(parameter: nn.Parameter, owner: nn.Module | None, own: str) -> bool:
    """Returns True if `parameter` is a matrix, or a stack of matrices, that its module multiplies by."""
    if owner is None:
        return True  # the module's first place decides
    shape = tuple(parameter.shape)
    if len(shape) == 2:
        # transformers' Conv1D, of GPT-2, is a linear layer with a transposed weight.
        transposed = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
        return own == "weight" and isinstance(owner, nn.Linear | transposed)
    outside = not type(owner).__module__.startswith("torch.nn.modules.")
    return outside and len(shape) == 3 and shape[0] > 1 and min(shape[1:]) >= _LEAST


def _kept(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[int]:
    """Returns the ids of parameters that are never stored as blocks: of output layers, and of adapters of peft."""
    ids: set[int] = set()
    for module in modules.values():
        get_output: Any = getattr(module, "get_output_embeddings", None)
        output = get_output() if callable(get_output) else None
        if isinstance(output, nn.Module):
            ids |= {id(parameter) for parameter in output.parameters()}
        # A layer of peft names the containers of its adapters. A second adapter may be frozen while the first trains.
        for name in getattr(module, "adapter_layer_names", ()):
            container = getattr(module, name, None)
            if isinstance(container, nn.Module):
                ids |= {id(parameter) for parameter in container.parameters()}
    return ids


# -- expand --------------------------------------------------------------------------------------------
#
# Computes the values of frozen weights that are stored as blocks. The device stores the values in the memory of the
# unit, behind its partitions.


def expander(layouts: Sequence[UnitLayout], dtype: torch.dtype) -> Callable[[int, torch.Tensor], None]:
    """Returns a function that computes the values of a unit's blocks, in the unit's own memory on the device.

    The function takes the index of the unit, and its memory, (nbytes,) uint8, which contains the partitions of all
    ranks.
    On an accelerator it submits its work to the current stream.
    """
    rows = [
        [(segment, start) for segment, start in zip(layout.segments, layout.device_starts, strict=True) if segment.form]
        for layout in layouts
    ]

    def expand(unit: int, memory: torch.Tensor) -> None:
        flat = memory.view(dtype)
        for segment, start in rows[unit]:
            first = segment.start * dtype.itemsize
            values_of(segment, memory[first:], flat[start : start + segment.value_numel])

    return expand


def values_of(segment: ParameterSegment, memory: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the values of a parameter into `values`.

    `memory`, uint8, begins with the parameter's blocks; `values` is (value_numel,) in the dtype of the weights.
    """
    form = BLOCK_FORMATS[segment.form]
    dequantize(form, memory[: form.stored_nbytes(segment.value_numel)], values)


# -- fill ----------------------------------------------------------------------------------------------
#
# Conversion of a frozen weight: its values come in pieces of any length, and are written as blocks.


def write_blocks(form: str, pieces: Iterable[torch.Tensor], memory: torch.Tensor) -> None:
    """Writes the blocks of one parameter.

    `pieces` are its values in order, (n,) at a time of any length and floating dtype, on the CPU. `memory`, uint8 of
    the caller, begins with the parameter's blocks.
    """
    block_format, at, rest = BLOCK_FORMATS[form], 0, torch.empty(0)

    def write(values: torch.Tensor) -> None:
        nonlocal at
        if len(values):
            stop = at + block_format.stored_nbytes(len(values))
            quantize(block_format, values.contiguous(), memory[at:stop])
            at = stop

    for piece in pieces:
        values = piece.float() if piece.dtype is torch.float64 else piece
        if len(rest):
            values = torch.cat((rest.to(values.dtype), values))
        # Values that do not fill a block wait for the next values.
        whole = len(values) // block_format.values * block_format.values
        write(values[:whole])
        rest = values[whole:].clone()
    write(rest)  # the last block may have fewer values than the others


# -- notices -------------------------------------------------------------------------------------------
#
# Lines for the user on frozen weights that are stored in other forms than values.


def frozen_notices(form: str | None, layouts: Sequence[UnitLayout], itemsize: int) -> tuple[str, ...]:
    """Returns a line for the user: which frozen weights are stored as blocks, or why there are none."""
    as_bytes: tuple[str, ...] = ()
    if quantized := [segment for layout in layouts for segment in layout.segments if segment.inner]:
        nbytes = sum(segment.numel for segment in quantized) * itemsize
        weights = count_of(len(quantized), "quantized weight is", "quantized weights are")
        form_of = "it" if len(quantized) == 1 else "them"
        as_bytes = (Remark(f"{weights} stored as the model has {form_of}: {format_size(nbytes)}"),)
    if form is None:
        return as_bytes
    blocks = [segment for layout in layouts for segment in layout.segments if segment.form]
    if not blocks:
        no_effect = f'"frozen": "{form}" has no effect: the model has no frozen matrix of a linear layer'
        return (*as_bytes, f"{no_effect} in values" if as_bytes else no_effect)
    stored, values = (sum(numel) * itemsize for numel in zip(*((s.numel, s.value_numel) for s in blocks), strict=True))
    matrices = count_of(len(blocks), "frozen matrix is", "frozen matrices are")
    return (*as_bytes, Remark(f"{matrices} stored in {form}: {format_size(stored)} instead of {format_size(values)}"))
