"""Each public name of DeepSpeed's documentation is here with its arguments, refused, or absent, as its page says."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import pytest

from offload.deepspeed.names import MODULES, public_names
from offload.errors import UsageError
from tests.pages import deepspeed_names
from tests.pages.deepspeed_names import ABSENT, NAMES, REFUSED, RIGHT


def found(path: str) -> Any:
    """What a dotted name is, by attributes as a script writes it, or by imports; raises where it is nothing."""
    value: Any = importlib.import_module("offload.deepspeed")
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            if not isinstance(value, ModuleType):
                raise
            value = importlib.import_module(f"{value.__name__}.{part}")
    return value


def named(outcome: str) -> list[deepspeed_names.Name]:
    """The names of the table that end so; at least one."""
    found = [name for name in NAMES if name.outcome == outcome]
    assert found
    return found


def test_a_name_is_here_with_deepspeeds_arguments_in_their_order() -> None:
    for name in named(RIGHT):
        value = found(name.path)
        wanted = name.parameters.split()
        assert not wanted or [*inspect.signature(value).parameters][: len(wanted)] == wanted, name.path
        if callable(value) and not isinstance(value, type):
            assert inspect.getdoc(value), name.path


def test_a_refused_name_can_be_imported_and_its_use_says_what_to_do() -> None:
    for name in named(REFUSED):
        refused = found(name.path)
        with pytest.raises(UsageError, match=r": \w.{15}"):
            refused(None, None)
            pytest.fail(f"{name.path} may be used")


@pytest.mark.parametrize("module", MODULES)
def test_each_name_of_the_table_of_modules_is_there(module: str) -> None:
    """By import and by attribute, as one object; a module of the table is found as Python finds any other."""
    imported = importlib.import_module(f"offload.deepspeed.{module}".removesuffix("."))
    assert imported is (found(module) if module else importlib.import_module("offload.deepspeed"))
    assert (
        imported.__spec__ is not None and imported.__doc__ and all(hasattr(imported, name) for name in imported.__all__)
    )
    for name in (*public_names(module), *(name for names in MODULES[module].values() for name in names.split())):
        assert getattr(imported, name) is getattr(imported, name), name
    with pytest.raises(AttributeError, match="reference/deepspeed-names"):
        _ = imported.no_such_name


def test_an_absent_name_is_an_error_of_python_and_the_page_says_why() -> None:
    for name in named(ABSENT):
        with pytest.raises((AttributeError, ImportError)):
            found(name.path)
            pytest.fail(f"{name.path} is there")
        assert name.words, name.path


def test_each_name_is_listed_once() -> None:
    paths = [name.path for name in NAMES]
    assert len(paths) > 200 and len(set(paths)) == len(paths)


def test_the_page_is_of_this_table() -> None:
    assert deepspeed_names.PAGE.read_text(encoding="utf-8") == deepspeed_names.document(), (
        "run: python -m tests.pages.deepspeed_names"
    )
