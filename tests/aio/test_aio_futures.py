"""A request can be waited for by any thread, by asyncio, or call back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from offload.aio import DirectFile, IoFuture, IoQueue, aligned_empty
from offload.errors import IoError
from tests.support.processes import warm_process


def test_a_callback_is_called_once_with_its_future(backend: str, tmp_path: Path) -> None:
    called: list[IoFuture] = []
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        futures = [queue.write(file, index << 16, bytes(1 << 16)) for index in range(100)]
        for future in futures:
            future.add_done_callback(lambda future: called.append((future.done(), future)))
    assert {id(future) for _, future in called} == {id(future) for future in futures} and len(called) == 100
    assert all(done for done, _ in called)


def test_a_callback_of_what_is_done_is_called_at_once(backend: str, tmp_path: Path) -> None:
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        future = queue.write(file, 0, b"x")
        future.wait()
        threads: list[threading.Thread] = []
        future.add_done_callback(lambda _: threads.append(threading.current_thread()))
        assert threads == [threading.current_thread()]
    future.add_done_callback(lambda _: threads.append(threading.current_thread()))
    assert len(threads) == 2, "also when the queue is closed"


def test_a_callback_may_submit_and_wait(backend: str, tmp_path: Path) -> None:
    """A chain of requests, each made by the callback of the one before."""
    end = threading.Event()
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:

        def go_on(index: int) -> None:
            if index == 20:
                end.set()
                return
            future = queue.write(file, index, bytes([index]))
            future.add_done_callback(lambda future: (future.wait(), go_on(index + 1)))

        go_on(0)
        assert end.wait(120)
    assert (tmp_path / "file").read_bytes() == bytes(range(20))


def test_a_callback_that_raises_harms_nobody(backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()
    with (
        caplog.at_level(logging.ERROR, logger="offload.aio"),
        DirectFile(tmp_path / "file", create=True) as file,
        IoQueue(backend) as queue,
    ):
        queue.write(file, 0, aligned_empty(4 << 20)).add_done_callback(lambda _: 1 / 0)
        queue.write(file, 0, aligned_empty(4 << 20)).add_done_callback(lambda _: called.set())
    assert called.is_set() and "ZeroDivisionError" in caplog.text


def test_a_callback_may_close_the_queue(backend: str, tmp_path: Path) -> None:
    closed = threading.Event()
    with DirectFile(tmp_path / "file", create=True) as file:
        queue = IoQueue(backend)
        queue.write(file, 0, aligned_empty(1 << 20)).add_done_callback(lambda _: (queue.close(), closed.set()))
        assert closed.wait(120)
        queue.close()


def test_callbacks_of_an_error(backend: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"short")
    errors: list[int | None] = []

    def note(future: IoFuture) -> None:
        try:
            future.wait()
        except IoError as error:
            errors.append(error.errno)

    with DirectFile(tmp_path / "file") as file, IoQueue(backend) as queue:
        queue.read(file, 0, bytearray(100)).add_done_callback(note)
    assert errors == [errno.ENODATA]


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


@pytest.mark.sample(1)
def test_the_loop_goes_on_while_it_awaits(backend: str, tmp_path: Path) -> None:
    async def work() -> int:
        turns = 0
        with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend, block_bytes=65536) as queue:

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            counting = asyncio.create_task(count())
            await queue.write(file, 0, aligned_empty(64 << 20))
            counting.cancel()
        return turns

    assert asyncio.run(work()) > 1


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


def test_wait_of_many_threads(backend: str, tmp_path: Path) -> None:
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        future = queue.write(file, 0, aligned_empty(32 << 20))
        got: list[int] = []
        threads = [threading.Thread(target=lambda: got.append(future.wait())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [32 << 20] * 8


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


def test_the_thread_of_callbacks_ends_with_the_queue(backend: str, tmp_path: Path) -> None:
    before = threading.active_count()
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        queue.write(file, 0, aligned_empty(1 << 20)).add_done_callback(lambda _: None)
        queue.write(file, 0, aligned_empty(1 << 20)).add_done_callback(lambda _: None)
    assert threading.active_count() == before


def test_every_callback_of_one_request(backend: str, tmp_path: Path) -> None:
    called: list[int] = []
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        future = queue.write(file, 0, aligned_empty(32 << 20))
        for number in range(5):
            future.add_done_callback(lambda _, number=number: called.append(number))
    assert called == list(range(5))


def test_many_tasks_await_one_request(backend: str, tmp_path: Path) -> None:
    async def work() -> list[int]:
        with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
            future = queue.write(file, 0, aligned_empty(16 << 20))

            async def one() -> int:
                return await future

            return await asyncio.wait_for(asyncio.gather(one(), one(), one()), 30)

    assert asyncio.run(work()) == [16 << 20] * 3


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
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


@pytest.mark.sample(1)
def test_a_callback_that_is_added_while_the_queue_closes(backend: str, tmp_path: Path) -> None:
    seen: list[bool] = []
    with DirectFile(tmp_path / "file", create=True) as file:
        queue = IoQueue(backend, block_bytes=65536)
        future = queue.write(file, 0, aligned_empty(256 << 20))
        closing = threading.Thread(target=queue.close)
        closing.start()
        while not queue._closed:
            pass
        future.add_done_callback(lambda future: seen.append(future.done()))
        closing.join()
    assert seen == [True]


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


def test_a_queue_that_is_dropped_leaves_nothing(backend: str, tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with DirectFile(tmp_path / "file", create=True) as file:
        before = held()
        for index in range(10):
            queue = IoQueue(backend)
            future = queue.write(file, index << 12, bytes(4096))
            future.add_done_callback(lambda _: None)
            del queue, future
        deadline = time.monotonic() + 30
        while held() != before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert held() == before
    assert (tmp_path / "file").stat().st_size == 10 << 12


@pytest.mark.sample(3)
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.sample(1)
def test_a_forked_child_ends_with_threads_that_wait(backend: str, tmp_path: Path) -> None:
    """As the process that imported the library does: see [Note: Exit]."""
    code = f"""
import os, sys, threading, time
from offload.aio import DirectFile, IoQueue
for number in range(4):
    child = os.fork()
    if child == 0:
        file, queue = DirectFile({str(tmp_path / "file")!r} + str(number), create=True), IoQueue({backend!r})
        queue.write(file, 0, bytes(1 << 20)).wait()
        def work():
            while True:
                queue.read(file, 0, bytearray(1 << 20)).wait()
        threading.excepthook = lambda _: None
        for _ in range(6):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.05)
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    done = warm_process.python(code, timeout=120)
    assert (done.stdout.split(), done.stderr) == (["5"] * 4, "")
