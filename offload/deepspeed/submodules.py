"""Submodules that are attributes of their package before anything imports them, as DeepSpeed's are."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def submodules(package: str, *names: str) -> Callable[[str], object]:
    """Returns the `__getattr__` of a package.

    Args:
        package: name of the package.
        names: its submodules that are imported when they are asked for.
    """

    def __getattr__(name: str) -> object:
        if name in names:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}; its page is reference/deepspeed-names")

    return __getattr__
