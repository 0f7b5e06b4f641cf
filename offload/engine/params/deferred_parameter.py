"""Parameters whose values come later, one unit at a time, in models of `offload.init` and `load_pretrained`.

A `DeferredParameter` is a parameter on the meta device, without values. Its shape, dtype and other properties can be
read; a function that needs values raises an error. Without that error a forward would return a result without values,
and an edit would be lost. A deferred parameter becomes real when it gets values and memory of its own. Its `device` is
the CPU, where the values will first be created, so code that copies the device of a parameter for a new module, such
as an adapter, makes that module on the CPU as well.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from offload.engine.params.harmless_functions import TENSOR, asks_for_no_element, call_plainly
from offload.errors import ConfigError, UsageError
from offload.torch_internals import SHALLOW_COPY_QUERY


class Origin(Protocol):
    """Source from which the values of a parameter are read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        ...

    def pieces(self, part: range | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields values in order, as tensors (n,) on the CPU, each with the position of its first element.

        A yielded tensor is valid until the next one is yielded.

        Args:
            part: the elements to yield, from whose first one positions are counted; None for all.

        Raises:
            IoError: if the source cannot be read.
            StoreError: if the source is damaged.
        """
        ...


class _Building(threading.local):
    """State of the calling thread: the depth of its `building` contexts, and whether `building_a_model` is open."""

    depth = 0
    model = False
    """True while a model is under construction, so that values written by its own code are kept."""
    copies = False
    """True in `keeping_copies`."""


_building = _Building()


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Allows computation with deferred parameters, on the meta device and without effect, inside of the context.

    Constructors and initializers need this, because they compute with their parameters.
    """
    _building.depth += 1
    try:
        yield
    finally:
        _building.depth -= 1


@contextlib.contextmanager
def building_a_model() -> Iterator[None]:
    """Extends `building`: a parameter that code writes by hand, outside of an initializer, keeps the written values."""
    outer, _building.model = _building.model, True
    try:
        with building():
            yield
    finally:
        _building.model = outer


@contextlib.contextmanager
def keeping_copies() -> Iterator[None]:
    """Extends `building_a_model` to a model that is built: values that anyone copies into a parameter are kept.

    While a model is built, a copy by the code of transformers is left out, since its initializers repeat it.
    """
    outer, _building.copies = _building.copies, True
    try:
        with building_a_model():
            yield
    finally:
        _building.copies = outer


def is_building() -> bool:
    """Returns True if this thread is inside of `building`."""
    return _building.depth > 0


class DeferredParameter(nn.Parameter):
    """A parameter on meta that `initialize` fills, from `origin` or by its module's own initialization."""

    origin: Origin | None = None
    whole: DeferredParameter | None = None
    """The parameter whose values a write to this alias or view changes; None for a parameter."""
    is_part = False
    """True for a view, which may contain only some elements of the parameter, or all of them in another order."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args and isinstance(kwargs.get("tensor"), DeferredParameter):  # torch.nn.init passes keywords
            args = (kwargs.pop("tensor"),)
        first = args[0] if args else None
        # A function of torch.nn.init sets every element in the end, unless it only computes with the shape.
        if _building.model and sys._getframe(1).f_code.co_filename == nn.init.__file__:
            target = kwargs.get("out", first)
            if isinstance(target, DeferredParameter) and _begins_init(func, target, kwargs) and (by_hand := _writer()):
                with _real(target, "torch.nn.init", by_hand, all_of_it=True) as real:
                    if "out" in kwargs:
                        return func(*args, **{**kwargs, "out": real})
                    return func(real, *args[1:], **kwargs)
        # Rules come before the general cases: `detach` and others must keep the link to the parameter's origin.
        rule = _RULES.get(func)
        if rule is not None and isinstance(first, DeferredParameter):
            return rule(func, *args, **kwargs)
        if not (is_building() or asks_for_no_element(func) or func in _ALLOWED):
            raise _refusal(getattr(func, "__name__", str(func)))
        # While a model is built, a write outside of an initializer cannot be repeated later. So the parameter becomes
        # real now if the write sets every element; another write is an error.
        if _building.model and isinstance(first, DeferredParameter) and _writes(func) and (by_hand := _writer()):
            all_of_it = func.__name__ in _OVERWRITES or getattr(func, "__module__", "") == nn.init.__name__
            with _real(first, func.__name__, by_hand, all_of_it) as real:
                return func(real, *args[1:], **kwargs)
        result = call_plainly(func, *args, **kwargs)
        return _as_part(result, first) if is_building() and isinstance(first, DeferredParameter) else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _like(self, call_plainly(torch.empty_like, self), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refusal("pickle")


def is_deferred(parameter: Any) -> bool:
    """Returns True if `initialize` will give this parameter its values."""
    return isinstance(parameter, DeferredParameter)


def origin_of(parameter: Any) -> Origin | None:
    """Returns the source of a parameter's values; None if the parameter has values, or its module initializes it."""
    return parameter.origin if isinstance(parameter, DeferredParameter) else None


def make_deferred(parameter: nn.Parameter, origin: Origin) -> None:
    """Drops a parameter's values, which `origin` will supply later. Identity and ties stay."""
    if not isinstance(parameter, DeferredParameter):
        # Swapped and not replaced: every module that shares the parameter keeps the same Python object.
        torch.utils.swap_tensors(parameter, DeferredParameter(parameter.detach().to("meta"), parameter.requires_grad))
    assert isinstance(parameter, DeferredParameter)
    parameter.origin = origin


def forget(parameter: nn.Parameter) -> None:
    """Frees the memory of a parameter whose values have been copied elsewhere. Identity and ties stay."""
    if parameter.is_meta:
        # Swapped, since `.data` of a deferred parameter cannot become a tensor of another shape.
        empty = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="cpu"), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)
    else:
        parameter.data = parameter.data.new_empty(0)


