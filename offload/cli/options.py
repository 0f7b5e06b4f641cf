"""How the options of a command are declared and listed: in groups, with other names that the help leaves out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""The settings of a command whose options may be written with underscores, as Hugging Face's arguments are."""


def option(panel: str, name: str, help: str, *names: str, **more: Any) -> Any:
    """Declare an option.

    Args:
        panel: the group in which the help lists it.
        name: what the help calls it.
        names: other names of it, as Hugging Face's arguments have them.
    """
    return typer.Option(name, *names, help=help, rich_help_panel=panel, **more)


T = TypeVar("T")


def takes_options(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Returns a decorator that makes a typer command of a function which takes its options as one object.

    typer reads a command's options from its signature. The decorated function shows the fields of `kind` there, so
    that each option is written once: name, type, default, help.

    Args:
        kind: a dataclass, each field annotated with `typer.Option` or `typer.Argument`.
    """
    signature = inspect.signature(kind, eval_str=True)

    def decorate(command: Callable[[T], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def typed(**options: Any) -> None:
            command(kind(**options))

        typed.__signature__ = signature  # type: ignore[attr-defined]  # which `inspect` looks for
        return typed

    return decorate


class Grouped(TyperCommand):
    """A command whose options are listed in groups, each by its first name."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        last = "Other"
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name = record[0]
            for other in (*parameter.opts[1:], *parameter.secondary_opts[1:]):
                name = name.replace(f", {other}", "").replace(f" / {other}", "")
            last = getattr(parameter, "rich_help_panel", None) or last
            groups.setdefault(last, []).append((name, record[1]))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
