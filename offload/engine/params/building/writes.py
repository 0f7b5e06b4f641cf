"""Recognition of writes to parameters without values, and of the code that writes."""

from __future__ import annotations

import inspect
import os
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

_OURS = str(Path(__file__).parents[1]) + os.sep
OVERWRITES = frozenset(
    "normal_ uniform_ fill_ zero_ copy_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_".split()
)
"""Methods that give every element of a tensor a value independent of the previous one."""
_INITIALIZERS = frozenset(
    "reset_parameters _reset_parameters _init_weights init_weights initialize_weights _initialize_weights".split()
)
"""Methods by which a module makes values, its own and those of modules below it."""


class Initializer(NamedTuple):
    """A call of such a method, which is made again when the values are needed, so that its writes need not be kept."""

    owner: nn.Module
    name: str
    arguments: tuple[Any, ...] = ()

    @property
    def target(self) -> nn.Module:
        """The module that contains the written parameters: the last one of the arguments, or the owner."""
        return next((each for each in reversed(self.arguments) if isinstance(each, nn.Module)), self.owner)

    def __call__(self) -> None:
        """Makes the values."""
        getattr(self.owner, self.name)(*self.arguments)


def writes(func: Any) -> bool:
    """Returns True if `func` changes its first argument in place, which torch marks by a trailing underscore."""
    name: str = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__") and name != "requires_grad_") or name == "__setitem__"


def writer() -> str | Initializer | None:
    """Returns the code that writes.

    Returns:
        The "file:line" of code that writes by hand; the call of an initializer; None for other code of transformers,
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
    """Returns the call that a frame runs; None if it cannot be made again, as that of a function without a module."""
    code = frame.f_code
    if code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return None
    values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    owner, arguments = values[0] if values else None, values[1:]
    if not isinstance(owner, nn.Module) or not _is_method(type(owner), code):
        return None
    if not all(each is None or isinstance(each, nn.Module | bool | int | float | str) for each in arguments):
        return None
    return Initializer(owner, code.co_name, tuple(arguments))


def _is_method(kind: type, code: types.CodeType) -> bool:
    """Returns True if the method of a class that has the name of `code`, or one that it overrides, is this code."""
    methods = (vars(base).get(code.co_name) for base in kind.__mro__)
    return any(getattr(inspect.unwrap(each), "__code__", None) is code for each in methods if callable(each))
