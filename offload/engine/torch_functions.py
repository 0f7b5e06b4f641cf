"""Rules for the torch functions that a placeholder answers in its own way.

`PagedParameter` looks for a rule first. Without one, a function that needs no element is called as it is, and any
other function receives the weights.

Every rule takes the torch function and its arguments, and returns the result that the user receives.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import __file__ as grad_scaler_file
from torch.distributed.utils import __file__ as wrappers_file
from torch.nn.utils.clip_grad import __file__ as clip_grad_file
from torch.utils.checkpoint import __file__ as checkpoint_file

from offload.engine import params
from offload.engine.params import (
    TENSOR,
    PagedParameter,
    PagedParameterView,
    call_plainly,
    call_with_weights,
    check_kind,
    handle_of,
    is_harmless_property,
    name_of,
)
from offload.errors import UsageError
from offload.torch_internals import SHALLOW_COPY_QUERY, tree_leaves

_LIBRARIES = frozenset({"offload", "torch", "transformers", "accelerate", "peft", "trl"})
"""Libraries that read `.grad` for their own purposes and cope with None."""


_DISPATCH = frozenset({__name__, params.__name__})
"""The modules between user code and a rule."""


def _alias(func: Any, tensor: Any) -> Any:
    """Implements `detach()` and `.data`, which need no elements yet."""
    # DistributedDataParallel detaches every parameter to broadcast it, in torch.distributed.utils.
    if _is_called_by(wrappers_file):
        raise UsageError(
            "DistributedDataParallel copies weights and sums gradients, which the engine does on several ranks itself: "
            "use the engine, or its model, without it; a loop of Accelerate imports offload.hf.Accelerator in place of "
            "accelerate.Accelerator"
        )
    own = getattr(tensor, "own", None)
    if own is not None:
        return own.detach()
    # Reentrant checkpointing detaches the arguments of its function in the backward, as leaves of a graph of its own.
    if _is_called_by(checkpoint_file) and (weights := tensor.offload_handle.here()) is not None:
        return call_plainly(func, weights).view(tensor.shape)
    # A view may have another shape than the parameter.
    return tensor.offload_handle.alias(None if isinstance(tensor, PagedParameter) else call_plainly(func, tensor))


def _address(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `data_ptr()`, `untyped_storage()`, `storage_offset()`, `stride()` and `is_contiguous()`.

    A caller that asks while a module runs will read memory without calling another torch function, as a launcher of
    Triton kernels does, so the weights are fetched and stay while the innermost module runs. The strides of a
    placeholder are all 0: a kernel that was given those, and the address of the weights, would read one element.
    Otherwise an address only shows whether two parameters are the same.
    """
    handle, own = tensor.offload_handle, getattr(tensor, "own", None)
    if own is not None:
        return func(own, *args, **kwargs)
    if handle.owner is not None and handle.fetch(stays=True):
        tensor = handle.parameter.detach().view(tensor.shape)
    return call_plainly(func, tensor, *args, **kwargs)


def _set_data(func: Any, tensor: Any, values: Any) -> None:
    """Implements the assignment to `.data`: the values become an edit, since a placeholder has no memory to replace."""
    handle = tensor.offload_handle
    if values is tensor or (handle_of(values) is handle and getattr(values, "own", None) is None):
        return  # the parameter's own memory
    check_kind(handle, tensor, values)
    if not isinstance(tensor, PagedParameter):
        raise UsageError(
            f"`.data` of a tensor that `.data` or detach() of {handle.name} returned cannot be set; set `.data` of the "
            "parameter"
        )
    with torch.no_grad():
        values = values.detach().clone()  # before the aliases receive copies: `values` may be one
        # In a running module the weights are materialized, and an alias shares their memory, as in torch.
        if not handle.fetch():
            handle.leave_aliases()
        tensor.copy_(values)


def _index(func: Any, tensor: Any, index: Any) -> Any:
    """Implements `tensor[index]`; fetches only the item if the parameter's form supports that."""
    handle = handle_of(tensor)
    item = None
    if handle is not None and getattr(tensor, "own", None) is None and tensor.shape == handle.shape:
        item = handle.form.item(handle, index)
    if item is None:
        return call_with_weights(func, (tensor, index), {})
    return item if isinstance(tensor, PagedParameter) else item.detach()


def _is_compatible(func: Any, tensor: Any, values: Any) -> bool:
    """Answers the query of `nn.Module.to` and others about how to replace a parameter."""
    handle = handle_of(tensor)
    if handle is not None:
        check_kind(handle, tensor, values)
    return bool(call_plainly(func, tensor, values))


