"""An edit on a grid copies the slots that it overwrites; from a damaged, cut or missing copy never come wrong bits."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.aio import IoQueue, crc32c
from offload.errors import IoError, StoreError
from tests.store.store_runs import PAGE, SPEC, Contents, Run, label_of
from tests.support.drives.filesystems import mounted

OWN_NBYTES = (8192, 8192, 4096, 4096)
"""Bytes of the copies of both units, weight and moment of each. The frozen half of the second's weight is not there."""


pytestmark = pytest.mark.usefixtures("equal_drives")


class Edited:
    """A run of two commits whose units are edited behind the second; the first may be needed all the same."""

    def __init__(self, root: Path, queue: IoQueue, units: tuple[int, ...] = (0, 1)) -> None:
        self.commits: dict[str, Contents] = {}
        self._root, self._queue = root, queue
        self.run = Run(root, 1, queue, self.commits)
        self.run.create()
        self.run.commit()
        for unit in (0, 1):
            self.run.update(unit)
        self.run.commit()
        for unit in units:
            self.run.edit(unit)
        self.undo = self.run.store.folders[0] / "undo"

    def end(self) -> None:
        """Ends the process."""
        self.run.store.close()

    def opens(self, serial: int) -> None:
        """Opens commit `serial` and compares everything, at the first read and in the next process."""
        run = Run(self._root, 1, self._queue, self.commits)
        try:
            run.now = dict(self.commits[label_of(run.store.open(serial))])
            assert run.store.durable is not None and run.store.durable.serial == serial
            run.compare()
            run.restart()
            run.open()
            run.compare()
        finally:
            run.store.close()

    def is_refused(self, serial: int) -> None:
        """Checks that commit `serial` is not opened, and that the last one stays."""
        before = self.undo.read_bytes()
        run = Run(self._root, 1, self._queue, self.commits)
        with pytest.raises(StoreError, match=rf"{self.undo} is damaged: .* step 1, .*go back to a checkpoint"):
            run.store.open(serial)
        run.restart()
        assert run.store.newest_serial() == 2 and self.undo.read_bytes() == before
        run.store.close()


def test_only_what_the_edit_overwrites_is_copied(tmp_path: Path, queue: IoQueue) -> None:
    edited = Edited(tmp_path, queue)
    edited.run.edit(0)  # once more: the slot is that of the first edit
    edited.end()
    assert SPEC.frozen[1] == 4096
    assert edited.undo.stat().st_size == sum(PAGE + nbytes for nbytes in OWN_NBYTES)
    edited.opens(1)


def test_the_last_commit_needs_no_copy(tmp_path: Path, queue: IoQueue) -> None:
    edited = Edited(tmp_path, queue)
    edited.end()
    edited.undo.write_bytes(b"what a damaged drive reads" * 1000)
    edited.opens(2)
    assert not edited.undo.exists()


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def in_words_of_another_version(data: bytes) -> bytes:
    """The first page is whole and says something else."""
    body = json.dumps({**json.loads(data[: PAGE - 4]), "state": "third_moment"}).encode().ljust(PAGE - 4)
    return body + crc32c(body).to_bytes(4, "little") + data[PAGE:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of a copy": flipped(PAGE + 100),
    "a bit of the last copy": flipped(-2),
    "a bit of a page": flipped(40),
    "a bit of the second page": flipped(2 * PAGE + 8192 + 7),
    "the first page": lambda data: bytes(PAGE) + data[PAGE:],
    "cut in a copy": lambda data: data[: 2 * PAGE],
    "cut in the last copy": lambda data: data[:-1],
    "cut in a page": lambda data: data[:100],
    "all in another order": lambda data: data[PAGE:] + data[:PAGE],
    "words of another version": in_words_of_another_version,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_and_loses_nothing(damage: str, tmp_path: Path, queue: IoQueue) -> None:
    edited = Edited(tmp_path, queue)
    edited.end()
    whole = edited.undo.read_bytes()
    edited.undo.write_bytes(DAMAGES[damage](whole))
    edited.is_refused(1)
    edited.undo.write_bytes(whole)
    edited.opens(1)


def test_copies_of_another_run_are_not_put_back(tmp_path: Path, queue: IoQueue) -> None:
    edited, other = Edited(tmp_path / "one", queue), Edited(tmp_path / "other", queue)
    edited.end()
    other.end()
    edited.undo.write_bytes(other.undo.read_bytes())
    edited.is_refused(1)


@pytest.mark.parametrize("left", [1, PAGE, PAGE + 100, 2 * PAGE + 8192, 3 * PAGE + 8192 + 10])
def test_a_copy_that_a_kill_has_interrupted_is_passed_over(left: int, tmp_path: Path, queue: IoQueue) -> None:
    """Its slot is whole: the edit waits for the copy."""
    edited = Edited(tmp_path, queue, (0,))
    first = edited.undo.stat().st_size
    edited.run.store.set_aside(1)
    edited.end()
    data = edited.undo.read_bytes()
    edited.undo.write_bytes(data[: first + left] + bytes(PAGE))
    edited.opens(1)


def test_a_commit_that_is_damaged_leaves_the_one_before_with_its_copies(tmp_path: Path, queue: IoQueue) -> None:
    edited = Edited(tmp_path, queue)
    edited.end()
    commit = edited.undo.with_name("commit")
    data = commit.read_bytes()
    commit.write_bytes(data[:PAGE] + flipped(50)(data[PAGE:]))
    run = Run(tmp_path, 1, queue, edited.commits)
    run.open()
    assert run.last == "commit 0"
    assert "all data of step 1 was compared and is intact" in run.store.notices[0]
    run.compare()
    run.store.close()


def test_a_full_drive_is_named_and_what_was_copied_before_stays(tmp_path: Path, queue: IoQueue) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=1m", "tmpfs") as place:
        edited = Edited(place, queue, (0,))
        copied = edited.undo.read_bytes()
        free = os.statvfs(place).f_bavail * PAGE
        (place / "room").write_bytes(bytes(free - 3 * PAGE))  # a page and a part of the first copy fit
        newest = list(edited.run.store.newest)
        with pytest.raises(IoError, match="No space left on device") as error:
            edited.run.store.set_aside(1)
        assert error.value.errno == errno.ENOSPC and error.value.path == str(edited.undo)
        assert edited.undo.read_bytes() == copied and edited.run.store.newest == newest
        edited.end()
        edited.opens(1)


def test_a_drive_that_fails_at_the_sync_is_named(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = Edited(tmp_path, queue, (0,))

    def fail(_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(IoError, match=str(edited.undo)):
            edited.run.store.set_aside(1)
    edited.end()
    edited.opens(1)
