"""The store: slots, copies, wear, and files without durability."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import offload
from offload.aio import IoQueue, aligned_empty, crc32c
from offload.cli.main import app
from offload.errors import IoError, StoreError
from offload.report.figures import forecast, warning
from offload.runs.inspection import inspect
from offload.sizes import PAGE as STORE_PAGE
from offload.states import State
from offload.swapper.store import DriveByteCounter, Rating, Store, StoreSpec, remove_run, run_status
from offload.swapper.store.format import MAX_UNITS, MAX_UNITS_OF_THREE_SLOTS, CommitRecord
from offload.swapper.store.spill_file import SpillFile
from tests import ROOT
from tests.support import models
from tests.support.drives.filesystems import mounted
from tests.support.oracle import Job, start, train_step
from tests.support.processes import warm_process

PAGE = 4096

SPEC = StoreSpec(
    (
        {State.WEIGHT: 8192, State.EXP_AVG: 8192},
        {State.WEIGHT: 8192, State.EXP_AVG: 4096},  # the second half of the weight is frozen
        {State.WEIGHT: 4096},  # frozen
    ),
    2,
    {"model": "test"},
    frozen=(0, 4096, 4096),
)

TRAINABLE = {0: {State.WEIGHT: 8192, State.EXP_AVG: 8192}, 1: {State.WEIGHT: 4096, State.EXP_AVG: 4096}}

Contents = dict[tuple[int, State], bytes]
"""The newest copy of everything."""


def label_of(contents: dict[str, torch.Tensor]) -> str:
    return bytes(contents["text"].numpy()).partition(b":")[0].decode()


# -- what a run does ----------------------------------------------------------------------------------


class Run:
    """A run under `root`, and the contents of its commits; `note` receives those that may be found from now on."""

    def __init__(
        self,
        root: Path,
        drives: int,
        queue: Any,
        commits: dict[str, Contents],
        seed: int = 0,
        note: Callable[..., None] = lambda *_: None,
        spec: StoreSpec = SPEC,
    ) -> None:
        self._spec = spec
        self.chance, self.commits, self._note, self._queue = random.Random(seed), commits, note, queue
        self.paths = [root / "drives" / str(drive) for drive in range(drives)]
        self.store = self._store()
        self.now: Contents = {}
        self.last: str | None = None
        self.before: str | None = None
        """The commit before, where it can still be gone back to."""

    def _store(self) -> Store:
        return Store(self.paths, "run", 0, self._spec, self._queue)

    def create(self, over: bool = False) -> None:
        self._note(self.last, None)
        self.store.create(over)
        self._note(None)
        self.last = self.before = None
        self.now = {(u, s): bytes(n) for u, row in enumerate(SPEC.partitions) for s, n in row.items()}
        for unit, numbers in ((0, (8192,)), (1, (4096, 4096)), (2, (4096,))):  # as the engine does, residuals left out
            writes, start = [], 0
            for nbytes in numbers:
                data = self.chance.randbytes(nbytes)
                writes.append((start, self.store.write(unit, State.WEIGHT, 0, start, _memory(data))))
                self._set(unit, State.WEIGHT, start, data)
                start += nbytes
            self.store.wrote(unit, 0, {State.WEIGHT: writes})

    def commit(self) -> None:
        label = f"commit {len(self.commits)}"
        self.commits[label] = dict(self.now)
        text = f"{label}:".encode() + self.chance.randbytes(self.chance.choice([10, 3000, 9000]) * len(self.commits))
        self._note(self.last, label)
        contents = {"text": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        self.store.commit(len(self.commits), contents)
        self._note(label)
        self.before, self.last = self.last, label

    def update(self, unit: int) -> None:
        """Reads the newest copy, write the new one, tile by tile, as the update worker does."""
        slot, tile = self.store.target(unit), self.chance.choice([1024, 2048, 4096])
        written: dict[State, list[Any]] = {}
        for state, nbytes in TRAINABLE[unit].items():
            for begin in range(0, nbytes, tile):
                content = _memory(bytes(tile))
                self.store.read(unit, state, self.store.newest[unit], begin, content).wait()
                assert bytes(content) == self.now[unit, state][begin : begin + tile]
                data = self.chance.randbytes(tile)
                written.setdefault(state, []).append((begin, self.store.write(unit, state, slot, begin, _memory(data))))
                self._set(unit, state, begin, data)
        self.store.wrote(unit, slot, written)
        self.before = None

    def edit(self, unit: int) -> None:
        """Does as `update`, without the other processes of a grid: the commit before can still be gone back to."""
        before = self.before
        self.store.set_aside(unit)
        self.update(unit)
        self.before = before

    def _set(self, unit: int, state: State, start: int, data: bytes) -> None:
        old = self.now[unit, state]
        self.now[unit, state] = old[:start] + data + old[start + len(data) :]

    def restart(self) -> None:
        """Ends the process and begin another."""
        self.store.close()
        self.store = self._store()

    def resume(self) -> None:
        """Ends the process and go on from what is there."""
        self.restart()
        self.open()

    def open(self) -> None:
        """Opens what is there, as the engine does."""
        serial = self.store.newest_serial()
        assert serial is not None
        label = label_of(self.store.open(serial))
        self.last, self.now = label, dict(self.commits[label])
        self._note(label)

    def compare(self) -> None:
        """Asserts that all contents are those of the commit."""
        for (unit, state), expected in self.now.items():
            content = _memory(bytes(len(expected)))
            self.store.read(unit, state, self.store.newest[unit], 0, content).wait()
            assert content == expected, f"{state.value} of unit {unit} is not what {self.last} holds"

    def take_back(self) -> None:
        """Takes the last commit back, as after a rank that has not made it."""
        assert self.before is not None and self.store.durable is not None
        serial = self.store.durable.serial - 1
        self.restart()
        self._note(self.last, self.before)
        self.store.open(serial)
        self._note(self.before)
        self.last, self.now, self.before = self.before, dict(self.commits[self.before]), None

    def start_over(self) -> None:
        """Gives up the first commit, as after a rank that was killed before its own."""
        self.restart()
        self.create(over=True)

    def remove(self) -> None:
        self._note(self.last, None)
        self.store.note_end({"steps": 3})
        self.store.remove()
        self._note(None)

    def delete(self) -> None:
        """Does as `offload rm`: no note says that the run has ended."""
        self._note(self.last, None)
        self.store.close()
        remove_run(self.paths[0] / "run")
        self._note(None)
        self.store = self._store()

    def anything(self, steps: int) -> None:
        """Steps with random updates, commits not after each, a process that ends now and then."""
        for _ in range(steps):
            for unit in TRAINABLE:
                if self.chance.random() < 0.8:
                    self.update(unit)
            if self.chance.random() < 0.7:
                self.commit()
                if self.before is not None and self.chance.random() < 0.3:
                    for unit in self.chance.choices(list(TRAINABLE), k=self.chance.randrange(4)):
                        self.edit(unit)
                    self.take_back()
            if self.chance.random() < 0.3:
                self.resume()


def _memory(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


def everything_that_runs_do(run: Run) -> None:
    run.create()
    run.commit()
    for unit in (0, 1):
        run.update(unit)
    run.commit()
    run.update(0)
    run.commit()
    for unit in (0, 1, 0):  # the second was not updated in the last step
        run.edit(unit)
    run.take_back()
    run.update(0)
    run.update(1)
    run.resume()  # and what was not committed is gone
    for _ in range(3):  # a window
        run.update(1)
        run.update(0)
    run.commit()
    run.resume()
    run.update(1)  # an edit
    run.commit()
    run.commit()


def several_updates_between_commits(run: Run) -> None:
    run.create()
    run.commit()
    for count in (3, 2, 4):
        for _ in range(count):
            run.update(0)
        run.update(1)
        run.commit()
        run.update(0)
        run.resume()


SIZES = {State.WEIGHT: 8192, State.EXP_AVG: 16384}
STORE_SPEC = StoreSpec((SIZES, SIZES, {State.WEIGHT: 4096}), 2, {"model": "test"}, frozen=(0, 0, 4096))


def filled(nbytes: int, value: int) -> memoryview:
    buffer = aligned_empty(nbytes)
    buffer[:] = bytes([value]) * nbytes
    return buffer


def created(folder: Path, queue: IoQueue, spec: StoreSpec = STORE_SPEC) -> Store:
    store = Store([folder], "run", 0, spec, queue)
    store.create()
    return store


def opened(folder: Path, queue: IoQueue, spec: StoreSpec = STORE_SPEC) -> tuple[Store, str]:
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


@given(st.integers(1, 2**60), st.lists(st.integers(0, 2), max_size=300), st.integers(0, 1), st.integers(0, 2**40))
def test_a_record_comes_back_as_it_went(epoch: int, slots: list[int], blob: int, nbytes: int) -> None:
    record = CommitRecord(epoch + 3, epoch, tuple(slots), blob, nbytes, 12345, 678)
    page = record.pack()
    assert len(page) == STORE_PAGE and CommitRecord.unpack(page, record.blob) == record


@given(st.integers(0, STORE_PAGE * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    page = bytearray(CommitRecord(9, 7, (0, 1, 1), 1, 100, 5).pack())
    page[bit // 8] ^= 1 << (bit % 8)
    assert CommitRecord.unpack(bytes(page), 1) is None


def test_a_record_of_two_slots_may_name_twice_as_many_units_as_one_of_three() -> None:
    """A record without a third slot is that of earlier versions: zeros follow the only bitmap."""
    for units, slots in ((MAX_UNITS, (0, 1)), (MAX_UNITS_OF_THREE_SLOTS, (0, 1, 2))):
        record = CommitRecord(1, 0, tuple(slots[unit % len(slots)] for unit in range(units)), 0, 100, 5)
        assert CommitRecord.unpack(record.pack(), 0) == record
    spec = StoreSpec(({},) * (MAX_UNITS_OF_THREE_SLOTS + 1), 2, {}, shadowed=frozenset({0}))
    with pytest.raises(StoreError, match=f"a store holds at most {MAX_UNITS_OF_THREE_SLOTS}"):
        Store([], "run", 0, spec, None)  # type: ignore[arg-type]


def test_between_two_commits_an_update_writes_neither_the_newest_slot_nor_the_committed_one(
    tmp_path: Path, queue: IoQueue
) -> None:
    """A unit with a shadow has three slots; one without alternates at the first update alone."""
    store = created(tmp_path, queue, STORE_SPEC._replace(shadowed=frozenset({1})))
    store.commit(0, blob("zero"))
    for value in range(4):
        for unit in (0, 1):
            writes = store.target(unit)
            assert store.durable is not None and writes != store.durable.slots[unit]
            assert (writes != store.newest[unit]) is (unit == 1 or value == 0)
            update(store, unit, 10 + value)
    store.commit(1, blob("one"))
    assert store.durable.slots == (1, 2, 0)
    store.close()
    # A start that would plan no third slot finds it in the files.
    store, text = opened(tmp_path, queue)
    assert (text, weight(store, 0), weight(store, 1)) == ("one", 13, 13) and store.spec.shadowed == {1}
    assert inspect(tmp_path / "run")["ranks"][0]["damaged"] == []
    store.close()


def test_a_record_that_names_a_slot_that_a_unit_lacks_is_refused(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(0, blob("zero"))
    assert store.durable is not None
    record = store.durable._replace(slots=(0, 2, 0))
    store.close()
    path = tmp_path / "run" / "rank0" / "commit"
    path.write_bytes(record.pack() + path.read_bytes()[PAGE:])
    with pytest.raises(StoreError, match="names slots that its files do not have, at step 0"):
        opened(tmp_path, queue)
    (commit,) = inspect(tmp_path / "run")["ranks"][0]["commits"]
    assert commit["blob"] == "damaged"


def test_without_commits_a_unit_with_a_shadow_has_two_slots(tmp_path: Path, queue: IoQueue) -> None:
    spec = STORE_SPEC._replace(slots=1, shadowed=frozenset({1}))
    store = created(tmp_path, queue, spec)
    for value in range(3):
        for unit in (0, 1):
            assert (store.target(unit) != store.newest[unit]) is (unit == 1)
            update(store, unit, 10 + value)
            assert weight(store, unit) == 10 + value
    assert spec.nbytes == STORE_SPEC._replace(slots=1).nbytes + sum(SIZES.values())
    store.close()


def damage(path: Path, offset: int, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(os.urandom(nbytes))


def test_a_damaged_blob_is_an_error_and_no_way_back(tmp_path: Path, queue: IoQueue) -> None:
    """The epoch before may have been overwritten already: an update of epoch 3 writes to its slots."""
    store = created(tmp_path, queue)
    for epoch in (1, 2):
        update(store, 0, epoch)
        store.commit(epoch, blob(f"blob {epoch}" * 100))
    update(store, 0, 3)
    slot = store.durable.blob
    store.close()
    damage(tmp_path / "run" / "rank0" / f"blob.{slot}", 0, 64)
    with pytest.raises(StoreError, match=r"step 1: weight of unit 0, slot [AB]: 4096 bytes at offset"):
        opened(tmp_path, queue)


def test_a_damaged_blob_of_a_store_that_was_closed_gives_the_commit_before(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    for epoch in (1, 2):
        update(store, 0, epoch)
        store.commit(epoch, blob(f"blob {epoch}"))
    slot = store.durable.blob
    store.close()
    damage(tmp_path / "run" / "rank0" / f"blob.{slot}", 0, 64)
    store, text = opened(tmp_path, queue)
    assert text == "blob 1" and weight(store, 0) == 1
    assert "all data of step 1 was compared and is intact" in store.notices[0]
    store.close()


def test_two_torn_records_are_an_error(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    damage(tmp_path / "run" / "rank0" / "commit", 0, 2 * STORE_PAGE)
    assert run_status([tmp_path], "run").exists, "it is not started over in silence"
    with pytest.raises(StoreError, match="no commit record"):
        opened(tmp_path, queue)


@pytest.mark.parametrize("kept", [4096, -4096])
def test_a_cut_file_is_an_error_if_the_commit_has_bytes_there(kept: int, tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    update(store, 0, 7)
    store.commit(1, blob("one"))
    store.close()
    states = tmp_path / "run" / "rank0" / "states"
    size = states.stat().st_size
    os.truncate(states, kept % size)
    if kept > 0:
        with pytest.raises(StoreError, match="cut short"):
            opened(tmp_path, queue)
    else:  # zeros, which no update has written yet
        store, _ = opened(tmp_path, queue)
        assert any("cut short" in line and "all data of step 1 was compared" in line for line in store.notices)
        assert states.stat().st_size == size
        store.close()


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
    assert (rank / "states").stat().st_blocks * 512 >= STORE_SPEC.nbytes, "the room is really reserved"
    store.close()


def test_remove_run_wants_a_run_folder_that_nobody_holds(tmp_path: Path, queue: IoQueue) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(StoreError, match="not a run folder"):
        remove_run(tmp_path / "mine")
    store = Store([tmp_path / "a", tmp_path / "b"], "run", 0, STORE_SPEC, queue)
    store.create()
    store.commit(1, blob("one"))
    with pytest.raises(StoreError, match=str(os.getpid())):
        remove_run(tmp_path / "a" / "run")
    store.close()
    remove_run(tmp_path / "a" / "run")
    assert not (tmp_path / "a" / "run").exists() and not (tmp_path / "b" / "run").exists()


@pytest.mark.parametrize("damage", ["{", '{"drives": 3}'])
def test_a_run_whose_notes_are_broken_can_still_be_removed(damage: str, tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    (tmp_path / "run" / "rank0" / "manifest.json").write_text(damage)
    remove_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


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


def test_a_commit_that_is_not_there_is_an_error(tmp_path: Path, queue: IoQueue) -> None:
    two_commits(tmp_path, queue)
    store = Store([tmp_path], "run", 0, STORE_SPEC, queue)
    with pytest.raises(StoreError, match="holds commits 2, 1, but the ranks agreed on commit 7, the last that all"):
        store.open(7)
    store, text = opened(tmp_path, queue)
    assert text == "two", "and nothing was taken back"
    store.close()


OWN_NBYTES = (8192, 8192, 4096, 4096)
"""Bytes of the copies of both units, weight and moment of each. The frozen half of the second's weight is not there."""


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


