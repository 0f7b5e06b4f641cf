"""A system that refuses a backend gets the next backend, and a reason."""

from __future__ import annotations

import errno
import os
import platform
from pathlib import Path

import pytest

from offload.aio import BACKENDS, DirectFile, IoQueue, aligned_empty
from offload.aio import backend as backend_module
from offload.aio.backend import refusals
from offload.errors import ConfigError
from offload.sizes import PAGE
from tests.support.processes.seccomp import FILTER_ALL, refusing, run_python

WORK = """
from offload.aio import DirectFile, IoQueue
with DirectFile("file", create=True) as file, IoQueue() as queue:
    queue.write(file, 0, b"x" * 10000).wait()
    back = bytearray(10000)
    queue.read(file, 0, back).wait()
    assert back == b"x" * 10000
    print(queue.backend)
    print("; ".join(queue.refusals))
"""


@pytest.mark.parametrize(
    ("refused", "backend", "pattern"),
    [
        ({"io_uring_setup": errno.EPERM}, "libaio", ["io_uring is not available", "EPERM", "seccomp"]),
        ({"io_uring_setup": errno.ENOSYS}, "libaio", ["io_uring is not available", "ENOSYS", "Linux 5.1"]),
        ({"io_uring_setup": errno.ENOMEM}, "libaio", ["io_uring is not available", "RLIMIT_MEMLOCK"]),
        (
            {"io_uring_setup": errno.EPERM, "io_setup": errno.EAGAIN},
            "threads",
            ["io_uring is not available", "libaio is not available", "aio-max-nr"],
        ),
        (
            {"io_uring_setup": errno.EPERM, "io_setup": errno.ENOSYS},
            "threads",
            ["libaio is not available", "does not support libaio"],
        ),
    ],
    ids=["seccomp", "old kernel", "memlock", "libaio exhausted", "no libaio"],
)
def test_the_next_backend_takes_over(tmp_path: Path, refused: dict[str, int], backend: str, pattern: list[str]) -> None:
    taken, reason = refusing(tmp_path, refused, WORK)
    if taken != backend and refusals()[backend]:
        pytest.skip(str(refusals()[backend]))
    assert taken == backend
    assert all(word in reason for word in pattern), reason


def test_a_backend_that_is_named_is_not_replaced(tmp_path: Path) -> None:
    code = """
from offload.aio import IoQueue
from offload.errors import ConfigError
from tests.support.processes.seccomp import FILTER_ALL, refusing, run_python
try:
    IoQueue("io_uring")
except ConfigError as error:
    print(error)
"""
    (message,) = refusing(tmp_path, {"io_uring_setup": errno.EPERM}, code)
    assert "io_uring is not available" in message and "auto" in message and "threads" in message


@pytest.mark.parametrize(
    ("disabled", "pattern"), [("2", "kernel.io_uring_disabled is 2"), ("0", "seccomp"), ("", "seccomp")]
)
def test_who_switched_io_uring_off(monkeypatch: pytest.MonkeyPatch, disabled: str, pattern: str) -> None:
    monkeypatch.setattr(backend_module, "_read", lambda path: disabled if "io_uring_disabled" in path else "")
    assert pattern in backend_module.refusal("io_uring", OSError(errno.EPERM, "", "io_uring_setup"))


def test_the_real_limit_of_libaio(tmp_path: Path) -> None:
    """More events than the system has left: refused by the system, not by a filter."""
    if refusals()["libaio"]:
        pytest.skip(str(refusals()["libaio"]))
    most = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    threads = most // 4096 + 1
    if threads > 256:
        pytest.skip(f"this system has {most} events, more than a queue can take")
    with pytest.raises(ConfigError, match="aio-max-nr"):
        IoQueue("libaio", threads=threads, depth=4096)
    with IoQueue("libaio", threads=1, depth=64) as queue:
        assert queue.backend == "libaio"


def test_there_is_no_other_backend() -> None:
    with pytest.raises(ConfigError, match="io_uring, libaio, threads"):
        IoQueue("aio")


def test_auto_takes_the_first_that_works() -> None:
    works = [name for name, refused in refusals().items() if refused is None]
    with IoQueue() as queue:
        assert queue.backend == works[0] and queue.backend in BACKENDS
        assert len(queue.refusals) == BACKENDS.index(queue.backend)


def test_threads_have_one_block_each_so_depth_makes_more_of_them() -> None:
    for given, threads in (({}, 4), ({"threads": 2}, 2), ({"depth": 8}, 8), ({"threads": 2, "depth": 32}, 16)):
        with IoQueue("threads", **given) as queue:
            assert (queue.threads, queue.depth) == (threads, 1)


