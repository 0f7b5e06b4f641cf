"""The store: what a commit record names is never lost, and nothing else is ever believed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.errors import StoreError
from offload.sizes import PAGE
from offload.swapper import store as store_module
from offload.swapper.states import State
from offload.swapper.store import MAX_UNITS, Commit, Record, Store, StoreSpec, remove_run, run_status

SIZES = {State.WEIGHT: 8192, State.EXP_AVG: 16384}
SPEC = StoreSpec((SIZES, SIZES, {State.WEIGHT: 4096}), 2, {"model": "test"})


@pytest.fixture
def queue() -> Iterator[IoQueue]:
    with IoQueue() as queue:
        yield queue


def filled(nbytes: int, value: int) -> memoryview:
    buffer = aligned_empty(nbytes)
    buffer[:] = bytes([value]) * nbytes
    return buffer


def created(folder: Path, queue: IoQueue, spec: StoreSpec = SPEC) -> Store:
    store = Store([folder], "run", 0, spec, queue)
    store.create()
    return store


def opened(folder: Path, queue: IoQueue, spec: StoreSpec = SPEC) -> tuple[Store, bytes]:
    store = Store([folder], "run", 0, spec, queue)
    return store, store.open()


def update(store: Store, unit: int, value: int) -> None:
    """Write a new copy of the unit's weight, as the update worker does."""
    slot = store.target(unit)
    store.write(unit, State.WEIGHT, slot, 0, filled(8192, value)).wait()
    store.newest[unit] = slot


def weight(store: Store, unit: int) -> int:
    buffer = aligned_empty(8192)
    store.read(unit, State.WEIGHT, store.newest[unit], 0, buffer).wait()
    assert len(set(buffer)) == 1
    return buffer[0]


@given(st.integers(0, 2**60), st.lists(st.integers(0, 1), max_size=300), st.integers(0, 1), st.integers(0, 2**40))
def test_a_record_comes_back_as_it_went(epoch: int, slots: list[int], blob: int, nbytes: int) -> None:
    record = Record(epoch, tuple(slots), blob, nbytes, 12345)
    page = record.pack()
    assert len(page) == PAGE and Record.unpack(page) == record


