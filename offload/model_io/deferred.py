"""Parameters whose values come later, one unit at a time, in models of `offload.init` and `load_pretrained`.

A `DeferredParameter` is a parameter on the meta device, without values. Its shape, dtype and other properties can be
read; a function that needs values raises an error. Without that error a forward would return a result without values,
and an edit would be lost. A deferred parameter becomes real when it gets values and memory of its own. Its `device` is
the CPU, where the values will first be created. Code that makes a new module, such as an adapter, on the device of a
parameter thus makes it on the CPU.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import sys
import threading
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from offload.engine.params import TENSOR, asks_for_no_element, call_plainly
from offload.errors import ConfigError, UsageError
from offload.torch_internals import SHALLOW_COPY_QUERY, swap_parameters

# -- context -------------------------------------------------------------------------------------------


class _State(threading.local):
    """State of the calling thread, which `building` changes."""

    building = False
    """True while code may compute with parameters without values."""
    model = False
    """True while a model is under construction, so that values written by its own code are kept."""
    copies = False
    """True while values that anyone copies into a parameter are kept."""


state = _State()


@contextlib.contextmanager
def building(model: bool = False, copies: bool = False) -> Iterator[None]:
    """Allows computation with deferred parameters, on the meta device and without effect, inside of the context.

    Constructors and initializers need this, because they compute with their parameters. With `model` a parameter keeps
    values that code writes by hand, outside of an initializer. While a model is built, a copy by the code of
    transformers is left out, since its initializers repeat it; with `copies` those values are kept too.
    """
    outer = state.building, state.model, state.copies
    state.building, state.model, state.copies = True, state.model or model, state.copies or copies
    try:
        yield
    finally:
        state.building, state.model, state.copies = outer


# -- writes --------------------------------------------------------------------------------------------
#
# Recognition of writes to parameters without values, and of the code that writes.


_OURS = str(Path(__file__).parents[1]) + os.sep
OVERWRITES = frozenset(
    "normal_ uniform_ fill_ zero_ copy_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_".split()
)
"""Methods that give every element of a tensor a value independent of the previous one."""
_INITIALIZERS = frozenset(
    "reset_parameters _reset_parameters _init_weights init_weights initialize_weights _initialize_weights".split()
)
"""Methods that make the values of a module and its submodules."""


class Initializer(NamedTuple):
    """A call of such a method. It is repeated when the values are needed, so its writes need not be kept."""

    owner: nn.Module
    name: str
    arguments: tuple[Any, ...] = ()

    @property
    def target(self) -> nn.Module:
        """The module that contains the written parameters: the last module among the arguments, or the owner."""
        return next((argument for argument in reversed(self.arguments) if isinstance(argument, nn.Module)), self.owner)

    def __call__(self) -> None:
        getattr(self.owner, self.name)(*self.arguments)


def writes(func: Any) -> bool:
    """Returns True if `func` changes its first argument in place, which torch marks by a trailing underscore."""
    name: str = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__") and name != "requires_grad_") or name == "__setitem__"


def writer() -> str | Initializer | None:
    """Returns the code on the call stack that writes.

    Returns:
        The "file:line" of code that writes by hand, or the call of an initializer. None for other code of transformers,
        whose `_init_weights` writes these values again.
    """
    where = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # An initializer anywhere on the stack counts, also if it writes through helpers.
        if code.co_name in _INITIALIZERS and (call := _call_of(frame)) is not None:
            return call
        foreign = f"{os.sep}torch{os.sep}" in code.co_filename or code.co_filename.startswith(_OURS)
        if where is None and not foreign:
            where = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None if where is not None and f"{os.sep}transformers{os.sep}" in where else where or "torch"


def _call_of(frame: types.FrameType) -> Initializer | None:
    """Returns the call that a frame runs; None if it cannot be repeated, such as a call of a plain function."""
    code = frame.f_code
    if code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return None
    values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    owner, arguments = values[0] if values else None, values[1:]
    if not isinstance(owner, nn.Module) or not _is_method(type(owner), code):
        return None
    if not all(
        argument is None or isinstance(argument, nn.Module | bool | int | float | str) for argument in arguments
    ):
        return None
    return Initializer(owner, code.co_name, tuple(arguments))


def _is_method(kind: type, code: types.CodeType) -> bool:
    """Returns True if `code` is the class's method of that name, or a method that this one overrides."""
    methods = (vars(base).get(code.co_name) for base in kind.__mro__)
    return any(getattr(inspect.unwrap(method), "__code__", None) is code for method in methods if callable(method))


