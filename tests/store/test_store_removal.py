"""A removal takes no folder from a process that is about to use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.aio import IoQueue
from offload.errors import StoreError
from offload.swapper.store import Store, remove_run
from offload.swapper.store.folder import Lock, remove_files
from tests.store.test_store import STORE_SPEC as SPEC
from tests.store.test_store import blob


@pytest.mark.sample(1)
@pytest.mark.parametrize("drive", ["a", "b"])
def test_a_run_that_has_no_more_than_its_locks_is_held(drive: str, tmp_path: Path, queue: IoQueue) -> None:
    """A start holds the locks for some time before it writes the first file."""
    store = Store([tmp_path / "a", tmp_path / "b"], "run", 0, SPEC, queue)
    with pytest.raises(StoreError, match="in use by process"):
        remove_run(tmp_path / drive / "run")
    assert (tmp_path / "a" / "run" / "rank0" / "lock").exists() and (tmp_path / "b" / "run" / "rank0" / "lock").exists()
    store.create()
    store.remove()


def test_a_drive_on_which_a_process_starts_anew_is_held(tmp_path: Path, queue: IoQueue) -> None:
    """The second drive holds a lock alone, and the manifest on the first names it."""
    store = Store([tmp_path / "a", tmp_path / "b"], "run", 0, SPEC, queue)
    store.create()
    store.commit(1, blob("one"))
    store.close()
    second = tmp_path / "b" / "run" / "rank0"
    for name in ("states", "manifest.json"):
        (second / name).unlink()
    with Lock(second), pytest.raises(StoreError, match="in use by process"):
        remove_run(tmp_path / "a" / "run")
    remove_run(tmp_path / "a" / "run")
    assert not second.exists() and not (tmp_path / "a" / "run").exists()


def test_the_lock_is_the_last_file_that_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gets the lock next may write temporary files at once."""
    for name in ("lock", "commit", "manifest.tmp"):
        (tmp_path / name).touch()
    gone: list[str] = []
    unlink = os.unlink

    def record(name: str, *, dir_fd: int) -> None:
        gone.append(name)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", record)
    remove_files(tmp_path)
    assert gone[-1] == "lock" and "manifest.tmp" in gone and not tmp_path.exists()
