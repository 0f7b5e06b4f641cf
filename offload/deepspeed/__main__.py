"""`python -m offload.deepspeed train.py ...`: runs a script in which `import deepspeed` means this package.

Under torchrun: `torchrun --nproc_per_node 2 -m offload.deepspeed train.py ...`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from offload.deepspeed import install
from offload.deepspeed.config import check_comments
from offload.distributed.process_group import join_launcher
from offload.interrupts import exit_on_next_signal, handled

_AT_ONCE = "stopped at once by a second Ctrl-C; steps that were committed are kept"


def main(arguments: Sequence[str]) -> None:
    """Runs a script, or a module with `-m`, as `__main__`.

    A Ctrl-C raises `KeyboardInterrupt` in the script. If the script does not catch it, the process prints a line and
    exits with code 130. A second Ctrl-C ends the process at once.

    Args:
        arguments: [`-m`,] the script, and its own arguments.

    Raises:
        ConfigError: if transformers or accelerate could not read a config that has comments.
    """
    install()
    _set_environment()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a parent ignores it for background jobs
        signal.signal(signal.SIGINT, _CtrlC())
    # `sys.argv` and `sys.path` are set as Python does for a script or a module.
    is_module = arguments[0] == "-m"
    target, *own = arguments[1:] if is_module else arguments
    sys.argv = [target, *own]
    try:
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            # Absolute, like Python's `__file__`: a script may change the working folder, then look for its own folder.
            script = os.path.abspath(target)
            sys.path[0] = os.path.dirname(script)
            runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt as error:
        # As Python does for an uncaught exception. Engines read these values to learn that the script was interrupted.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            exit_on_next_signal(_AT_ONCE, signal.SIGINT)
        print(f"stopped by Ctrl-C{_place_of(error)}; Ctrl-C again ends at once", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    except json.JSONDecodeError as error:
        check_comments(error)
        raise


class _CtrlC:
    """The handler of Ctrl-C while a script runs: raises `KeyboardInterrupt`, and ends the process at the second."""

    def __init__(self) -> None:
        self._raised: KeyboardInterrupt | None = None

    def __call__(self, number: int, _: FrameType | None) -> None:
        # True while the first Ctrl-C is being handled or propagates. If the script has caught it and continues, the
        # next Ctrl-C raises again.
        if self._raised is not None and self._raised in handled():
            os.write(2, f"{_AT_ONCE}\n".encode())
            os._exit(128 + number)
        self._raised = KeyboardInterrupt()
        raise self._raised


def _place_of(error: BaseException) -> str:
    """Returns a clause on the line at which an exception left the script; empty if the script had not started."""
    frames = traceback.extract_tb(error.__traceback__)
    runners = {__file__, runpy.__file__, "<frozen runpy>", "<string>"}
    script = next(
        (frame.filename for frame in frames if frame.name == "<module>" and frame.filename not in runners), None
    )
    if script is None:
        return ""
    line = [frame.lineno for frame in frames if frame.filename == script][-1]
    return f" in {os.path.basename(script)}, line {line}"


def _set_environment() -> None:
    """Sets the environment variables of DeepSpeed's launcher that no launcher has set."""
    join_launcher()
    if "WORLD_SIZE" in os.environ:
        return
    # With a fixed port, two runs on one machine would collide.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in alone.items()})


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("expected a script: python -m offload.deepspeed train.py [arguments]")
    main(sys.argv[1:])
