"""The command line: options in, words out. The work is in `offload.train` and the library."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import offload
from offload import cli_inspect, cli_machine, cli_plan, cli_report, cli_store, cli_train

app = typer.Typer(
    help="Train PyTorch models larger than the GPU and larger than the RAM, from NVMe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

cli_machine.register(app)
cli_plan.register(app)
app.command()(cli_inspect.inspect)
app.command()(cli_report.report)
cli_store.register(app)
cli_train.register(app)


def main() -> None:
    """Entry point of the command `offload`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where a terminal has no µ, training need not end for it
    try:
        app()
    except OSError as error:  # a full disk below stdout, mostly
        print(f"error: {error}", file=sys.stderr)
        sys.exit(cli_machine.FAILED)


def _version(wanted: bool) -> None:
    if wanted:
        print(offload.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
