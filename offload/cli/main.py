"""The entry point of the command line. Commands only parse options and print; the library does the work."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperGroup

import offload
from offload.cli.commands import bench, check_config, launch, machine, offline, plan, report, store, train
from offload.cli.console import BAD_INPUT, FAILED, echo_error, printable_logs
from offload.cli.options import UNDERSCORES, Command, Grouped, HelpContext
from offload.cli.signals import AT_ONCE, handlers
from offload.errors import BudgetError, IoError, naming_memory, printable
from offload.interrupts import exit_on_next_signal

# Some versions of typer vendor click, so UsageError is taken from typer's own class hierarchy.
_NotUsable: type[Exception] = typer.BadParameter.__mro__[1]


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Reports typer's usage errors in one line and exits with `BAD_INPUT`, as for any other bad input."""
    try:
        yield
    except _NotUsable as error:
        # The message of this error is the complete help.
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        print(f"error: {printable(_one_line(error), lines=False)}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None


def _one_line(error: Any) -> str:
    words = " ".join(error.format_message().split()).replace("Value error, ", "").removesuffix(".")
    command = "offload" if error.ctx is None else error.ctx.command_path
    return f"{words[:1].lower()}{words[1:]}{'' if words.endswith('?') else ';'} see `{command} --help`"


_OF_SCRIPTS = ("run", "launch")
"""Commands that pass arguments on to a script. These arguments may be empty."""


def _check_not_empty(arguments: Sequence[str], ctx: Any) -> None:
    """Raises typer's usage error for an empty argument, for example from an unset shell variable.

    As a path, an empty argument would be the working folder. `offload generate` itself refuses an empty prompt.
    """
    for before, argument in pairwise(("", *arguments)):
        name, equals, value = argument.partition("=")
        if name != "--prompt" and before != "--prompt" and (not argument or (equals and not value and name[:1] == "-")):
            of = name or (before if before[:1] == "-" else "")
            raise _NotUsable(f"an argument is empty{of and ', that of '}{of}: give a value, or leave it out", ctx)


class _Commands(TyperGroup):
    """The group of all commands. Usage errors appear in one line, with the exit code of other bad input."""

    context_class = HelpContext

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _in_one_line():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with _in_one_line(), printable_logs():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns name, command and arguments. No argument may be empty unless a script receives it."""
        resolved = super().resolve_command(ctx, args)
        if resolved[0] not in _OF_SCRIPTS:
            _check_not_empty(args, ctx)
        return resolved


app = typer.Typer(
    cls=_Commands,
    help="Train PyTorch models larger than the GPU and larger than the RAM, from NVMe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# The order of registration is the order in the help.
_OPTIONS: dict[str, Any] = {"cls": Grouped, "context_settings": UNDERSCORES}
app.command(cls=Command)(machine.info)
app.command(cls=Command)(machine.doctor)
app.command(cls=Command)(machine.tune)
app.add_typer(bench.bench, name="bench")
app.command(cls=Command)(machine.probe)
app.command(**_OPTIONS)(plan.plan)
app.command("check-config", cls=Command)(check_config.check_config)
app.command(cls=Command)(report.report)
app.command(cls=Command)(store.inspect)
app.command(cls=Command)(store.verify)
app.command("import", cls=Command)(store.import_)
app.command(cls=Command)(store.export)
app.command(cls=Command)(store.merge)
app.command(cls=Command)(store.convert)
app.command(cls=Command)(store.fork)
app.command(cls=Command)(store.log)
app.command(cls=Command)(store.replay)
app.command(cls=Command)(store.rm)
app.command(**_OPTIONS)(train.train)
app.command(**_OPTIONS)(offline.score)
app.command(**_OPTIONS)(offline.generate)
app.command(**_OPTIONS)(offline.chat)
# Options after the script belong to the script.
app.command(cls=Command, context_settings={"allow_interspersed_args": False})(launch.run)
app.command(cls=launch.Launch, context_settings={**UNDERSCORES, "allow_interspersed_args": False})(launch.launch)


class _Output(io.FileIO):
    """The file of stdout, whose errors say what could not be written: those of the system name no file."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno == errno.EPIPE:  # its reader has gone, which click and rich handle by this class
                raise
            raise IoError("the output", 0, 0, error.errno or errno.EIO, "write") from error


def _flush() -> None:
    """Writes what waits in stdout's buffer, where Python's end would report an error without its cause."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:  # its reader has gone, and wants no more
            echo_error(error)
        # What is left in the buffer is lost, and must not fail once more.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        sys.exit(FAILED)


def main() -> None:
    """Runs the command `offload`."""
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        file = io.BufferedWriter(_Output(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(file, sys.stdout.encoding, line_buffering=sys.stdout.line_buffering)
    for stream in (sys.stdout, sys.stderr):
        # A test or a notebook may have replaced the streams.
        if isinstance(stream, io.TextIOWrapper):
            # An encoding without µ must not end a training: such characters are replaced.
            stream.reconfigure(errors="replace")
    try:
        with naming_memory():
            app()
    except SystemExit as ended:
        # A signal has ended the command. A second signal must not raise an exception while Python shuts down.
        if isinstance(ended.code, int) and ended.code > 128:
            exit_on_next_signal(AT_ONCE, *handlers(signal.SIGINT, signal.SIGTERM))
        _flush()
        raise
    except (OSError, BudgetError) as error:  # usually a full disk behind stdout, or a limit of memory
        # What could not be written waits in the buffer: the flush below reports it.
        if not (isinstance(error, IoError) and error.path == "the output"):
            echo_error(error)
        _flush()
        sys.exit(FAILED)


def _version(wanted: bool) -> None:
    if wanted:
        print(offload.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


if __name__ == "__main__":
    main()
