"""A request that fails, is never answered, or outlives its owner ends with its own error and leaves nothing."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload import testing
from offload.aio import DirectFile, IoFuture, IoQueue, aligned_empty, unanswered
from offload.errors import IoError, UsageError
from offload.fileio import atomic_write, sync_folder, write_new
from offload.swapper.store.folder import write_durably
from tests.aio.test_aio_queue import noise
from tests.store.test_store import blob, created, update
from tests.support.drives.filesystems import disk, mounted
from tests.support.processes import warm_process

MIB = 1 << 20
WITHOUT_JOURNAL = ("mkfs.ext4", "-q", "-O", "^has_journal")


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system with about 8 MiB of room."""
    if request.param == "tmpfs":
        with mounted(tmp_path, "-t", "tmpfs", "-o", "size=8m", "none") as folder:
            yield folder
    else:
        with disk(tmp_path, 12 * MIB, WITHOUT_JOURNAL) as folder:
            yield folder


def _error_of(future: IoFuture) -> IoError:
    with pytest.raises(IoError) as caught:
        future.wait()
    return caught.value


def test_a_full_disk_fails_the_write_with_enospc(backend: str, small_disk: Path) -> None:
    """Where others report success, this is an error; what was there before stays as it was."""
    with DirectFile(small_disk / "kept", create=True) as kept, IoQueue(backend, block_bytes=256 << 10) as queue:
        before = random.Random(0).randbytes(MIB)
        queue.write(kept, 0, before).wait()
        with DirectFile(small_disk / "long", create=True) as file:
            error = _error_of(queue.write(file, 0, aligned_empty(32 * MIB)))
            assert (error.errno, error.path, error.offset, error.nbytes) == (errno.ENOSPC, file.path, 0, 32 * MIB)
        again = bytearray(MIB)
        assert queue.read(kept, 0, again).wait() == MIB and again == before
        with DirectFile(small_disk / "long") as file, pytest.raises(IoError) as caught:
            file.reserve(32 * MIB)
        assert caught.value.errno == errno.ENOSPC


def test_a_drive_that_fails_in_the_middle(backend: str, tmp_path: Path) -> None:
    """A real EIO: the drive under a file system loses its second half."""
    with disk(tmp_path, 64 * MIB, WITHOUT_JOURNAL) as folder, IoQueue(backend, block_bytes=256 << 10) as queue:
        pieces = range(0, 48 * MIB, MIB)
        buffer = aligned_empty(48 * MIB)
        buffer[:] = random.Random(0).randbytes(MIB) * 48
        with DirectFile(folder / "file", create=True) as file:
            if not file.direct:
                pytest.skip("this kernel's loop device has no O_DIRECT")
            queue.write(file, 0, buffer).wait()
            file.sync()
            os.truncate(tmp_path / "image", 32 * MIB)
            _tell_its_loop_device(tmp_path / "image")
            for operation in (queue.read, queue.write):
                futures = [operation(file, start, buffer[start : start + MIB]) for start in pieces]
                failed = []
                for start, future in zip(pieces, futures, strict=True):
                    try:
                        assert future.wait() == MIB
                    except IoError as error:
                        assert (error.errno, error.path, error.nbytes) == (errno.EIO, file.path, MIB)
                        assert error.offset == start
                        failed.append(start)
                assert 0 < len(failed) < len(pieces)


def _tell_its_loop_device(image: Path) -> None:
    """Have it see that its file has become shorter."""
    listed = subprocess.run(["losetup", "-j", str(image)], capture_output=True, text=True, check=True).stdout
    subprocess.run(["losetup", "-c", listed.partition(":")[0]], check=True)


