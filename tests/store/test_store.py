"""The store never loses a commit that a record names, and never trusts anything else."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.errors import StoreError
from offload.sizes import PAGE
from offload.states import State
from offload.swapper.store import Store, StoreSpec, remove_run, run_status
from offload.swapper.store import store as store_module
from offload.swapper.store import store as swap_files
from offload.swapper.store.format import MAX_UNITS, CommitRecord, StoreManifest
from tests.support.drives import filesystems

SIZES = {State.WEIGHT: 8192, State.EXP_AVG: 16384}
SPEC = StoreSpec((SIZES, SIZES, {State.WEIGHT: 4096}), 2, {"model": "test"}, frozen=(0, 0, 4096))


def filled(nbytes: int, value: int) -> memoryview:
    buffer = aligned_empty(nbytes)
    buffer[:] = bytes([value]) * nbytes
    return buffer


def created(folder: Path, queue: IoQueue, spec: StoreSpec = SPEC) -> Store:
    store = Store([folder], "run", 0, spec, queue)
    store.create()
    return store


def opened(folder: Path, queue: IoQueue, spec: StoreSpec = SPEC) -> tuple[Store, str]:
    """The store at its last commit, and the text that was committed."""
    store = Store([folder], "run", 0, spec, queue)
    return store, text_of(store.open())


def blob(text: str) -> dict[str, torch.Tensor]:
    return {"text": torch.tensor(list(text.encode()), dtype=torch.uint8)}


def text_of(contents: dict[str, torch.Tensor]) -> str:
    assert list(contents) == ["text"], "what the store adds is taken out"
    return bytes(contents["text"].tolist()).decode()


def update(store: Store, unit: int, value: int) -> None:
    """Write a new copy of the unit, as the update worker does: here only the weight changes."""
    slot = store.target(unit)
    first, second = filled(4096, value), filled(4096, value)
    writes = [
        (0, store.write(unit, State.WEIGHT, slot, 0, first)),
        (4096, store.write(unit, State.WEIGHT, slot, 4096, second)),
    ]
    moments = store.write(unit, State.EXP_AVG, slot, 0, filled(16384, value))
    store.wrote(unit, slot, {State.WEIGHT: writes, State.EXP_AVG: [(0, moments)]})


def weight(store: Store, unit: int) -> int:
    buffer = aligned_empty(8192)
    store.read(unit, State.WEIGHT, store.newest[unit], 0, buffer).wait()
    assert len(set(buffer)) == 1
    return buffer[0]


@given(st.integers(1, 2**60), st.lists(st.integers(0, 1), max_size=300), st.integers(0, 1), st.integers(0, 2**40))
def test_a_record_comes_back_as_it_went(epoch: int, slots: list[int], blob: int, nbytes: int) -> None:
    record = CommitRecord(epoch + 3, epoch, tuple(slots), blob, nbytes, 12345, 678)
    page = record.pack()
    assert len(page) == PAGE and CommitRecord.unpack(page, record.blob) == record


@given(st.integers(0, PAGE * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    page = bytearray(CommitRecord(9, 7, (0, 1, 1), 1, 100, 5).pack())
    page[bit // 8] ^= 1 << (bit % 8)
    assert CommitRecord.unpack(bytes(page), 1) is None


def test_a_commit_is_what_open_finds(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    for epoch in range(5):
        update(store, epoch % 2, 10 + epoch)
        store.commit(epoch, blob(f"blob {epoch}"))
    store.close()
    store, text = opened(tmp_path, queue)
    assert text == "blob 4" and store.durable is not None and store.durable.step == 4
    assert (weight(store, 0), weight(store, 1)) == (14, 13)
    store.close()


def test_commits_share_one_copy_of_the_manifest(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names each parameter of the model, so a commit must not make it again."""
    made: list[int] = []
    pack = StoreManifest.pack

    def counted(manifest: StoreManifest, drive: int = 0) -> bytes:
        made.append(drive)
        return pack(manifest, drive)

    monkeypatch.setattr(StoreManifest, "pack", counted)
    store = created(tmp_path, queue)
    for epoch in range(3):
        store.commit(epoch, blob("text"))
    store.close()
    assert made == [0, 0], "one for the file and one for all blobs"


