"""Parameters whose values come later, one unit at a time: what `offload.init` and `load_pretrained` put into a model.

An `Absent` is a parameter on the meta device. It answers questions about itself, and refuses to compute: on meta a
forward would give a result of no values, an edit would be lost, and neither would be an error. Its `device` is the CPU,
where its values will first be: who makes a module beside it, such as an adapter, makes it there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from offload.engine.params.harmless_functions import asks_for_no_element
from offload.errors import ConfigError, UsageError
from offload.torch_internals import SHALLOW_COPY_QUERY, plain_tensors


class Origin(Protocol):
    """Where the values of a parameter are read from."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        ...

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The values, (n,) at a time on the CPU, each with the position of its first element; in order.

        A piece is valid until the next one. Raises `IoError` and `StoreError`.
        """
        ...


class _Building(threading.local):
    depth = 0
    model = False
    """Whether a model is being built, so that what its code writes by hand is kept."""


_building = _Building()


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Let absent parameters be computed with, on the meta device: constructors and initializers do, to no effect."""
    _building.depth += 1
    try:
        yield
    finally:
        _building.depth -= 1


@contextlib.contextmanager
def building_a_model() -> Iterator[None]:
    """What `building` does; a parameter that is written by hand, outside of an initializer, has these values."""
    outer, _building.model = _building.model, True
    try:
        with building():
            yield
    finally:
        _building.model = outer


def is_building() -> bool:
    """Whether this thread is inside of `building`."""
    return _building.depth > 0


class Absent(nn.Parameter):
    """A parameter on meta that `initialize` gives its values: those of `origin`, or of its module's initialization."""

    origin: Origin | None = None
    whole: Absent | None = None
    """Of an alias or a view: the parameter that a write to it is a write to."""
    is_part = False
    """Whether this is a view, which may have other elements, or another order of them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args and isinstance(kwargs.get("tensor"), Absent):  # functions of torch.nn.init
            args = (kwargs.pop("tensor"),)
        # Whatever torch.nn.init asks of a tensor, it sets all of it in the end.
        if _building.model and sys._getframe(1).f_code.co_filename == nn.init.__file__ and isinstance(args[0], Absent):
            if by_hand := _writer():
                return func(_real(args[0], "torch.nn.init", by_hand, all_of_it=True), *args[1:], **kwargs)
        rule = _RULES.get(func)
        if rule is not None and isinstance(args[0], Absent):
            return rule(func, *args, **kwargs)
        if is_building() or asks_for_no_element(func) or func in _ALLOWED:
            if _building.model and _writes(func) and args and isinstance(args[0], Absent) and (by_hand := _writer()):
                name, all_of_it = (
                    func.__name__,
                    func.__name__ in _OVERWRITES or getattr(func, "__module__", "") == nn.init.__name__,
                )
                return func(_real(args[0], name, by_hand, all_of_it), *args[1:], **kwargs)
            result = _plainly(func, *args, **kwargs)
            return _as_part(result, args[0]) if is_building() and args and isinstance(args[0], Absent) else result
        raise _refusal(getattr(func, "__name__", str(func)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _like(self, _plainly(torch.empty_like, self), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refusal("pickle")


def is_absent(parameter: Any) -> bool:
    """Whether this is a parameter that `initialize` will give its values."""
    return isinstance(parameter, Absent)


def origin_of(parameter: Any) -> Origin | None:
    """Where the values of a parameter are to be read from; None where it has them, or is initialized by its module."""
    return parameter.origin if isinstance(parameter, Absent) else None


def make_absent(parameter: nn.Parameter, origin: Origin) -> None:
    """Let go of a parameter's values: `origin` will give others. Identity and ties stay."""
    if not isinstance(parameter, Absent):
        torch.utils.swap_tensors(parameter, Absent(parameter.detach().to("meta"), parameter.requires_grad))
    assert isinstance(parameter, Absent)
    parameter.origin = origin


def forget(parameter: nn.Parameter) -> None:
    """Leave a parameter without values and memory, as who has copied them does. Identity and ties stay."""
    if parameter.is_meta:
        empty = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="cpu"), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)
    else:
        parameter.data = parameter.data.new_empty(0)


# -- what becomes of a call ------------------------------------------------------------------------------

_TENSOR: Any = torch.Tensor  # of which the stubs say that its properties are tensors
_ALLOWED = frozenset({_TENSOR.__repr__, _TENSOR.requires_grad_, SHALLOW_COPY_QUERY})


_OVERWRITES = frozenset(
    "normal_ uniform_ fill_ zero_ copy_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_".split()
)
"""What gives every element of a tensor a value that does not depend on the one before."""
_INITIALIZERS = frozenset(
    "reset_parameters _reset_parameters _init_weights init_weights initialize_weights _initialize_weights".split()
)
"""What is called again, or stands for it, when a module makes its own values."""


