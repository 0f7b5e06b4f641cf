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

from offload.engine.placeholder import asks_for_no_element
from offload.errors import UsageError


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
    lost: list[str] | None = None
    """Where values were written that nothing will make again, while that is being noted."""


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
def noting_lost() -> Iterator[list[str]]:
    """Note where a constructor writes values that its modules' own initialization does not make: "file:line"."""
    outer, _building.lost = _building.lost, [] if _building.lost is None else _building.lost
    try:
        yield _building.lost
    finally:
        _building.lost = outer


def is_building() -> bool:
    """Whether this thread is inside of `building`."""
    return _building.depth > 0


class Absent(nn.Parameter):
    """A parameter on meta that `initialize` gives its values: those of `origin`, or of its module's initialization."""

    origin: Origin | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None and isinstance(args[0], Absent):
            return rule(func, *args, **kwargs)
        if is_building() or asks_for_no_element(func) or func in _ALLOWED:
            if _building.lost is not None and _writes(func):
                _note(_building.lost)
            return _plainly(func, *args, **kwargs)
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
_ALLOWED = frozenset({_TENSOR.__repr__, _TENSOR.requires_grad_, torch._has_compatible_shallow_copy_type})


_INITIALIZERS = frozenset(
    "reset_parameters _reset_parameters _init_weights init_weights initialize_weights _initialize_weights".split()
)
"""What is called again, or stands for it, when a module makes its own values."""


def _writes(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__") and name != "requires_grad_") or name == "__setitem__"


def _note(lost: list[str]) -> None:
    """Note where a write comes from, unless an initializer makes it."""
    where = ""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _INITIALIZERS:
            return
        if not where and f"{os.sep}torch{os.sep}" not in code.co_filename and code.co_filename != __file__:
            where = f"{code.co_filename}:{frame.f_lineno}"
            if f"{os.sep}transformers{os.sep}" in where:
                return  # whose models write everything in _init_weights as well
        frame = frame.f_back
    if where not in lost:
        lost.append(where)


def _plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
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
    return _like(tensor, _plainly(_TENSOR.detach, tensor).as_subclass(torch.Tensor), False)


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
    if _building.lost is not None:
        _note(_building.lost)
    return _plainly(func, tensor, source, *args, **kwargs)


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
    **{
        getattr(_TENSOR, name): _convert
        for name in "to half float double bfloat16 cpu cuda xpu".split()
        if hasattr(_TENSOR, name)
    },
}
