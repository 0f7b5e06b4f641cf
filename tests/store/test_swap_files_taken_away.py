"""Swap files that others rename, replace or delete are noticed, and never read as those of another rank."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from offload.aio import IoQueue
from offload.errors import StoreError
from offload.model_io.source import StoreSource
from offload.runs.verify import RunChecking
from offload.swapper.store import Store, StoreSpec, remove_run
from offload.swapper.store import drives as drives_module
from offload.swapper.store import folder as rank_folder
from offload.swapper.store.folder import Lock
from tests.store.store_runs import PAGE, SPEC, TRAINABLE, Contents, Run
from tests.support.drives.filesystems import mounted

pytestmark = pytest.mark.usefixtures("equal_drives")


OF_TWO = StoreSpec(SPEC.partitions, 2, {"world_size": 2, "units": []}, frozen=SPEC.frozen)


def test_ranks_that_have_changed_places_are_refused(tmp_path: Path, queue: IoQueue) -> None:
    """Their files look alike: every checksum is right, and every weight would be in a wrong place."""
    for rank in range(2):
        store = Store([tmp_path], "run", rank, OF_TWO, queue)
        store.create()
        store.commit(0, {})
        store.close()
    run = tmp_path / "run"
    for name, other in (("rank0", "aside"), ("rank1", "rank0"), ("aside", "rank1")):
        (run / name).rename(run / other)
    told = r"rank0 has the swap files of rank 1, expected those of rank 0: .* put the files of each rank back"
    store = Store([tmp_path], "run", 0, OF_TWO, queue)
    assert store.newest_serial() == 1
    with pytest.raises(StoreError, match=told):
        store.open()
    with pytest.raises(StoreError, match=told):
        StoreSource(run, queue)
    with pytest.raises(StoreError, match=told):
        RunChecking(run)


def run_of_two_commits(root: Path, queue: IoQueue, drives: int = 1) -> Run:
    commits: dict[str, Contents] = {}
    run = Run(root, drives, queue, commits)
    run.create()
    run.commit()
    run.update(0)
    run.commit()
    return run


def test_a_run_that_is_mounted_for_reads_is_verified_and_read(tmp_path: Path, queue: IoQueue) -> None:
    """As a snapshot, or a drive that is about to fail."""
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=1m", "tmpfs") as place:
        run = run_of_two_commits(place, queue)
        folder = run.store.folders[0].parent
        run.store.close()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with contextlib.closing(RunChecking(folder)) as checking:
            with pytest.raises(StoreError, match="is in use by another process"):
                Lock(folder / "rank0")
            assert checking.run(queue, lambda _: None).whole
        (states,) = (path for path in folder.rglob("states"))
        before = states.read_bytes()
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        states.write_bytes(bytes(len(before)))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with contextlib.closing(RunChecking(folder)) as checking:
            (rank,) = checking.run(queue, lambda _: None).ranks  # type: ignore[union-attr]
        assert rank.damages and not rank.wrong, "that no note can be written is no damage"


def test_a_run_of_another_user_is_read_and_not_resumed(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the refusals are made up."""
    run = run_of_two_commits(tmp_path, queue)
    folder = run.store.folders[0].parent

    def refuse(path: Path, **_: object) -> rank_folder.DirLock:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(rank_folder, "DirLock", refuse)
    with pytest.raises(StoreError, match=r"in use by process \d+ on .*wait until it has ended: a run is read"):
        RunChecking(folder)
    run.store.close()
    with contextlib.closing(RunChecking(folder)) as checking:
        assert checking.run(queue, lambda _: None).whole
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(StoreError, match="is not writable; set nvme_path to one that is"):
        run.resume()
    with pytest.raises(StoreError, match="is another user's, who alone may change it"):
        Lock(folder / "rank0", "delete")


def test_a_lock_file_that_a_cleaner_deletes_lets_nobody_in(tmp_path: Path, queue: IoQueue) -> None:
    """Such programs delete files that nobody has changed for days."""
    run = run_of_two_commits(tmp_path, queue)
    folder = run.store.folders[0]
    (folder / "lock").unlink()
    with pytest.raises(StoreError, match=f"{folder} is in use by another process"):
        Lock(folder)
    run.update(0)
    run.commit()
    run.store.close()
    run.resume()
    run.compare()
    run.store.close()


@pytest.mark.parametrize("drive", [0, 1])
def test_swap_files_that_are_deleted_beneath_a_run_are_told_once(
    drive: int, tmp_path: Path, queue: IoQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The process can still save its states, which are in files without a name."""
    run = run_of_two_commits(tmp_path, queue, drives=2)
    states = run.store.folders[drive] / "states"
    with caplog.at_level(logging.WARNING, "offload"):
        run.update(0)
        run.commit()
        assert not caplog.messages
        os.replace(states, states.with_name("moved"))
        for _ in range(2):
            run.update(0)
            run.commit()
    told = f"offload: {states} was deleted or moved while the run uses it: the run cannot be resumed after this process"
    assert [message.startswith(told) for message in caplog.messages] == [True]
    run.compare()
    run.store.close()


def test_a_copy_of_all_drives_is_read_without_the_originals(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest has the paths of the original's drives, which the original goes on writing."""
    monkeypatch.setattr(drives_module, "_STRIPE_BYTES", PAGE)
    run = run_of_two_commits(tmp_path / "here", queue, drives=2)
    run.store.close()
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    run.resume()
    for _ in range(2):
        for unit in TRAINABLE:
            run.update(unit)
        run.commit()
    run.store.close()
    copy = tmp_path / "copy" / "drives" / "0" / "run"
    with contextlib.closing(RunChecking(copy)) as checking:
        assert checking.run(queue, lambda _: None).whole
    shutil.rmtree(tmp_path / "copy" / "drives" / "1")
    with contextlib.closing(RunChecking(copy)) as checking:
        (rank,) = checking.run(queue, lambda _: None).ranks  # type: ignore[union-attr]
    missing = f"{tmp_path}/copy/drives/1/run/rank0: the folder is missing: drive 1 of 2"
    assert missing in [str(wrong) for wrong in rank.wrong]
    assert not rank.damages


def test_a_run_is_found_by_a_path_without_its_name(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `offload verify .`; the folders on the other drives have the name."""
    run = run_of_two_commits(tmp_path, queue, drives=2)
    run.store.close()
    monkeypatch.chdir(run.store.folders[0].parent)
    for path in (Path(), Path("rank0") / ".."):
        with contextlib.closing(RunChecking(path)) as checking:
            assert checking.run(queue, lambda _: None).whole
    remove_run(Path())
    assert not any((tmp_path / "drives").rglob("states"))
