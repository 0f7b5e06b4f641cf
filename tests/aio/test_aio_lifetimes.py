"""Buffers, files, threads and processes may end in any order around a queue: no byte is lost, nothing is left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.errors import IoError, UsageError
from tests.aio.aio_queues import noise, queue
from tests.support.processes import warm_process

__all__ = ["queue"]  # fixtures


def test_close_waits_for_all_requests(tmp_path: Path, backend: str) -> None:
    file = DirectFile(tmp_path / "file", create=True)
    queue = IoQueue(backend, threads=1)
    buffer = aligned_empty(8 << 20)
    buffer[:] = noise(8 << 20)
    futures = [queue.write(file, start, buffer[start : start + (1 << 20)]) for start in range(0, 8 << 20, 1 << 20)]
    queue.close()
    queue.close()
    assert all(future.done() for future in futures)
    assert (tmp_path / "file").read_bytes() == buffer and queue.written_bytes == 8 << 20
    with pytest.raises(UsageError, match="closed"):
        queue.read(file, 0, buffer)
    file.close()


def test_buffers_live_as_long_as_their_requests(queue: IoQueue, tmp_path: Path) -> None:
    """Nobody keeps the futures or the buffers: the queue does."""
    expected = b""
    with DirectFile(tmp_path / "file", create=True) as file:
        for index in range(50):
            data = noise(100_000, index)
            expected += data
            queue.write(file, index * 100_000, bytearray(data))
        queue.close()
    assert (tmp_path / "file").read_bytes() == expected


@pytest.mark.sample(1)
def test_buffers_live_when_the_queue_is_dropped(tmp_path: Path, backend: str) -> None:
    with DirectFile(tmp_path / "file", create=True) as file:
        buffers = [aligned_empty(4 << 20) for _ in range(16)]
        for index, buffer in enumerate(buffers):
            buffer[:] = bytes([index + 1]) * len(buffer)
        queue = IoQueue(backend, threads=1, block_bytes=16 << 10)
        for index in range(16):
            queue.write(file, index << 22, buffers[index])
        del buffers, buffer, queue
    data = (tmp_path / "file").read_bytes()
    assert data == b"".join(bytes([index + 1]) * (4 << 20) for index in range(16))


def test_buffers_end_while_other_threads_submit(tmp_path: Path, backend: str) -> None:
    """The end of a mapped buffer gives up the GIL in the midst of a submission."""
    code = f"""
import sys, threading, time
from offload.aio import DirectFile, IoQueue, aligned_empty
sys.setswitchinterval(1e-6)
file, queue = DirectFile({str(tmp_path / "file")!r}, create=True), IoQueue({backend!r}, threads=2)
end = time.monotonic() + 0.4
def work(index):
    while time.monotonic() < end:
        queue.write(file, index << 16, aligned_empty(4096))
threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    done = warm_process.python(code, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_file_closed_under_its_requests(tmp_path: Path, backend: str) -> None:
    """They end well, and files opened meanwhile are left alone even if they get the same numbers."""
    before = len(os.listdir("/proc/self/fd"))
    with IoQueue(backend, threads=1) as queue:
        file = DirectFile(tmp_path / "file", create=True)
        buffer = aligned_empty(32 << 20)
        buffer[:] = bytes([5]) * len(buffer)
        future = queue.write(file, 0, buffer)
        file.close()
        others = [os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT) for _ in range(4)]
        assert future.wait() == len(buffer)
        for other in others:
            os.close(other)
        for call in (file.sync, file.size, file.identity, lambda: file.reserve(1)):
            with pytest.raises(IoError) as caught:
                call()
            assert caught.value.errno == errno.EBADF
    assert (tmp_path / "file").read_bytes() == buffer and (tmp_path / "other").stat().st_size == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_close_waits_for_a_close_elsewhere(tmp_path: Path, backend: str) -> None:
    with DirectFile(tmp_path / "file", create=True) as file:
        queue = IoQueue(backend, threads=1)
        future = queue.write(file, 0, aligned_empty(64 << 20))
        other = threading.Thread(target=queue.close)
        other.start()
        queue.close()
        assert future.done()
        other.join()


def test_threads_that_cannot_be_had_are_an_error() -> None:
    code = """
import resource
from offload.aio import IoQueue
from offload.errors import ConfigError
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    IoQueue("threads", threads=256)
except ConfigError as error:
    print(error)
"""
    done = warm_process.python(code, timeout=120)
    assert done.returncode == 0 and "no more threads may be started" in done.stdout, done.stderr


