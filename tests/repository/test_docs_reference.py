"""The reference has every public name, and each has words of its own."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import offload
from offload import aio, checkpointing, deepnvme, errors, hf, kernels, losses, schedules
from tests import ROOT
from tests.pages import command_line_page

PAGES = sorted((ROOT / "docs" / "reference").rglob("*.md"))
NAMED = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)]
NOT_INSTALLED = {
    name for name in NAMED if name.startswith("offload.integrations.") and find_spec(name.split(".")[2]) is None
}
"""Names of modules that are imported where the package is installed whose trainer they serve, and has their name."""
MODULES = (offload, aio, checkpointing, deepnvme, hf, kernels, losses, schedules)
NOT_FOR_USERS = {"forward"}
OF_AN_ENGINE = {f"offload.Engine.{name}" for name in ("module", "optimizer", "device", "notices")} | {
    f"offload.InferenceEngine.{name}" for name in ("module", "device", "notices")
}
"""Attributes that the constructors of engines set."""


def public() -> Iterator[tuple[str, Any]]:
    """Each public name, and what it is."""
    for module in MODULES:
        for name in module.__all__:
            if not isinstance(getattr(module, name), ModuleType) and name != "__version__":
                yield f"{module.__name__}.{name}", getattr(module, name)
    for name in {"__call__", *dir(offload.Engine)} - NOT_FOR_USERS:
        if name == "__call__" or not name.startswith("_"):
            yield f"offload.Engine.{name}", inspect.getattr_static(offload.Engine, name)
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == errors.__name__:
            yield f"offload.errors.{name}", value


def found(name: str) -> Any:
    """What a dotted name is; raises where it is nothing."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            # A module gives its names when they are asked for; a property must not be.
            value = getattr(value, part) if isinstance(value, ModuleType) else inspect.getattr_static(value, part)
        return value
    raise AssertionError(f"there is no {name}")


def test_every_public_name_is_there_once() -> None:
    known = [found(name) for name in NAMED if name not in OF_AN_ENGINE | NOT_INSTALLED]
    assert [name for name, value in public() if not any(value is each for each in known)] == []
    assert set(NAMED) >= OF_AN_ENGINE
    assert [name for name in NAMED if NAMED.count(name) > 1] == []


def test_each_name_of_the_reference_exists_and_is_described() -> None:
    silent = []
    for name in sorted(set(NAMED) - OF_AN_ENGINE - NOT_INSTALLED):
        value = found(name)
        described = [*members(value)] if isinstance(value, type) else []
        if callable(value) or isinstance(value, property | ModuleType):
            described.append((name, value))
        silent += [each for each, member in described if not inspect.getdoc(member)]
    assert silent == [], "these have no docstring"


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that are code of ours."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] == "offload":
            for name, member in vars(each).items():
                if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    yield f"{each.__name__}.{name}", member


def test_the_commands_are_as_they_say_themselves() -> None:
    assert command_line_page.document() == command_line_page.PAGE.read_text(encoding="utf-8"), (
        "run: python -m tests.pages.command_line_page"
    )
    helps = {command: command_line_page.help_of(*command) for command in command_line_page.commands()}
    silent = [command for command, words in helps.items() if "\nCommands:" not in words and "--json" not in words]
    assert silent == [("run",), ("launch",)], "all but those whose output is a script's"
