"""A request of any size, offset and address moves all of its bytes, or raises an error that names the failure."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offload.aio import DirectFile, IoQueue, Priority, aligned_empty
from offload.errors import IoError, UsageError
from tests.aio.aio_queues import noise, queue
from tests.support.processes import warm_process

__all__ = ["queue"]  # fixtures

SIZES = [0, 1, 511, 4095, 4096, 4097, 12289, (1 << 20) + 1, 3 << 20]

OFFSETS = [0, 1, 4095, 4096, 8191]


@pytest.fixture(params=["disk", "memory", "overlay"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A real file system, tmpfs, which has O_DIRECT only since Linux 6.6, and the layers of a container."""
    if request.param == "disk":
        yield tmp_path
        return
    if request.param == "overlay":
        parts = {name: tmp_path / name for name in ("lower", "upper", "work", "merged")}
        for part in parts.values():
            part.mkdir()
        layers = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
        command = ["mount", "-t", "overlay", "-o", layers, "none", str(parts["merged"])]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("only root can mount an overlay, and not everywhere")
        yield parts["merged"]
        subprocess.run(["umount", "-l", str(parts["merged"])], check=True)
        return
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no /dev/shm")
    place = shared / f"offload-test-{os.getpid()}"
    place.mkdir()
    yield place
    for path in place.iterdir():
        path.unlink()
    place.rmdir()


@pytest.mark.sample(4)
@pytest.mark.parametrize("skew", [0, 1, 512], ids=lambda skew: f"address+{skew}")
def test_any_size_offset_and_address(queue: IoQueue, folder: Path, skew: int) -> None:
    path = folder / "file"
    with DirectFile(path, create=True) as file:
        for nbytes in SIZES:
            for offset in OFFSETS:
                before = noise(offset + nbytes + 5000, 1)
                path.write_bytes(before)
                buffer = aligned_empty(nbytes + skew)[skew:]
                buffer[:] = noise(nbytes, 2)
                assert queue.write(file, offset, buffer).wait() == nbytes
                expected = before[:offset] + bytes(buffer) + before[offset + nbytes :]
                assert path.read_bytes() == expected, "and nothing beside it"
                back = aligned_empty(nbytes + skew)[skew:]
                assert queue.read(file, offset, back).wait() == nbytes
                assert back == buffer


def test_a_file_on_a_disk_is_direct(tmp_path: Path) -> None:
    with DirectFile(tmp_path / "file", create=True) as file:
        if not file.direct:
            pytest.skip("this file system has no O_DIRECT")
        flags = fcntl.fcntl(file.descriptors.direct, fcntl.F_GETFL)
        assert flags & os.O_DIRECT and os.readlink(f"/proc/self/fd/{file.descriptors.direct}") == file.path


