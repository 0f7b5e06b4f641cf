"""Parameters whose values come later, one unit at a time, in models of `offload.init` and `load_pretrained`.

A `DeferredParameter` is a parameter on the meta device, without values. Its shape, dtype and other properties can be
read; a function that needs values raises an error. Without that error a forward would return a result without values,
and an edit would be lost. A deferred parameter becomes real when it gets values and memory of its own. Its `device` is
the CPU, where the values will first be created, so code that copies the device of a parameter for a new module, such
as an adapter, makes that module on the CPU as well.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from offload.engine.params.building.contexts import is_building, state
from offload.engine.params.building.draws import Copied, Draw, mark_copy, marked_copy
from offload.engine.params.building.writes import OVERWRITES, writer, writes
from offload.engine.params.harmless_functions import TENSOR, asks_for_no_element, call_plainly
from offload.errors import ConfigError, UsageError
from offload.torch_internals import SHALLOW_COPY_QUERY, swap_parameters


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


class DeferredParameter(nn.Parameter):
    """A parameter on meta that `initialize` fills, from `origin` or by its module's own initialization."""

    origin: Origin | None = None
    draw: Draw | None = None
    """What its module will initialize it with; None if nothing is known of that."""
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
        if state.model and sys._getframe(1).f_code.co_filename == nn.init.__file__:
            target = kwargs.get("out", first)
            begins = isinstance(target, DeferredParameter) and _begins_init(func, target, kwargs)
            if begins and (by_hand := _hand_that_writes(target)):
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
        if (
            state.model
            and isinstance(first, DeferredParameter)
            and writes(func)
            and (by_hand := _hand_that_writes(first))
        ):
            all_of_it = func.__name__ in OVERWRITES or getattr(func, "__module__", "") == nn.init.__name__
            with _real(first, func.__name__, by_hand, all_of_it) as real:
                return func(real, *args[1:], **kwargs)
        if state.model and isinstance(first, list | tuple) and writes(func) and isinstance(by := writer(), str):
            raise _refused_part(func.__name__, by)
        result = call_plainly(func, *args, **kwargs)
        return _as_part(result, first) if is_building() and isinstance(first, DeferredParameter) else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            whole, copied = _whole_of(self), _copied_of(self)
            if copied is not None:
                memo[id(self)] = new = _like(self, call_plainly(torch.empty_like, self), self.requires_grad)
                _begin_as(new, copied)
            elif self.is_part:
                raise _refusal("deepcopy")
            else:  # an alias of a parameter that has values by now
                memo[id(self)] = whole.detach().clone()
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
        swap_parameters(parameter, DeferredParameter(parameter.detach().to("meta"), parameter.requires_grad))
    assert isinstance(parameter, DeferredParameter)
    parameter.origin = origin


def forget(parameter: nn.Parameter) -> None:
    """Frees the memory of a parameter whose values have been copied elsewhere. Identity and ties stay."""
    if parameter.is_meta:
        # Swapped, since `.data` of a deferred parameter cannot become a tensor of another shape.
        empty = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="cpu"), parameter.requires_grad)
        swap_parameters(parameter, empty)
    else:
        parameter.data = parameter.data.new_empty(0)


# -- dispatch of a torch function --------------------------------------------------------------------------

_ALLOWED = frozenset({TENSOR.__repr__, TENSOR.requires_grad_, SHALLOW_COPY_QUERY})


def _begins_init(func: Any, target: DeferredParameter, kwargs: Mapping[str, Any]) -> bool:
    """Returns True if a call by a function of torch.nn.init shows that the function is about to set every element.

    Questions about the shape do not: `_calculate_fan_in_and_fan_out` asks them too, and writes nothing.

    Args:
        func: the function of torch that is called.
        target: the tensor of the call.
        kwargs: keywords of the call.
    """
    if "out" in kwargs or writes(func):
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
    swap_parameters(whole, new)
    try:
        yield whole if tensor is whole else whole.data
    except BaseException:
        swap_parameters(whole, new)
        raise


def _whole_of(tensor: DeferredParameter) -> Any:
    """Returns the parameter of an alias or view, which may be real by now; for a parameter, `tensor` itself."""
    return tensor if tensor.whole is None else tensor.whole


def _hand_that_writes(tensor: Any) -> str | None:
    """Returns the "file:line" of code that writes by hand; None for an initializer, whose draw is then another one."""
    by = writer()
    if isinstance(by, str):
        return by
    whole = _whole_of(tensor)
    if isinstance(whole, DeferredParameter) and whole.draw is not None:
        whole.draw = whole.draw.anew(by)
    return None