# -- draws ---------------------------------------------------------------------------------------------
#
# Equality of values that do not exist yet: which parameters without values begin as copies of others.


_calls = itertools.count()


class Draw:
    """Values that an initializer will make. All parameters of one draw begin with equal values.

    Attributes:
        copied: True once a parameter was copied, so that several parameters may share the draw.
        writers: the initializers that have written the values, each with the number of its last write.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._class, self._name = weakref.ref(module), type(module), name
        self.copied = False
        self.writers: dict[Initializer, int] = {}

    def anew(self, by: Initializer | None) -> Draw:
        """Returns the draw of the same parameter after the initializer `by`, or an unknown one, has run again."""
        draw: Draw = object.__new__(Draw)
        draw._module, draw._class, draw._name, draw.copied = self._module, self._class, self._name, False
        draw.writers = self.writers if by is None else {**self.writers, by: next(_calls)}
        return draw

    def is_made_in(self, module: nn.Module, name: str) -> int:
        """Returns 2 if `module` itself makes the values, 1 if it is another module that makes them alike, else 0."""
        if name != self._name or type(module) is not self._class:
            return 0
        return 2 if self._module() is module else 1


Copied = tuple[Any, Draw | None]
"""Origin and draw of a parameter without values at the time when it was copied."""

_MARK = "offload_copied"
"""Attribute of a tensor without values that is a copy of a whole parameter: the origin, and the tensor's version."""


# -- deferred parameter --------------------------------------------------------------------------------


class Origin(Protocol):
    """Source of the values of a parameter."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def pieces(self, part: range | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields values in order, as tensors (n,) on the CPU, each with the position of its first element.

        A yielded tensor is valid until the next one is yielded.

        Args:
            part: the elements to yield; positions count from the first of them. None for all elements.

        Raises:
            IoError: if the source cannot be read.
            StoreError: if the source is damaged.
        """
        ...


class DeferredParameter(nn.Parameter):
    """A parameter on meta that `initialize` fills from `origin` or by the module's own initialization."""

    origin: Origin | None = None
    draw: Draw | None = None
    """The values that the module will initialize it with; None if they are unknown."""
    whole: DeferredParameter | None = None
    """The parameter that a write to this alias or view changes; None if this is a parameter itself."""
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
        if not (state.building or asks_for_no_element(func) or func in _ALLOWED):
            raise _refusal(getattr(func, "__name__", str(func)))
        # While a model is built, a write outside of an initializer cannot be repeated later. So the parameter becomes
        # real now if the write sets every element; any other write is an error.
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
        return _as_part(result, first) if state.building and isinstance(first, DeferredParameter) else result

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
    """Returns True if a call made by a function of torch.nn.init shows that it is about to set every element.

    Reads of the shape do not show that: `_calculate_fan_in_and_fan_out` reads it too, and writes nothing.
    """
    if "out" in kwargs or writes(func):
        return True
    # `orthogonal_` and others return early for a tensor on meta, so the parameter must be real when they read
    # `is_meta`. In versions of torch that do not read it, the first call makes a tensor on the parameter's device.
    if func in (TENSOR.is_meta.__get__, TENSOR.new, TENSOR.new_empty):
        return True
    # The parameter of this alias is real by now, and the function may copy the device for its temporary tensors.
    return not target.is_part and not isinstance(_whole_of(target), DeferredParameter)


