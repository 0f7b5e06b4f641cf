"""Private names of torch for its compiler and for modes of dispatch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

_P = ParamSpec("_P")
_T = TypeVar("_T")


def outside_of_compiled_code(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `hook`, disabled as by `torch.compiler.disable`, at a fraction of the cost where no compiled code runs.

    A hook of each module is called often, and `disable` changes and restores the state of the compiler at each call.
    """
    from torch._dynamo.decorators import skip  # imports sympy, which takes long

    called_uncompiled = _called_uncompiled()
    compiles = torch._C._dynamo.eval_frame.get_eval_frame_callback

    def call(*args: Any) -> Any:
        return hook(*args) if compiles() is None else called_uncompiled(hook, *args)

    # With `skip` the compiler does not compile `call` itself, but it does compile functions that `call` calls: hence
    # `called_uncompiled`.
    skipped: Callable[..., Any] = skip(call)
    return skipped


@functools.cache  # one for all hooks: `disable` takes longer than all else that a hook of an engine's start needs
def _called_uncompiled() -> Callable[..., Any]:
    """Returns a function that calls its first argument with the others, disabled for the compiler."""

    def call(hook: Callable[..., Any], *args: Any) -> Any:
        return hook(*args)

    disabled: Callable[..., Any] = torch.compiler.disable(call)
    return disabled


def is_optimized_module(module: Any) -> bool:
    """Returns True for what `torch.compile` returns for a module."""
    # The compiler is not imported for this: whoever compiles has imported it.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


# -- modes of dispatch -------------------------------------------------------------------------------

_dispatch_modes = torch._C._len_torch_dispatch_stack
_interpreter = torch._C._functorch.peek_interpreter_stack


def under_modes() -> bool:
    """Returns True if a dispatch mode or a transform of torch.func is active on this thread."""
    return _dispatch_modes() > 0 or _interpreter() is not None


def active_modes() -> list[Any]:
    """Returns the modes of torch functions and of dispatch that are active on this thread."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def under_transforms() -> bool:
    """Returns True if a transform of torch.func is active on this thread."""
    return _interpreter() is not None


@contextmanager
def without_modes() -> Iterator[None]:
    """Suspends all dispatch modes and transforms of torch.func on this thread while the context is open."""
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def outside_of_modes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes `function` run without dispatch modes and torch.func, which must not see the engine's own copies."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not under_modes():
            return function(*args, **kwargs)
        with without_modes():
            return function(*args, **kwargs)

    return call
