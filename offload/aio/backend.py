"""Chooses the backend for a queue, io_uring, libaio or threads, and explains each refusal."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import NamedTuple

from offload.aio._native import Queue
from offload.errors import ConfigError
from offload.sizes import MIB

BACKENDS = ("io_uring", "libaio", "threads")
"""Names of the backends in the order in which "auto" tries them: fewest system calls and context switches first."""


class QueueShape(NamedTuple):
    """The capacity of a queue: at most `threads` times `depth` blocks of `block_bytes` bytes are in flight."""

    threads: int
    depth: int
    block_bytes: int


DEFAULTS = {
    "io_uring": QueueShape(1, 32, 2 * MIB),
    "libaio": QueueShape(1, 32, 2 * MIB),
    "threads": QueueShape(4, 1, 4 * MIB),
}
"""The fastest shapes on the drives that were measured (docs/benchmarks/2026-11-io.md)."""


# Most threads that `_shape` derives from a `depth`; an explicit `threads` may be larger.
_MOST_THREADS = 16
_DESCRIPTORS = "this process has no free file descriptor (ulimit -n)"


class OpenedBackend(NamedTuple):
    """The opened backend, messages with the reason for the refusal of each earlier backend, and the shape."""

    backend: str
    refusals: tuple[str, ...]
    shape: QueueShape


def open_native(
    backend: str, threads: int | None, depth: int | None, block_bytes: int | None
) -> tuple[Queue, OpenedBackend]:
    """Opens a native queue on the backend `backend`, or with "auto" on the first one that this system permits."""
    if backend != "auto" and backend not in BACKENDS:
        raise ConfigError(f"there is no I/O backend {backend!r}: expected auto, {', '.join(BACKENDS)}")
    refusals: list[str] = []
    # Opening a queue is the only reliable test: only the system call reveals seccomp filters, sysctls and limits.
    for name in BACKENDS if backend == "auto" else (backend,):
        shape = _shape(name, threads, depth, block_bytes)
        try:
            return Queue(name, *shape), OpenedBackend(name, tuple(refusals), shape)
        # The native code sets `filename` to the system call that failed, from which `refusal` derives its advice.
        except OSError as error:
            refusals.append(refusal(name, error))
    raise ConfigError(f'{"; ".join(refusals)}: let "auto" choose, or take another of {", ".join(BACKENDS)}')


def _shape(name: str, threads: int | None, depth: int | None, block_bytes: int | None) -> QueueShape:
    """Returns the requested shape with defaults filled in. For "threads", a `depth` multiplies the threads."""
    auto = DEFAULTS[name]
    block_bytes = block_bytes or auto.block_bytes
    if name != "threads":
        return QueueShape(threads or auto.threads, depth or auto.depth, block_bytes)
    if depth is None:
        return QueueShape(threads or auto.threads, 1, block_bytes)
    # Each thread blocks in one pread or pwrite. `depth` blocks in flight therefore need `depth` threads, up to a bound.
    return QueueShape(max(threads or 1, min((threads or 1) * depth, _MOST_THREADS)), 1, block_bytes)


def refusals() -> dict[str, str | None]:
    """Returns, for each backend, the reason why this system refuses it; None if the backend works."""
    reasons: dict[str, str | None] = {}
    for name in BACKENDS:
        try:
            Queue(name, 1, 1, MIB).close()
            reasons[name] = None
        except OSError as error:
            reasons[name] = refusal(name, error)
    return reasons


def refusal(name: str, error: OSError) -> str:
    """Returns the reason why backend `name` could not be opened, with advice if the cause is known.

    Args:
        error: the failure; its `filename` is the system call that failed.
    """
    call, code = error.filename, error.errno
    # Pairs of system call and errno. One errno has different causes in different calls.
    known = {
        ("io_uring_setup", errno.EPERM): _why_not_permitted(),
        ("io_uring_setup", errno.ENOSYS): (
            "this kernel does not support io_uring (Linux 5.1 does), or a container hides it"
        ),
        ("io_uring_register", errno.ENOSYS): "this kernel's io_uring lacks plain reads and writes (Linux 5.6 has them)",
        ("io_uring_register", errno.EINVAL): "this kernel's io_uring lacks plain reads and writes (Linux 5.6 has them)",
        ("io_uring_setup", errno.EMFILE): _DESCRIPTORS,
        ("eventfd", errno.EMFILE): _DESCRIPTORS,
        ("io_uring_setup", errno.E2BIG): "the depth is larger than a ring of this kernel; ask for a smaller one",
        ("pthread_create", errno.EAGAIN): "no more threads may be started (ulimit -u, or a container's limit of pids)",
        ("io_uring_setup", errno.ENOMEM): "the rings need more locked memory than RLIMIT_MEMLOCK allows (ulimit -l)",
        ("io_setup", errno.EAGAIN): "all events of fs.aio-max-nr are in use" + _aio_events(),
        ("io_setup", errno.ENOSYS): "this kernel does not support libaio, or a container hides it",
        ("io_setup", errno.EPERM): "a seccomp filter forbids it",
        ("io_submit", errno.EINVAL): "this kernel's libaio cannot poll (Linux 4.18 can)",
    }
    why = known.get((str(call), code or 0), "")
    return (f"{name} is not available: {call} failed with {errno.errorcode.get(code or 0, str(code))}") + (
        f", {why}" if why else ""
    )


def _why_not_permitted() -> str:
    disabled = _read("/proc/sys/kernel/io_uring_disabled")
    if disabled not in ("", "0"):
        return f"the system disables io_uring (kernel.io_uring_disabled is {disabled})"
    return "a seccomp filter forbids it, as Docker's default profile does"


def _aio_events() -> str:
    taken, most = _read("/proc/sys/fs/aio-nr"), _read("/proc/sys/fs/aio-max-nr")
    return f" ({taken} of {most})" if most else ""


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(os.fspath(path)) as file:
        return file.read().strip()
    return ""
