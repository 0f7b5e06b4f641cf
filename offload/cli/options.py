"""Declarations of command options. The help lists the options in groups, and leaves their aliases out."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from offload.sizes import MIB

UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Context settings of a command whose options may contain underscores, as Hugging Face's arguments do."""


def option(help: str, *aliases: str, default: Any = None, name: str = "", group: str | None = None, **more: Any) -> Any:
    """Declares an option of a class for `takes_options`.

    Args:
        help: what the option is for.
        aliases: further names, such as those of Hugging Face's arguments.
        default: the value of an option that is not given; a switch is then off. `...` for one that must be given.
        name: the name; by default that of the field.
        group: the group of the help; by default that of the option before.
        more: further arguments of `typer.Option`.
    """
    return typer.Option(default, name, *aliases, help=help, rich_help_panel=group, **more)


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


def read_recipe(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the values of a YAML file the defaults of a command's options; a callback of its option `--recipe`.

    Keys are names of options, aliases among them. A list stands for an option that repeats.

    Raises:
        typer.BadParameter: The file cannot be read, or contains something else than values of options.
    """
    if path is None:
        return None
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise typer.BadParameter("a recipe needs PyYAML; run: pip install 'offload[hf]'") from error
    from offload.fileio.inner_files import read_bounded

    try:
        text = read_bounded(path, MIB)
        node = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
        if not isinstance(content, dict):
            raise ValueError("expected a line KEY: VALUE for each option")
        keys = [key.value for key, _ in node.value]  # a second one would silently win
    except OSError as error:
        raise typer.BadParameter(f"cannot read the recipe {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} is no recipe: {' '.join(str(error).split())}") from error
    options = {
        name.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if parameter.name not in ("recipe", "help")
    }
    defaults: dict[str, Any] = {}
    for key in keys:
        name = str(key).replace("-", "_")
        if name not in options or options[name].name in defaults or keys.count(key) > 1:
            near = difflib.get_close_matches(name, options, 1)
            hint = f"; did you mean {near[0]}?" if near and name not in options else ""
            reason = "sets an option twice" if name in options else f"is no option{hint}"
            raise typer.BadParameter(f"{path}: the key {key!r:.99} {reason}")
        parameter, value = options[name], content[key]
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int | float) for item in listed) or (
            len(listed) != 1 and not multiple(parameter)
        ):
            raise typer.BadParameter(f"{path}: expected the value of an option as {key!r:.99}, got {value!r:.99}")
        value = listed if multiple(parameter) else listed[0]
        defaults[str(parameter.name)] = functools.partial(_unless_other, context, str(parameter.name), value)
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


_OTHER = {"steps": "epochs", "epochs": "steps", "data": "text", "text": "data"}
"""Options that exclude each other: one on the command line takes the place of the other in the recipe."""


def _unless_other(context: Any, name: str, value: Any) -> Any:
    # Options of the command line are processed before defaults are looked up.
    other = context.get_parameter_source(_OTHER.get(name, ""))
    return None if other is not None and other.name == "COMMANDLINE" else value


def multiple(parameter: Any) -> bool:
    """Returns True for an option that may repeat."""
    return bool(getattr(parameter, "multiple", False))


T = TypeVar("T")


def takes_options(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Returns a decorator that turns a function of one options object into a typer command.

    typer reads a command's options from the function's signature. The decorated function has the fields of `kind` as
    its signature, so that name, type, default and help of each option are declared once. The defaults of the fields of
    `kind`, a dataclass, are those that `option`, `typer.Option` or `typer.Argument` returns.
    """
    signature = inspect.signature(kind, eval_str=True)
    for field, parameter in signature.parameters.items():
        declared = parameter.default
        if (getattr(declared, "param_decls", None) or ("--",))[0] == "":
            declared.param_decls = (f"--{field.replace('_', '-')}", *declared.param_decls[1:])
            if parameter.annotation is bool and declared.default is None:
                declared.default = False

    def decorate(command: Callable[[T], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def typed(**options: Any) -> None:
            command(kind(**options))

        typed.__signature__ = signature  # type: ignore[attr-defined]  # `inspect.signature` reads this attribute
        return typed

    return decorate


_BOUND = {" ": "\N{NO-BREAK SPACE}", "-": "\N{NON-BREAKING HYPHEN}"}
_UNBOUND = str.maketrans({bound: plain for plain, bound in _BOUND.items()})


def _bound(text: str) -> str:
    """Returns a help text whose defaults, words with dashes and last two words stay on one line."""
    text = re.sub(r"\[default: .{,40}?\]", lambda default: default[0].replace(" ", _BOUND[" "]), text)
    text = re.sub(r"(?<=\S)-(?=\S)", _BOUND["-"], text)
    return re.sub(r" (\S{,24})(?=\n\n|$)", rf"{_BOUND[' ']}\1", text)


_HelpFormatter: Any = typer.Context.formatter_class  # of click, which some versions of typer vendor


class _Formatter(_HelpFormatter):  # type: ignore[misc]
    """The formatter of help: no line ends within a default or a name, and none is a single word."""

    def write_text(self, text: str) -> None:
        super().write_text(_bound(text))

    def write_dl(self, rows: Sequence[tuple[str, str]], *widths: int, **more: int) -> None:
        super().write_dl([(name, _bound(text)) for name, text in rows], *widths, **more)

    def getvalue(self) -> str:
        return str(super().getvalue()).translate(_UNBOUND)


class HelpContext(typer.Context):
    """The context of commands and groups, for its formatter of help."""

    formatter_class = _Formatter


class Command(TyperCommand):
    """A command."""

    context_class = HelpContext


class Grouped(Command):
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
