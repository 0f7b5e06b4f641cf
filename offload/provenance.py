"""Where code comes from: whether a library's own functions run between a call of a module and its result.

A replacement of a part of a user's model, such as a loss in chunks, is right for known code and wrong for any other. So
code is compared by identity, and never by names, which `functools.wraps` copies: a function belongs to the module whose
dictionary it uses for its global names. The text of a function is read only after that, to find out how a library's own
class works.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn import functional

from offload.torch_internals import active_modes, global_module_hooks

_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")
"""Methods of torch's between a call of a module and its forward."""
_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_TOKENWISE = frozenset(
    (
        *(nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity),
        *(nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.SELU, nn.ELU, nn.Mish),
        *(nn.Sigmoid, nn.Tanh, nn.Softplus),
    )
)
"""Classes of torch that compute each token by itself."""
_LIBRARIES = ("transformers", "peft", "bitsandbytes", "torchao")
"""Packages whose layers, where an MLP has one, compute each token by itself."""


def is_of(function: Any, package: str, *around: str) -> bool:
    """Returns True if a package defines a function, and all that was wrapped around it.

    Args:
        package: a dotted name, such as "transformers": that of the innermost function's module begins with it.
        *around: other packages that may define a wrapper, such as "torch" for a function with a compiler disabled.
    """
    packages = [_package_of(layer, (package, *around)) for layer in _unwrapped(function)]
    return packages[-1] == package and None not in packages


def is_class_of(kind: type, package: str) -> bool:
    """Returns True if a module of a package has this very class under the class's name."""
    module = sys.modules.get(kind.__module__)
    return _is_below(kind.__module__, package) and vars(module).get(kind.__qualname__) is kind if module else False


def method_of(module: nn.Module, name: str) -> Any:
    """Returns the function of a module's method, from the object or else from its class; None without the method."""
    return vars(module).get(name, getattr(type(module), name, None))


def described(function: Any) -> str:
    """Returns a description that leads a user to a function: the name and the place of its code."""
    inner = getattr(function, "__func__", function)
    if isinstance(inner, functools.partial):
        return described(inner.func)
    if isinstance(inner, FunctionType):
        return f"{inner.__qualname__} ({inner.__code__.co_filename}:{inner.__code__.co_firstlineno})"
    return f"{type(inner).__module__}.{type(inner).__qualname__}"


def change_of_call(module: nn.Module, name: str) -> str | None:
    """Returns, as a clause, the code that runs in a call of a module besides its class's forward; None without any.

    Hooks of this library are left out. Other hooks may read or change inputs and outputs.

    Args:
        name: the clause's words for the module.
    """
    own = next((attribute for attribute in (*_CALLS, "forward") if attribute in vars(module)), None)
    if own is not None:
        return f"{name} has a {own} of its own, {described(vars(module)[own])}"
    changed = next((attribute for attribute in _CALLS if not is_of(getattr(type(module), attribute), "torch")), None)
    if changed is not None:
        return f"{name} is called by {described(getattr(type(module), changed))}"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return f"{name} is compiled"
    foreign = next(foreign_hooks(module), None)
    if foreign is not None:
        kind, hook = foreign
        return f"{name} has the {kind} {described(hook)}"
    everywhere = global_module_hooks()
    if everywhere:
        return f"all modules have the hook {described(everywhere[0])}"
    return foreign_mode()


def foreign_mode() -> str | None:
    """Returns, as a clause, a user's active mode that may change results of torch's functions; None without one.

    Modes of torch, such as a default device or a counter of operations, change no value.
    """
    for kind in map(type, active_modes()):
        if not any(is_class_of(kind, package) for package in ("torch", "offload")):
            return f"the mode {kind.__module__}.{kind.__qualname__} is active"
    return None


def mixture_of_tokens(module: nn.Module) -> str | None:
    """Returns, as a clause, the part of a module that may mix tokens; None if each token is computed by itself."""
    for path, inner in module.named_modules():
        if not path:
            continue
        known = type(inner) in _TOKENWISE or any(is_class_of(type(inner), package) for package in _LIBRARIES)
        if not known or not any(is_of(type(inner).forward, package) for package in ("torch", *_LIBRARIES)):
            return f"its {path} is a {type(inner).__module__}.{type(inner).__qualname__}"
        if "forward" in vars(inner):
            return f"its {path} has a forward of its own"
        if (hook := next(foreign_hooks(inner, *_LIBRARIES), None)) is not None:
            return f"its {path} has a {hook[0]}"
    return foreign_mode()


def foreign_hooks(module: nn.Module, *known: str) -> Iterator[tuple[str, Any]]:
    """Yields the hooks of a module's calls that neither this library nor one of the packages `known` defines.

    Yields:
        The words for the kind of a hook, and the hook.
    """
    for attribute, kind in _HOOKS.items():
        for hook in getattr(module, attribute).values():
            if not any(is_of(hook, package, "torch", "offload") for package in ("offload", *known)):
                yield kind, hook


def is_causal_lm_loss(function: Any) -> bool:
    """Returns True for transformers' loss of a causal language model, and for one of this library that wraps it.

    The functions that it calls are compared too: Liger replaces `torch.nn.functional.cross_entropy`, and not the loss.
    """
    # transformers is not imported here: a model of transformers has imported it.
    losses = sys.modules.get("transformers.loss.loss_utils")
    if losses is None or not is_of(function, "transformers", "offload"):
        return False
    parts = (losses.ForCausalLMLoss, losses.fixed_cross_entropy)
    return (
        _unwrapped(function)[-1] is parts[0]
        and all(is_of(part, "transformers.loss") for part in parts)
        and is_of(functional.cross_entropy, "torch.nn.functional")
        and losses.nn is nn
    )


def forward_text(module: nn.Module, package: str) -> ast.AST | None:
    """Returns the parsed text of a module's forward, if it is a package's own; None otherwise."""
    function = method_of(module, "forward")
    return _parsed(_unwrapped(function)[-1]) if is_of(function, package) else None


@functools.cache
def _parsed(function: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, as of a package without its .py files
        return None


def _unwrapped(function: Any) -> list[Any]:
    chain = [function]
    while (inner := getattr(chain[-1], "__wrapped__", None)) is not None and inner not in chain:
        chain.append(inner)
    return chain


def _package_of(function: Any, packages: tuple[str, ...]) -> str | None:
    plain = function.__func__ if isinstance(function, MethodType) else function
    called = plain if isinstance(plain, FunctionType) else inspect.getattr_static(type(function), "__call__", None)
    if not isinstance(called, FunctionType):
        return None
    name = str(called.__globals__.get("__name__"))
    module = sys.modules.get(name)
    if module is None or vars(module) is not called.__globals__:
        return None
    if getattr(module, "__file__", None) != called.__code__.co_filename:  # code that was given to the function
        return None
    return next((package for package in packages if _is_below(name, package)), None)


def _is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
