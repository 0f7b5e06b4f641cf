"""A file is replaced completely or not at all, by one function for all rooms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.fileio import atomic_write


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
