"""Frozen parameters that are stored as the bytes they consist of: weights that another library has quantized.

**The rule.** A parameter is opaque if it is frozen and

* its class is one of bitsandbytes (`Params4bit`, `Int8Params`), or
* its class wraps other tensors, as the tensor subclasses of torchao do (`__tensor_flatten__`), or
* its dtype is none in which weights are trained, such as integers or float8, or
* it is beside one of such a dtype in a module, as the scales of GPTQ and AWQ are.

Nobody but the library that made such a parameter knows what its bytes mean. It consists of *inner tensors*: codes,
scales and whatever else the library keeps of it. They are stored one after the other, each at a multiple of 64 bytes:

    [ first inner tensor | second inner tensor | … ]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.layout.flat_layout import Stored
from offload.layout.opaque_state import ALIGNMENT, StateField
from offload.provenance import is_class_of
from offload.sizes import align_up
from offload.torch_internals import inner_tensors

_VALUES = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
"""Dtypes of ordinary weights."""

OWN = "data"
"""Name of the inner tensor that is the parameter itself, where its class wraps no others."""

_INT8 = "Int8Params"
"""Name of a class of bitsandbytes, which need not be installed."""
_LEFT_OUT = frozenset(("idx", "subB", "geometry"))
"""Attributes with tensors that are no part of a parameter.

A Linear8bitLt leaves the outliers of its last input in the first two; a tensor whose bytes are in a file has the third.
"""


def opaque_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are stored as the bytes they consist of, by their first names."""
    found: set[int] = set()
    for module in model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if not parameter.requires_grad]
        theirs = {id(each) for each in own if is_of_bitsandbytes(each) or inner_tensors(each) is not None}
        # Codes of a plain dtype mean nothing without the scales beside them, whose bits must stay too.
        codes = any(each.dtype not in _VALUES for each in own if id(each) not in theirs)
        found |= {id(each) for each in own} if codes else theirs
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in found}


def is_of_bitsandbytes(parameter: nn.Parameter) -> bool:
    """Returns True if bitsandbytes has quantized a parameter, or will."""
    eight = any(kind.__name__ == _INT8 and is_class_of(kind, "bitsandbytes") for kind in type(parameter).__mro__)
    # Codes of 4 bits may be in elements of a floating dtype; the state to read them with tells them apart.
    return hasattr(parameter, "quant_state") or (eight and not getattr(parameter, "has_fp16_weights", False))


def waits_for_quantization(parameter: nn.Parameter) -> bool:
    """Returns True for a parameter of bitsandbytes that has its values still, since it was never moved to a device."""
    if not is_of_bitsandbytes(parameter):
        return False
    if hasattr(parameter, "quant_state"):
        return parameter.quant_state is None
    return parameter.dtype is not torch.int8


def is_packed(parameter: nn.Parameter) -> bool:
    """Returns True for 4 bits that bitsandbytes has packed for the CPU, as it does in an evaluation there."""
    return bool(getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False))


def inner_tensors_of(parameter: nn.Parameter, owner: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the inner tensors of an opaque parameter, by names that tell where they are; some may be the same one.

    Args:
        parameter: the parameter.
        owner: the module that owns it. The one of `Int8Params` keeps tensors of the parameter once it has run.
    """
    if inner_tensors(parameter) is not None:
        return dict(_flattened(parameter, ""))
    found: dict[str, torch.Tensor] = {OWN: parameter}
    for prefix, holder in holders(parameter, owner):
        found |= {f"{prefix}{name}": value for name, value in tensors_of(holder).items()}
    return found


def _flattened(tensor: torch.Tensor, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the inner tensors of a wrapper, those of wrappers in it included."""
    found = inner_tensors(tensor)
    if found is None:
        yield prefix[:-1], tensor
        return
    for name, value in found[0].items():
        if isinstance(value, torch.Tensor):
            yield from _flattened(value, f"{prefix}{name}.")


def holders(parameter: nn.Parameter, owner: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the objects that hold tensors of a parameter as attributes, each with the prefix of their names."""
    yield "", parameter
    state, prefix = getattr(parameter, "quant_state", None), "quant_state."
    # Double quantization: the scales are quantized, and have a state of their own.
    while state is not None:
        yield prefix, state
        state, prefix = getattr(state, "state2", None), f"{prefix}state2."
    # The first forward of a Linear8bitLt moves them from the parameter to an attribute of the module.
    if is_of_bitsandbytes(parameter) and hasattr(owner, "state"):
        yield "", owner.state


def tensors_of(holder: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a parameter among the attributes of an object, by name."""
    every = vars(holder).items()
    return {name: value for name, value in every if isinstance(value, torch.Tensor) and name not in _LEFT_OUT}


def first_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns for each inner tensor the first name under which the same memory, or source, stands in the same form."""
    seen: dict[tuple[Any, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        # A tensor whose bytes are in a file has a source. Tensors on meta, and empty ones, have neither.
        source = getattr(tensor, "source", None)
        if source is None and tensor.numel() and not tensor.is_meta:
            source = tensor.data_ptr()
        form = (tensor.dtype, tensor.shape, tensor.stride())
        key = (id(tensor),) if source is None else (source, *form)
        found[name] = seen.setdefault(key, name)
    return found


def fields_of(parameter: nn.Parameter, owner: nn.Module) -> tuple[StateField, ...]:
    """Returns a description of the inner tensors of an opaque parameter, each once."""
    tensors = inner_tensors_of(parameter, owner)
    return tuple(
        StateField(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for (name, tensor), first in zip(tensors.items(), first_names(tensors).values(), strict=True)
        if name == first
    )


def inner_starts(inner: Sequence[StateField]) -> dict[str, int]:
    """Returns the first byte of each inner tensor, counted in the parameter's bytes."""
    starts: dict[str, int] = {}
    end = 0
    for each in inner:
        starts[each.name] = end
        end = align_up(end + each.nbytes, ALIGNMENT)
    return starts


def inner_nbytes(inner: Sequence[StateField]) -> int:
    """Returns the bytes of all inner tensors of a parameter, with the padding between and after them."""
    return sum(align_up(each.nbytes, ALIGNMENT) for each in inner)


def stored_as_bytes(model: nn.Module, dtype: torch.dtype) -> dict[str, Stored]:
    """Returns how each opaque parameter is stored, by its first name.

    Args:
        model: the model.
        dtype: dtype of the weights. A unit is laid out in elements of this dtype.
    """
    found: dict[str, Stored] = {}
    for name, parameter in opaque_parameters(model).items():
        inner = fields_of(parameter, model.get_submodule(name.rpartition(".")[0]))
        found[name] = Stored("", math.ceil(inner_nbytes(inner) / dtype.itemsize), inner, _kind(parameter))
    return found


def _kind(parameter: nn.Parameter) -> str:
    """Returns a parameter's class, and its code book: the same bytes mean other values in another one."""
    book = getattr(getattr(parameter, "quant_state", None), "quant_type", None)
    return type(parameter).__name__ + (f" {book}" if isinstance(book, str) else "")
