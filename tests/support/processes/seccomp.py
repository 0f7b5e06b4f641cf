"""Processes that are refused system calls, as a container's profile does."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.support.processes import warm_process

CALLS = {
    "io_setup": {"x86_64": 206, "aarch64": 0},
    "io_uring_setup": {"x86_64": 425, "aarch64": 425},
    "mbind": {"x86_64": 237, "aarch64": 235},
}

# A seccomp filter that answers the system calls of `refused` with an errno, as a container's profile does.
FILTER = """
import ctypes, errno, struct
def refuse(refused):
    code = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # load the number of the call
    for number, error in refused.items():
        code.append(struct.pack("HBBI", 0x15, 0, 1, number))  # if it is this one,
        code.append(struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error))  # return the error
    code.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))  # else allow it
    program = ctypes.create_string_buffer(b"".join(code))
    head = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    if libc.prctl(22, 2, ctypes.c_char_p(head)) != 0:
        raise SystemExit("no seccomp")
"""

# The same for every thread of the process, those that run already among them (TSYNC).
FILTER_ALL = FILTER.replace("def refuse(", "def refuse_all(").replace(
    "libc.prctl(22, 2, ctypes.c_char_p(head))", "libc.syscall(317, 1, 1, ctypes.c_char_p(head))"
)


def run_python(code: str, tmp_path: Path) -> str:
    """Returns what `code` prints in a process of its own, in `tmp_path`."""
    done = warm_process.python(code, cwd=tmp_path)
    if done.stderr.strip() == "no seccomp":
        pytest.skip("no seccomp filters here")
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusing(tmp_path: Path, refused: dict[str, int], code: str) -> list[str]:
    """Returns the lines that `code` prints where each system call of `refused` fails with that errno."""
    machine = platform.machine()
    if machine not in CALLS["io_setup"]:
        pytest.skip(f"the numbers of the system calls of {machine} are not known here")
    numbers = {CALLS[call][machine]: error for call, error in refused.items()}
    return run_python(f"{FILTER}\nrefuse({numbers})\n{code}", tmp_path).splitlines()