def test_what_was_not_committed_is_forgotten(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    update(store, 0, 1)
    store.commit(1, blob("one"))
    for value in (2, 3, 4):  # all to the slot that the record does not name
        update(store, 0, value)
    store.close()
    store, text = opened(tmp_path, queue)
    assert text == "one" and weight(store, 0) == 1
    store.close()


def damage(path: Path, offset: int, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(os.urandom(nbytes))


def test_a_torn_record_gives_the_commit_before(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    for epoch in (1, 2):
        update(store, 0, epoch)
        store.commit(epoch, blob(f"blob {epoch}" * 100))
    which = store.durable.blob
    store.close()
    damage(tmp_path / "run" / "rank0" / "commit", which * PAGE, 512)
    store, text = opened(tmp_path, queue)
    assert text == "blob 1" * 100 and weight(store, 0) == 1
    store.close()


def test_a_damaged_blob_is_an_error_and_no_way_back(tmp_path: Path, queue: IoQueue) -> None:
    """The epoch before may have been overwritten already: an update of epoch 3 writes to its slots."""
    store = created(tmp_path, queue)
    for epoch in (1, 2):
        update(store, 0, epoch)
        store.commit(epoch, blob(f"blob {epoch}" * 100))
    update(store, 0, 3)
    which = store.durable.blob
    store.close()
    damage(tmp_path / "run" / "rank0" / f"blob.{which}", 0, 64)
    with pytest.raises(StoreError, match=r"step 1: weight of unit 0, slot [AB]: 4096 bytes at offset"):
        opened(tmp_path, queue)


def test_a_damaged_blob_of_a_store_that_was_closed_gives_the_commit_before(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    for epoch in (1, 2):
        update(store, 0, epoch)
        store.commit(epoch, blob(f"blob {epoch}"))
    which = store.durable.blob
    store.close()
    damage(tmp_path / "run" / "rank0" / f"blob.{which}", 0, 64)
    store, text = opened(tmp_path, queue)
    assert text == "blob 1" and weight(store, 0) == 1
    assert "all data of step 1 was compared and is intact" in store.notices[0]
    store.close()


def test_two_torn_records_are_an_error(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    damage(tmp_path / "run" / "rank0" / "commit", 0, 2 * PAGE)
    assert run_status([tmp_path], "run").exists, "it is not started over in silence"
    with pytest.raises(StoreError, match="no commit record"):
        opened(tmp_path, queue)


def test_data_is_durable_before_its_record(tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut needs: every drive, then the blob, then the record; each synced before the next begins."""
    store = Store([tmp_path / "a", tmp_path / "b"], "run", 0, SPEC, queue)
    store.create()
    events: list[str] = []
    sync, write = DirectFile.sync, store_module.write_in_place
    monkeypatch.setattr(
        DirectFile, "sync", lambda file: (sync(file), events.append(f"sync {Path(file.path).parts[-4]}"))[0]
    )
    monkeypatch.setattr(
        store_module, "write_in_place", lambda path, *args: (write(path, *args), events.append(path.name))[0]
    )
    store.commit(1, blob("one"))
    assert events == ["sync a", "sync b", "blob.0", "commit"]
    store.commit(2, blob("two"))
    assert events[4:] == ["sync a", "sync b", "blob.1", "commit"]
    store.close()


def test_a_cut_file_is_an_error(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    rank = tmp_path / "run" / "rank0"
    os.truncate(rank / "states", 4096)
    with pytest.raises(StoreError, match="cut short"):
        opened(tmp_path, queue)


def test_extents_lie_one_behind_the_other() -> None:
    extents = sorted(
        {each for row in SPEC.places() for slots in row.values() for place in slots for each in place.extents}
    )
    assert extents[0].offset == 0
    for left, right in itertools.pairwise(extents):
        assert left.offset + left.nbytes == right.offset
    assert sum(extent.nbytes for extent in extents) == SPEC.nbytes == 2 * 2 * (8192 + 16384) + 4096


def test_too_many_units_is_an_error(tmp_path: Path, queue: IoQueue) -> None:
    spec = StoreSpec(({State.WEIGHT: 4096},) * (MAX_UNITS + 1), 2, {})
    with pytest.raises(StoreError, match="units"):
        Store([tmp_path], "run", 0, spec, queue)


def test_files_are_private(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
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
    store.commit(1, blob("one"))
    with pytest.raises(StoreError, match=str(os.getpid())):
        remove_run(tmp_path / "a" / "run")
    store.close()
    remove_run(tmp_path / "a" / "run")
    assert not (tmp_path / "a" / "run").exists() and not (tmp_path / "b" / "run").exists()


@pytest.mark.parametrize("damage", ["{", "[]", '{"drives": 3}', "\x00"])
def test_a_run_whose_notes_are_broken_can_still_be_removed(damage: str, tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    (tmp_path / "run" / "rank0" / "manifest.json").write_text(damage)
    remove_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_broken_note_of_a_finished_run_is_no_obstacle(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.note_end({"steps": 12})
    store.remove()
    (tmp_path / "run" / "finished.json").write_text("{")
    status = run_status([tmp_path], "run")
    assert not status.exists and status.finished == {}
    created(tmp_path, queue).close()


def test_the_note_of_the_end_contains_the_steps_and_the_date(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.note_end({"steps": 12})
    store.remove()
    note = json.loads((tmp_path / "run" / "finished.json").read_text())
    assert note["steps"] == 12 and note["date"].endswith("+00:00")


def test_not_enough_room_is_an_error_with_both_numbers(tmp_path: Path, queue: IoQueue) -> None:
    spec = StoreSpec(({State.WEIGHT: 1 << 50},), 1, {})
    store = Store([tmp_path], "run", 0, spec, queue)
    with pytest.raises(StoreError, match=r"need 1024\.0 TiB.*has [0-9.]+ .iB free"):
        store.create()
    assert not (tmp_path / "run").exists(), "a start that fails leaves nothing behind"


def test_a_reservation_on_a_full_disk_leaves_it_unchanged(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reserving more than it has leaves it as it was."""
    with filesystems.disk(tmp_path, 16 << 20) as mount:
        before = shutil.disk_usage(mount).free
        store = Store([mount], "run", 0, StoreSpec(({State.WEIGHT: 12 << 20},), 2, {}), queue)
        # One extent: a frozen unit. Take the check's word away, so that the reservation itself must fail.
        (mount / "filler").write_bytes(os.urandom(8 << 20))
        for check in ("find_shortage", "find_drive_shortage"):
            monkeypatch.setattr(swap_files, check, lambda *_: None)
        with pytest.raises(OSError, match="No space left"):
            store.create()
        (mount / "filler").unlink()
        assert not (mount / "run").exists()
        assert shutil.disk_usage(mount).free >= before - (64 << 10)


# -- taking a commit back -----------------------------------------------------------------------------


def two_commits(folder: Path, queue: IoQueue) -> None:
    """Epoch 1, of which both units are 10, and epoch 2, of which unit 0 is 20."""
    store = created(folder, queue)
    update(store, 0, 10)
    update(store, 1, 10)
    store.commit(1, blob("one"))
    update(store, 0, 20)
    store.commit(2, blob("two"))
    store.close()


def test_the_commit_before_can_be_opened_while_nothing_was_written_since(tmp_path: Path, queue: IoQueue) -> None:
    two_commits(tmp_path, queue)
    store = Store([tmp_path], "run", 0, SPEC, queue)
    assert store.newest_serial() == 2
    assert text_of(store.open(1)) == "one"
    assert [weight(store, unit) for unit in (0, 1)] == [10, 10]
    store.close()


def test_a_commit_that_was_taken_back_never_returns(tmp_path: Path, queue: IoQueue) -> None:
    """Else its slots, half overwritten by another second step, would count again after the next kill."""
    two_commits(tmp_path, queue)
    store = Store([tmp_path], "run", 0, SPEC, queue)
    store.open(1)
    update(store, 0, 99)  # a kill now
    store.close()
    store, text = opened(tmp_path, queue)
    assert (text, weight(store, 0)) == ("one", 10)
    update(store, 0, 21)
    store.commit(2, blob("two again"))
    store.close()
    store, text = opened(tmp_path, queue)
    assert (text, weight(store, 0)) == ("two again", 21)
    store.close()


def test_a_commit_that_is_not_there_is_an_error(tmp_path: Path, queue: IoQueue) -> None:
    two_commits(tmp_path, queue)
    store = Store([tmp_path], "run", 0, SPEC, queue)
    with pytest.raises(StoreError, match="holds commits 2, 1, but the ranks agreed on commit 7, the last that all"):
        store.open(7)
    store, text = opened(tmp_path, queue)
    assert text == "two", "and nothing was taken back"
    store.close()


def test_a_store_without_a_commit_is_empty(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    assert store.newest_serial() is None
    store.close()
