"""The commands `offload run` and `offload launch`: a script of DeepSpeed, unmodified; on several hosts, by torchrun."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from offload.cli.console import BAD_INPUT, FAILED, errors
from offload.cli.options import Grouped, takes_options
from offload.cli.signals import signals
from offload.errors import UsageError
from offload.fileio.inner_files import read_bounded
from offload.launch.commands import Command, decide
from offload.launch.environment import SECRET, parse_environment_file
from offload.launch.hosts import Host, parse_hostfile
from offload.launch.options import NOT_HERE, LaunchOptions, LocalMachine, asks_for_gpus
from offload.launch.processes import run_together
from offload.sizes import MIB

_START = """import os, signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"stopped before the script began\\n"), os._exit(130)))
sys.path[0] = sys.path[1]
from offload.deepspeed.__main__ import main
main(sys.argv[1:])"""
"""Code that starts the stand-in without the working folder on the path: modules there would hide Python's and ours.

The imports take seconds, and a Ctrl-C during them has nothing to clean up.
"""


def run(
    script: str = typer.Argument(help="The script; with -m a module; or a command that starts scripts."),
    arguments: list[str] | None = typer.Argument(None, help="Arguments of the script."),
    module: bool = typer.Option(False, "-m", "--module", help="Run a module, as python -m does."),
) -> None:
    """Run a script of DeepSpeed, unmodified. In it `import deepspeed` means offload.deepspeed.

    transformers and accelerate find it too, and so do all processes that a launcher starts: offload run accelerate
    launch --use_deepspeed train.py. The command deepspeed in it, or in a script of a shell, is `offload launch`.
    Example: offload run train.py --deepspeed ds_config.json
    """
    from offload.deepspeed.import_hook import STAND_IN

    # The virtual environment of this Python need not be activated. Below the command the user's PATH goes before it.
    deepspeed, here, path = str(STAND_IN / "bin"), os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    with errors(BAD_INPUT):
        program = None if module else _program(script, os.pathsep.join([deepspeed, here, path]))
    if program is None:
        command = [sys.executable, "-c", _START, *(["-m"] if module else []), script, *(arguments or [])]
    else:
        command = [program, *(arguments or [])]
    # The script replaces this process, so that signals, exit code and tracebacks are the script's own.
    sys.stdout.flush()
    python_path = with_stand_in(os.environ.get("PYTHONPATH"))
    paths = {"PATH": os.pathsep.join([deepspeed, path, here]), "PYTHONPATH": python_path}
    os.execve(command[0], command, {**os.environ, **paths})


def with_stand_in(path: str | None) -> str:
    """Returns a PYTHONPATH with which processes find offload.deepspeed as `deepspeed`."""
    from offload.deepspeed.import_hook import STAND_IN

    # Put in front, as the real package may be installed too. Every process inherits the variable.
    return os.pathsep.join([str(STAND_IN), *filter(None, [path])])


def _program(name: str, places: str) -> str | None:
    """Returns the path of the command to run, from the folders `places`; None for a script of Python."""
    path = Path(name)
    if path.is_file() and (path.suffix == ".py" or not os.access(path, os.X_OK)):
        return None
    executable = shutil.which(name, path=places)
    if executable is None:
        raise UsageError(
            f"{name} is no file and no command: expected a script of Python, a module behind -m, or a launcher such as "
            "torchrun"
        )
    return executable


# -- launch --------------------------------------------------------------------------------------------

_HOSTFILE = Path("/job/hostfile")
"""The default hostfile of DeepSpeed's launcher. Some clusters write it."""
_ENVIRONMENT_FILE = ".deepspeed_env"


class Launch(Grouped):
    """The command. It gives advice in place of options of DeepSpeed's launcher that it lacks."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the options; an option that only DeepSpeed's launcher has is an error with advice."""
        try:
            parsed: list[str] = super().parse_args(ctx, args)
        except Exception as error:
            # typer's own error has the name; its class has moved between versions.
            name = getattr(error, "option_name", "").replace("_", "-")
            if name not in NOT_HERE:
                raise
            with errors(BAD_INPUT):
                raise UsageError(f"offload launch has no option {name}: {NOT_HERE[name]}") from None
        return parsed


