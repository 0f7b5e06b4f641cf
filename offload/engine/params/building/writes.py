"""Recognition of writes to parameters without values, and of the code that writes."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parents[1]) + os.sep
OVERWRITES = frozenset(
    "normal_ uniform_ fill_ zero_ copy_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_".split()
)
"""Methods that give every element of a tensor a value independent of the previous one."""
_INITIALIZERS = frozenset(
    "reset_parameters _reset_parameters _init_weights init_weights initialize_weights _initialize_weights".split()
)
"""Functions by which a module makes its own values. They are called again later, so their writes need not be kept."""


def writes(func: Any) -> bool:
    """Returns True if `func` changes its first argument in place, which torch marks by a trailing underscore."""
    name: str = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__") and name != "requires_grad_") or name == "__setitem__"


def writer() -> str | None:
    """Returns the "file:line" of the code that writes; None if an initializer writes, which will be called again."""
    where = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # An initializer anywhere on the stack counts, also if it writes through helpers.
        if code.co_name in _INITIALIZERS:
            return None
        foreign = f"{os.sep}torch{os.sep}" in code.co_filename or code.co_filename.startswith(_OURS)
        if where is None and not foreign:
            where = f"{code.co_filename}:{frame.f_lineno}"
            if f"{os.sep}transformers{os.sep}" in where:
                return None  # `_init_weights`, called later, writes these values again
        frame = frame.f_back
    return where or "torch"