def test_sigterm_ends_the_process_at_once(backend: str, tmp_path: Path) -> None:
    """Python's own answer to the signal is kept; the file holds whole blocks or none, and can be used again."""
    code = f"""
from offload.aio import DirectFile, IoQueue, aligned_empty
with DirectFile({str(tmp_path / "file")!r}, create=True) as file, IoQueue({backend!r}) as queue:
    buffer = aligned_empty(64 << 20)
    print("ready", flush=True)
    while True:
        queue.write(file, 0, buffer).wait()
"""
    child = warm_process.begin(["-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=120) == -signal.SIGTERM
    child.stdout.close()
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        assert queue.write(file, 0, bytes(4096)).wait() == 4096


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


def test_a_file_closed_under_its_requests(tmp_path: Path, backend: str) -> None:
    """They end well, and files opened meanwhile are left alone even if they get the same numbers."""
    before = len(os.listdir("/proc/self/fd"))
    with IoQueue(backend, threads=1) as queue:
        file = DirectFile(tmp_path / "file", create=True)
        buffer = aligned_empty(32 << 20)
        buffer[:] = bytes([5]) * len(buffer)
        future = queue.write(file, 0, buffer)
        file.close()
        descriptors = [os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT) for _ in range(4)]
        assert future.wait() == len(buffer)
        for descriptor in descriptors:
            os.close(descriptor)
        for call in (file.sync, file.size, file.identity, lambda: file.reserve(1)):
            with pytest.raises(IoError) as caught:
                call()
            assert caught.value.errno == errno.EBADF
    assert (tmp_path / "file").read_bytes() == buffer and (tmp_path / "other").stat().st_size == 0
    assert len(os.listdir("/proc/self/fd")) == before


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


def test_a_callback_runs_though_its_thread_finds_no_memory_at_first(queue: IoQueue, tmp_path: Path) -> None:
    """A thread that ended would leave each later wait for a callback without an end."""

    class Short:
        def __init__(self, native: Any) -> None:
            self._native, self.refusals = native, 2

        def __getattr__(self, name: str) -> Any:
            return getattr(self._native, name)

        def announced(self) -> Any:
            if self.refusals:
                self.refusals -= 1
                raise MemoryError
            return self._native.announced()

    short = queue._callbacks._queue = Short(queue._callbacks._queue)  # type: ignore[assignment]
    called = threading.Event()
    with DirectFile(tmp_path / "file", create=True) as file:
        queue.write(file, 0, aligned_empty(64 << 20)).add_done_callback(lambda _: called.set())
        assert called.wait(120) and not short.refusals


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


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
def test_ctrl_c_ends_a_wait(tmp_path: Path, backend: str) -> None:
    code = f"""
import os, signal, threading, time
from offload.aio import DirectFile, IoQueue
file, queue = DirectFile({str(tmp_path / "file")!r}, create=True), IoQueue({backend!r}, threads=1)
try:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        queue.write(file, 0, bytes(16 << 20)).wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    done = warm_process.python(code, timeout=120)
    assert done.stdout.strip() == "interrupted" and done.returncode == 0


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


class Clock:
    """A clock that goes on by what somebody waits."""

    def __init__(self) -> None:
        self.now, self.waits = 1000.0, list[float]()

    def monotonic(self) -> float:
        return self.now


class Silent:
    """A request of the native queue that is not answered for `seconds`."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._left = clock, seconds

    def wait(self, seconds: float) -> int:
        self._clock.waits.append(seconds)
        passed = min(seconds, self._left)
        self._clock.now += passed
        self._left -= passed
        return -1 if self._left else 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    testing.replace(monkeypatch, "clock.drive", clock)
    return clock


@pytest.mark.parametrize(("seconds", "told"), [(29, []), (100, [30, 90]), (400, [30, 90, 150, 210, 270, 330, 390])])
def test_a_request_without_an_answer_is_told_after_half_a_minute_and_every_minute_then(
    seconds: float, told: list[int], clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DirectFile(tmp_path / "states", create=True) as file:
        flight: Any = Silent(clock, seconds)
        callbacks: Any = None
        assert IoFuture(callbacks, flight, "read", file, 8192, 4096, False).wait() == 4096
    lines = [each.getMessage() for each in caplog.records]
    assert [int(line.split(" has not answered for ")[1].split(" s:")[0]) for line in lines] == told
    assert all(f"read of 4096 bytes at offset 8192 of {tmp_path / 'states'};" in line for line in lines)


def test_a_commit_that_waits_for_the_drive_is_told_while_it_waits(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fdatasync has no limit: another thread speaks."""
    said, lines = threading.Event(), list[str]()

    def announce(line: str) -> None:
        if "commit of step" in line:  # not of the reads beside it, in a folder of this test's name
            lines.append(line)
            said.set()

    store = created(tmp_path, queue)
    update(store, 0, 1)
    testing.replace(monkeypatch, "clock.drive_notice", 0.0)
    testing.replace(monkeypatch, "io.notice", announce)
    testing.intercept(monkeypatch, "store.sync", lambda sync, files: (said.wait(60), sync(files)))
    before = set(threading.enumerate())
    store.commit(7, blob("one"))
    assert f"commit of step 7 to {store.folders[0]}, fdatasync of {store.folders[0] / 'states'};" in lines[0]
    assert set(threading.enumerate()) <= before, "the thread ends with the call"
    store.close()


def _sync_folder(folder: Path) -> None:
    sync_folder(folder)


def _write_new(folder: Path) -> None:
    write_new(folder / "file", b"x")


def _note(folder: Path) -> None:
    (folder / "run").mkdir()
    write_durably(folder / "run" / "closed.json", b"{}")


def _page(folder: Path) -> None:
    atomic_write(folder / "file", "x")


@pytest.mark.parametrize("write", [_sync_folder, _write_new, _note, _page])
def test_a_small_file_that_waits_for_the_drive_is_told_once(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also inside of a wait that is told by its own name, as the syncs of a commit are."""
    lines, said = list[str](), threading.Event()

    def announce(line: str) -> None:
        lines.append(line)
        said.set()

    fsync = os.fsync
    testing.replace(monkeypatch, "clock.drive_notice", 0.0)
    testing.replace(monkeypatch, "io.notice", announce)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (said.wait(60), fsync(descriptor)))
    write(tmp_path)
    assert f"fsync of {tmp_path}" in lines[0]
    said.clear()
    lines.clear()
    with (tmp_path / "other").open("w") as file, unanswered.aloud(lambda: "all of it"):
        unanswered.sync(file.fileno(), "a part")
        unanswered.sync(file.fileno(), "another")
    assert len(lines) == 1 and "all of it" in lines[0]


def test_a_write_needs_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None can be started at the end of Python, nor where a user has too many."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    write_new(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_bytes() == b"x"