@pytest.mark.usefixtures("equal_drives")
def test_only_what_the_edit_overwrites_is_copied(tmp_path: Path, queue: IoQueue) -> None:
    edited = Edited(tmp_path, queue)
    edited.run.edit(0)  # once more: the slot is that of the first edit
    edited.end()
    assert SPEC.frozen[1] == 4096
    assert edited.undo.stat().st_size == sum(PAGE + nbytes for nbytes in OWN_NBYTES)
    edited.opens(1)


@pytest.mark.usefixtures("equal_drives")
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


@pytest.mark.sample(4)
@pytest.mark.usefixtures("equal_drives")
@pytest.mark.parametrize("damage", [*DAMAGES, "copies of another run"])
def test_damage_is_an_error_and_loses_nothing(damage: str, tmp_path: Path, queue: IoQueue) -> None:
    edited, intact = Edited(tmp_path / "one", queue), Edited(tmp_path / "other", queue)
    edited.end()
    intact.end()
    whole = edited.undo.read_bytes()
    edited.undo.write_bytes(DAMAGES[damage](whole) if damage in DAMAGES else intact.undo.read_bytes())
    edited.is_refused(1)
    edited.undo.write_bytes(whole)
    edited.opens(1)


@pytest.mark.usefixtures("equal_drives")
@pytest.mark.parametrize("left", [PAGE, PAGE + 100, 3 * PAGE + 8192 + 10])
def test_a_copy_that_a_kill_has_interrupted_is_passed_over(left: int, tmp_path: Path, queue: IoQueue) -> None:
    """Its slot is whole: the edit waits for the copy."""
    edited = Edited(tmp_path, queue, (0,))
    first = edited.undo.stat().st_size
    edited.run.store.set_aside(1)
    edited.end()
    data = edited.undo.read_bytes()
    edited.undo.write_bytes(data[: first + left] + bytes(PAGE))
    edited.opens(1)


