"""A file is replaced completely or not at all, by one function for all rooms."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from offload.fileio import atomic_write, keep_mode_and_owner, write_new


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
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, "new")
    assert path.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_two_threads_that_write_one_file_write_it_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins and ends while the first has written its text and not yet renamed it."""
    path, sync = tmp_path / "file", os.fsync

    def late(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        other = threading.Thread(target=atomic_write, args=(path, "other"))
        other.start()
        other.join()
        assert path.read_text() == "other"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", late)
    atomic_write(path, "the first one")
    assert path.read_text() == "the first one" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_mode_stays_where_the_owner_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_permitted(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", not_permitted)
    old, new = tmp_path / "old", tmp_path / "new"
    for each in (old, new):
        each.mkdir()
    old.chmod(0o2750)
    keep_mode_and_owner(old.stat(), new)
    assert stat.S_IMODE(new.stat().st_mode) == 0o2750


def test_a_new_file_that_cannot_be_written_is_not_left_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_new(tmp_path / "file", b"bytes")
    assert not list(tmp_path.iterdir())
    write_new(tmp_path / "file", b"bytes")
    with pytest.raises(FileExistsError):
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


def test_a_device_is_written_to(tmp_path: Path) -> None:
    read, write = os.pipe()
    atomic_write(Path(f"/proc/self/fd/{write}"), "words")
    assert os.read(read, 9) == b"words"
    os.close(read)
    os.close(write)
