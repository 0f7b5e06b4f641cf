"""Files of a store that cannot be read, or only look damaged, are reported as what they are."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from offload.aio import IoQueue
from offload.errors import IoError, StoreError
from offload.runs.inspection import inspect
from offload.swapper.store import Store, format, inspection, run_status
from offload.swapper.store import store as store_module
from offload.swapper.store.folder import read_whole
from offload.swapper.store.format import read_manifest
from offload.swapper.store.runs import read_closed
from tests.store.test_store import SPEC, blob, created, opened


@pytest.fixture
def rank(tmp_path: Path, queue: IoQueue) -> Path:
    """The folder of a rank with one commit, of step 1."""
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    return tmp_path / "run" / "rank0"


def test_a_commit_that_is_intact_after_all_is_not_called_damaged(rank: Path, tmp_path: Path, queue: IoQueue) -> None:
    (rank / "suspect").touch()
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "one" and store.notices == [
        "a commit or its record looked damaged; all data of step 1 was compared and is intact, and the run resumes "
        "from it"
    ]


def test_a_comparison_that_fails_leaves_no_file_open(
    rank: Path, tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read itself, as when no memory is left; the caller of `newest_serial` may try again."""

    def fails(*_: object) -> None:
        raise MemoryError

    def states_open() -> int:
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return sum(os.path.exists(link) and os.readlink(link).endswith("run/rank0/states") for link in links)

    (rank / "suspect").touch()
    store = Store([tmp_path], "run", 0, SPEC, queue)
    monkeypatch.setattr(store_module, "first_damage", fails)
    with pytest.raises(MemoryError):
        store.newest_serial()
    assert states_open() == 0
    store.close()


# -- files that cannot be read ------------------------------------------------------------------------


def unreadable(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int) -> None:
    """Makes each read of the files of this name fail in `module`, as a drive or a limit of the process does."""

    def read(path: Path) -> bytes:
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        return read_whole(path)

    monkeypatch.setattr(module, "read_whole", read)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("name", ["commit", "blob.1"])