@pytest.mark.usefixtures("equal_drives")
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


@pytest.mark.usefixtures("equal_drives")
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


@pytest.mark.usefixtures("equal_drives")
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


DISK = ("nvme", "nvme")


def model() -> nn.Module:
    """Large enough for a few stripes."""
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def loss(net: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + micro)
    value: torch.Tensor = net(torch.randn(4, 256, generator=generator)).pow(2).mean()
    return value


JOB = Job(model, loss, steps=3)


def begin(folder: Path, drives: int = 1, **more: Any) -> offload.Engine:
    """An engine over swap files in the folders a and b, or in a alone."""
    paths = [str(folder / name) for name in "ab"[:drives]]
    return start(JOB, DISK, folder, **{"nvme_path": paths, **more})


def test_what_goes_to_each_drive_is_what_was_asked_for_and_commits(tmp_path: Path, equal_drives: None) -> None:
    # Else a row of stripes may be so long, by what was measured, that all of so small a store lies on the first.
    engine = begin(tmp_path, 2)
    before = engine.io_bytes().written, sum(each.run_bytes for each in engine.drive_writes())
    for step in range(3):
        train_step(engine, JOB, step)
    engine.state_dict()  # all updates are written
    drives = engine.drive_writes()
    grown = engine.io_bytes().written - before[0]
    commits = sum(each.run_bytes for each in drives) - before[1] - grown
    assert [Path(each.path).name for each in drives] == ["a", "b"]
    assert all(each.run_bytes == each.life_bytes for each in drives)
    assert grown > 2 * sum(p.numel() for p in model().parameters()) * 12
    assert 2 * 4096 < commits < 3 * 100_000, "records and blobs of two or three commits"
    assert min(each.run_bytes for each in drives) > grown / 10
    engine.destroy(remove=True)


