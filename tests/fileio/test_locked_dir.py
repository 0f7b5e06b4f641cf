"""The lock on a folder has one named holder; it ends with its process, or for all by `remove`."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from offload.fileio import DirLock, LockHeldError, holder_of, locked_dir, this_process
from tests.support.processes import warm_process


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
    monkeypatch.setattr("offload.fileio.locked_dir.time.sleep", lambda _: first.close())
    second = DirLock(tmp_path / "lock", tries=2)
    assert second.held and not first.held
    second.close()


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes the file between the two calls of whoever comes next, who then locks a new one."""
    path, real = tmp_path / "lock", locked_dir._flock
    first = DirLock(path)

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        first.remove()
        real(descriptor, operation)

    monkeypatch.setattr(locked_dir, "_flock", late)
    second = DirLock(path)
    assert second.held and holder_of(path) == this_process()
    second.remove()


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