def _copied_of(tensor: torch.Tensor) -> Copied | None:
    """Returns what a tensor without values is a whole copy of, or an alias; None if that is not certain."""
    if not isinstance(tensor, DeferredParameter):
        return marked_copy(tensor)
    whole = _whole_of(tensor)
    known = isinstance(whole, DeferredParameter) and not tensor.is_part
    return Copied(whole.origin, whole.draw) if known else None


def _begin_as(parameter: DeferredParameter, copied: Copied) -> None:
    """Lets a parameter begin with the values of the one that was copied."""
    if copied.draw is not None:
        copied.draw.copied = True
    parameter.origin, parameter.draw = copied


def _alike(parameter: Any, source: torch.Tensor) -> bool:
    """Returns True if a copy of `source` has all of its values as they are."""
    return bool(parameter.shape == source.shape and parameter.dtype == source.dtype)


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
        f"{what} needs the values of a parameter that does not contain any yet: offload.initialize fills those of "
        "offload.load_pretrained and offload.init, so call it first; code that needs values before, as PiSSA, OLoRA "
        "and DoRA do to make adapters of LoRA, takes a model of from_pretrained, or one built outside of "
        "offload.init, which offload.initialize takes too"
    )


def _like(tensor: DeferredParameter, meta: torch.Tensor, requires_grad: bool) -> DeferredParameter:
    """Returns a deferred parameter over `meta`, with the same origin as `tensor`."""
    new = DeferredParameter(meta, requires_grad)
    new.origin = tensor.origin
    new.draw = tensor.draw
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
    if is_building() and not values.is_meta:
        swap_parameters(tensor, nn.Parameter(values.detach(), tensor.requires_grad))
        return
    copied = _copied_of(values)
    # Two parameters over one memory would be trained apart.
    shares = isinstance(values, DeferredParameter) and values.whole is not None and values.whole is not tensor
    if copied is not None and not shares and (is_building() or isinstance(values, DeferredParameter)):
        call_plainly(func, tensor, call_plainly(values.detach).as_subclass(torch.Tensor))
        _begin_as(tensor, copied)
        return
    if not is_building():
        raise _refusal(f"setting .data, of shape {list(tensor.shape)}, to a tensor of shape {list(values.shape)}")
    if state.model and (by_hand := _hand_that_writes(tensor)):
        raise _refused_part(".data = …", by_hand)
    call_plainly(func, tensor, values)


def _copy(func: Any, tensor: DeferredParameter, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `copy_`: values that code copies by hand while a model is built are kept, also those still to come."""
    if not is_building():
        raise _refusal("copy_")
    if isinstance(source, DeferredParameter) and not source.is_part and not is_deferred(_whole_of(source)):
        source = _whole_of(source).data
    if not state.model:
        return call_plainly(func, tensor, source, *args, **kwargs)
    absent = isinstance(source, torch.Tensor) and call_plainly(TENSOR.is_meta.__get__, source)
    whole, copied = _whole_of(tensor), _copied_of(source) if absent else None
    if copied is not None and is_deferred(whole) and not tensor.is_part and _alike(whole, source):
        _begin_as(whole, copied)
        return tensor
    by_hand = "GatheredParameters" if state.copies else _hand_that_writes(tensor)
    if by_hand and absent:
        raise _refused_part("copy_", by_hand)
    if by_hand:
        with _real(tensor, "copy_", by_hand, all_of_it=True) as real:
            return func(real, source, *args, **kwargs)
    return call_plainly(func, tensor, source, *args, **kwargs)


def _clone(func: Any, tensor: DeferredParameter, *args: Any, **kwargs: Any) -> Any:
    """Implements `clone()`, whose result may become the values of another parameter."""
    if not is_building():
        raise _refusal("clone")
    result = call_plainly(func, tensor, *args, **kwargs)
    copied = _copied_of(tensor)
    if copied is not None:
        mark_copy(result, copied)
    return result


def _is_meta(func: Any, tensor: DeferredParameter) -> bool:
    """Implements `is_meta`: False for `load_state_dict`, which would warn that copying to meta has no effect."""
    # For this class the copy has an effect: `_copy` makes the parameter real.
    if state.model and sys._getframe(2).f_code.co_name == "_load_from_state_dict":
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
    TENSOR.clone: _clone,
    torch.clone: _clone,
    TENSOR.is_meta.__get__: _is_meta,
    **{
        getattr(TENSOR, name): _convert
        for name in "to half float double bfloat16 cpu cuda xpu".split()
        if hasattr(TENSOR, name)
    },
}