@takes_options(LaunchOptions)
def launch(options: LaunchOptions) -> None:
    """Run a script on several GPUs and hosts. It takes the options and the hostfile of DeepSpeed's launcher.

    It starts a torchrun on each host, and ends all when one fails. In the
    script `import deepspeed` means offload.deepspeed, as with offload run. The script learns its rank from the
    environment; it gets no --local_rank. Variables of .deepspeed_env, in the home and the working folder, are set on
    every host.

    Example: offload launch --hostfile hosts --num-gpus 8 train.py --deepspeed ds_config.json
    """
    with errors(BAD_INPUT):
        commands = _commands(options, os.environ)
        if not options.dry_run:
            _check_programs(commands)
    if options.dry_run:
        for command in commands:
            typer.echo(str(command))
        return
    if not any(command.ends_with_input for command in commands):
        sys.stdout.flush()
        only = commands[0]
        with errors(BAD_INPUT):
            # Checked here, since torchrun would report a missing script once per rank.
            if not (options.module or options.no_python or Path(options.script).is_file()):
                raise UsageError(
                    f"there is no script {options.script} in {Path.cwd()}; for a module of Python add --module"
                )
        # torchrun replaces this process, so that signals, exit code and tracebacks are torchrun's own.
        os.execvpe(only.arguments[0], only.arguments, {**os.environ, **only.environment})
    with errors(FAILED), signals():
        status = run_together(commands, lambda message: typer.echo(message, err=True))
    raise typer.Exit(status)


def _commands(options: LaunchOptions, environ: Mapping[str, str]) -> list[Command]:
    if options.enable_each_rank_log == "":
        raise UsageError("--enable-each-rank-log is empty: give a folder, or leave it out")
    hostfile, exports = _read_hostfile(options.hostfile), _read_environment(environ)
    gpus = None
    if asks_for_gpus(options, hostfile is not None, environ):
        import torch  # takes seconds, and nothing else of this command needs it

        gpus = torch.accelerator.device_count()
    machine = LocalMachine(
        python=sys.executable,
        folder=os.getcwd(),
        names=frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}),
        environ=environ,
        secret=environ.get(SECRET) or secrets.token_hex(32),
        gpus=gpus,
    )
    path = exports.get("PYTHONPATH", environ.get("PYTHONPATH"))
    return decide(options, hostfile, {**exports, "PYTHONPATH": with_stand_in(path)}, machine)


def _read_hostfile(path: Path | None) -> list[Host] | None:
    """Returns the hosts of the file, or of DeepSpeed's default; None without either."""
    if path is None and not _HOSTFILE.is_file():
        return None
    path = path or _HOSTFILE
    if not path.is_file():
        # DeepSpeed would continue on this machine alone, and the other hosts would wait unnoticed.
        raise UsageError(f"there is no hostfile {path}: name one, or leave --hostfile out for this machine alone")
    return parse_hostfile(_read(path), str(path))


def _read(path: Path) -> str:
    """Returns the text of a file. Raises `UsageError` if it is not UTF-8, or cannot be read, or is no such file."""
    try:
        return read_bounded(path, MIB).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error.reason} at byte {error.start}; write it again as text") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}; expected a text of {MIB} bytes at most") from error


def _check_owner(path: Path) -> None:
    """Raises `UsageError` if another user could have written a file of variables: PYTHONPATH can run code."""
    about = path.stat()
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"{path} belongs to another user, or everybody may write it, and its variables would be those of all "
            "ranks: make it yours (chown, chmod o-w) if you trust it, or name another file, DS_ENV_FILE"
        )


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of `.deepspeed_env` in the home and the working folder; the latter takes precedence."""
    variables: dict[str, str] = {}
    for folder in (Path.home(), Path()):
        path = folder / environ.get("DS_ENV_FILE", _ENVIRONMENT_FILE)
        if path.is_file():
            _check_owner(path)
            variables |= parse_environment_file(_read(path), str(path))
    return variables


def _check_programs(commands: list[Command]) -> None:
    for program in {command.arguments[0] for command in commands}:
        if shutil.which(program) is None:
            raise UsageError(
                f"{program} is not installed: install it, or start the ranks of each host there, by offload launch "
                f"--no-ssh --node-rank N {shlex.join(sys.argv[2:])}"
            )
