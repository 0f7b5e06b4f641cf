"""The server of `warm_process`: it has imported torch and offload, and forks a process for each request.

It runs as a script.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.processes.warm_process import receive, send

_PRELOADED = (
    "transformers.models.gpt2.modeling_gpt2",
    "offload.finetune.job",
    "offload.bench.swap",
    "offload.deepnvme",
    "offload.cli.main",
    "offload.cli.commands.train_run",
)


def preload() -> None:
    """Imports what the processes need."""
    for name in ("tests", *_PRELOADED):  # the first puts a mutant in, as in every process of a test
        __import__(name)


def listen(path: str) -> socket.socket:
    """Makes the socket of a server."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def serve(listener: socket.socket, ready: int | None, owner: int) -> None:
    """Forks a child for each request, for ever; the child runs what it shall, and ends.

    Args:
        listener: The socket to which the requests come.
        ready: A pipe that is told when the first may come, and closed.
        owner: The number of the process with which the server ends.
    """
    _run_to_its_end(_fork_for_each_request(listener, ready, owner))


def _fork_for_each_request(listener: socket.socket, ready: int | None, owner: int) -> dict[str, Any]:
    """Returns in the child alone, with what it shall run."""
    gc.collect()
    gc.freeze()  # so that children neither collect nor copy what they share
    if ready is not None:
        os.write(ready, b"ready")
        os.close(ready)
    path = listener.getsockname()
    signal.signal(signal.SIGTERM, lambda *_: _end(path))
    threading.Thread(target=_end_with, args=(owner, path), daemon=True).start()
    while True:
        connection, _ = listener.accept()
        request, streams = receive(connection)
        if request is None:
            continue
        child = os.fork()
        if child == 0:
            listener.close()
            connection.close()
            _place(streams, request["descriptors"])
            return dict(request)
        for descriptor in streams:
            os.close(descriptor)
        send(connection, {"pid": child})
        threading.Thread(target=_reap, args=(child, connection), daemon=True).start()


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives descriptors the numbers that they shall have here."""
    # Out of the way first: one may have the number of another.
    away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(away, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _reap(child: int, connection: socket.socket) -> None:
    """Waits for a child and tells its status; kills a child whose client has gone, as by a kill of its own."""
    ended = os.pidfd_open(child)
    # The client sends nothing more, so what could be read from it is its end.
    if ended not in select.select([ended, connection.fileno()], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        send(connection, {"returncode": status})
    except OSError:
        pass  # nobody waits for it any more
    connection.close()


def _end_with(owner: int, path: str) -> None:
    """Ends the server once its owner is gone, which may have been killed."""
    select.select([os.pidfd_open(owner)], [], [])
    _end(path)


def _end(path: str) -> None:
    folder = os.path.dirname(path)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}.lock")
    os._exit(0)


def _become(request: Mapping[str, Any]) -> None:
    """Runs what was asked for as `__main__`."""
    # The server's own know whether *its* descriptors could seek.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    kind, *rest = request["arguments"]
    while kind.startswith("-") and kind not in ("-c", "-m"):  # of streams and warnings: the server has its own
        kind, *rest = rest
    sys.path[0] = "" if kind in ("-c", "-m") else os.path.dirname(os.path.abspath(kind))
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


def _run_to_its_end(request: Mapping[str, Any]) -> None:
    """Runs what was asked for and ends the process; returns, or raises, if Python shall end it."""
    try:
        _become(request)
        status = 0
    except SystemExit as end:
        if request["whole_end"] or not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    if request["whole_end"]:
        return
    # In Python's order. What fails here fails again, with Python's words, when Python ends the process.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        sys.exit(status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    preload()
    serve(listen(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
