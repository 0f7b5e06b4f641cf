"""Declarations of command options. The help lists the options in groups, and leaves their aliases out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Context settings of a command whose options may contain underscores, as Hugging Face's arguments do."""


def option(help: str, *aliases: str, name: str = "", group: str | None = None, **more: Any) -> Any:
    """Declares an option of a class for `takes_options`.

    Args:
        help: what the option is for.
        aliases: further names, such as those of Hugging Face's arguments.
        name: the name; by default that of the field.
        group: the group of the help; by default that of the option before.
        more: further arguments of `typer.Option`.
    """
    return typer.Option(name, *aliases, help=help, rich_help_panel=group, **more)


def dtypes(*names: str) -> Any:
    """Returns arguments of `option` for dtypes, one of `names`; torch's spellings, such as float16, are taken too.

    Without names the command itself checks the value.
    """

    def parse(text: str) -> str:
        from offload.config.blocks import short_dtype  # loads pydantic

        name: str = short_dtype(text)
        if names and name not in names:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}")
        return name

    return {"parser": parse, "metavar": "|".join(names) or "DTYPE"}


T = TypeVar("T")


def takes_options(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Returns a decorator that turns a function of one options object into a typer command.

    typer reads a command's options from the function's signature. The decorated function has the fields of `kind` as
    its signature, so that name, type, default and help of each option are declared once. The fields of `kind`, a
    dataclass, are annotated with `typer.Option` or `typer.Argument`.
    """
    signature = inspect.signature(kind, eval_str=True)
    for field, parameter in signature.parameters.items():
        for declared in parameter.annotation.__metadata__:
            if declared.default == "":  # where typer has the first name of an annotation
                declared.default = f"--{field.replace('_', '-')}"

    def decorate(command: Callable[[T], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def typed(**options: Any) -> None:
            command(kind(**options))

        typed.__signature__ = signature  # type: ignore[attr-defined]  # `inspect.signature` reads this attribute
        return typed

    return decorate


class Grouped(TyperCommand):
    """A command whose help lists options in groups, each option by its first name."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes one section of the help per group. An option without a group joins the previous option's group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        last = "Other"
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name = record[0]
            # The longest alias comes first, since one alias may begin with another.
            for other in sorted((*parameter.opts[1:], *parameter.secondary_opts[1:]), key=len, reverse=True):
                name = name.replace(f", {other}", "").replace(f" / {other}", "")
            last = getattr(parameter, "rich_help_panel", None) or last
            groups.setdefault(last, []).append((name, record[1]))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
