"""Commands of several hosts as processes that end together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from offload.launch.commands import Command

_POLL = 0.1
"""Seconds between two checks of the processes."""
_GRACE = 40.0
"""Seconds that the hosts have to end; torchrun gives its ranks 30."""


def run_together(commands: Sequence[Command], tell: Callable[[str], None]) -> int:
    """Runs the commands until all have succeeded or one has failed, and then ends the others; returns the exit status.

    If an exception such as Ctrl-C's is raised, all commands are ended before it propagates. A SIGKILL of this process
    also ends them, since it closes the standard input of each command. The status of a command that a signal ended is
    128 plus the signal's number.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for command in commands:
            # A new session, since Ctrl-C must reach only this process, which then ends all commands in order.
            running[command.host] = subprocess.Popen(
                command.arguments,
                stdin=subprocess.PIPE,
                env={**os.environ, **command.environment},
                start_new_session=True,
            )
        for command in commands:
            # A process that has already ended, such as ssh to an unreachable host, is reported by its exit status.
            with contextlib.suppress(BrokenPipeError):
                file = running[command.host].stdin
                assert file is not None
                file.write(os.fsencode(command.first_input))
                file.flush()
        return _first_failure(running, tell)
    finally:
        _end(running.values())


def _first_failure(running: Mapping[str, subprocess.Popen[bytes]], tell: Callable[[str], None]) -> int:
    """Waits for the first process that fails, or for all, and returns the exit status."""
    left = dict(running)
    while left:
        for host, process in [*left.items()]:
            returned = process.poll()
            if returned is None:
                continue
            del left[host]
            if returned != 0:
                status = returned if returned > 0 else 128 - returned
                others = f"; ending {', '.join(left)}" if left else ""
                tell(f"{host} has ended with exit status {status}{others}")
                return status
        time.sleep(_POLL)
    return 0


def _end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Ends the processes that still run: in order, or by force after `_GRACE` seconds or a second Ctrl-C."""
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if the process has not read its variables
            process.stdin.close()  # ends torchrun on its host
    deadline = time.monotonic() + _GRACE
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
