"""The queue moves all bytes of any request, and its futures say how each ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offload.aio import DirectFile, IoFuture, IoQueue, aligned_empty
from offload.errors import IoError, UsageError
from tests.support.processes import warm_process


@pytest.fixture(params=[1, 4], ids=["one thread", "four threads"])
def any_queue(request: pytest.FixtureRequest, backend: str) -> Iterator[IoQueue]:
    with IoQueue(backend, threads=request.param, depth=6, block_bytes=64 << 10) as queue:
        yield queue


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


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
def test_any_size_offset_and_address(any_queue: IoQueue, folder: Path, skew: int) -> None:
    path = folder / "file"
    with DirectFile(path, create=True) as file:
        for nbytes in SIZES:
            for offset in OFFSETS:
                before = noise(offset + nbytes + 5000, 1)
                path.write_bytes(before)
                buffer = aligned_empty(nbytes + skew)[skew:]
                buffer[:] = noise(nbytes, 2)
                assert any_queue.write(file, offset, buffer).wait() == nbytes
                expected = before[:offset] + bytes(buffer) + before[offset + nbytes :]
                assert path.read_bytes() == expected, "and nothing beside it"
                back = aligned_empty(nbytes + skew)[skew:]
                assert any_queue.read(file, offset, back).wait() == nbytes
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


def test_a_read_past_the_end_is_an_error_of_that_request_alone(any_queue: IoQueue, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(noise(10_000))
    with DirectFile(tmp_path / "file") as file:
        short, good = aligned_empty(8192), aligned_empty(8192)
        bad = any_queue.read(file, 4096, short)
        fine = any_queue.read(file, 0, good)
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


def test_a_file_that_is_renamed_over_is_one_file(backend: str, tmp_path: Path) -> None:
    """Both descriptors are of the inode that was opened first."""
    left, right = b"A" * 20_000, b"B" * 20_000
    real, seen = os.open, []

    def swap(path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = real(path, flags, mode)
        if not seen:
            seen.append(path)
            (tmp_path / "new").write_bytes(right)
            os.rename(tmp_path / "new", tmp_path / "file")
        return descriptor

    (tmp_path / "file").write_bytes(left)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", swap)
        file = DirectFile(tmp_path / "file")
    with file, IoQueue(backend) as queue:
        back = aligned_empty(20_000)
        queue.read(file, 0, back).wait()
        assert back == left and seen


def test_a_callback_is_called_once_with_its_future(backend: str, tmp_path: Path) -> None:
    called: list[IoFuture] = []
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        futures = [queue.write(file, index << 16, bytes(1 << 16)) for index in range(100)]
        for future in futures:
            future.add_done_callback(lambda future: called.append((future.done(), future)))
    assert {id(future) for _, future in called} == {id(future) for future in futures} and len(called) == 100
    assert all(done for done, _ in called)


def test_a_callback_may_close_the_queue(backend: str, tmp_path: Path) -> None:
    closed = threading.Event()
    with DirectFile(tmp_path / "file", create=True) as file:
        queue = IoQueue(backend)
        queue.write(file, 0, aligned_empty(1 << 20)).add_done_callback(lambda _: (queue.close(), closed.set()))
        assert closed.wait(120)
        queue.close()


def test_a_future_can_be_awaited(backend: str, tmp_path: Path) -> None:
    async def work() -> None:
        with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:

            async def one(index: int) -> None:
                data, back = bytes([index]) * 70_000, bytearray(70_000)
                assert await queue.write(file, index * 70_000, data) == 70_000
                assert await queue.read(file, index * 70_000, back) == 70_000
                assert back == data

            await asyncio.gather(*(one(index) for index in range(50)))
            with pytest.raises(IoError) as caught:
                await queue.read(file, 1 << 30, bytearray(1))
            assert caught.value.errno == errno.ENODATA

    asyncio.run(work())


def test_a_task_that_is_cancelled_leaves_the_request(backend: str, tmp_path: Path) -> None:
    async def work() -> None:
        with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
            future = queue.write(file, 0, b"y" * (8 << 20))

            async def wait() -> int:
                return await future

            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert future.wait() == 8 << 20

    asyncio.run(work())
    assert (tmp_path / "file").read_bytes() == b"y" * (8 << 20)


@pytest.mark.sample(1)
def test_an_exit_runs_the_callbacks(backend: str, tmp_path: Path) -> None:
    code = f"""
from offload.aio import DirectFile, IoQueue
file, queue = DirectFile({str(tmp_path / "file")!r}, create=True), IoQueue({backend!r})
for index in range(8):
    queue.write(file, index << 22, bytes(4 << 20)).add_done_callback(lambda _: print("called"))
"""
    done = warm_process.python(code, timeout=120)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["called"] * 8, "")


@pytest.mark.sample(3)
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_nothing_that_a_callback_raises_ends_the_others(
    backend: str, tmp_path: Path, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: IoFuture) -> None:
        raise error

    called = threading.Event()
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        with contextlib.suppress(KeyboardInterrupt):  # where it is called at once, on this thread, that is a Ctrl-C
            queue.write(file, 0, aligned_empty(4 << 20)).add_done_callback(fail)
        queue.write(file, 0, aligned_empty(4 << 20)).add_done_callback(lambda _: called.set())
        assert called.wait(120)


def test_ctrl_c_in_a_callback_on_the_main_thread_is_not_lost(backend: str, tmp_path: Path) -> None:
    def interrupted(_: IoFuture) -> None:
        raise KeyboardInterrupt

    seen: list[IoFuture] = []
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        future = queue.write(file, 0, aligned_empty(4096))
        future.wait()
        with pytest.raises(KeyboardInterrupt):
            future.add_done_callback(interrupted)
        future.add_done_callback(seen.append)
    assert seen == [future]


def test_a_long_chain_of_callbacks(backend: str, tmp_path: Path) -> None:
    """Longer than the stack is deep, of requests that are done at once."""
    end, errors = threading.Event(), []
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:

        def go_on(left: int) -> None:
            try:
                future = queue.read(file, 0, bytearray(0))
                future.add_done_callback(lambda _: go_on(left - 1) if left else end.set())
            except BaseException as error:
                errors.append(error)
                end.set()

        queue.write(file, 0, b"x").add_done_callback(lambda _: go_on(5000))
        assert end.wait(120)
    assert not errors


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", ["after", "in a callback"])
def test_a_queue_that_is_made_at_the_very_end(backend: str, tmp_path: Path, when: str) -> None:
    """By an exit function that was registered before ours, or by a callback while queues are closed."""
    use = f"""
def use(_=None):
    from offload.aio import DirectFile, IoQueue
    file, queue = DirectFile({str(tmp_path / "file")!r}, create=True), IoQueue({backend!r})
    queue.write(file, 0, b"x" * 100000).add_done_callback(lambda future: print("called", future.wait(), flush=True))
"""
    after = """
import atexit
atexit.register(use)
import offload.aio
"""
    in_a_callback = f"""
from offload.aio import DirectFile, IoQueue
file, queue = DirectFile({str(tmp_path / "other")!r}, create=True), IoQueue({backend!r})
queue.write(file, 0, bytes(64 << 20)).add_done_callback(use)
"""
    start = after if when == "after" else in_a_callback
    done = warm_process.python(use + start, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "called 100000\n", "")
