"""A failed request raises its own error with place and reason; the other requests and the queue continue."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.aio import DirectFile, IoFuture, IoQueue, aligned_empty
from offload.errors import IoError, UsageError
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


def test_eio_of_some_blocks_alone(tmp_path: Path) -> None:
    """EIO at one offset of `pread`, put in by LD_PRELOAD: of the threads, since the rings go past libc."""
    source, library = tmp_path / "eio.c", tmp_path / "eio.so"
    source.write_text(
        """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/types.h>
ssize_t pread64(int fd, void *data, size_t n, off_t at) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread64");
    if (at <= 5 * 65536 && 5 * 65536 < at + (off_t)n) { errno = EIO; return -1; }
    return real(fd, data, n > 20480 ? 20480 : n, at);
}
ssize_t pread(int fd, void *data, size_t n, off_t at) { return pread64(fd, data, n, at); }
"""
    )
    built = subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=False)
    if built.returncode != 0:
        pytest.skip("no C compiler")
    data = random.Random(0).randbytes(16 * 65536)
    (tmp_path / "file").write_bytes(data)
    code = f"""
from offload.aio import DirectFile, IoQueue, aligned_empty
data = open({str(tmp_path / "file")!r}, "rb").read()
with DirectFile({str(tmp_path / "file")!r}) as file, IoQueue("threads", block_bytes=65536) as queue:
    parts = [(at, n, aligned_empty(n)) for at, n in ((0, 5 * 65536), (4 * 65536, 4 * 65536), (6 * 65536, 10 * 65536))]
    futures = [(at, n, back, queue.read(file, at, back)) for at, n, back in parts]
    for at, n, back, future in futures:
        try:
            print(future.wait(), back == data[at:at + n])
        except OSError as error:
            print(error.errno, error.offset, error.nbytes)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [f"{5 * 65536} True", f"{errno.EIO} {4 * 65536} {4 * 65536}", f"{10 * 65536} True"]
    assert (done.stdout.splitlines(), done.stderr) == (lines, "")


def test_a_file_cut_short_under_its_reader(backend: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(random.Random(0).randbytes(4 * MIB))
    with DirectFile(tmp_path / "file") as file, IoQueue(backend, block_bytes=256 << 10) as queue:
        target = aligned_empty(4 * MIB)
        assert queue.read(file, 0, target).wait() == 4 * MIB
        os.truncate(tmp_path / "file", 2 * MIB + 100)
        error = _error_of(queue.read(file, 0, target))
        assert (error.errno, error.offset, error.nbytes) == (errno.ENODATA, 0, 4 * MIB)
        assert queue.read(file, 0, target[: 2 * MIB + 100]).wait() == 2 * MIB + 100


@pytest.mark.parametrize("size", [0, 1, 4096, 10_000])
def test_a_read_past_the_end(backend: str, tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(bytes(size))
    with DirectFile(tmp_path / "file") as file, IoQueue(backend) as queue:
        for offset, nbytes in ((0, size + 1), (size, 1), (size + 4096, 4096)):
            assert _error_of(queue.read(file, offset, aligned_empty(nbytes))).errno == errno.ENODATA
        assert queue.read(file, 0, bytearray(size)).wait() == size


def test_a_write_to_a_file_opened_for_reading(backend: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(MIB))
    with DirectFile(tmp_path / "file", writable=False) as file, IoQueue(backend) as queue:
        assert _error_of(queue.write(file, 0, aligned_empty(8192))).errno == errno.EBADF
        assert queue.read(file, 0, aligned_empty(8192)).wait() == 8192


def test_a_path_that_is_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(IoError, match=r"symbolic link.*realpath") as caught:
        DirectFile(tmp_path / "link", create=True)
    assert caught.value.errno == errno.ELOOP and (tmp_path / "target").read_bytes() == b"kept"
    with DirectFile((tmp_path / "link").resolve()) as file:
        assert file.size() == 4


def test_a_folder_is_refused_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(IoError) as caught:
        DirectFile(tmp_path)
    assert caught.value.errno == errno.EISDIR


def test_a_closed_queue_refuses_requests(backend: str, tmp_path: Path) -> None:
    with DirectFile(tmp_path / "file", create=True) as file:
        queue = IoQueue(backend)
        queue.close()
        for call in (
            lambda: queue.read(file, 0, bytearray(1)),
            lambda: queue.write(file, 0, b"x"),
            lambda: queue.register(file),
        ):
            with pytest.raises(UsageError, match="closed"):
                call()


@pytest.mark.sample(1)
def test_a_signal_storm_interrupts_no_request(backend: str, tmp_path: Path) -> None:
    """Hundreds of interruptions, of every thread that takes signals, and not a byte wrong."""
    code = f"""
import random, signal
from offload.aio import DirectFile, IoQueue, aligned_empty
count = 0
def handle(*_):
    global count
    count += 1
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
data, back = aligned_empty(8 << 20), aligned_empty(8 << 20)
data[:] = random.Random(0).randbytes(len(data))
with DirectFile({str(tmp_path / "file")!r}, create=True) as file, IoQueue({backend!r}, block_bytes=65536) as queue:
    while count < 500:
        back[:] = bytes(len(back))
        for operation, buffer in (("write", data), ("read", back)):
            step = 512 << 10
            futures = [getattr(queue, operation)(file, at, buffer[at:at + step]) for at in range(0, len(data), step)]
            assert sum(future.wait() for future in futures) == len(data)
        assert back == data
signal.setitimer(signal.ITIMER_REAL, 0)
print("right")
"""
    done = warm_process.python(code, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


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


def test_an_error_does_not_stop_what_else_is_in_flight(backend: str, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(4096))
    with (
        DirectFile(tmp_path / "short") as short,
        DirectFile(tmp_path / "good", create=True) as good,
        IoQueue(backend, block_bytes=4096, depth=4) as queue,
    ):
        good.reserve(64 << 12)
        futures: list[tuple[bool, IoFuture]] = []
        for index in range(64):
            futures.append((True, queue.read(good, index << 12, aligned_empty(4096))))
            futures.append((False, queue.read(short, 0, aligned_empty(5 * 4096))))
        for fine, future in futures:
            if fine:
                assert future.wait() == 4096
            else:
                assert _error_of(future).errno == errno.ENODATA


def test_many_threads_and_errors(backend: str, tmp_path: Path) -> None:
    """Each error reaches who asked, once a wait, and nobody else."""
    (tmp_path / "file").write_bytes(bytes(MIB))
    surprises: list[BaseException] = []
    with DirectFile(tmp_path / "file") as file, IoQueue(backend, threads=2, depth=3, block_bytes=65536) as queue:

        def work(index: int) -> None:
            try:
                for turn in range(50):
                    if (turn + index) % 3:
                        assert queue.read(file, 0, bytearray(MIB)).wait() == MIB
                    else:
                        future = queue.read(file, MIB - 1, bytearray(MIB))
                        assert [_error_of(future).errno for _ in range(2)] == [errno.ENODATA] * 2
            except BaseException as error:
                surprises.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not surprises
