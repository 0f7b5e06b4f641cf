"""Sections that the docstrings of public functions lack: `Args:`, `Returns:`, `Raises:`."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType

import offload
from offload import aio, deepnvme, hf
from offload.engine.optim.optimizer import Optimizer

_FOR_TORCH = {"forward"}
"""Public by its name, but what users call is `__call__`."""


def public_functions() -> dict[str, FunctionType]:
    """Returns the functions that users call, each once, by a name that they write.

    These are the functions of each `__all__` and the public methods of its classes. Methods that the class of another
    library brings are that library's; a property is an attribute and needs no section; what is compiled has no source.
    """
    found = {f"offload.Engine.optimizer.{name}": each for name, each in _methods(Optimizer)}
    modules = [offload, hf, deepnvme, aio]
    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                modules.append(value)
            elif inspect.isclass(value):
                found |= {f"{module.__name__}.{name}.{method}": each for method, each in _methods(value)}
            elif isinstance(value, FunctionType):
                found[f"{module.__name__}.{name}"] = value
    return dict({function: (name, function) for name, function in reversed(found.items())}.values())


def _methods(owner: type) -> Iterator[tuple[str, FunctionType]]:
    for name in sorted(set(dir(owner)) - _FOR_TORCH):
        value = inspect.getattr_static(owner, name)
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if (name == "__call__" or not name.startswith("_")) and isinstance(value, FunctionType):
            value = inspect.unwrap(value)
            if value.__module__.partition(".")[0] == "offload":
                yield name, value


def source_of(function: FunctionType) -> str:
    """Returns the text of `function` without the indentation of its class."""
    return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))


def lacks(source: str) -> list[str]:
    """Returns the sections that the docstring of the function in `source` lacks.

    A function has `Args:` if it takes parameters other than itself, `Raises:` if there is a `raise` of an exception in
    its own body, and `Returns:` (or `Yields:`) if it is annotated with another result than None. A first line that says
    what it "returns" or "yields" is as good as the last of them.
    """
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    text = ast.get_docstring(node) or ""
    sections = set(re.findall(r"^(Args|Returns|Yields|Raises):$", text, re.MULTILINE))
    lacking = []
    if _parameters(node) and "Args" not in sections:
        lacking.append("Args")
    if _gives(node) and not sections & {"Returns", "Yields"} and not re.match(r"(?i).*\b(returns|yields)\b", text):
        lacking.append("Returns")
    if _raises(node) and "Raises" not in sections:
        lacking.append("Raises")
    return lacking


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    return [each.arg for each in every if each is not None and each.arg not in ("self", "cls")]


def _gives(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns).strip("'\"") not in ("None", "NoReturn", "Never")


def _raises(node: ast.AST) -> bool:
    """Returns whether an exception is raised in `node`, functions inside of it aside. A bare `raise` is none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if (isinstance(child, ast.Raise) and child.exc is not None) or _raises(child):
            return True
    return False
