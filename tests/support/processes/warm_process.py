"""Processes that have imported torch and offload already: forked from a server, in a tenth of a second instead of four.

    python("print(1)", cwd=folder)          a program, like subprocess.run([sys.executable, "-c", ...])
    begin(["-m", "offload", "train"], ...)  arguments of Python, like subprocess.Popen

Each is a real process with streams, an environment, signals and an exit of its own. Only what is read when torch or
offload are *imported* (OMP_NUM_THREADS, OFFLOAD_ISA) is the server's: a test of that needs `subprocess`.

A client connects to the server of `warm_server.py` for each process, and sends what to run with the three streams; the
server forks, and the child runs it as `__main__`. The connection answers with the process's number, and with its exit
status once it has ended. A process whose client ends before is killed.

A program by `-c` ends as any Python does. A command or a script waits for its threads, runs its exit functions, writes
what it has printed, and ends then: to take torch and transformers apart copies most of what the child shares with the
server, in a third of a second of CPU. A test of the very end of a command says `whole_end=True`.

This file is also a script without `site`, as which it stands for a command: it imports the standard library alone.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[3]
SERVER = str(Path(__file__).with_name("warm_server.py"))
_LENGTH = 8
_MOST_DESCRIPTORS = 64


class Process:
    """A forked process, with the part of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        whole_end: bool = False,
        more: Sequence[int] = (),
    ) -> None:
        """Starts the process; `more` are descriptors that it has beside its streams, by the same numbers."""
        self.args = [os.fspath(argument) for argument in arguments]
        self.returncode: int | None = None
        self._out: list[str | None] = [None, None]
        streams = _Streams(stdin, stdout, stderr)
        self.stdin, self.stdout, self.stderr = streams.mine
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server())
        request = {
            "descriptors": [0, 1, 2, *more],
            "arguments": self.args,
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "whole_end": whole_end or self.args[0] == "-c",
        }
        send(self._connection, request, [*streams.theirs, *more])
        streams.close()
        self.pid = int(receive(self._connection)[0]["pid"])

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process; returns minus the number of the signal that ended it, as Popen does."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                answer, _ = receive(self._connection)
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self.returncode = int(answer["returncode"])
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit status, or None while the process runs."""
        try:
            return self.wait(1e-6)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Reads both outputs to their ends, and waits.

        Raises `TimeoutExpired` also if the process has ended and a child of it holds an output open.
        """
        end = None if timeout is None else time.monotonic() + timeout
        readers = [
            threading.Thread(target=self._read, args=(index, stream), daemon=True)
            for index, stream in enumerate((self.stdout, self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._out[0], self._out[1]

    def _read(self, index: int, stream: IO[str]) -> None:
        self._out[index] = stream.read()
        stream.close()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


class _Streams:
    """The three descriptors for the process, and this side's ends of pipes."""

    def __init__(self, *wanted: int | IO[Any] | None) -> None:
        self.theirs: list[int] = []
        self.mine: list[IO[str] | None] = []
        self._ours: list[int] = []  # to be closed here once they are sent
        for number, source in enumerate(wanted):
            theirs, mine = self._open(number, source)
            self.theirs.append(theirs)
            self.mine.append(mine)

    def _open(self, number: int, wanted: int | IO[Any] | None) -> tuple[int, IO[str] | None]:
        if wanted is None:
            return number, None
        if wanted == subprocess.PIPE:
            reading, writing = os.pipe()
            theirs, mine = (reading, writing) if number == 0 else (writing, reading)
            self._ours.append(theirs)
            return theirs, os.fdopen(mine, "w" if number == 0 else "r")
        if wanted == subprocess.STDOUT:
            return self.theirs[1], None
        if wanted == subprocess.DEVNULL:
            self._ours.append(os.open(os.devnull, os.O_RDWR))
            return self._ours[-1], None
        return (wanted if isinstance(wanted, int) else wanted.fileno()), None

    def close(self) -> None:
        for descriptor in self._ours:
            os.close(descriptor)


def begin(arguments: Sequence[str | os.PathLike[str]], **options: Any) -> Process:
    """Starts Python with these arguments: "-c CODE", "-m MODULE ..." or "SCRIPT ..."."""
    return Process(arguments, **options)


def run(
    arguments: Sequence[str | os.PathLike[str]],
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments to its end, its output captured; it is killed after `timeout` seconds."""
    process = Process(
        arguments, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = process.communicate(timeout)
    except BaseException:
        process.kill()
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program, its output captured."""
    return run(["-c", code], **options)


def commands(folder: Path, server: str | None = None) -> Path:
    """Makes `offload` and `python` in a folder to put on a shell's PATH: what they run is forked, in their own streams.

    SIGTERM and SIGKILL to them are one to what they run.
    """
    folder.mkdir()
    server = server or _server()
    for name, arguments in (("offload", "-m offload "), ("python", "")):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {__file__} run {server} {arguments}"$@"\n')
        command.chmod(0o755)
    return folder


def _run_at(server: str, arguments: Sequence[str]) -> int:
    """Runs Python with these arguments, forked from a server of another process; returns what a shell would say."""
    global _started
    _started = server
    # Those that a parent left open for it, as multiprocessing does.
    inherited = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    process = begin(arguments, more=[each for each in inherited if os.path.exists(f"/proc/self/fd/{each}")])
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    status = process.wait()
    return 128 - status if status < 0 else status


def python_of_run() -> Path | None:
    """Returns a program that stands for `python` and is forked, where the workers of this run share a server."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    program = Path(socket_of_run(run)).parent / "bin" / "python"
    return program if program.exists() else None


_started: str | None = None
"""The socket of the server."""
_TEMPORARY = tempfile.gettempdir()
"""The folder for sockets, as it is before any test names another one: a socket's path has at most 107 bytes."""


def _server() -> str:
    """Returns the socket of the server, which starts with the first use and ends with this process.

    The workers of one run of pytest share a server, which ends with the process that started them.
    """
    global _started
    if _started is None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        if run is None:
            _started = os.path.join(tempfile.mkdtemp(prefix="offload-warm-", dir=_TEMPORARY), "socket")
            atexit.register(_stop, start(SERVER, _started, os.getpid()))
        else:
            path = socket_of_run(run)
            folder = os.path.dirname(path)
            os.makedirs(folder, exist_ok=True)
            with open(f"{folder}.lock", "w") as lock:  # one of them starts it, the others wait for that
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.exists(path):
                    # As if it had ended: no worker waits for that, and Popen warns of a process that is not waited for.
                    start(SERVER, path, os.getppid()).returncode = 0
            _started = path
    return _started


def socket_of_run(run: str) -> str:
    """Returns the socket of the server that the workers of a run of pytest share."""
    return os.path.join(_TEMPORARY, f"offload-warm-{run}", "socket")


def start(script: str, path: str, owner: int, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a server, by this script or by that of workers, that ends with the process `owner`.

    Waits until it listens.
    """
    listening, ready = os.pipe()
    server = subprocess.Popen(
        [sys.executable, script, path, str(ready), str(owner), *arguments],
        pass_fds=[ready],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        cwd=ROOT,
    )
    os.close(ready)
    with os.fdopen(listening) as pipe:
        assert pipe.read() == "ready", "the server of warm processes did not start"
    return server


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait()


# -- messages of both sides ---------------------------------------------------------------------------


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends a message, and descriptors with its first bytes."""
    content = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([len(content).to_bytes(_LENGTH, "little")], rights)
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Returns a message, None at the end of the connection, and the descriptors that came with it."""
    head, ancillary, _, _ = connection.recvmsg(_LENGTH, socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    content, nbytes = b"", int.from_bytes(head, "little")
    # No more than this message: the next one may be there already, as of a process that has ended at once.
    while len(content) < nbytes:
        content += connection.recv(nbytes - len(content))
    return json.loads(content or "null"), list(descriptors)


if __name__ == "__main__":
    sys.exit(_run_at(sys.argv[2], sys.argv[3:]))