def test_a_resumed_run_goes_on_counting_and_inspect_tells(tmp_path: Path) -> None:
    engine = begin(tmp_path, durability="step", drive_tbw=2)
    for step in range(2):
        train_step(engine, JOB, step)
    (first,) = engine.drive_writes()
    engine.destroy()
    (rank,) = inspect(tmp_path / "a")["runs"][0]["ranks"]
    assert rank["rated_bytes"] == 2e12
    words = CliRunner().invoke(app, ["inspect", str(tmp_path / "a" / "default")]).stdout
    assert "of the 2 TB that it is rated for" in words
    engine = begin(tmp_path, durability="step", resume="must")
    (again,) = engine.drive_writes()
    assert again.run_bytes == 0 and again.life_bytes >= first.run_bytes - 200_000
    train_step(engine, JOB, 2)
    engine.destroy()
    (later,) = engine.drive_writes()
    assert later.life_bytes == again.life_bytes + later.run_bytes and later.run_bytes > 0
    (rank,) = inspect(tmp_path / "a")["runs"][0]["ranks"]
    assert again.life_bytes < rank["written_bytes"][0] <= later.life_bytes and rank["rated_bytes"] is None
    words = CliRunner().invoke(app, ["inspect", str(tmp_path / "a" / "default")]).stdout
    assert "in the life of the run" in words