def _copy(func: Any, tensor: Any, source: Any, non_blocking: bool = False) -> Any:
    """Implements `copy_`. Values of a higher precision than the weights' are kept, since the master can store them."""
    handle = handle_of(tensor)
    if handle is None or getattr(tensor, "own", None) is not None or handle_of(source) is not None or handle.fetch():
        return call_with_weights(func, (tensor, source), {})
    if torch.is_grad_enabled() and tensor.requires_grad:
        return call_with_weights(func, (tensor, source), {})  # raises torch's own error: an in-place change of a leaf
    # The edit sets every element, so the old weights are not read.
    handle.edit(source.detach().expand(tensor.shape).reshape(handle.shape))
    return tensor


def _set_requires_grad(func: Any, tensor: Any, value: bool = True) -> Any:
    """Implements `requires_grad_()` and the assignment; refuses to train a parameter that has no optimizer states."""
    handle = tensor.offload_handle
    if value and isinstance(tensor, PagedParameterView):
        raise UsageError(
            f"this is the memory of {handle.name}, whose weights are in the swap tiers; clone() this tensor to make a "
            "parameter of its own"
        )
    if value and not handle.trainable:
        raise handle.cannot_train()
    return call_plainly(func, tensor, value)


def _set_grad(func: Any, tensor: Any, value: Any = None) -> None:
    """Implements the assignment to `.grad`, which may only be None."""
    if value is not None:
        raise UsageError(
            f"the gradient of {tensor.offload_handle.name} cannot be set: gradients are in the engine, which "
            f"backward() adds to; offload.safe_set_full_grad sets one"
        )
    call_plainly(func, tensor, value)


def _get_grad(func: Any, tensor: Any) -> Any:
    """Returns `.grad`, which is None between backwards, and reports user code that reads it.

    Code of torch that clips by `.grad` would compute a norm of 0 and clip nothing, and a GradScaler would unscale
    nothing, so both are refused.
    """
    # torch skips a parameter whose `.grad` is None, without an error.
    if _is_called_by(clip_grad_file):
        raise UsageError(
            "gradients are in the engine, where torch.nn.utils cannot clip them: step() clips by gradient_clipping "
            "of the config, engine.clip_grad_norm_(max_norm) sets another norm for the next step, and "
            "engine.get_global_grad_norm() gives the norm after it; a loop of Accelerate imports "
            "offload.hf.Accelerator in place of accelerate.Accelerator, whose clip_grad_norm_ is the engine's"
        )
    if _is_called_by(grad_scaler_file):
        raise UsageError(
            "gradients are in the engine, where a GradScaler finds none to unscale: leave the scaler out and call "
            'engine.step(); with "fp16": {"enabled": true} in the config the engine scales the loss, unscales the '
            "gradients and leaves out a step whose gradients are not finite, and other dtypes need no scale"
        )
    gradient = call_plainly(func, tensor)
    if gradient is not None:
        return gradient
    caller = _caller()
    if caller.startswith("peft.tuners.adalora"):
        raise UsageError(
            "AdaLoRA chooses the ranks of its adapters by their gradients, which are in the engine: leave "
            "update_and_allocate out, so that the ranks stay init_r, or train a peft.LoraConfig"
        )
    handle = handle_of(tensor)
    of_a_library = not caller or caller.partition(".")[0] in _LIBRARIES
    if handle is not None and handle.owner is not None and not of_a_library:
        handle.owner.miss_gradient(handle.name)
    return None


def _caller() -> str:
    """Returns the name of the module that called the torch function; "" if there is none."""
    frame: types.FrameType | None = sys._getframe()
    # The first frame outside of the dispatch is the caller's.
    while frame is not None and _module_of(frame) in _DISPATCH:
        frame = frame.f_back
    return "" if frame is None else _module_of(frame)