@given(st.integers(0, PAGE * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    page = bytearray(Record(7, (0, 1, 1), 1, 100, 5).pack())
    page[bit // 8] ^= 1 << (bit % 8)
    assert Record.unpack(bytes(page)) is None


def test_a_commit_is_what_open_finds(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    for epoch in range(5):
        update(store, epoch % 2, 10 + epoch)
        store.commit(epoch, f"blob {epoch}".encode())
    store.close()
    store, blob = opened(tmp_path, queue)
    assert blob == b"blob 4" and store.durable is not None and store.durable.epoch == 4
    assert (weight(store, 0), weight(store, 1)) == (14, 13)
    store.close()


def test_what_was_not_committed_is_forgotten(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    update(store, 0, 1)
    store.commit(1, b"one")
    for value in (2, 3, 4):  # all to the slot that the record does not name
        update(store, 0, value)
    store.close()
    store, blob = opened(tmp_path, queue)
    assert blob == b"one" and weight(store, 0) == 1
    store.close()


def _damage(path: Path, offset: int, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(os.urandom(nbytes))


def test_a_torn_record_gives_the_commit_before(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    for epoch in (1, 2):
        update(store, 0, epoch)
        store.commit(epoch, f"blob {epoch}".encode() * 100)
    which = store.durable.blob
    store.close()
    _damage(tmp_path / "run" / "rank0" / "commit", which * PAGE, 512)
    store, blob = opened(tmp_path, queue)
    assert blob == b"blob 1" * 100 and weight(store, 0) == 1
    store.close()


def test_a_damaged_blob_is_an_error_and_no_way_back(tmp_path: Path, queue: IoQueue) -> None:
    """The epoch before may have been overwritten already: an update of epoch 3 writes to its slots."""
    store = created(tmp_path, queue)
    for epoch in (1, 2):
        update(store, 0, epoch)
        store.commit(epoch, f"blob {epoch}".encode() * 100)
    update(store, 0, 3)
    which = store.durable.blob
    store.close()
    _damage(tmp_path / "run" / "rank0" / f"blob.{which}", 0, 64)
    with pytest.raises(StoreError, match=r"blob\.[01] is damaged: epoch 2"):
        opened(tmp_path, queue)


def test_two_torn_records_are_an_error(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, b"one")
    store.close()
    _damage(tmp_path / "run" / "rank0" / "commit", 0, 2 * PAGE)
    assert run_status([tmp_path], "run").exists, "it is not started over in silence"
    with pytest.raises(StoreError, match="no commit record"):
        opened(tmp_path, queue)


def test_data_is_durable_before_its_record(tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut needs: every drive, then the blob, then the record; each synced before the next begins."""
    store = Store([tmp_path / "a", tmp_path / "b"], "run", 0, SPEC, queue)
    store.create()
    events: list[str] = []
    sync, write = DirectFile.sync, store_module._write_in_place
    monkeypatch.setattr(
        DirectFile, "sync", lambda file: (sync(file), events.append(f"sync {Path(file.path).parts[-4]}"))[0]
    )
    monkeypatch.setattr(
        store_module, "_write_in_place", lambda path, *args: (write(path, *args), events.append(path.name))[0]
    )
    store.commit(1, b"one")
    assert events == ["sync a", "sync b", "blob.0", "commit"]
    store.commit(2, b"two")
    assert events[4:] == ["sync a", "sync b", "blob.1", "commit"]
    store.close()


def test_a_cut_file_and_a_corrupt_manifest_are_errors(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, b"one")
    store.close()
    rank = tmp_path / "run" / "rank0"
    os.truncate(rank / "states", 4096)
    with pytest.raises(StoreError, match="cut short"):
        opened(tmp_path, queue)
    (rank / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match=r"manifest\.json"):
        opened(tmp_path, queue)


def test_extents_never_overlap_and_fill_the_drives_evenly() -> None:
    table = SPEC.extents(2)
    extents = sorted({extent for row in table for slots in row.values() for extent in slots})
    for left, right in itertools.pairwise(extents):
        assert left.drive != right.drive or left.offset + left.nbytes <= right.offset
    assert sum(extent.nbytes for extent in extents) == SPEC.nbytes == 2 * 2 * (8192 + 16384) + 4096
    ends = [sum(e.nbytes for e in extents if e.drive == drive) for drive in (0, 1)]
    assert abs(ends[0] - ends[1]) <= 16384


def test_too_many_units_is_an_error(tmp_path: Path, queue: IoQueue) -> None:
    spec = StoreSpec(({State.WEIGHT: 4096},) * (MAX_UNITS + 1), 2, {})
    with pytest.raises(StoreError, match="units"):
        Store([tmp_path], "run", 0, spec, queue)


def test_files_are_private(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, b"one")
    rank = tmp_path / "run" / "rank0"
    assert rank.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in rank.iterdir()} == {0o600}
    assert (rank / "states").stat().st_blocks * 512 >= SPEC.nbytes, "the room is really reserved"
    store.close()


def test_remove_run_wants_a_run_folder_that_nobody_holds(tmp_path: Path, queue: IoQueue) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(StoreError, match="not a run folder"):
        remove_run(tmp_path / "mine")
    store = Store([tmp_path / "a", tmp_path / "b"], "run", 0, SPEC, queue)
    store.create()
    store.commit(1, b"one")
    with pytest.raises(StoreError, match=str(os.getpid())):
        remove_run(tmp_path / "a" / "run")
    store.close()
    remove_run(tmp_path / "a" / "run")
    assert not (tmp_path / "a" / "run").exists() and not (tmp_path / "b" / "run").exists()


@pytest.mark.parametrize("damage", ["{", "[]", '{"drives": 3}', "\x00"])
def test_a_run_whose_notes_are_broken_can_still_be_removed(damage: str, tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, b"one")
    store.close()
    (tmp_path / "run" / "rank0" / "manifest.json").write_text(damage)
    remove_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_broken_note_of_a_finished_run_is_no_obstacle(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.remove({"steps": 12})
    (tmp_path / "run" / "finished.json").write_text("{")
    status = run_status([tmp_path], "run")
    assert not status.exists and status.finished == {}
    created(tmp_path, queue).close()


def test_finished_says_the_steps_and_the_date(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, b"one")
    store.remove({"steps": 12})
    note = json.loads((tmp_path / "run" / "finished.json").read_text())
    assert note["steps"] == 12 and note["date"].endswith("+00:00")


def test_not_enough_room_is_an_error_with_both_numbers(tmp_path: Path, queue: IoQueue) -> None:
    spec = StoreSpec(({State.WEIGHT: 1 << 50},), 1, {})
    store = Store([tmp_path], "run", 0, spec, queue)
    with pytest.raises(StoreError, match=r"need 1024\.0 TiB.*has [0-9.]+ .iB free"):
        store.create()
    assert not (tmp_path / "run").exists(), "a start that fails leaves nothing behind"


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mkfs.ext4") is None, reason="mounts a small file system: needs root"
)
def test_a_full_disk(tmp_path: Path, queue: IoQueue) -> None:
    """A real file system of 16 MiB: reserving more than it has leaves it as it was."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)], capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        before = shutil.disk_usage(mount).free
        store = Store([mount], "run", 0, StoreSpec(({State.WEIGHT: 12 << 20},), 2, {}), queue)
        # One extent: a frozen unit. Take the check's word away, so that the reservation itself must fail.
        (mount / "filler").write_bytes(os.urandom(8 << 20))
        store._check_room = lambda: None  # type: ignore[method-assign]
        with pytest.raises(OSError, match="No space left"):
            store.create()
        (mount / "filler").unlink()
        assert not (mount / "run").exists()
        assert shutil.disk_usage(mount).free >= before - (64 << 10)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


# -- taking a commit back -----------------------------------------------------------------------------


def two_commits(folder: Path, queue: IoQueue) -> None:
    """Epoch 1, of which both units are 10, and epoch 2, of which unit 0 is 20."""
    store = created(folder, queue)
    update(store, 0, 10)
    update(store, 1, 10)
    store.commit(1, b"one")
    update(store, 0, 20)
    store.commit(2, b"two")
    store.close()


def test_the_commit_before_can_be_opened_while_nothing_was_written_since(tmp_path: Path, queue: IoQueue) -> None:
    two_commits(tmp_path, queue)
    store = Store([tmp_path], "run", 0, SPEC, queue)
    assert store.newest_commit() == Commit(2, 0)
    assert store.open(Commit(1, 0)) == b"one"
    assert [weight(store, unit) for unit in (0, 1)] == [10, 10]
    store.close()


def test_a_commit_that_was_taken_back_never_returns(tmp_path: Path, queue: IoQueue) -> None:
    """Else its slots, half overwritten by another second step, would count again after the next kill."""
    two_commits(tmp_path, queue)
    store = Store([tmp_path], "run", 0, SPEC, queue)
    store.open(Commit(1, 0))
    update(store, 0, 99)  # a kill now
    store.close()
    store, blob = opened(tmp_path, queue)
    assert (blob, weight(store, 0)) == (b"one", 10)
    update(store, 0, 21)
    store.commit(2, b"two again")
    store.close()
    store, blob = opened(tmp_path, queue)
    assert (blob, weight(store, 0)) == (b"two again", 21)
    store.close()


def test_a_commit_that_is_not_there_is_an_error(tmp_path: Path, queue: IoQueue) -> None:
    two_commits(tmp_path, queue)
    store = Store([tmp_path], "run", 0, SPEC, queue)
    with pytest.raises(StoreError, match="holds epochs 2, 1, but the last that all ranks hold is 0"):
        store.open(Commit(0, 0))
    store, blob = opened(tmp_path, queue)
    assert blob == b"two", "and nothing was taken back"
    store.close()


def test_no_commit_yet(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    assert store.newest_commit() is None
    store.close()