def test_a_commit_of_before_these_counts_begins_at_nothing() -> None:
    counts = DriveByteCounter(["/a"])
    counts.add(0, 7)
    counts.go_on(None)
    assert counts.drives()[0].life_bytes == 7
    after = DriveByteCounter(["/a"])
    after.go_on(counts.pack())
    assert after.drives()[0][1:] == (0, 7)


def test_gradients_that_wait_on_a_drive_count(tmp_path: Path) -> None:
    counts = DriveByteCounter([tmp_path])
    with IoQueue() as queue:
        scratch = SpillFile([tmp_path], {0: 8192}, queue, counts)
        scratch.write(0, 0, memoryview(aligned_empty(8192))).wait()
        scratch.close()
    assert counts.drives()[0].run_bytes == 8192


def test_a_life_is_warned_of_once_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    counts = DriveByteCounter(["/mnt/a", "/mnt/b"], Rating(1e12, 0.1, ranks=2))
    with caplog.at_level(logging.WARNING):
        counts.add(0, 40 * 10**9)
        assert not caplog.records
        counts.add(0, 20 * 10**9)
        counts.add(0, 20 * 10**9)
    (message,) = [each.getMessage() for each in caplog.records]
    assert message.startswith("/mnt/a: this run has written 120 GB to this drive, 12.0 % of its rated 1 TB")