def _is_called_by(file: str) -> bool:
    """Returns True if the torch function was called in `file` of torch, directly or through other code of torch."""
    frame: types.FrameType | None = sys._getframe()
    # The first frame that is neither the dispatch's nor torch's belongs to the code that called torch.
    while frame is not None and ((name := _module_of(frame)) in _DISPATCH or name.partition(".")[0] == "torch"):
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def _module_of(frame: types.FrameType) -> str:
    """Returns the name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__"))


def _convert(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `to`, `half`, `cuda` …: the same parameter if nothing would change, as in torch; otherwise a copy."""
    if handle_of(tensor) is None:
        return call_plainly(func, tensor, *args, **kwargs)  # x.to(parameter) needs only dtype and device
    form = kwargs.pop("memory_format", None)
    if form not in (None, torch.preserve_format, torch.contiguous_format):
        raise UsageError(
            f"parameter {tensor.offload_handle.name} is stored contiguously in the swap tiers, so it cannot become "
            f"{form}"
        )
    # torch parses the many signatures of `to`: one element shows the dtype and the device that result.
    probe = call_plainly(func, torch.empty((), dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    if (probe.dtype, probe.device) == (tensor.dtype, tensor.device) and not kwargs.get("copy", False):
        return tensor
    return call_with_weights(func, (tensor, *args), kwargs)


class _GraphOfParameter(torch.Tensor):
    """A view of a whole parameter that was made between steps, with the parameter's graph and without its values.

    Code of torch and of users makes one to reach the node that accumulates the parameter's gradient.
    """

    parameter_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_harmless_property(func):  # `grad_fn` and others
            return call_plainly(func, *args, **(kwargs or {}))
        names = [leaf.parameter_name for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        raise UsageError(
            f"{name_of(func)} of a view of {names[0]} that was made between steps with the parameter's graph, so the "
            "view has no values: use `with offload.gathered(parameter):`, or clone() the parameter"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a view of {self.parameter_name} with its graph and no values"


def _like(func: Any, tensor: Any, other: Any) -> Any:
    """Implements `view_as` and others whose second argument only supplies a shape.

    A view of the whole parameter, outside of a run, is another placeholder: writes through the view are edits.
    """
    handle = handle_of(tensor)
    if handle is None:
        return call_plainly(func, tensor, other)
    if getattr(tensor, "own", None) is not None or handle.engine.runs_now():
        return call_with_weights(func, (tensor, other), {})
    view, with_graph = call_plainly(func, tensor, other), torch.is_grad_enabled() and tensor.requires_grad
    # The gradient of a parameter in several parts goes to the parts, not to the parameter's own accumulation node.
    if view.numel() != tensor.numel() or (with_graph and handle.take_gradient is None):
        return call_with_weights(func, (tensor, other), {})
    if not with_graph:
        return handle.alias(view.detach())  # to torch even a view without a graph requires a gradient
    view.__class__ = _GraphOfParameter
    view.__dict__["parameter_name"] = handle.name
    return view


def _represent(func: Any, tensor: Any, *_: Any, **__: Any) -> str:
    """Implements `repr()` and `format()`, without the values."""
    handle = tensor.offload_handle
    return (
        f"PagedParameter({handle.name}, shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={tensor.device}, "
        f"requires_grad={tensor.requires_grad})"
    )


def _register_after_gradient(func: Any, tensor: Any, hook: Callable[[torch.Tensor], None]) -> Any:
    """Registers a hook of the user before the engine's own, which takes the gradient away and so must run last."""
    handle = call_plainly(func, tensor, hook)
    own = tensor.offload_handle.gradient_hook
    if own is not None:
        # torch offers no public way to reorder these hooks.
        hooks = tensor._post_accumulate_grad_hooks
        hooks[own.id] = hooks.pop(own.id)  # torch calls hooks in the order of this dict
    return handle


RULES: Mapping[Any, Callable[..., Any]] = {
    TENSOR.detach: _alias,
    torch.detach: _alias,
    TENSOR.data.__get__: _alias,
    TENSOR.data.__set__: _set_data,
    **{
        getattr(TENSOR, name): _address
        for name in "data_ptr untyped_storage storage_offset stride is_contiguous".split()
    },
    SHALLOW_COPY_QUERY: _is_compatible,
    TENSOR.__getitem__: _index,
    TENSOR.copy_: _copy,
    TENSOR.requires_grad_: _set_requires_grad,
    TENSOR.requires_grad.__set__: _set_requires_grad,
    TENSOR.grad.__get__: _get_grad,
    TENSOR.grad.__set__: _set_grad,
    TENSOR.__repr__: _represent,
    TENSOR.__format__: _represent,
    TENSOR.register_post_accumulate_grad_hook: _register_after_gradient,
    **{
        # `cuda` and `xpu` do not exist in every build of torch.
        getattr(TENSOR, name): _convert
        for name in "to type_as half float double bfloat16 cpu cuda xpu".split()
        if hasattr(TENSOR, name)
    },
    **{getattr(TENSOR, name): _like for name in "view_as expand_as reshape_as".split()},
}
