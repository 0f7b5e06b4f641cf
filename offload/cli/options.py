"""Commands from records of options. The help lists the options in groups, and leaves their aliases out."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from offload.sizes import MIB

UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Context settings of a command whose options may contain underscores, as Hugging Face's arguments do."""


def read_recipe(context: typer.Context, path: Path | None) -> None:
    """Makes the values of a YAML file the defaults of a command's options; a callback of its option `--recipe`.

    Keys are names of options, aliases among them. A list stands for an option that repeats.

    Raises:
        typer.BadParameter: The file cannot be read, or contains something else than values of options.
    """
    if path is None:
        return
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


_OTHER = {"steps": "epochs", "epochs": "steps", "data": "text", "text": "data"}
"""Options that exclude each other: one on the command line takes the place of the other in the recipe."""


def _unless_other(context: Any, name: str, value: Any) -> Any:
    # Options of the command line are processed before defaults are looked up.
    other = context.get_parameter_source(_OTHER.get(name, ""))
    return None if other is not None and other.name == "COMMANDLINE" else value


def multiple(parameter: Any) -> bool:
    """Returns True for an option that may repeat."""
    return bool(getattr(parameter, "multiple", False))


def takes_options(kind: type[Any], **callbacks: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that turns a function of a record, and perhaps of further options, into a typer command.

    typer reads a command's options from the function's signature. The signature of the decorated function has the
    fields of `kind`, a dataclass, that `option` and `argument` declare, those of its bases last. The function's further
    parameters follow. `callbacks` are typer's, for some of these fields.
    """
    hints, own = get_type_hints(kind), inspect.get_annotations(kind)
    fields = [
        _parameter(field, hints[field.name], callbacks.get(field.name))
        for field in sorted(dataclasses.fields(kind), key=lambda field: field.name not in own)
        if field.metadata
    ]
    repeated = {field.name for field in fields if get_origin(hints[field.name]) is tuple}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def typed(**options: Any) -> None:
            values = {field.name: options.pop(field.name) for field in fields}
            # typer has None for a repeated option that was not typed.
            values |= {name: tuple(values[name] or ()) for name in repeated}
            command(kind(**values), **options)

        signature = [*fields, *(other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others)]
        typed.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]  # `inspect.signature` reads it
        return typed

    return decorate


def _parameter(field: dataclasses.Field[Any], hint: Any, callback: Any) -> inspect.Parameter:
    """Returns the parameter of a command for the field of a record."""
    declared = {**field.metadata, "callback": callback}
    default = ... if field.default is dataclasses.MISSING else field.default
    if get_origin(hint) is tuple:
        hint, default = GenericAlias(list, get_args(hint)[:1]), default or None
    if "parser" in declared:
        hint = str
    if "names" not in declared:
        value = typer.Argument(default, **declared)
    else:
        name, *aliases = declared.pop("names")
        value = typer.Option(default, name or f"--{field.name.replace('_', '-')}", *aliases, **declared)
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hint)


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
    """A command. A name that is too long for the system is bad input of the argument that has it."""

    context_class = HelpContext

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            argument, typed = _argument_of(ctx, str(error.filename)) if too_long(error) else ("", "")
            if not argument:
                raise
            words = f"{typed}: {error.strerror}; give a shorter name"
            raise typer.BadParameter(words, ctx, param_hint=argument) from error


def too_long(error: BaseException) -> bool:
    """Returns True for an error of the system about a name that is too long; `Command` says which argument has it."""
    return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG


def _argument_of(ctx: Any, path: str) -> tuple[str, str]:
    """Returns the option or argument of a command that leads to `path`, and its value; "" for both if none does."""
    matches = [("", "")]
    for parameter in ctx.command.params:
        name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
        value = ctx.params.get(parameter.name)
        for typed in map(str, value if isinstance(value, list | tuple) else [value]):
            if path.startswith((typed, os.path.abspath(typed))):
                matches.append((name, typed))
    return max(matches, key=lambda match: len(match[1]))


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
