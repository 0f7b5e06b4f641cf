"""A drive that does not answer is told of: which request of which file, and for how long."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.aio import DirectFile, IoFuture, IoQueue, unanswered
from offload.fileio import atomic_write, sync_folder, write_new
from offload.swapper.store.folder import write_durably
from offload.swapper.store.store import SwapFiles
from tests.store.test_store import blob, created, update


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
    monkeypatch.setattr(unanswered, "time", clock)
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


def test_a_wait_with_a_limit_of_its_own_says_nothing(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DirectFile(tmp_path / "states", create=True) as file:
        flight: Any = Silent(clock, 100)
        callbacks: Any = None
        with pytest.raises(TimeoutError):
            IoFuture(callbacks, flight, "read", file, 0, 4096, False).wait(50)
    assert clock.waits == [50] and not caplog.records


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
    sync = SwapFiles.sync
    monkeypatch.setattr(unanswered, "NOTICE_S", 0.0)
    monkeypatch.setattr(unanswered, "announce", announce)
    monkeypatch.setattr(SwapFiles, "sync", lambda files: (said.wait(60), sync(files)))
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
    monkeypatch.setattr(unanswered, "NOTICE_S", 0.0)
    monkeypatch.setattr(unanswered, "announce", announce)
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
