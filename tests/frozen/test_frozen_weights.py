"""Frozen weights beside trained ones are stored once on disk, and a run never writes them again."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.errors import EngineFailed, IoError
from offload.states import State
from offload.swapper.store.inspection import look
from tests.support import models
from tests.support.drives.fault_injection import flip_bit
from tests.support.oracle import (
    DTYPES,
    assert_same,
    assert_same_tensors,
    least_host_memory,
    room_for,
    run,
    same_bits,
    small_pieces,
    start,
    train_step,
    weights_of,
)

DISK = ("nvme", "nvme")
JOB = models.LORA._replace(dtype="bf16")
OTHER = JOB._replace(seed=5)
"""With other frozen weights."""
BYTES = {"bf16": 12, "fp16": 14, "fp32": 12}
"""Of a trainable element, in one slot."""


def frozen_bytes(rank: Path) -> dict[str, str]:
    """What lies on disk of the frozen part of each unit, as a hash."""
    manifest = look(rank).manifest
    assert manifest is not None
    found = {}
    with (rank / "states").open("rb") as file:
        for unit, row in zip(manifest.spec.fingerprint["units"], manifest.spec.places(), strict=True):
            (shared,) = {place.extents[-1] for place in row[State.WEIGHT]}  # both slots name it
            file.seek(shared.offset)
            found[unit["name"]] = hashlib.sha256(file.read(shared.nbytes)).hexdigest()
    return found


def by_formula(engine: offload.Engine, slots: int, dtype: str) -> int:
    """Bytes of the swap files: slots of what trains, and once what does not."""
    trainable = sum(len(own) for own, _ in testing.inspect(engine).shares)
    frozen = sum(len(behind) for _, behind in testing.inspect(engine).shares)
    assert trainable and frozen > 4 * trainable
    return slots * BYTES[dtype] * trainable + DTYPES[dtype].itemsize * frozen


# -- room ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["step", "none"])
@pytest.mark.parametrize("dtype", BYTES)
def test_the_room_is_two_slots_of_what_trains_and_one_of_what_does_not(
    dtype: str, durability: str, tmp_path: Path
) -> None:
    engine = start(JOB._replace(dtype=dtype), DISK, tmp_path, durability=durability)
    store = testing.inspect(engine).store
    assert store is not None
    assert store._files.states.size() == by_formula(engine, 2 if durability == "step" else 1, dtype)
    engine.destroy(remove=True)


def test_a_weight_that_has_no_other_state_has_two_slots_if_it_trains(tmp_path: Path) -> None:
    """SGD in fp32 keeps nothing beside the weights: an update must not write over what the last commit names."""
    job = JOB._replace(dtype="fp32", optimizer="SGD")
    engine = start(job, DISK, tmp_path)
    trainable = [len(own) for own, _ in testing.inspect(engine).shares]
    frozen = [len(behind) for _, behind in testing.inspect(engine).shares]
    assert (tmp_path / "default" / "rank0" / "states").stat().st_size == 8 * sum(trainable) + 4 * sum(frozen)
    store = testing.inspect(engine).store
    assert store is not None
    for unit, row in enumerate(store.spec.places()):
        own = 4 * trainable[unit]
        one, other = (place.extents_of(0, own) for place in row[State.WEIGHT])
        assert not own or one != other
    train_step(engine, job, 0)
    engine.destroy(remove=True)


# -- what is read -------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_the_same_bits_wherever_they_lie(optimizer: str, tmp_path: Path) -> None:
    job = JOB._replace(optimizer=optimizer, dtype="fp32")
    placements = [("none", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "cpu"), DISK]
    unbroken = same_bits(job, tmp_path, placements, durability="step", device_memory=1 << 20)
    assert_same(unbroken, run(job, DISK, tmp_path / "few", device_memory=room_for(job, 2)))
    assert_same(unbroken, run(job, DISK, tmp_path / "none", durability="none", device_memory=room_for(job, 2)))


def test_frozen_units_are_streamed_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a unit may begin in what trains and end in what does not."""
    unbroken = run(JOB, DISK, tmp_path / "whole")
    small_pieces(monkeypatch)
    least = least_host_memory(JOB, tmp_path / "least")
    assert_same(unbroken, run(JOB, DISK, tmp_path / "least", host_memory=least, device_memory=room_for(JOB, 1)))


# -- what is written ----------------------------------------------------------------------------------


def test_they_stay_as_they_are_through_steps_and_a_resume(tmp_path: Path) -> None:
    unbroken = run(JOB, DISK, tmp_path / "whole")
    rank = tmp_path / "run" / "default" / "rank0"
    engine = start(JOB, DISK, tmp_path / "run")
    testing.settle(engine)
    before = frozen_bytes(rank)
    for step in range(2):
        train_step(engine, JOB, step)
    engine.destroy()
    assert frozen_bytes(rank) == before
    engine = start(JOB, DISK, tmp_path / "run", resume="must")
    losses = [train_step(engine, JOB, step) for step in range(2, JOB.steps)]
    engine.destroy()
    assert losses == unbroken.losses[2:] and frozen_bytes(rank) == before


# -- damage -------------------------------------------------------------------------------------------