# -- dispatch of a torch function --------------------------------------------------------------------------

_ALLOWED = frozenset({TENSOR.__repr__, TENSOR.requires_grad_, SHALLOW_COPY_QUERY})


_OVERWRITES = frozenset(
    "normal_ uniform_ fill_ zero_ copy_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_".split()
)
"""Methods that give every element of a tensor a value independent of the previous one."""
_INITIALIZERS = frozenset(
    "reset_parameters _reset_parameters _init_weights init_weights initialize_weights _initialize_weights".split()
)
"""Functions by which a module makes its own values. They are called again later, so their writes need not be kept."""


def _writes(func: Any) -> bool:
    """Returns True if `func` changes its first argument in place, which torch marks by a trailing underscore."""
    name: str = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__") and name != "requires_grad_") or name == "__setitem__"


def _writer() -> str | None:
    """Returns the "file:line" of the code that writes; None if an initializer writes, which will be called again."""
    where = None
    # Skips this function and its caller; further frames of this file are skipped below.
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        # An initializer anywhere on the stack counts, also if it writes through helpers.
        if code.co_name in _INITIALIZERS:
            return None
        if where is None and f"{os.sep}torch{os.sep}" not in code.co_filename and code.co_filename != __file__:
            where = f"{code.co_filename}:{frame.f_lineno}"
            if f"{os.sep}transformers{os.sep}" in where:
                return None  # `_init_weights`, called later, writes these values again
        frame = frame.f_back
    return where or "torch"


def _begins_init(func: Any, target: DeferredParameter, kwargs: Mapping[str, Any]) -> bool:
    """Returns True if a call by a function of torch.nn.init shows that the function is about to set every element.

    Questions about the shape do not: `_calculate_fan_in_and_fan_out` asks them too, and writes nothing.

    Args:
        func: the function of torch that is called.
        target: the tensor of the call.
        kwargs: keywords of the call.
    """
    if "out" in kwargs or _writes(func):
        return True
    # `orthogonal_` and others return early for a tensor on meta, so the parameter must be real by this question. In
    # versions of torch that do not ask it, the first call makes a tensor on the parameter's device.
    if func in (TENSOR.is_meta.__get__, TENSOR.new, TENSOR.new_empty):
        return True
    # The parameter of this alias is real by now, and the function may copy the device for its temporary tensors.
    return not target.is_part and not isinstance(_whole_of(target), DeferredParameter)


@contextlib.contextmanager
def _real(tensor: DeferredParameter, name: str, where: str, all_of_it: bool) -> Iterator[Any]:
    """Makes real the parameter that the body is about to write, and yields the tensor to pass instead of `tensor`.

    If the body raises an exception, the parameter is deferred again: its memory may not contain values.

    Args:
        tensor: the parameter, or an alias or a view of the parameter.
        name: name of the function that writes.
        where: "file:line" of the write, for the error.
        all_of_it: True if the function sets every element.

    Raises:
        ConfigError: if the write does not set every element of the parameter, since the others do not exist yet.
    """
    whole = _whole_of(tensor)
    if not isinstance(whole, DeferredParameter):  # an earlier write has made the parameter real
        if tensor.is_part:
            raise _refused_part(name, where)
        yield whole.data
        return
    if tensor.is_part or not all_of_it:
        raise _refused_part(name, where)
    empty = call_plainly(torch.empty, whole.shape, dtype=whole.dtype, device="cpu")
    new = nn.Parameter(empty, whole.requires_grad)
    vars(new).update(vars(whole))  # what code has set on the parameter, such as transformers' marks, stays there
    torch.utils.swap_tensors(whole, new)
    try:
        yield whole if tensor is whole else whole.data
    except BaseException:
        torch.utils.swap_tensors(whole, new)
        raise


