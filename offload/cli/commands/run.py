"""The command `offload run`: a script of DeepSpeed, unmodified, by this library."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from offload.cli.console import BAD_INPUT, errors
from offload.errors import UsageError

_START = """import sys
sys.path[0] = sys.path[1]
from offload.deepspeed.__main__ import main
main(sys.argv[1:])"""
"""Starts the stand-in without the working folder on the path, whose modules would hide Python's and ours."""


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    # Options behind the script are the script's.
    app.command(context_settings={"allow_interspersed_args": False})(run)


def run(
    script: Annotated[str, typer.Argument(help="The script; with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module, as python -m does.")] = False,
) -> None:
    """Run a script of DeepSpeed, unmodified: `import deepspeed` means offload.deepspeed in it.

    transformers and accelerate find it too. Several ranks: torchrun --nproc_per_node 2 -m offload.deepspeed train.py.
    Example: offload run train.py --deepspeed ds_config.json
    """
    with errors(BAD_INPUT):
        if not module and not Path(script).is_file():
            raise UsageError(f"{script} is no file: expected a script of Python, or a module behind -m")
    # In the place of this process: signals, exit code and tracebacks are then those of the script alone.
    sys.stdout.flush()
    command = [sys.executable, "-c", _START, *(["-m"] if module else []), script, *(arguments or [])]
    os.execv(sys.executable, command)
