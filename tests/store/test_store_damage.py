"""Drives that corrupt, fill up or fail under a run are reported, and the last commit stays as it was."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import EngineFailed, IoError, StoreError
from offload.states import State
from offload.swapper.store import Store
from offload.swapper.store.format import CommitRecord, read_manifest, read_records
from tests.support import models
from tests.support.drives import filesystems
from tests.support.drives.fault_injection import flip_bit
from tests.support.oracle import Job, least_host_memory, processes, run, small_pieces, start, train_step

DISK = ("nvme", "nvme")


class Partly(nn.Module):
    """Layers of which some weights are frozen, and a layer that is frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in "123")
        self.layers[0][2].requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(64, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


JOB = Job(Partly, models.mixture_loss, steps=6, dtype="bf16")
DONE = 3
"""Steps of the run before something happens to it."""


def records(folder: Path) -> tuple[CommitRecord, ...]:
    return read_records(folder / "default" / "rank0" / "commit").valid


def begin(folder: Path, placement: tuple[str, str] = DISK, **options: Any) -> list[float]:
    """A run of `DONE` steps that was closed; its losses."""
    engine = start(JOB, placement, folder, **options)
    losses = [train_step(engine, JOB, step) for step in range(DONE)]
    engine.destroy()
    return losses


def go_on(folder: Path, expected: int, unbroken: list[float], placement: tuple[str, str] = DISK) -> None:
    """To the end, from the step `expected`, as the unbroken run did."""
    engine = start(JOB, placement, folder, resume="must")
    assert engine.global_steps == expected
    losses = [train_step(engine, JOB, step) for step in range(expected, JOB.steps)]
    engine.destroy(remove=True)
    assert losses == unbroken[expected:]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run(JOB, DISK, tmp_path_factory.mktemp("whole")).losses


# -- bits that flip while the run is closed -----------------------------------------------------------

PLACES = {
    "a weight": ("layers.2", State.WEIGHT, 0.4),
    "a weight beside frozen ones": ("layers.0", State.WEIGHT, 0.2),
    "a frozen weight beside others": ("layers.0", State.WEIGHT, 0.9),
    "a weight of a frozen unit": ("layers.1", State.WEIGHT, 0.5),
    "what bf16 leaves of a weight": ("layers.2", State.MASTER_LOW_BITS, 0.3),
    "a moment": ("layers.0", State.EXP_AVG, 0.01),
    "the last byte of a moment": ("layers.2", State.EXP_AVG_SQ, 1.0),
}


def flip(folder: Path, unit_name: str, state: State, where: float) -> None:
    """One bit of the newest slot, so far into it."""
    rank = folder / "default" / "rank0"
    spec = read_manifest(rank / "manifest.json").spec
    unit = next(number for number, row in enumerate(spec.fingerprint["units"]) if row["name"] == unit_name)
    place = spec.places()[unit][state][records(folder)[0].slots[unit]]
    at = place.offset(int(where * (place.nbytes - 1)))
    flip_bit(rank / "states", at, random.Random(where).choice([1, 16, 128]))


def refused(folder: Path, unit_name: str, state: State, placement: tuple[str, str] = DISK, **options: Any) -> None:
    """A resumed run raises, and names what is damaged; nothing is committed."""
    before = records(folder)
    with pytest.raises((EngineFailed, IoError)) as caught:
        engine = start(JOB, placement, folder, resume="must", **options)
        try:
            for step in range(DONE, JOB.steps):
                train_step(engine, JOB, step)
        finally:
            engine.destroy()
    cause: Any = caught.value
    while not isinstance(cause, IoError):
        cause = cause.__cause__
    assert cause.errno == errno.EBADMSG
    assert f"use {state.value} of {unit_name}, slot " in str(cause)
    assert records(folder) == before


@pytest.mark.sample(3)
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_named_before_it_is_committed(place: str, tmp_path: Path) -> None:
    begin(tmp_path)
    flip(tmp_path, *PLACES[place])
    refused(tmp_path, *PLACES[place][:2])


@pytest.mark.sample(3)
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_named_by_other_tiles(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed with less memory: what was written in one request is read in many, and units come piece by piece."""
    begin(tmp_path)
    flip(tmp_path, *PLACES[place])
    small_pieces(monkeypatch)
    refused(tmp_path, *PLACES[place][:2], host_memory=least_host_memory(JOB, tmp_path, resume="must"))


@pytest.mark.parametrize("place", ["a weight", "a moment", "a frozen weight beside others"])
@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("none", "nvme")])
def test_a_flipped_bit_is_named_where_states_are_read_back(
    place: str, placement: tuple[str, str], tmp_path: Path
) -> None:
    begin(tmp_path, placement, durability="step")
    flip(tmp_path, *PLACES[place])
    refused(tmp_path, *PLACES[place][:2], placement, durability="step")


def test_a_flipped_bit_in_a_window_is_named_before_the_next_commit(tmp_path: Path) -> None:
    begin(tmp_path, durability={"every": 2})
    flip(tmp_path, *PLACES["a moment"])
    refused(tmp_path, *PLACES["a moment"][:2], durability={"every": 2})


def test_the_slot_that_is_not_named_may_be_anything(tmp_path: Path, unbroken: list[float]) -> None:
    begin(tmp_path)
    rank = tmp_path / "default" / "rank0"
    spec, newest = read_manifest(rank / "manifest.json").spec, records(tmp_path)[0]
    with (rank / "states").open("r+b") as file:
        for unit, row in enumerate(spec.places()):
            for slots in row.values():
                named = slots[newest.slots[unit]].extents
                for extent in slots[1 - newest.slots[unit]].extents:
                    if extent not in named:
                        file.seek(extent.offset)
                        file.write(os.urandom(extent.nbytes))
    go_on(tmp_path, DONE, unbroken)


# -- two processes ------------------------------------------------------------------------------------


def _hold(folder: Path, pipe: Any) -> None:
    logging.disable(logging.CRITICAL)
    engine = start(JOB, DISK, folder, resume="auto")
    train_step(engine, JOB, engine.global_steps)
    testing.settle(engine)
    pipe.send(os.getpid())
    pipe.recv()


def test_the_error_of_a_second_process_names_the_holder_of_the_run(tmp_path: Path, unbroken: list[float]) -> None:
    begin(tmp_path)
    mine, theirs = processes().Pipe()
    process = processes().Process(target=_hold, args=(tmp_path, theirs))
    process.start()
    holder = mine.recv()
    for resume in ("auto", "must"):
        with pytest.raises(
            StoreError, match=rf"is in use by process {holder} on .*; end that process, or give a run beside it a name"
        ):
            start(JOB, DISK, tmp_path, resume=resume)
    os.kill(holder, signal.SIGKILL)
    process.join()
    go_on(tmp_path, DONE + 1, unbroken)


# -- a full disk --------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with filesystems.disk(tmp_path, 24 << 20) as mount:
        yield mount


def fill(disk: Path, leave: int = 0) -> None:
    """Somebody else takes all of the room, or all but so many bytes."""
    with (disk / "filler").open("ab") as file, contextlib.suppress(OSError):
        while shutil.disk_usage(disk).free > leave:
            file.write(bytes(min(1 << 16, max(shutil.disk_usage(disk).free - leave, 1))))
            file.flush()


def test_a_disk_that_others_fill_later(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All room was reserved, that of the blobs too, which then hold many more checksums than at the start."""
    job = models.GPT2._replace(dtype="bf16", steps=4)
    expected = run(job, DISK, tmp_path / "whole").losses
    from offload.layout import placement as tiles
    from offload.swapper.store import format

    monkeypatch.setattr(tiles, "_TILE_NBYTES", range(2048 * 12, 2048 * 12 + 1))
    monkeypatch.setattr(format, "_MIN_CHECKSUM_NBYTES", 2048)
    folder = disk / "swap"
    losses: list[float] = []
    for resume in ("never", "must"):
        engine = start(job, DISK, folder, resume=resume)
        fill(disk)
        assert shutil.disk_usage(disk).free == 0
        losses += [train_step(engine, job, step) for step in range(len(losses), len(losses) + 2)]
        engine.destroy()
    assert losses == expected


def test_a_disk_that_is_full_at_the_start(disk: Path, unbroken: list[float]) -> None:
    fill(disk, 200 << 10)
    with pytest.raises(StoreError, match=r"the swap files need .* free; free some room, or add a drive to nvme_path"):
        start(JOB, DISK, disk / "swap", durability="step")
    assert not (disk / "swap" / "default").exists()
    (disk / "filler").unlink()
    begin(disk / "swap")
    go_on(disk / "swap", DONE, unbroken)


def test_a_disk_that_is_full_when_the_first_blob_comes(
    disk: Path, unbroken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Store.create
    with monkeypatch.context() as patch:
        patch.setattr(Store, "create", lambda store, **given: (create(store, **given), fill(disk))[0])
        with pytest.raises(IoError, match="No space left") as caught:
            start(JOB, DISK, disk / "swap")
        assert caught.value.errno == errno.ENOSPC
    assert not (disk / "swap" / "default").exists(), "a start that fails leaves nothing behind"
    (disk / "filler").unlink()
    begin(disk / "swap")
    go_on(disk / "swap", DONE, unbroken)


# -- a commit that fails ------------------------------------------------------------------------------

CALLS = {
    "the sync of the data": ("fdatasync", "states"),
    "the write of the blob": ("pwrite", "blob"),
    "the sync of the blob": ("fsync", "blob"),
    "the write of the record": ("pwrite", "commit"),
}


def failing(call: str, file: str, number: int) -> Callable[..., Any]:
    real = getattr(os, call)

    def fail(descriptor: int, *arguments: Any) -> Any:
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).startswith(file):
            raise OSError(number, os.strerror(number))
        return real(descriptor, *arguments)

    return fail


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("what", CALLS)
def test_a_commit_that_fails_stops_the_engine_at_the_one_before(
    what: str, number: int, tmp_path: Path, unbroken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(JOB, DISK, tmp_path)
    for step in range(DONE):
        train_step(engine, JOB, step)
    testing.settle(engine, commit=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, CALLS[what][0], failing(*CALLS[what], number))
        with pytest.raises(EngineFailed) as caught:
            for step in range(DONE, JOB.steps):
                train_step(engine, JOB, step)
    cause = caught.value.__cause__
    assert isinstance(cause, IoError) and cause.errno == number
    assert os.path.basename(cause.path).startswith(CALLS[what][1])
    engine.destroy()  # the drive works again, but a sync that failed once must not be believed the next time
    assert records(tmp_path)[0].step == DONE - 1
    go_on(tmp_path, DONE - 1, unbroken)


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", CALLS)
def test_the_last_commit_of_all_fails(
    what: str, tmp_path: Path, unbroken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of `destroy`, of an edit: the error is raised, the lock is given back, nothing is committed later."""
    begin(tmp_path)
    engine = start(JOB, DISK, tmp_path, resume="must")
    with offload.gathered(engine.module.head, modify=True):
        engine.module.head.weight.data.zero_()
    with monkeypatch.context() as patch:
        patch.setattr(os, CALLS[what][0], failing(*CALLS[what], errno.EIO))
        with pytest.raises(IoError):
            engine.destroy()
    engine.destroy()
    testing.leave(engine)
    go_on(tmp_path, DONE, unbroken)