@contextlib.contextmanager
def _real(tensor: DeferredParameter, name: str, where: str, all_of_it: bool) -> Iterator[Any]:
    """Makes the parameter real that the body is about to write, and yields the tensor to pass instead of `tensor`.

    `tensor` may be an alias or a view of it. If the body raises an exception, the parameter is deferred again: its
    memory may not contain values. A write that does not set every element is a `ConfigError`, since the remaining
    values do not exist yet; `name` is the function that writes, and `where` its "file:line".
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
    vars(new).update(vars(whole))  # keeps attributes that code has set, such as transformers' marks
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
    """Returns the "file:line" of code that writes by hand; None for an initializer, which renews the draw."""
    by = writer()
    if isinstance(by, str):
        return by
    whole = _whole_of(tensor)
    if isinstance(whole, DeferredParameter) and whole.draw is not None:
        whole.draw = whole.draw.anew(by)
    return None


def _copied_of(tensor: torch.Tensor) -> Copied | None:
    """Returns the source of a tensor without values that is a whole copy or alias; None if that is not certain."""
    if not isinstance(tensor, DeferredParameter):
        marked, version = tensor.__dict__.get(_MARK, (None, 0))
        return marked if version == tensor._version else None
    whole = _whole_of(tensor)
    known = isinstance(whole, DeferredParameter) and not tensor.is_part
    return (whole.origin, whole.draw) if known else None


def _begin_as(parameter: DeferredParameter, copied: Copied) -> None:
    """Makes a parameter begin with the values of the copied parameter."""
    parameter.origin, parameter.draw = copied
    if parameter.draw is not None:
        parameter.draw.copied = True


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
    return torch.device("cpu")  # where the values will first be created


def _set_data(func: Any, tensor: DeferredParameter, values: torch.Tensor) -> None:
    """Implements `.data = values`: a conversion changes the dtype; real values from a constructor are kept."""
    if state.building and not values.is_meta:
        swap_parameters(tensor, nn.Parameter(values.detach(), tensor.requires_grad))
        return
    copied = _copied_of(values)
    # Two parameters over the same memory would be trained separately.
    shares = isinstance(values, DeferredParameter) and values.whole is not None and values.whole is not tensor
    if copied is not None and not shares and (state.building or isinstance(values, DeferredParameter)):
        call_plainly(func, tensor, call_plainly(values.detach).as_subclass(torch.Tensor))
        _begin_as(tensor, copied)
        return
    if not state.building:
        raise _refusal(f"setting .data, of shape {list(tensor.shape)}, to a tensor of shape {list(values.shape)}")
    if state.model and (by_hand := _hand_that_writes(tensor)):
        raise _refused_part(".data = …", by_hand)
    call_plainly(func, tensor, values)


def _copy(func: Any, tensor: DeferredParameter, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `copy_`: keeps values, even deferred ones, that code copies by hand while a model is built."""
    if not state.building:
        raise _refusal("copy_")
    if isinstance(source, DeferredParameter) and not source.is_part and not is_deferred(_whole_of(source)):
        source = _whole_of(source).data
    if not state.model:
        return call_plainly(func, tensor, source, *args, **kwargs)
    absent = isinstance(source, torch.Tensor) and call_plainly(TENSOR.is_meta.__get__, source)
    whole, copied = _whole_of(tensor), _copied_of(source) if absent else None
    alike = copied is not None and (whole.shape, whole.dtype) == (source.shape, source.dtype)
    if copied is not None and alike and is_deferred(whole) and not tensor.is_part:
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
    if not state.building:
        raise _refusal("clone")
    result = call_plainly(func, tensor, *args, **kwargs)
    copied = _copied_of(tensor)
    if copied is not None:
        result.__dict__[_MARK] = (copied, result._version)
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