def test_a_run_is_foreseen_to_its_end() -> None:
    use = forecast("/mnt/a", 1e9, 1e9, 99, tbw=0.5)
    assert (use.at_end_bytes, use.share) == (1e11, 0.2)
    words = warning(use, 0.1, seconds_left=7200)
    assert (
        words is not None
        and "in 2.0 hours, this run will have written 100 GB to this drive, 20.0% of its rated 500 GB" in words
    )
    assert warning(use, 0.2, 7200) is None and warning(dataclasses.replace(use, rated_bytes=None), 0.1, 7200) is None


PROGRAM = """
import os, pathlib, signal
from tests.support import models
from tests.support.oracle import start, train_step

engine = start(models.GPT2, ("nvme", "nvme"), pathlib.Path({folder!r}), durability="none")
train_step(engine, models.GPT2, 0)
print("trained", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def named_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_nothing_is_left_that_takes_room(tmp_path: Path) -> None:
    done = warm_process.python(PROGRAM.format(folder=str(tmp_path)), cwd=ROOT)
    assert done.returncode != 0 and "trained" in done.stdout
    assert named_bytes(tmp_path) < 64 << 10
    assert not list(tmp_path.rglob("states"))
    run = str(tmp_path / "default")
    result = CliRunner().invoke(app, ["inspect", run, "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["ranks"][0]["damaged"] == []
    assert "nothing is committed" in CliRunner().invoke(app, ["inspect", run]).output
    assert CliRunner().invoke(app, ["verify", run]).exit_code == 2
    engine = start(models.GPT2, DISK, tmp_path, durability="none")  # the same run begins again
    train_step(engine, models.GPT2, 0)
    engine.destroy()
    assert not named_bytes(tmp_path)