def test_a_file_system_without_o_direct(queue: IoQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with DirectFile(tmp_path / "file", create=True) as file:
        monkeypatch.undo()
        assert not file.direct
        data, back = noise(100_001), bytearray(100_001)
        queue.write(file, 4096, data).wait()
        queue.read(file, 4096, back).wait()
        assert back == data


def test_many_requests_from_many_threads(queue: IoQueue, tmp_path: Path) -> None:
    """Each thread has its own pages of one file; half of them are read while others are written."""
    with DirectFile(tmp_path / "file", create=True) as file:
        file.reserve(64 << 16)
        wrong: list[int] = []

        def work(index: int) -> None:
            buffer, back = aligned_empty(1 << 16), aligned_empty(1 << 16)
            for turn in range(20):
                buffer[:] = noise(1 << 16, 64 * index + turn)
                queue.write(file, index << 16, buffer).wait()
                queue.read(file, index << 16, back).wait()
                if back != buffer:
                    wrong.append(index)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_read_past_the_end_is_an_error_of_that_request_alone(queue: IoQueue, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(noise(10_000))
    with DirectFile(tmp_path / "file") as file:
        short, good = aligned_empty(8192), aligned_empty(8192)
        bad = queue.read(file, 4096, short)
        fine = queue.read(file, 0, good)
        with pytest.raises(IoError) as caught:
            bad.wait()
        assert (caught.value.errno, caught.value.offset, caught.value.nbytes) == (errno.ENODATA, 4096, 8192)
        assert caught.value.path == file.path and "read" in str(caught.value)
        assert fine.wait() == 8192 and bytes(good) == noise(10_000)[:8192]


@pytest.mark.sample(1)
def test_a_limit_on_file_size_is_an_error(tmp_path: Path, backend: str) -> None:
    code = f"""
import resource, signal
from offload.aio import DirectFile, IoQueue, aligned_empty
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with DirectFile({str(tmp_path / "file")!r}, create=True) as file, IoQueue({backend!r}, block_bytes=65536) as queue:
    inside = queue.write(file, 0, aligned_empty(1 << 20))
    beyond = queue.write(file, (1 << 20) - 8192, aligned_empty(1 << 20))
    assert inside.wait() == 1 << 20
    try:
        beyond.wait()
    except OSError as error:
        print(error.errno)
"""
    done = warm_process.python(code)
    assert done.stdout.strip() == str(errno.EFBIG) and done.stderr == ""


def test_a_full_disk_is_an_error_of_that_request_alone(queue: IoQueue, tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small file system")
    try:
        with DirectFile(tmp_path / "file", create=True) as file:
            file.reserve(65536)  # or the other request might take the last room first
            fine, bad = queue.write(file, 0, aligned_empty(65536)), queue.write(file, 65536, aligned_empty(2 << 20))
            with pytest.raises(IoError) as caught:
                bad.wait()
            assert (caught.value.errno, caught.value.offset) == (errno.ENOSPC, 65536)
            assert fine.wait() == 65536
            with pytest.raises(IoError) as caught:
                file.reserve(2 << 20)
            assert (caught.value.errno, caught.value.nbytes) == (errno.ENOSPC, 2 << 20)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)  # lazily: a failed test may hold files


def _overtakes(backend: str, path: Path, long: str, short: str, priority: Priority | None = None) -> bool:
    """Whether a short request that comes after a long one can end before it.

    Once in many tries is enough: this thread may sleep while the long one is moved, and in strict order of arrival it
    would never be so.
    """
    with (
        DirectFile(path, create=True) as file,
        IoQueue(backend, threads=1, depth=4, block_bytes=16 << 10) as queue,
    ):
        file.reserve(64 << 20)
        buffers = aligned_empty(48 << 20), aligned_empty(16 << 10)
        given = {} if priority is None else {"priority": priority}
        for _ in range(50):
            order: list[str] = []
            first = getattr(queue, long)(file, 0, buffers[0])
            second = getattr(queue, short)(file, 60 << 20, buffers[1], **given)
            first.add_done_callback(lambda _, order=order: order.append("long"))
            second.add_done_callback(lambda _, order=order: order.append("short"))
            while len(order) < 2:
                time.sleep(0.001)
            if order == ["short", "long"]:
                return True
    return False


def test_reads_go_before_writes(tmp_path: Path, backend: str) -> None:
    assert _overtakes(backend, tmp_path / "file", "write", "read")


def test_writes_are_not_starved_by_reads(tmp_path: Path, backend: str) -> None:
    assert _overtakes(backend, tmp_path / "file", "read", "write")


def test_urgent_goes_before_normal(tmp_path: Path, backend: str) -> None:
    assert _overtakes(backend, tmp_path / "file", "read", "read", Priority.URGENT)


def test_numpy_arrays_are_written_and_read(queue: IoQueue, tmp_path: Path) -> None:
    with DirectFile(tmp_path / "file", create=True) as file:
        array, back = np.arange(5000.0).reshape(50, 100), np.empty((50, 100))
        assert queue.write(file, 0, array).wait() == array.nbytes
        queue.read(file, 0, back).wait()
        assert np.array_equal(back, array)


def test_wrong_buffers_and_arguments(queue: IoQueue, tmp_path: Path) -> None:
    with DirectFile(tmp_path / "file", create=True) as file:
        with pytest.raises(ValueError, match="writable"):
            queue.read(file, 0, b"read only")
        for strided in (memoryview(bytearray(64))[::2], np.zeros((4, 4)).T, np.zeros(8)[::-1]):
            with pytest.raises(ValueError, match="C-contiguous"):
                queue.write(file, 0, strided)
        with pytest.raises(TypeError, match="bytes-like"):
            queue.write(file, 0, "text")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="offset"):
            queue.write(file, -1, b"x")
    with pytest.raises(UsageError, match="closed"):
        queue.write(file, 0, b"x")
    with pytest.raises(ValueError, match="threads"):
        IoQueue(threads=0)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(IoError) as caught:
        DirectFile(tmp_path / "none")
    assert caught.value.errno == errno.ENOENT and caught.value.operation == "open"
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(IoError) as caught:
        DirectFile(tmp_path / "link", create=True)
    assert caught.value.errno == errno.ELOOP and not (tmp_path / "target").exists()


def test_reserve_is_real_zeroed_and_never_shrinks(tmp_path: Path, backend: str) -> None:
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        file.reserve(1 << 20)
        assert file.size() == 1 << 20 and os.stat(file.path).st_blocks * 512 >= 1 << 20
        buffer = aligned_empty(1 << 20)
        buffer[:] = noise(1 << 20)
        queue.read(file, 0, buffer).wait()
        assert not any(buffer)
        file.reserve(4096)
        assert file.size() == 1 << 20
        file.sync()
    assert os.stat(tmp_path / "file").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("offset", [2**63, 2**64 - 1, 2**64, 2**63 - 9, -1])
def test_an_offset_beyond_any_file(queue: IoQueue, tmp_path: Path, offset: int) -> None:
    """To io_uring an offset of -1 is the place where the descriptor is."""
    (tmp_path / "file").write_bytes(b"0123456789")
    with DirectFile(tmp_path / "file") as file, pytest.raises(ValueError, match="offset"):
        queue.write(file, offset, b"CORRUPTED!")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_arguments_that_mean_nothing(queue: IoQueue, tmp_path: Path) -> None:
    with DirectFile(tmp_path / "file", create=True) as file:
        for call, error in (
            (lambda: queue.read(file, 0, bytearray(1), expect_crc32c=-1), ValueError),
            (lambda: queue.read(file, 0, bytearray(1), expect_crc32c=1 << 32), ValueError),
            (lambda: queue.read(file, 0, bytearray(1), priority=9), ValueError),
            (lambda: queue.read(file, 1.5, bytearray(1)), TypeError),
            (lambda: queue.latency("read", 2), ValueError),
            (lambda: IoQueue(depth=1 << 20), ValueError),
            (lambda: IoQueue(block_bytes=1 << 40), ValueError),
        ):
            with pytest.raises(error):
                call()


@pytest.mark.sample(1)
def test_the_deepest_queue(backend: str, tmp_path: Path) -> None:
    with (
        DirectFile(tmp_path / "file", create=True) as file,
        IoQueue(backend, depth=4096, block_bytes=4096) as queue,
    ):
        data, back = aligned_empty(32 << 20), aligned_empty(32 << 20)
        data[:] = noise(32 << 20)
        queue.write(file, 0, data).wait()
        queue.read(file, 0, back).wait()
        assert back == data


def test_a_file_that_is_renamed_over_is_one_file(backend: str, tmp_path: Path) -> None:
    """Both descriptors are of the inode that was opened first."""
    one, other = b"A" * 20_000, b"B" * 20_000
    real, seen = os.open, []

    def swap(path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = real(path, flags, mode)
        if not seen:
            seen.append(path)
            (tmp_path / "new").write_bytes(other)
            os.rename(tmp_path / "new", tmp_path / "file")
        return descriptor

    (tmp_path / "file").write_bytes(one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", swap)
        file = DirectFile(tmp_path / "file")
    with file, IoQueue(backend) as queue:
        back = aligned_empty(20_000)
        queue.read(file, 0, back).wait()
        assert back == one and seen


def test_bytes_are_counted(queue: IoQueue, tmp_path: Path) -> None:
    with DirectFile(tmp_path / "file", create=True) as file:
        queue.write(file, 100, bytes(10_000)).wait()
        queue.read(file, 100, bytearray(9_000)).wait()
        assert (queue.written_bytes, queue.read_bytes) == (10_000, 9_000)