def test_a_buffer_is_free_when_its_request_is_done(queue: IoQueue, tmp_path: Path) -> None:
    with DirectFile(tmp_path / "file", create=True) as file:
        buffer = bytearray(4096)
        future = queue.write(file, 0, buffer)
        while not future.done():
            time.sleep(0.001)
        buffer.extend(b"more")
        again = bytearray(4096)
        extended = threading.Event()
        queue.write(file, 0, again).add_done_callback(lambda _: (again.extend(b"more"), extended.set()))
        assert extended.wait(120)


def test_nothing_stalls_while_memory_is_registered(backend: str) -> None:
    if backend != "io_uring":
        pytest.skip("has nothing to register")
    turns, stop = 0, threading.Event()
    with IoQueue(backend) as queue, DirectFile("/dev/zero", writable=False) as file:

        def submit() -> None:
            nonlocal turns
            while not stop.is_set():
                queue.read(file, 0, bytearray(1))
                turns += 1

        thread = threading.Thread(target=submit)
        thread.start()
        during = 0
        for _ in range(8):  # on a machine with other work the thread may get no core while one registration lasts
            before = turns
            queue.register(aligned_empty(256 << 20))
            during = during or turns - before
        stop.set()
        thread.join()
    assert during > 0


def test_a_timeout_leaves_the_request_alone(tmp_path: Path, backend: str) -> None:
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend, threads=1) as queue:
        buffer = aligned_empty(64 << 20)
        future = queue.write(file, 0, buffer)
        try:
            future.wait(timeout=0.0)
        except TimeoutError as error:
            assert "write" in str(error)
        assert future.wait() == 64 << 20 and future.wait() == 64 << 20


@pytest.mark.sample(1)
def test_an_exit_without_close_keeps_what_was_submitted(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "file"
    code = f"""
from offload.aio import DirectFile, IoQueue
file, queue = DirectFile({str(path)!r}, create=True), IoQueue({backend!r}, threads=1)
for index in range(64):
    queue.write(file, index << 20, bytes([index]) * (1 << 20))
"""
    done = warm_process.python(code)
    assert done.returncode == 0 and done.stderr == ""
    data = path.read_bytes()
    assert len(data) == 64 << 20 and all(data[index << 20] == index for index in range(64))


def test_a_forked_child_is_refused(queue: IoQueue, tmp_path: Path) -> None:
    with DirectFile(tmp_path / "file", create=True) as file:
        child = os.fork()
        if child == 0:
            try:
                queue.write(file, 0, b"x")
            except UsageError:
                queue.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert queue.write(file, 0, b"x").wait() == 1, "and the parent goes on"


def test_a_forked_child_ends(tmp_path: Path, backend: str) -> None:
    """It neither waits for threads that are not there nor for what they were doing."""
    code = f"""
import os, sys, time
from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.errors import UsageError
file, queue = DirectFile({str(tmp_path / "file")!r}, create=True), IoQueue({backend!r}, threads=2)
buffer = aligned_empty(64 << 20)
time.sleep(0.1)
future = queue.write(file, 0, buffer)
for drop in (False, True):
    child = os.fork()
    if child == 0:
        try:
            future.wait()
        except UsageError:
            if drop:
                del future, queue, buffer, file
            sys.exit(7)
        sys.exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(future.wait())
"""
    # Python 3.12 and later warn of what this is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.strip(), done.stderr) == (f"7\n7\n{64 << 20}", "")


def test_an_exit_with_a_daemon_thread_that_waits(tmp_path: Path, backend: str) -> None:
    code = f"""
import sys, threading, time
from offload.aio import DirectFile, IoQueue
file, queue = DirectFile({str(tmp_path / "file")!r}, create=True), IoQueue({backend!r}, threads=2)
def work():
    while True:
        queue.write(file, 0, bytes(4 << 20)).wait()
threading.excepthook = lambda arguments: None
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""
    done = warm_process.python(code, timeout=120)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_a_wait(tmp_path: Path, backend: str) -> None:
    code = f"""
import os, signal, threading, time
from offload.aio import DirectFile, IoQueue
file, queue = DirectFile({str(tmp_path / "file")!r}, create=True), IoQueue({backend!r}, threads=1)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        queue.write(file, 0, bytes(16 << 20)).wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    done = warm_process.python(code, timeout=120)
    assert done.stdout.strip() == "interrupted" and done.returncode == 0


def test_the_gil_is_free_during_a_wait(tmp_path: Path, backend: str) -> None:
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0)

    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend, threads=1) as queue:
        thread = threading.Thread(target=count)
        future = queue.write(file, 0, aligned_empty(256 << 20))
        thread.start()
        future.wait()
        stop.set()
        thread.join()
    assert counted > 0


def test_no_descriptor_or_thread_is_left(tmp_path: Path, backend: str) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = descriptors(), threads()
    for _ in range(5):
        with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
            queue.write(file, 0, b"x").wait()
    assert (descriptors(), threads()) == before
