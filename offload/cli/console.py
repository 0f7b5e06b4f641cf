"""Helpers that all commands share: exit codes, one-line errors, progress, and tables."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.options import too_long
from offload.errors import BudgetError, ConfigError, OffloadError, StoreError, UsageError, is_damage, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAD_INPUT, FAILED = 2, 1

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object; all else goes to stderr.")]


def echo(text: object, err: bool = False) -> None:
    """Prints text that may quote foreign files, without characters that control the terminal."""
    typer.echo(printable(str(text)), err=err)


def with_option(message: str, named: Mapping[str, Path | None]) -> str:
    """Returns a message about a file with the option before the path that the user has `named` by it."""
    for option, path in named.items():
        if path is not None and option not in message:
            # A path in a message may be absolute, or that of a file below.
            for name in (os.path.abspath(path), str(path)):
                message, count = re.subn(rf"(?<![\w./-])(?={re.escape(name)})", f"{option} ", message, count=1)
                if count:
                    break
    return message


def echo_error(error: BaseException, named: Mapping[str, Path | None] = MappingProxyType({})) -> None:
    """Prints an error on stderr in one line; a list of config errors takes one line per error.

    A terminal also shows where the documentation has the cause and the cure.
    """
    # If a name contained a line break, the rest of the name would look like a line of this program.
    message = with_option(str(error), named)
    typer.echo(f"error: {printable(message, lines=isinstance(error, ConfigError))}", err=True)
    if isinstance(error, OffloadError) and sys.stderr.isatty():
        typer.echo(f"cause and cure: {error.page}", err=True)


def make_console(**options: Any) -> Console:
    """Returns a rich console that prints texts as `echo` does. Values of tables must be printable already."""
    from rich.console import Console

    class Printable(Console):
        """A console that prints no control characters of a text."""

        def print(self, *objects: Any, **more: Any) -> None:
            super().print(*(printable(value) if isinstance(value, str) else value for value in objects), **more)

    return Printable(**options)


class _Record(logging.LogRecord):
    """A log record of any library, such as transformers, whose message may quote a foreign file."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


@contextmanager
def printable_logs() -> Iterator[None]:
    """Makes the logs of all libraries as printable as the lines of the command, inside the context."""
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_Record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)


@contextmanager
def errors(
    code: int, named: Mapping[str, Path | None] = MappingProxyType({}), *, failed: int = FAILED
) -> Iterator[None]:
    """Reports an `OffloadError` or `OSError` in one line on stderr, and exits with `code_of` it.

    `named` has the paths to be written, by option; the message about one names the option too.
    """
    try:
        yield
    except (OffloadError, OSError) as error:
        if too_long(error):
            raise
        echo_error(error, named)
        raise typer.Exit(code_of(error, code, failed)) from None


def code_of(error: BaseException, of_files: int, failed: int = FAILED) -> int:
    """Returns the exit code of an error: `BAD_INPUT` if the input was refused, `failed` if something failed.

    `of_files` is the code of an error of a file that is not damaged: the user may have named the file.
    """
    if is_damage(error):
        return failed
    if isinstance(error, ConfigError | BudgetError | StoreError | UsageError):
        return BAD_INPUT
    return of_files if isinstance(error, OSError) else failed


@contextmanager
def status_line(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows its text as a status line. Without a terminal the function does nothing."""
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield status.update


@contextmanager
def measuring() -> Iterator[Callable[[str, float], None]]:
    """Yields a function of a description and the fraction done, from 0 to 1, which shows both.

    The progress goes to stderr, so that stdout contains the result only.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda words, _: console.print(f"measuring {words}")
        return
    columns = (BarColumn(30), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda words, done: progress.update(task, completed=done, description=words)


def make_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: int | None = None, no_wrap: bool = False
) -> Table:
    """Returns a table of texts. Columns from number `right` on are aligned to the right; without titles none is."""
    from rich.table import Table

    table = Table(box=None, show_header=bool(titles))
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if right is None or number < right else "right", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def without_collector() -> Iterator[None]:
    """Leaves cycles in memory inside the context: for a command that imports much, makes little garbage, and ends.

    Python else looks for garbage among all objects of the imported modules, again and again, and once more at its end.
    """
    before = gc.isenabled()
    gc.disable()
    # At the end of the process only: it could not free any object that lives now.
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        if before:
            gc.enable()
