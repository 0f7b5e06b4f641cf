"""Files are written whole or not at all, under locks, in buffers."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload import testing
from offload.errors import IoError
from offload.fileio import DirLock, LockHeldError, atomic_write, holder_of, this_process, write_new
from offload.fileio.buffered_copy import WriteBehind, flow
from tests.support.processes import warm_process


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_made_and_replaced_and_nothing_lies_beside_it(tmp_path: Path, durable: bool) -> None:
    for text in ("first\n", "µ\r\n"):
        atomic_write(tmp_path / "file", text, durable=durable)
        assert (tmp_path / "file").read_bytes() == text.encode()
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_stays_and_so_do_modes(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    atomic_write(link, "new")
    assert link.is_symlink() and target.read_text() == "new" and target.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_where_it_fails_the_old_file_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(IoError, match=f"cannot write {path}: .Errno 28. No space left"):
        atomic_write(path, "new")
    assert path.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_two_threads_that_write_one_file_write_it_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins and ends while the first has written its text and not yet renamed it."""
    path, sync = tmp_path / "file", os.fsync

    def late(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        thread = threading.Thread(target=atomic_write, args=(path, "other"))
        thread.start()
        thread.join()
        assert path.read_text() == "other"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", late)
    atomic_write(path, "the first one")
    assert path.read_text() == "the first one" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_new_file_that_cannot_be_written_is_not_left_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(IoError, match=f"cannot write {tmp_path}/file: .Errno 28. No space left"):
            write_new(tmp_path / "file", b"bytes")
    assert not list(tmp_path.iterdir())
    write_new(tmp_path / "file", b"bytes")
    with pytest.raises(IoError, match="File exists"):
        write_new(tmp_path / "file", b"others")
    assert (tmp_path / "file").read_bytes() == b"bytes"


def test_a_kill_before_the_exchange_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    child = os.fork()
    if not child:
        os.replace = lambda *_: os._exit(9)
        atomic_write(path, "new")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert path.read_text() == "old"


class Request:
    """A request that ends when somebody waits for it, or fails then."""

    def __init__(self, fails: bool = False) -> None:
        self._fails, self.waited = fails, 0

    def done(self) -> bool:
        return bool(self.waited)

    def wait(self) -> int:
        self.waited += 1
        if self._fails:
            raise IoError("file", 0, 0, errno.EIO, "write")
        return 1


def test_a_buffer_is_filled_again_when_its_writes_have_ended() -> None:
    buffers = [memoryview(bytearray(1)) for _ in range(3)]
    requests: list[Request] = []
    with WriteBehind(buffers) as behind:
        for index in range(7):
            buffer, writes = behind.take()
            assert buffer is buffers[index % 3] and not writes
            assert [request.waited for request in requests] == [1] * max(index - 2, 0) + [0] * min(index, 2)
            requests.append(Request())
            writes.append(requests[-1])  # type: ignore[arg-type]
    assert all(request.waited for request in requests)


@pytest.mark.parametrize("failing", range(4))
def test_the_error_of_a_write_comes_once_and_after_all_writes(failing: int) -> None:
    requests = [Request(fails=index == failing) for index in range(4)]
    raised = 0

    def write() -> None:
        nonlocal raised
        with WriteBehind([memoryview(bytearray(1)) for _ in range(2)]) as behind:
            for request in requests:
                try:
                    _, writes = behind.take()
                except IoError:
                    raised += 1
                    raise
                writes.append(request)  # type: ignore[arg-type]

    with pytest.raises(IoError) as caught:
        write()
    assert caught.value.errno == errno.EIO and raised == (failing < 2), "at the next use of the buffer, or at the end"
    begun = failing + 2 if failing < 2 else 4
    assert all(request.waited for request in requests[:begun])


def test_reads_that_began_before_one_that_cannot_are_awaited() -> None:
    begun: list[Request] = []

    def begin(item: int, _: memoryview) -> Iterator[Request]:
        for part in range(3):
            if (item, part) == (1, 2):
                raise IoError("file", 0, 0, errno.EBADF, "read")
            begun.append(Request())
            yield begun[-1]

    with pytest.raises(IoError, match="cannot read file"):
        flow([memoryview(bytearray(1)) for _ in range(4)], range(3), begin, lambda *_: (), lambda *_: None)
    assert len(begun) == 5 and all(request.waited == 1 for request in begun)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_chunks_are_ended_in_their_order_whatever_the_buffers(count: int) -> None:
    ended: list[int] = []

    def end(item: int, _: memoryview) -> tuple[()]:
        ended.append(item)
        return ()

    flow([memoryview(bytearray(1)) for _ in range(count)], range(9), lambda *_: [Request()], end, lambda *_: None)
    assert ended == list(range(9))


def test_one_holder_at_a_time_that_others_can_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder_of(path) is None
    lock = DirLock(path, " (tag)", mode=0o640)
    assert lock.held and holder_of(path) == f"{this_process()} (tag)"
    with pytest.raises(LockHeldError) as error:
        DirLock(path, tries=2)
    assert error.value.holder == f"{this_process()} (tag)"
    lock.close()
    assert not lock.held and holder_of(path) is None and path.exists()
    DirLock(path).remove()
    assert not path.exists()


def test_a_forked_child_neither_ends_nor_keeps_it(tmp_path: Path) -> None:
    """`close` in a child leaves the parent's lock; `remove` in the parent frees it though a child has the file open."""
    path, (read, write) = tmp_path / "lock", os.pipe()
    lock = DirLock(path)
    closes = os.fork()
    if not closes:
        lock.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(closes, 0)[1]) == 0 and holder_of(path) == this_process()
    stays = os.fork()
    if not stays:
        os.close(write)
        os.read(read, 1)  # until the parent closes its end
        os._exit(0)
    kept = os.open(path, os.O_RDONLY)
    try:
        lock.remove()
        fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the child's copy still locks the file
    finally:
        os.close(kept)
        os.close(write)
        os.close(read)
        os.waitpid(stays, 0)


def test_a_file_system_without_locks_is_warned_of_and_excludes_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuses)
    locks = [DirLock(tmp_path / "lock") for _ in range(2)]
    assert all(lock.refused is not None and lock.held for lock in locks) and holder_of(tmp_path / "lock") is None
    for lock in locks:
        lock.remove()
    assert not (tmp_path / "lock").exists()


def test_who_waits_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that goes between two tries is no obstacle."""
    first = DirLock(tmp_path / "lock")
    monkeypatch.setattr(time, "sleep", lambda _: first.close())
    second = DirLock(tmp_path / "lock", tries=2)
    assert second.held and not first.held
    second.close()


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes the file between the two calls of whoever comes next, who then locks a new one."""
    path = tmp_path / "lock"
    first = DirLock(path)

    def late(real: Callable[[int, int], None], descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        first.remove()
        real(descriptor, operation)

    testing.intercept(monkeypatch, "file.lock", late)
    second = DirLock(path)
    assert second.held and holder_of(path) == this_process()
    second.remove()


@pytest.mark.sample(1)
@pytest.mark.parametrize("locked", [False, True])
def test_a_pipe_in_the_place_of_the_lock_has_no_holder(locked: bool, tmp_path: Path) -> None:
    """To open one for reading waits for a writer, and it has no text to read: in a process that would not end."""
    os.mkfifo(tmp_path / "lock")
    script = f"""
import fcntl, os
from pathlib import Path
from offload.fileio import holder_of
path = Path({str(tmp_path / "lock")!r})
if {locked}:
    other = os.open(path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
print(holder_of(path))
"""
    done = warm_process.python(script, timeout=120)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