def test_no_descriptor_or_thread_is_left_of_a_refusal(tmp_path: Path) -> None:
    code = """
import os
from offload.aio import IoQueue
before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
for _ in range(5):
    IoQueue(threads=3).close()
assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
print("same")
"""
    assert refusing(tmp_path, {"io_uring_setup": errno.EPERM, "io_setup": errno.EAGAIN}, code) == ["same"]


def test_registered_memory_and_files_hold_the_same_bytes(backend: str, tmp_path: Path) -> None:
    """Inside of the memory, beside it, and across its edge."""
    nbytes = 8 << 20
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend, block_bytes=1 << 20) as queue:
        memory = aligned_empty(nbytes)
        known = queue.register(memory[: nbytes // 2], file)
        assert known == (nbytes // 2 if backend == "io_uring" else 0)
        memory[:] = os.urandom(nbytes)
        queue.write(file, 0, memory).wait()
        back = aligned_empty(nbytes)
        queue.read(file, 0, back).wait()
        assert back == memory
        memory[:] = bytes(nbytes)
        queue.read(file, 0, memory).wait()
        assert back == memory


def test_a_ring_registers_256_regions_of_memory_at_most(backend: str, tmp_path: Path) -> None:
    memory = aligned_empty(260 * PAGE)
    with IoQueue(backend) as queue:
        known = queue.register(*(memory[start : start + PAGE] for start in range(0, len(memory), PAGE)))
        assert known == (256 * PAGE if backend == "io_uring" else 0)
        with DirectFile(tmp_path / "file", create=True) as file:
            assert queue.write(file, 0, memory).wait() == len(memory), "those that have no slot move all the same"


def test_a_registered_file_may_be_closed(backend: str, tmp_path: Path) -> None:
    """Its number stays taken until the queue is closed, so that no other file can be meant by it."""
    with IoQueue(backend) as queue:
        file = DirectFile(tmp_path / "file", create=True)
        queue.register(file)
        numbers = {file.descriptors.direct, file.descriptors.buffered} - {-1}
        file.close()
        others = [DirectFile(tmp_path / f"other{index}", create=True) for index in range(4)]
        assert not numbers & {other.descriptors.direct for other in others}
        for index, other in enumerate(others):
            queue.write(other, 0, bytes([index]) * 4096).wait()
        for index in range(4):
            assert (tmp_path / f"other{index}").read_bytes() == bytes([index]) * 4096


def test_less_is_registered_where_memory_may_not_be_locked(tmp_path: Path) -> None:
    """As a user without privileges, with room for 4 MiB: smaller pieces, or none, and I/O all the same."""
    if os.geteuid() != 0 or refusals()["io_uring"]:
        pytest.skip("needs root, to become somebody else, and io_uring")
    code = """
import os, resource
from offload.aio import DirectFile, IoQueue, aligned_empty
os.chmod(".", 0o777)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20, 4 << 20))
os.setresuid(65534, 65534, 65534)
memory = aligned_empty(64 << 20)
with DirectFile("file", create=True) as file, IoQueue("io_uring") as queue:
    print(queue.register(memory))
    memory[:] = os.urandom(1 << 20) * 64
    queue.write(file, 0, memory).wait()
    back = aligned_empty(64 << 20)
    queue.read(file, 0, back).wait()
    print(back == memory)
"""
    for parent in tmp_path.parents[:2]:
        os.chmod(parent, 0o755)
    registered, same = run_python(code, tmp_path).splitlines()
    assert 0 <= int(registered) <= 4 << 20 and same == "True"


@pytest.mark.parametrize("when", ["before the first request", "later"])
def test_a_ring_that_is_refused_once_it_is_there(tmp_path: Path, when: str) -> None:
    """An error of each request, no spinning and no hanging."""
    refuse = "refuse_all({426: errno.EPERM})\n"
    code = f"""
{FILTER_ALL}
from offload.aio import DirectFile, IoQueue
file, queue = DirectFile("file", create=True), IoQueue("io_uring")
if {when!r} == "later":
    queue.write(file, 0, bytes(4096)).wait()
else:
    {refuse}
if {when!r} == "later":
    {refuse}
for _ in range(3):
    try:
        queue.write(file, 0, bytes(4096)).wait(120)
    except OSError as error:
        print(error.errno)
queue.close()
print("closed")
"""
    if platform.machine() != "x86_64" or refusals()["io_uring"]:
        pytest.skip("needs io_uring, on x86-64")
    assert run_python(code, tmp_path).split() == ["1", "1", "1", "closed"]