def _whole_of(tensor: DeferredParameter) -> Any:
    """Returns the parameter of an alias or view, which may be real by now; for a parameter, `tensor` itself."""
    return tensor if tensor.whole is None else tensor.whole


def _refused_part(name: str, where: str) -> ConfigError:
    """Returns the error for a write that depends on values that do not exist yet."""
    return ConfigError(
        f"{where} changes a weight by {name}, but offload.init fills weights later: move the change to "
        "reset_parameters (or _init_weights, in a model of transformers), or build this model outside of offload.init"
    )


def _as_part(result: Any, tensor: DeferredParameter) -> Any:
    """Links a view of a deferred parameter to that parameter, so that no write to the view is lost."""
    if type(result) is torch.Tensor and result.is_meta and result._base is not None and result.dtype == tensor.dtype:
        result = result.as_subclass(DeferredParameter)
        result.whole, result.is_part = _whole_of(tensor), True
    return result


def _refusal(what: str) -> UsageError:
    """Returns the error for a use that needs values."""
    return UsageError(
        f"{what} needs the values of a parameter that does not contain any yet: call offload.initialize first, which "
        "fills the parameters of offload.load_pretrained and offload.init"
    )


def _like(tensor: DeferredParameter, meta: torch.Tensor, requires_grad: bool) -> DeferredParameter:
    """Returns a deferred parameter over `meta`, with the same origin as `tensor`."""
    new = DeferredParameter(meta, requires_grad)
    new.origin = tensor.origin
    return new


def _alias(func: Any, tensor: DeferredParameter) -> DeferredParameter:
    """Implements `detach()` and `.data`, which need no elements yet."""
    alias = _like(tensor, call_plainly(TENSOR.detach, tensor).as_subclass(torch.Tensor), False)
    # So a write through the alias still makes the parameter real.
    alias.whole, alias.is_part = _whole_of(tensor), tensor.is_part
    return alias


def _device(func: Any, tensor: DeferredParameter) -> torch.device:
    """Implements `device`: the CPU, where the values will first be created."""
    return torch.device("cpu")


def _set_data(func: Any, tensor: DeferredParameter, values: torch.Tensor) -> None:
    """Implements `.data = values`: a conversion changes the dtype, and real values from a constructor are kept."""
    if isinstance(values, DeferredParameter) and values.shape == tensor.shape:
        call_plainly(func, tensor, call_plainly(values.detach).as_subclass(torch.Tensor))
    elif is_building() and values.is_meta:
        call_plainly(func, tensor, values)
    elif is_building():
        torch.utils.swap_tensors(tensor, nn.Parameter(values.detach(), tensor.requires_grad))
    else:
        raise _refusal(f"setting .data, of shape {list(tensor.shape)}, to a tensor of shape {list(values.shape)}")


def _copy(func: Any, tensor: DeferredParameter, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `copy_`: real values that code copies by hand while a model is built are kept."""
    if not is_building():
        raise _refusal("copy_")
    absent = isinstance(source, torch.Tensor) and source.is_meta
    if _building.model and not absent and (by_hand := "GatheredParameters" if _building.copies else _writer()):
        with _real(tensor, "copy_", by_hand, all_of_it=True) as real:
            return func(real, source, *args, **kwargs)
    return call_plainly(func, tensor, source, *args, **kwargs)


def _is_meta(func: Any, tensor: DeferredParameter) -> bool:
    """Implements `is_meta`: False for `load_state_dict`, which would warn that copying to meta has no effect."""
    # For this class the copy has an effect: `_copy` makes the parameter real.
    if _building.model and sys._getframe(2).f_code.co_name == "_load_from_state_dict":
        return False
    return bool(call_plainly(func, tensor))


def _convert(func: Any, tensor: DeferredParameter, *args: Any, **kwargs: Any) -> Any:
    """Implements `to`, `half`, `cuda` …: the dtype may change; the device is set by the engine's config."""
    # `to` has many signatures: the same call on one element on the CPU shows the resulting dtype and device.
    probe = call_plainly(func, torch.empty((), dtype=tensor.dtype, device="cpu"), *args, **kwargs)
    if probe.device.type not in ("cpu", "meta"):
        raise _refusal(f"moving a model to {probe.device}, which the engine's config says,")
    if probe.dtype == tensor.dtype:
        return tensor
    return _like(tensor, torch.empty(tensor.shape, dtype=probe.dtype, device="meta"), tensor.requires_grad)


_RULES: dict[Any, Callable[..., Any]] = {
    TENSOR.detach: _alias,
    torch.detach: _alias,
    TENSOR.data.__get__: _alias,
    TENSOR.data.__set__: _set_data,
    TENSOR.device.__get__: _device,
    TENSOR.copy_: _copy,
    TENSOR.is_meta.__get__: _is_meta,
    **{
        getattr(TENSOR, name): _convert
        for name in "to half float double bfloat16 cpu cuda xpu".split()
        if hasattr(TENSOR, name)
    },
}