def test_a_run_whose_commits_cannot_be_read_is_not_taken_for_none(
    name: str, number: int, rank: Path, tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would delete it."""
    if name == "blob.1":
        (rank / "commit").write_bytes(bytes(8192))  # the records are lost, the second blob tells of two commits
    store = Store([tmp_path], "run", 0, SPEC, queue)
    with monkeypatch.context() as patch:
        unreadable(patch, format, name, number)
        for call in (lambda: run_status([tmp_path], "run"), store.newest_serial, store.create):
            with pytest.raises(IoError, match=f"cannot read {rank / name}: ") as caught:
                call()
            assert caught.value.errno == number
    store.close()
    assert (rank / "states").stat().st_size == SPEC.nbytes


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_blob_that_cannot_be_read_is_not_damaged(
    number: int, rank: Path, tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit before would be resumed, and the newest written over."""
    store, _ = opened(tmp_path, queue)
    store.commit(2, blob("two"))
    store.close()
    store = Store([tmp_path], "run", 0, SPEC, queue)
    with monkeypatch.context() as patch:
        for module in (inspection, format):
            unreadable(patch, module, "blob.1", number)
        with pytest.raises(IoError, match=f"cannot read {rank / 'blob.1'}: ") as caught:
            store.newest_serial()
        assert caught.value.errno == number
    store.close()
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "two" and not store.notices


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_drive_whose_manifest_cannot_be_read_is_not_taken(
    number: int, tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the second drive of another run, which a start would write over."""
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    theirs = Store([one, two], "run", 0, SPEC, queue)
    theirs.create()
    theirs.commit(1, blob("theirs"))
    theirs.close()
    manifest = two / "run" / "rank0" / "manifest.json"
    before = manifest.read_bytes()
    for start in (lambda: Store([three, two], "run", 0, SPEC, queue), lambda: Store([one, two], "run", 0, SPEC, queue)):
        mine = start()
        with monkeypatch.context() as patch:
            for module in (inspection, format, format):
                unreadable(patch, module, "manifest.json", number)
            with pytest.raises(IoError, match=r"cannot read .*manifest\.json: "):
                mine.create() if mine.newest_serial() is None else mine.open(mine.newest_serial())
        mine.close()
        assert manifest.read_bytes() == before


def test_a_run_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert not format.was_committed(tmp_path / "none")
    (tmp_path / "rank0").touch()  # in the place of a folder
    assert not format.was_committed(tmp_path / "rank0")


@pytest.mark.parametrize("name", ["commit", "blob.0", "manifest.json"])
def test_an_unreadable_file_is_not_called_missing(name: str, rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.swapper.store import format

    with monkeypatch.context() as patch:
        for module in (inspection, format):
            unreadable(patch, module, name, errno.EIO)
        found = inspection.look(rank)
    reasons = [wrong.reason for wrong in found.wrong if wrong.path == str(rank / name)]
    assert len(reasons) == 1 and reasons[0].startswith("the file cannot be read: Input/output error")
    (rank / name).unlink()
    reasons = [wrong.reason for wrong in inspection.look(rank).wrong if wrong.path == str(rank / name)]
    assert len(reasons) == 1 and reasons[0].startswith("the file is missing")


# -- manifests that are JSON and yet damaged ----------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        {"drives": ["/a", "/b"]},
        {"drives": []},
        {"drives": [7]},
        {"drives": {"a": 1}},
        {"drive": "first"},
        {"drive": [1]},
        {"stripes": {"bytes": 0, "weights": [1]}},
        {"stripes": {"bytes": 4096, "weights": [0]}},
        {"stripes": {"bytes": 4096, "weights": 1}},
        {"layout": []},
        {"about": "me"},
        {"format": 99, "about": "me"},
    ],
    ids=str,
)
def test_a_manifest_with_impossible_values_is_reported(
    damage: dict[str, Any], rank: Path, tmp_path: Path, queue: IoQueue
) -> None:
    path = rank / "manifest.json"
    right = path.read_text()
    path.write_text(json.dumps(json.loads(right) | damage))
    with pytest.raises(StoreError, match=str(path)):
        read_manifest(path)
    assert any(wrong.path == str(path) for wrong in inspection.look(rank).wrong)
    (rank / "commit").rename(tmp_path / "away")  # as on a later drive, or after a start that was killed
    inspection.look(rank)
    inspection.place_of(rank)
    (tmp_path / "away").rename(rank / "commit")
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "one" and path.read_text() == right


def test_a_manifest_that_differs_from_the_commit_is_said_to(rank: Path) -> None:
    path = rank / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"created": "never"}))
    assert [wrong.reason for wrong in inspection.look(rank).wrong] == [
        "the file differs from the copy in the last commit"
    ]


def test_a_manifest_nested_deeper_than_python_parses_is_damage(rank: Path, tmp_path: Path, queue: IoQueue) -> None:
    (rank / "manifest.json").write_text('{"a":' * 100_000)
    (wrong,) = inspection.look(rank).wrong
    assert wrong.path == str(rank / "manifest.json")
    with pytest.raises(StoreError, match="cannot read"):
        read_manifest(rank / "manifest.json")
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "one" and inspection.look(rank).wrong == (), "the copy in the commit is written anew"


@pytest.mark.parametrize("name", ["finished.json", "closed.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "", "no note", '["steps"]', '{"steps": "3"}', '{"step": 3}'])
def test_a_note_that_cannot_be_read_ends_no_run(content: str, name: str, rank: Path, tmp_path: Path) -> None:
    """The swap files beside it may be all that there is of the run: no start takes them for remainders."""
    (rank.parent / name).write_text(content)
    status = run_status([tmp_path], "run")
    assert (status.exists, status.finished, status.closed) == (True, None, name == "closed.json")
    closed = json.loads(content) if content == '{"step": 3}' else {}
    assert read_closed(rank.parent) == (closed if name == "closed.json" else None)
    assert inspect(rank.parent)["finished"] == status.finished


def test_a_folder_in_the_place_of_a_note_is_named(rank: Path, tmp_path: Path, queue: IoQueue) -> None:
    note = rank.parent / "closed.json"
    note.mkdir()
    with pytest.raises(StoreError, match=f"{note} is a folder, expected a note of the run or nothing"):
        opened(tmp_path, queue)
    note.rmdir()
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "one"
