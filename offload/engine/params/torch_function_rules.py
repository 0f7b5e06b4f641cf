"""Rules for the functions of torch that a placeholder answers in a way of its own.

`placeholder` asks a rule first. Without a rule a function that needs no element is called as it is, and any other
function gets the weights."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.utils import __file__ as wrappers_file
from torch.nn.utils.clip_grad import __file__ as clip_grad_file

from offload.engine.params import paged_parameter as placeholder
from offload.engine.params.harmless_functions import TENSOR
from offload.engine.params.paged_parameter import (
    Paged,
    PagedAlias,
    call_plainly,
    call_with_weights,
    check_kind,
    place_of,
)
from offload.errors import UsageError
from offload.torch_internals import SHALLOW_COPY_QUERY

_DEPTH = 6
"""Calls between who asks a function of torch and the rule for it."""


_LIBRARIES = frozenset({"offload", "torch", "transformers", "accelerate", "peft", "trl"})
"""Which look at `.grad` for themselves, and go on where it is None."""


_DISPATCH = frozenset({__name__, placeholder.__name__})
"""The modules between user code and a rule."""


def _alias(func: Any, tensor: Any) -> Any:
    """`detach()` and `.data`: no elements are asked for yet."""
    if _is_called_by(wrappers_file):
        raise UsageError(
            "DistributedDataParallel copies weights and sums gradients, which the engine does on several ranks itself: "
            "use the engine, or its model, without it; a loop of Accelerate imports offload.hf.Accelerator in place of "
            "accelerate.Accelerator"
        )
    own = getattr(tensor, "own", None)
    return tensor.offload_place.alias() if own is None else own.detach()


def _address(func: Any, tensor: Any) -> Any:
    """`data_ptr()`, `untyped_storage()`: who asks while a module runs reads there, where no other function is called.

    Otherwise an address only says whether two parameters are one.
    """
    place, own = tensor.offload_place, getattr(tensor, "own", None)
    if own is not None:
        return func(own)
    brought = place.keeper is not None and place.keeper.bring(place.unit, stays=True)
    return call_plainly(func, place.parameter if brought else tensor)


def _set_data(func: Any, tensor: Any, values: Any) -> None:
    place = tensor.offload_place
    if values is tensor or (place_of(values) is place and getattr(values, "own", None) is None):
        return  # its own memory
    check_kind(place, tensor, values)
    if not isinstance(tensor, Paged):
        raise UsageError(f"`.data` of what `.data` or detach() of {place.name} gave cannot be set; set the parameter's")
    with torch.no_grad():
        values = values.detach().clone()  # before the aliases change: it may be one
        if not place.engine.bring(place.unit):
            place.leave_aliases()
        tensor.copy_(values)


def _is_compatible(func: Any, tensor: Any, values: Any) -> bool:
    """`nn.Module.to` and its like ask this before they replace a parameter."""
    place = place_of(tensor)
    if place is not None:
        check_kind(place, tensor, values)
    return bool(call_plainly(func, tensor, values))


def _copy(func: Any, tensor: Any, source: Any, non_blocking: bool = False) -> Any:
    """Values of a higher precision than the weights' are kept as they are: the master takes them."""
    place = place_of(tensor)
    if place is None or place_of(source) is not None or place.engine.bring(place.unit):
        return call_with_weights(func, (tensor, source), {})
    if torch.is_grad_enabled() and tensor.requires_grad:
        return call_with_weights(func, (tensor, source), {})  # torch's own error
    place.edit(source.detach().expand(tensor.shape))
    return tensor


def _set_requires_grad(func: Any, tensor: Any, value: bool = True) -> Any:
    place = tensor.offload_place
    if value and isinstance(tensor, PagedAlias):
        raise UsageError(
            f"this is the memory of {place.name}, whose weights are in the swap tiers; clone() it to make a parameter "
            f"of its own"
        )
    if value and not place.trainable:
        raise place.cannot_train()
    return call_plainly(func, tensor, value)


def _set_grad(func: Any, tensor: Any, value: Any = None) -> None:
    if value is not None:
        raise UsageError(
            f"the gradient of {tensor.offload_place.name} cannot be set: gradients are in the engine, which "
            f"backward() adds to; offload.safe_set_full_grad sets one"
        )
    call_plainly(func, tensor, value)