# -- meta init -----------------------------------------------------------------------------------------
#
# Construction of a model without its weights, and initialization of the weights one unit at a time.
#
# Inside of `deferring_weights`, parameters are registered on the meta device and buffers stay real. `materialize` then
# makes the parameters of one unit real, by the initialization of the modules that own them. The unit determines the
# seed, so the weights do not depend on budgets, placements or the number of ranks. Parameters that are read from files
# (see `model_io.load_pretrained`) stay as they are.


@contextlib.contextmanager
def deferring_weights() -> Iterator[None]:
    """Registers parameters on the meta device, in this thread, while a model is built inside of the context.

    Raises:
        ConfigError: if a constructor needs values that do not exist yet, or changes them.
    """
    thread = threading.get_ident()
    seen = WeakTensorKeyDictionary()  # a parameter registered twice is replaced by the same object: tied

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:  # torch's stub says None
        """Returns the parameter to register: deferred if its module can make the values again later."""
        if parameter is None or threading.get_ident() != thread:
            return parameter
        if isinstance(parameter, DeferredParameter) and parameter.whole is not None:
            return _of_its_own(module, name, parameter)
        if type(parameter) is not nn.Parameter:
            return parameter
        if parameter not in seen:
            of_library = type(module).__module__.startswith("transformers.")
            can_initialize = of_library or _resetter(module) is not None
            keep = parameter.is_meta or not can_initialize or _is_given(module, name, parameter)
            seen[parameter] = None
            if not keep:
                seen[parameter] = DeferredParameter(parameter.detach().to("meta"), parameter.requires_grad)
                seen[parameter].draw = Draw(module, name)
        deferred: nn.Parameter | None = seen[parameter]
        return parameter if deferred is None else deferred

    removal = register_module_parameter_registration_hook(register)
    try:
        with building(model=True):
            yield
    except (RuntimeError, NotImplementedError) as error:
        # torch raises no class of its own for an operation without values: only the message shows the cause.
        if "meta" not in str(error).lower():
            raise
        raise ConfigError(
            f"{_handle_of(error)} computes with values of parameters, but offload.init fills parameters later "
            f"({error}); build this model outside of offload.init, or load it with its own from_pretrained, and pass "
            "it to offload.initialize"
        ) from error
    finally:
        removal.remove()


def _of_its_own(module: nn.Module, name: str, alias: DeferredParameter) -> DeferredParameter:
    """Returns the parameter to register for `nn.Parameter(weight.data)`, which must replace `weight`.

    Raises:
        ConfigError: if `weight` stays, or only a part was taken, since the new parameter would then be initialized
            separately.
    """
    if alias.is_part or alias.whole is not module._parameters.get(name):
        raise ConfigError(
            f"{type(module).__name__} makes its parameter {name} from another parameter, but offload.init fills "
            "parameters later: build this module outside of offload.init (weight_norm and other parametrizations too)"
        )
    assert alias.whole is not None
    parameter = DeferredParameter(alias.detach().as_subclass(torch.Tensor), alias.requires_grad)
    parameter.origin, parameter.draw = alias.whole.origin, alias.whole.draw
    return parameter


