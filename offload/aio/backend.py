"""Which way to the kernel a queue takes: io_uring, libaio or threads, and why not another."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import NamedTuple

from offload.aio._native import Queue
from offload.errors import ConfigError
from offload.sizes import MIB

BACKENDS = ("io_uring", "libaio", "threads")
"""In the order in which "auto" tries them: fewest system calls and context switches first."""


class Shape(NamedTuple):
    """How much a queue has in flight: `threads` times `depth` blocks of `block_bytes` bytes."""

    threads: int
    depth: int
    block_bytes: int


DEFAULTS = {
    "io_uring": Shape(1, 32, 2 * MIB),
    "libaio": Shape(1, 32, 2 * MIB),
    "threads": Shape(4, 1, 4 * MIB),
}
"""What was fastest on the drives that were tried (docs/benchmarks/2026-11-io.md)."""


_MOST_THREADS = 16
_DESCRIPTORS = "no descriptor is left (ulimit -n)"


class Chosen(NamedTuple):
    """A backend with all that it was opened with, and why those before it were refused, for people."""

    backend: str
    refusals: tuple[str, ...]
    shape: Shape


def open_native(backend: str, threads: int | None, depth: int | None, block_bytes: int | None) -> tuple[Queue, Chosen]:
    """A native queue. `ConfigError` where this system refuses the `backend` that is named."""
    if backend != "auto" and backend not in BACKENDS:
        raise ConfigError(f"there is no I/O backend {backend!r}: expected auto, {', '.join(BACKENDS)}")
    refusals: list[str] = []
    for name in BACKENDS if backend == "auto" else (backend,):
        shape = _shape(name, threads, depth, block_bytes)
        try:
            return Queue(name, *shape), Chosen(name, tuple(refusals), shape)
        except OSError as error:
            refusals.append(refusal(name, error))
    raise ConfigError(f'{"; ".join(refusals)}: let "auto" choose, or take another of {", ".join(BACKENDS)}')


def _shape(name: str, threads: int | None, depth: int | None, block_bytes: int | None) -> Shape:
    auto = DEFAULTS[name]
    block_bytes = block_bytes or auto.block_bytes
    if name != "threads":
        return Shape(threads or auto.threads, depth or auto.depth, block_bytes)
    if depth is None:
        return Shape(threads or auto.threads, 1, block_bytes)
    # A thread has one block in flight: as many of them as there were to be blocks, within reason.
    return Shape(max(threads or 1, min((threads or 1) * depth, _MOST_THREADS)), 1, block_bytes)


def refusals() -> dict[str, str | None]:
    """For each backend None where it works, else why this system refuses it."""
    found: dict[str, str | None] = {}
    for name in BACKENDS:
        try:
            Queue(name, 1, 1, MIB).close()
            found[name] = None
        except OSError as error:
            found[name] = refusal(name, error)
    return found


def refusal(name: str, error: OSError) -> str:
    """Why `name` could not be opened, with what to do about it where that is known."""
    call, code = error.filename, error.errno
    known = {
        ("io_uring_setup", errno.EPERM): _why_not_permitted(),
        ("io_uring_setup", errno.ENOSYS): "this kernel has none (Linux 5.1), or a container hides it",
        ("io_uring_register", errno.ENOSYS): "this kernel's has no plain reads and writes (Linux 5.6)",
        ("io_uring_register", errno.EINVAL): "this kernel's has no plain reads and writes (Linux 5.6)",
        ("io_uring_setup", errno.EMFILE): _DESCRIPTORS,
        ("eventfd", errno.EMFILE): _DESCRIPTORS,
        ("io_uring_setup", errno.E2BIG): "its rings are shorter than the depth; ask for less",
        ("pthread_create", errno.EAGAIN): "no more threads may be started (ulimit -u, or a container's limit of pids)",
        ("io_uring_setup", errno.ENOMEM): "its rings do not fit RLIMIT_MEMLOCK (ulimit -l)",
        ("io_setup", errno.EAGAIN): "all events of fs.aio-max-nr are taken" + _aio_events(),
        ("io_setup", errno.ENOSYS): "this kernel has none, or a container hides it",
        ("io_setup", errno.EPERM): "a seccomp filter forbids it",
        ("io_submit", errno.EINVAL): "this kernel's cannot poll (Linux 4.18)",
    }
    why = known.get((str(call), code or 0), "")
    return f"no {name}: {call} says {errno.errorcode.get(code or 0, str(code))}" + (f", {why}" if why else "")


def _why_not_permitted() -> str:
    disabled = _read("/proc/sys/kernel/io_uring_disabled")
    if disabled not in ("", "0"):
        return f"the system has it switched off (kernel.io_uring_disabled is {disabled})"
    return "a seccomp filter forbids it, as Docker's default profile does"


def _aio_events() -> str:
    taken, most = _read("/proc/sys/fs/aio-nr"), _read("/proc/sys/fs/aio-max-nr")
    return f" ({taken} of {most})" if most else ""


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(os.fspath(path)) as file:
        return file.read().strip()
    return ""