def _get_grad(func: Any, tensor: Any) -> Any:
    """None. Who clips by it would be told a norm of 0, and clip nothing."""
    if _is_called_by(clip_grad_file):
        raise UsageError(
            "gradients are in the engine, where torch.nn.utils cannot clip them: step() clips by gradient_clipping "
            "of the config, engine.clip_grad_norm_(max_norm) sets another norm for the next step, and "
            "engine.get_global_grad_norm() gives the norm after it; a loop of Accelerate imports "
            "offload.hf.Accelerator in place of accelerate.Accelerator, whose clip_grad_norm_ is the engine's"
        )
    gradient = call_plainly(func, tensor)
    place = place_of(tensor)
    if gradient is None and place is not None and place.keeper is not None and not _is_asked_by_a_library():
        place.keeper.miss_gradient(place.name)
    return gradient


def _is_asked_by_a_library() -> bool:
    """Whether it is no code of the user's that has called a function of torch."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in _DISPATCH:
        frame = frame.f_back
    return frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


def _is_called_by(file: str) -> bool:
    """Whether a function of torch was called in this file, or close below it."""
    frame: types.FrameType | None = sys._getframe()
    for _ in range(_DEPTH):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code.co_filename == file:
            return True
    return False


def _convert(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """`to`, `half`, `cuda` …: the same parameter where nothing would change, as torch has it; else a copy."""
    if place_of(tensor) is None:
        return call_plainly(func, tensor, *args, **kwargs)  # x.to(parameter) asks for its dtype and device
    form = kwargs.pop("memory_format", None)
    if form not in (None, torch.preserve_format, torch.contiguous_format):
        raise UsageError(
            f"parameter {tensor.offload_place.name} lies contiguously in the swap tiers, it cannot become {form}"
        )
    probe = call_plainly(func, torch.empty((), dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    if (probe.dtype, probe.device) == (tensor.dtype, tensor.device) and not kwargs.get("copy", False):
        return tensor
    return call_with_weights(func, (tensor, *args), kwargs)


def _like(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """`view_as` and others whose second argument only gives a shape."""
    return (call_plainly if place_of(tensor) is None else _call_with_weights_of)(func, tensor, *args, **kwargs)


def _call_with_weights_of(func: Any, *args: Any, **kwargs: Any) -> Any:
    return call_with_weights(func, args, kwargs)


def _represent(func: Any, tensor: Any, *_: Any, **__: Any) -> str:
    place = tensor.offload_place
    return (
        f"Paged({place.name}, shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={tensor.device}, "
        f"requires_grad={tensor.requires_grad})"
    )


def _register_after_gradient(func: Any, tensor: Any, hook: Callable[[torch.Tensor], None]) -> Any:
    """The user's hook sees the gradient; the engine's own, which takes it away, comes after all of them."""
    handle = call_plainly(func, tensor, hook)
    own = tensor.offload_place.gradient_hook
    if own is not None:
        hooks = tensor._post_accumulate_grad_hooks
        hooks[own.id] = hooks.pop(own.id)  # torch goes through them in the order of a plain dict
    return handle


RULES: Mapping[Any, Callable[..., Any]] = {
    TENSOR.detach: _alias,
    torch.detach: _alias,
    TENSOR.data.__get__: _alias,
    TENSOR.data.__set__: _set_data,
    TENSOR.data_ptr: _address,
    TENSOR.untyped_storage: _address,
    SHALLOW_COPY_QUERY: _is_compatible,
    TENSOR.copy_: _copy,
    TENSOR.requires_grad_: _set_requires_grad,
    TENSOR.requires_grad.__set__: _set_requires_grad,
    TENSOR.grad.__get__: _get_grad,
    TENSOR.grad.__set__: _set_grad,
    TENSOR.__repr__: _represent,
    TENSOR.__format__: _represent,
    TENSOR.register_post_accumulate_grad_hook: _register_after_gradient,
    **{
        getattr(TENSOR, name): _convert
        for name in "to type_as half float double bfloat16 cpu cuda xpu".split()
        if hasattr(TENSOR, name)
    },
    **{getattr(TENSOR, name): _like for name in "view_as expand_as reshape_as".split()},
}