def _is_given(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Returns True if a parameter comes with values, and is not memory allocated by the constructor of `module`.

    A tensor among the constructor's arguments that shares the parameter's memory is such a value. A parameter that
    replaces another one, or is registered outside of the constructor, counts as given too.
    """
    if module._parameters.get(name) is not None:
        return True
    # Skips this function and `register`, and searches the stack for the constructor of `module`.
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        code, known = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        # The first argument of a constructor is its module, whatever the argument's name.
        if code.co_name == "__init__" and names and known.get(names[0]) is module:
            return any(_same_memory(known.get(argument_name), parameter) for argument_name in names[1:])
        frame = frame.f_back
    return True


def _same_memory(value: Any, parameter: nn.Parameter) -> bool:
    """Returns True if `value` is a tensor over the parameter's storage."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    return value.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def _handle_of(error: BaseException) -> str:
    """Returns the model class and the line that raised an error: the innermost module frame outside of torch."""
    line_of_user = "the model"
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, frame.f_locals.get("module", frame.f_locals.get("self"))
        if f"{os.sep}torch{os.sep}" not in file and isinstance(module, nn.Module):
            line_of_user = f"{type(module).__name__} ({file}:{line})"
    return line_of_user


def _resetter(module: nn.Module) -> str | None:
    """Returns the name of the method that initializes a module's parameters, or None."""
    return next((name for name in ("reset_parameters", "_reset_parameters") if getattr(module, name, None)), None)


def _on_cpu(name: str, parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(parameter, device="cpu")


def materialize(
    model: nn.Module,
    names: Sequence[str],
    seed: int,
    shapes: Mapping[int, torch.Size] | None = None,
    new: Callable[[str, torch.Tensor], torch.Tensor] = _on_cpu,
) -> Mapping[str, nn.Parameter]:
    """Makes the deferred parameters `names` of `model` real, on the CPU, and initializes them. Identity and ties stay.

    Returns the parameters made.

    Parameters that will be read from an origin stay as they are. `seed` is for torch's CPU generator, whose state is
    restored afterwards. `shapes` are those of parameters of the model that may have been emptied, by id. `new` returns
    memory on the CPU for the parameter of a name.

    Raises:
        ConfigError: if the owning module does not initialize a parameter.
    """
    parameters = {name: model.get_parameter(name) for name in names}
    absent = {name: weight for name, weight in parameters.items() if weight.is_meta and origin_of(weight) is None}
    if not absent:
        return absent
    made = {id(parameter) for parameter in absent.values()}
    draws = {
        name: weight.draw
        for name, weight in absent.items()
        if isinstance(weight, DeferredParameter) and weight.draw is not None
    }
    # NaN marks a value as not yet set, for the check at the end.
    for name, parameter in absent.items():
        real = nn.Parameter(new(name, parameter).fill_(torch.nan), parameter.requires_grad)
        swap_parameters(parameter, real)
    # Forked, so that making the weights leaves the user's random state as it was.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), building():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would change the GPU's seed for good
        for call in _meta_init_calls(model, absent, draws):
            try:
                with _apart(call.target, made, shapes or {}):
                    call()
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error).lower():
                    raise
                raise ConfigError(
                    f"{call.name} of {type(call.target).__name__} computes with values of parameters of another unit, "
                    f"but offload.init fills one unit after the other ({error}); build this model outside of "
                    "offload.init"
                ) from error
    for name, parameter in absent.items():
        # A minimum is NaN where any value is, and takes no tensor of the parameter's size.
        if parameter.numel() and bool(parameter.detach().amin().isnan()):
            raise ConfigError(
                f"parameter {name} of {type(model.get_submodule(name.rpartition('.')[0])).__name__} has no initial "
                "value: its module has no reset_parameters that sets the parameter; add that method, or build the "
                "model outside of offload.init"
            )
    return absent


@contextlib.contextmanager
def _apart(module: nn.Module, made: Collection[int], shapes: Mapping[int, torch.Size]) -> Iterator[None]:
    """Keeps an initializer of `module` from changing buffers, and parameters that are not being made.

    An initializer sets all parameters of its module, and may set parameters of submodules. Inside of the context,
    parameters of other units are on meta, in their shapes: the range of a bias is computed from the shape of a weight,
    which may belong to an earlier unit and be emptied by now.
    """
    elsewhere: list[tuple[dict[str, Any], str, Any]] = []
    copied: list[tuple[nn.Parameter, torch.Tensor]] = []
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is None or id(parameter) in made:
                continue
            shape = shapes.get(id(parameter), parameter.shape)
            if submodule is module and not parameter.is_meta and parameter.shape == shape:
                copied.append((parameter, parameter.detach().clone()))  # the initializer may read it
            elif not parameter.is_meta:
                elsewhere.append((submodule._parameters, name, parameter))
        elsewhere += [
            (submodule._buffers, name, buffer) for name, buffer in submodule._buffers.items() if buffer is not None
        ]
    for place, name, tensor in elsewhere:
        if isinstance(tensor, nn.Parameter):
            empty = torch.empty(shapes.get(id(tensor), tensor.shape), dtype=tensor.dtype, device="meta")
            place[name] = DeferredParameter(empty, tensor.requires_grad)
        else:
            place[name] = tensor.clone()
    try:
        yield
    finally:
        for place, name, tensor in elsewhere:
            place[name] = tensor
        for parameter, values in copied:
            parameter.copy_(values)


def _meta_init_calls(
    model: nn.Module, absent: Mapping[str, nn.Parameter], draws: Mapping[str, Draw]
) -> list[Initializer]:
    """Returns the initializers of the parameters `absent`: of their modules, and of the modules above.

    They run children first, since a parent's initializer may overwrite a child's values. If other initializers have
    written values too, all run again in the order of their calls: `_init_weights` of a Whisper encoder, for instance,
    writes the positions of its embedding.
    """
    own = list(_initializers(model, absent))
    written: dict[Initializer, int] = {}
    for name, draw in draws.items():
        for call, number in draw.writers.items():
            within = _within(model, name, call) if call not in own else call
            written[within] = max(number, written.get(within, -1))
    if written.keys() <= set(own):
        return own
    return sorted([*own, *(written.keys() - set(own))], key=lambda call: written.get(call, -1))


def _within(model: nn.Module, name: str, call: Initializer) -> Initializer:
    """Returns the call that writes parameter `name` of `model`, as `call` has written the parameter's original.

    Raises:
        ConfigError: if the model does not contain such a module.
    """
    above = [model]
    for part in name.split(".")[:-1]:
        above.append(above[-1].get_submodule(part))

    def same(value: Any) -> Any:
        if not isinstance(value, nn.Module) or value in above:
            return value
        return next((outer for outer in reversed(above) if type(outer) is type(value)), value)

    initializer = Initializer(same(call.owner), call.name, tuple(map(same, call.arguments)))
    parameter = model.get_parameter(name)
    if initializer.target not in above and not any(trained is parameter for trained in initializer.target.parameters()):
        raise ConfigError(
            f"parameter {name} is a copy of one that {call.name} of {type(call.target).__name__} has written, and this "
            "model contains no such module; build this model outside of offload.init"
        )
    return initializer


def _initializers(model: nn.Module, names: Mapping[str, nn.Parameter]) -> Iterator[Initializer]:
    """Yields the initializers of the modules that own `names` and of the modules between, children first."""
    paths: set[str] = set()
    # The path of the deepest module that contains all `names`.
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = ".".join(level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
    for name in names:
        path = name.rpartition(".")[0]
        while path not in paths and len(path) >= len(shared):
            paths.add(path)
            if not path or path == shared:
                break
            path = path.rpartition(".")[0]
    modules = dict(model.named_modules(remove_duplicate=False))
    order = {path: position for position, path in enumerate(modules)}
    # Deepest first, and equally deep modules in the order of construction.
    for path in sorted(paths, key=lambda path: (-path.count(".") - bool(path), order[path])):
        module = modules[path]
        reset = _resetter(module)
        if reset is not None and any(not p.is_meta for p in module.parameters(recurse=False)):
            yield Initializer(module, reset)
        library = _library_model(modules, path)
        if library is not None:
            yield Initializer(library, "_init_weights", (module,))


def _library_model(modules: Mapping[str, nn.Module], path: str) -> nn.Module | None:
    """Returns the innermost module at or above `path` with `_init_weights(module)`, as models of transformers have."""
    while True:
        initializer = getattr(type(modules[path]), "_init_weights", None)
        if initializer is not None and len(inspect.signature(initializer).parameters) > 1:
            return modules[path]
        if not path:
            return None
        path = path.rpartition(".")[0]


# -- first values --------------------------------------------------------------------------------------
#
# First values of the parameters of each unit: drawn by their modules, or copied from another parameter.


class FirstValues:
    """Maker of the first values, one unit after the other.

    A unit follows soon after the units that it copies, since their values stay in memory until then.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Sequence[str]],
        seed: int,
        new: Callable[[str, torch.Tensor], torch.Tensor] = _on_cpu,
    ) -> None:
        """Finds the parameters that are copies, and their sources. `units` are the names of each unit's parameters.

        `new` as in `materialize`.

        Raises:
            ConfigError: if a parameter is a copy of a parameter outside of the model, and no module of the model makes
                such values.
        """
        self._model, self._units, self._seed, self._new = model, units, seed, new
        self._shapes = {id(parameter): parameter.shape for parameter in model.parameters()}
        self._unit_of = {name: unit for unit, names in reversed(list(enumerate(units))) for name in names}
        self._sources = _sources(model, list(self._unit_of))
        self._waiting = Counter(self._sources.values())
        """Number of copies of each parameter that have no values yet."""
        self._kept: dict[str, torch.Tensor] = {}
        """Values of the parameters with such copies."""

    def order(self) -> Iterator[int]:
        """Yields each unit once; the units that copy it follow directly."""
        copies: dict[int, set[int]] = {}
        for name, source in self._sources.items():
            copies.setdefault(self._unit_of[source], set()).add(self._unit_of[name])
        done: set[int] = set()
        for first in range(len(self._units)):
            waiting = [first]
            while waiting:
                unit = waiting.pop()
                if unit not in done:
                    done.add(unit)
                    yield unit
                    waiting += sorted(copies.get(unit, ()), reverse=True)

    def make(self, unit: int) -> None:
        """Makes the deferred parameters of a unit real; those that will be read from an origin stay as they are.

        Raises:
            ConfigError: if a parameter has no initial value.
        """
        for name, parameter in self._draw(unit).items():
            source = self._sources.get(name)
            if source is None:
                continue
            # This unit may come before the one that it copies, whose values then wait for their turn.
            self._draw(self._unit_of[source])
            with torch.no_grad():
                parameter.copy_(self._kept[source])
            self._waiting[source] -= 1
            if not self._waiting[source]:
                del self._kept[source]

    def _draw(self, unit: int) -> Mapping[str, nn.Parameter]:
        """Lets the modules of a unit initialize its parameters, and returns the parameters made now."""
        # Distinct for every pair of seed and unit, as no model has a million units, and within torch's 64 bits.
        seed = (self._seed * 1_000_003 + unit) % 2**63
        made = materialize(self._model, self._units[unit], seed, self._shapes, self._new)
        for name, parameter in made.items():
            if self._waiting[name]:
                # An alias, which keeps the memory after the parameter was emptied.
                self._kept[name] = parameter.detach()
        return made


def _sources(model: nn.Module, names: Sequence[str]) -> Mapping[str, str]:
    """Returns, for each parameter that is a copy, the name of the parameter whose module makes the values."""
    groups: dict[Draw, list[str]] = {}
    parameters = dict(model.named_parameters())
    for name in names:
        parameter = parameters[name]
        if isinstance(parameter, DeferredParameter) and parameter.origin is None and parameter.draw is not None:
            groups.setdefault(parameter.draw, []).append(name)
    sources: dict[str, str] = {}
    for draw, group in groups.items():
        if not draw.copied:
            continue
        places = [name.rpartition(".") for name in group]
        makes = [draw.is_made_in(model.get_submodule(path), leaf) for path, _, leaf in places]
        if not any(makes):
            kind = type(model.get_submodule(places[0][0])).__name__
            raise ConfigError(
                f"parameter {group[0]} is a copy of a parameter outside of the model, and {kind} does not initialize "
                "it as the other's module does; "
                "build this model outside of offload.init"
            )
        source = group[makes.index(max(makes))]
        sources |= {name: source for name in group if name != source}
    return sources