def _writes(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__") and name != "requires_grad_") or name == "__setitem__"


def _writer() -> str | None:
    """Where a write comes from, "file:line"; None where an initializer makes it, which will be called again."""
    where = None
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _INITIALIZERS:
            return None
        if where is None and f"{os.sep}torch{os.sep}" not in code.co_filename and code.co_filename != __file__:
            where = f"{code.co_filename}:{frame.f_lineno}"
            if f"{os.sep}transformers{os.sep}" in where:
                return None  # whose models write everything in _init_weights as well
        frame = frame.f_back
    return where or "torch"


def _real(tensor: Absent, name: str, where: str, all_of_it: bool) -> Any:
    """Make the parameter real that `name` is about to write at `where`; returns what to give it in place of `tensor`.

    Raises `ConfigError` where it does not set `all_of_it`, since what it would change is not there.
    """
    whole = _whole_of(tensor)
    if not isinstance(whole, Absent):  # a write before has made it real
        if tensor.is_part:
            raise _refused_part(name, where)
        return whole.data
    if tensor.is_part or not all_of_it:
        raise _refused_part(name, where)
    empty = _plainly(torch.empty, whole.shape, dtype=whole.dtype, device="cpu")
    torch.utils.swap_tensors(whole, nn.Parameter(empty, whole.requires_grad))
    return whole if tensor is whole else whole.data


def _whole_of(tensor: Absent) -> Any:
    """The parameter that an alias is one of, which may have become real; a parameter itself."""
    return tensor if tensor.whole is None else tensor.whole


def _refused_part(name: str, where: str) -> ConfigError:
    return ConfigError(
        f"{where} changes a weight by {name}, whose values offload.init leaves for later: write it in reset_parameters "
        f"(or _init_weights, in a model of transformers), or build this model outside of offload.init"
    )


def _as_part(result: Any, tensor: Absent) -> Any:
    """A view of an absent parameter knows whose it is, so that no write to it is lost."""
    if type(result) is torch.Tensor and result.is_meta and result._base is not None and result.dtype == tensor.dtype:
        result = result.as_subclass(Absent)
        result.whole, result.is_part = _whole_of(tensor), True
    return result


def _plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    with plain_tensors():
        return func(*args, **kwargs)


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"{what} needs the values of a parameter that has none yet: in a model of offload.load_pretrained or "
        f"offload.init they are made by offload.initialize; call it first"
    )


def _like(tensor: Absent, meta: torch.Tensor, requires_grad: bool) -> Absent:
    """Another absent tensor, of the same origin."""
    new = Absent(meta, requires_grad)
    new.origin = tensor.origin
    return new


def _alias(func: Any, tensor: Absent) -> Absent:
    """`detach()` and `.data`: no elements are asked for yet."""
    alias = _like(tensor, _plainly(_TENSOR.detach, tensor).as_subclass(torch.Tensor), False)
    alias.whole, alias.is_part = _whole_of(tensor), tensor.is_part
    return alias


def _device(func: Any, tensor: Absent) -> torch.device:
    return torch.device("cpu")


def _set_data(func: Any, tensor: Absent, values: torch.Tensor) -> None:
    """What conversions to another dtype do; a constructor that sets values keeps them."""
    if isinstance(values, Absent) and values.shape == tensor.shape:
        _plainly(func, tensor, _plainly(values.detach).as_subclass(torch.Tensor))
    elif is_building() and values.is_meta:
        _plainly(func, tensor, values)
    elif is_building():
        torch.utils.swap_tensors(tensor, nn.Parameter(values.detach(), tensor.requires_grad))
    else:
        raise _refusal(f"setting .data, of shape {list(tensor.shape)}, to a tensor of shape {list(values.shape)}")


def _copy(func: Any, tensor: Absent, source: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_building():
        raise _refusal("copy_")
    absent = isinstance(source, torch.Tensor) and source.is_meta
    if _building.model and not absent and (by_hand := _writer()):
        return func(_real(tensor, "copy_", by_hand, all_of_it=True), source, *args, **kwargs)
    return _plainly(func, tensor, source, *args, **kwargs)


def _is_meta(func: Any, tensor: Absent) -> bool:
    """`load_state_dict` warns that copying to a tensor on meta does nothing; to this one it does."""
    if _building.model and sys._getframe(2).f_code.co_name == "_load_from_state_dict":
        return False
    return bool(_plainly(func, tensor))


def _convert(func: Any, tensor: Absent, *args: Any, **kwargs: Any) -> Any:
    """`to`, `half`, `cuda` …: another dtype may be said; the engine's config says the device."""
    probe = _plainly(func, torch.empty((), dtype=tensor.dtype, device="cpu"), *args, **kwargs)
    if probe.device.type not in ("cpu", "meta"):
        raise _refusal(f"moving a model to {probe.device}, which the engine's config says,")
    if probe.dtype == tensor.dtype:
        return tensor
    return _like(tensor, torch.empty(tensor.shape, dtype=probe.dtype, device="meta"), tensor.requires_grad)


_RULES: dict[Any, Callable[..., Any]] = {
    _TENSOR.detach: _alias,
    torch.detach: _alias,
    _TENSOR.data.__get__: _alias,
    _TENSOR.data.__set__: _set_data,
    _TENSOR.device.__get__: _device,
    _TENSOR.copy_: _copy,
    _TENSOR.is_meta.__get__: _is_meta,
    **{
        getattr(_TENSOR, name): _convert
        for name in "to half float double bfloat16 cpu cuda xpu".split()
        if hasattr(_TENSOR, name)
    },
}
