"""Declarations of the options of commands: fields of records, which the command line and the library share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from offload.errors import ConfigError


def option(help: str, *aliases: str, default: Any = None, name: str = "", group: str | None = None, **more: Any) -> Any:
    """Returns the field of a record that is an option of a command.

    A field whose type is a tuple is an option that may repeat; with a parser the option is a text, whatever the type.

    Args:
        help: what the option is for.
        aliases: further names, such as those of Hugging Face's arguments.
        default: the value of an option that was not typed. `...` for one that must be.
        name: the name; by default that of the field.
        group: the group of the help; by default that of the option before.
        more: further arguments of `typer.Option`.
    """
    return _field(default, {"names": (name, *aliases), "help": help, "rich_help_panel": group, **more})


def switch(help: str, *aliases: str, **more: Any) -> Any:
    """Returns the field of a switch, which is off unless it is typed; as `option`."""
    return option(help, *aliases, default=False, **more)


def argument(help: str, *, default: Any = ..., group: str | None = None, **more: Any) -> Any:
    """Returns the field of a record that is an argument of a command; as `option`, with those of `typer.Argument`."""
    return _field(default, {"help": help, "rich_help_panel": group, **more})


def _field(default: Any, declared: dict[str, Any]) -> Any:
    return dataclasses.field(default=dataclasses.MISSING if default is ... else default, metadata=declared)


def checked(parse: Callable[[str], object]) -> Any:
    """Returns arguments of `option` for a text that `parse` must take: its `ConfigError` then names the option.

    The help shows what `parse_size` takes as <size>.
    """

    def check(text: str) -> str:
        import typer  # which calls this function

        try:
            parse(text)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
        return text

    return {"parser": check, "metavar": f"<{parse.__name__.removeprefix('parse_')}>"}


def dtypes(*names: str) -> Any:
    """Returns arguments of `option` for dtypes, one of `names`; torch's spellings, such as float16, are taken too.

    Without names the command itself checks the value.
    """

    def parse(text: str) -> str:
        import typer  # which calls this function

        from offload.config.blocks import short_dtype  # loads pydantic

        name: str = short_dtype(text)
        if names and name not in names:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}")
        return name

    return {"parser": parse, "metavar": "|".join(names) or "DTYPE"}
