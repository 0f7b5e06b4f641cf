"""The command `offload run`: a script of DeepSpeed, unmodified, by this library."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from offload.cli.console import BAD_INPUT, errors
from offload.errors import UsageError

_START = """import os, signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"stopped before the script began\\n"), os._exit(130)))
sys.path[0] = sys.path[1]
from offload.deepspeed.__main__ import main
main(sys.argv[1:])"""
"""Starts the stand-in without the working folder on the path, whose modules would hide Python's and ours.

The imports take seconds, in which a Ctrl-C has nothing to clean up.
"""


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    # Options behind the script are the script's.
    app.command(context_settings={"allow_interspersed_args": False})(run)


def run(
    script: Annotated[str, typer.Argument(help="The script; with -m a module; or a command that starts scripts.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module, as python -m does.")] = False,
) -> None:
    """Run a script of DeepSpeed, unmodified: `import deepspeed` means offload.deepspeed in it.

    transformers and accelerate find it too, and so do all processes that a launcher starts: offload run accelerate
    launch --use_deepspeed train.py. `offload launch` starts several ranks, on several hosts too.
    Example: offload run train.py --deepspeed ds_config.json
    """
    with errors(BAD_INPUT):
        program = None if module else _program(script)
    if program is None:
        command = [sys.executable, "-c", _START, *(["-m"] if module else []), script, *(arguments or [])]
    else:
        command = [program, *(arguments or [])]
    # In the place of this process: signals, exit code and tracebacks are then those of the script alone.
    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, "PYTHONPATH": with_stand_in(os.environ.get("PYTHONPATH"))})


def with_stand_in(path: str | None) -> str:
    """Returns a PYTHONPATH with which processes find offload.deepspeed as `deepspeed`."""
    from offload.deepspeed.import_hook import STAND_IN

    # In front, as the real package may be installed too. Every process inherits the variable.
    return os.pathsep.join([str(STAND_IN), *filter(None, [path])])


def _program(name: str) -> str | None:
    """Returns the path of the command to run; None for a script of Python.

    A command is looked for beside this Python first.

    Raises:
        UsageError: if there is no such file and no such command.
    """
    path = Path(name)
    if path.is_file() and (path.suffix == ".py" or not os.access(path, os.X_OK)):
        return None
    if name == "deepspeed":
        raise UsageError(
            "there is no launcher deepspeed here: start one process by `offload run train.py`, more by `offload launch "
            "--num_gpus 2 train.py`, which takes DeepSpeed's options and hostfile"
        )
    # The environment of this Python need not be activated.
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=places)
    if found is None:
        raise UsageError(
            f"{name} is no file and no command: expected a script of Python, a module behind -m, or a launcher such as "
            "torchrun"
        )
    return found