def flip_frozen(rank: Path, unit: int) -> None:
    manifest = look(rank).manifest
    assert manifest is not None
    extent = manifest.spec.places()[unit][State.WEIGHT][0].extents[-1]
    flip_bit(rank / "states", extent.offset + extent.nbytes // 2)


def test_damage_in_them_is_found_by_verify_and_by_who_reads_them(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path)
    for step in range(3):
        train_step(engine, JOB, step)
    unit = next(n for n, (own, behind) in enumerate(testing.inspect(engine).shares) if own and behind)
    title = testing.inspect(engine).layouts[unit].name
    engine.destroy()
    verify = ["verify", str(tmp_path / "default"), "--json"]
    assert CliRunner().invoke(app, verify).exit_code == 0
    flip_frozen(tmp_path / "default" / "rank0", unit)
    with pytest.raises((EngineFailed, IoError)) as caught:
        engine = start(JOB, DISK, tmp_path, resume="must", device_memory=room_for(JOB, 2))
        try:
            for step in range(3, 6):
                train_step(engine, JOB, step)
        finally:
            engine.destroy()
    error: Any = caught.value
    while not isinstance(error, IoError):
        error = error.__cause__
    assert error.errno == errno.EBADMSG and f"use weight of {title}, slot " in str(error)
    found = CliRunner().invoke(app, verify)
    (damage,) = json.loads(found.stdout)["ranks"][0]["damages"]
    assert found.exit_code == 1 and (damage["state"], damage["unit"]) == ("weight", title)


# -- checkpoints and exports --------------------------------------------------------------------------


def test_a_checkpoint_with_other_ones_replaces_them(tmp_path: Path) -> None:
    other = start(OTHER, DISK, tmp_path / "other")
    for step in range(2):
        train_step(other, OTHER, step)
    other.save_checkpoint(tmp_path / "saved")
    expected, weights = [train_step(other, OTHER, step) for step in (2, 3)], weights_of(other)
    other.destroy()
    engine = start(JOB, DISK, tmp_path / "run")
    train_step(engine, JOB, 0)
    engine.load_checkpoint(tmp_path / "saved")
    rank = tmp_path / "run" / "default" / "rank0"
    assert frozen_bytes(rank) == frozen_bytes(tmp_path / "other" / "default" / "rank0")
    losses = [train_step(engine, JOB, 2)]
    engine.destroy()
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "run" / "default")]).exit_code == 0
    engine = start(JOB, DISK, tmp_path / "run", resume="must")
    losses.append(train_step(engine, JOB, 3))
    assert losses == expected
    assert_same_tensors(weights, weights_of(engine))
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("same", [True, False])
def test_a_failed_load_reports_whether_the_last_commit_is_intact(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOB if same else OTHER
    saver = start(job, DISK, tmp_path / "other")
    train_step(saver, job, 0)
    saver.save_checkpoint(tmp_path / "saved")
    saver.destroy(remove=True)
    engine = start(JOB, DISK, tmp_path / "run")
    losses = [train_step(engine, JOB, step) for step in range(2)]
    assert testing.inspect(engine).store is not None

    def fails(*_: Any) -> None:
        raise IoError("states", 0, 1, errno.EIO, "write")

    testing.settle(engine)
    monkeypatch.setattr(testing.inspect(engine).store, "commit", fails)
    with pytest.raises(IoError):
        engine.load_checkpoint(tmp_path / "saved")
    with pytest.raises(EngineFailed) as caught:
        train_step(engine, JOB, 2)
    assert ("replacing frozen weights" in str(caught.value)) is not same
    assert ("the last committed step is intact" in str(caught.value)) is same
    engine.destroy()
    monkeypatch.undo()
    assert (CliRunner().invoke(app, ["verify", str(tmp_path / "run" / "default")]).exit_code == 0) is same
    if same:
        unbroken = run(JOB, DISK, tmp_path / "whole")
        engine = start(JOB, DISK, tmp_path / "run", resume="must")
        last = [train_step(engine, JOB, step) for step in range(engine.global_steps, JOB.steps)]
        assert last == unbroken.losses[-len(last) :] and losses == unbroken.losses[:2]
        engine.destroy(remove=True)


def exported(what: Path, out: Path) -> dict[str, torch.Tensor]:
    result = CliRunner().invoke(app, ["export", str(what), str(out)])
    assert result.exit_code == 0, result.output
    files = sorted(out.glob("*.safetensors"))
    return {name: value for file in files for name, value in safetensors.torch.load_file(file).items()}


def test_an_export_of_swap_files_and_one_of_a_checkpoint_are_the_weights(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path)
    for step in range(3):
        train_step(engine, JOB, step)
    engine.save_checkpoint(tmp_path / "saved", tag="three")
    weights = weights_of(engine)
    engine.destroy()
    store = look(tmp_path / "default" / "rank0")
    assert set(store.commits[0].record.slots) == {0, 1}, "some of the newest slots are B"
    for number, what in enumerate((tmp_path / "default", tmp_path / "saved" / "three")):
        found = exported(what, tmp_path / f"out{number}")
        assert found and all(torch.equal(value, weights[name]) for name, value in found.items())
        assert {name for name in weights if name not in found} <= {"base_model.model.lm_head.weight"}
