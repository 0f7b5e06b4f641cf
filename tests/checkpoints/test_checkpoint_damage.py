"""A checkpoint that is damaged changes nothing, and damage does not become a checkpoint; full disks, shared bytes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from offload import testing
from offload.aio import IoQueue
from offload.checkpoint import save
from offload.errors import EngineFailed, IoError, StoreError
from offload.states import State
from tests.support import models
from tests.support.drives import filesystems
from tests.support.drives.fault_injection import flip_bit
from tests.support.drives.filesystems import sync
from tests.support.oracle import assert_same_tensors, run, start, train_step, weights_of

DISK, CPU = ("nvme", "nvme"), ("cpu", "cpu")


def harm(folder: Path, how: str) -> None:
    states = folder / "states.rank0.safetensors"
    if how == "a byte of a state":
        flip_bit(states, states.stat().st_size - 5000)
    elif how == "a byte of a weight":
        flip_bit(states, 4096 * 3)
    elif how == "a header":
        flip_bit(states, 30)
    elif how == "cut short":
        os.truncate(states, states.stat().st_size - 4096)
    elif how == "no states":
        states.unlink()
    elif how == "progress":
        flip_bit(folder / "progress.rank0.safetensors", 3000)
    elif how == "manifest":
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace('"epoch": 2', '"epoch": 3'))
    elif how == "half a manifest":
        os.truncate(folder / "manifest.json", 100)
    elif how == "a later format":
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace('"format": 1', '"format": 2'))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("a byte of a state", r"states.rank0.safetensors is damaged: \d+.exp_avg_sq does not match"),
        ("a byte of a weight", r"states.rank0.safetensors is damaged: 0.weight does not match"),
        ("a header", "states.rank0.safetensors"),
        ("cut short", "states.rank0.safetensors contains"),
        ("no states", "states.rank0.safetensors"),
        ("progress", "progress.rank0.safetensors is damaged"),
        ("manifest", "manifest.json.*checksum"),
        ("half a manifest", "manifest.json"),
        ("a later format", "format is 2.*reads format 1"),
    ],
)
@pytest.mark.parametrize("placement", [DISK, CPU])
def test_damage_is_named_and_changes_nothing(how: str, words: str, placement: tuple[str, str], tmp_path: Path) -> None:
    job = models.DROPOUT._replace(dtype="bf16", steps=4)
    unbroken = run(job, placement, tmp_path / "whole")
    engine = start(job, placement, tmp_path / "run")
    losses = [train_step(engine, job, step) for step in range(2)]
    engine.save_checkpoint(tmp_path / "saved")
    losses.append(train_step(engine, job, 2))
    harm(tmp_path / "saved" / "global_step2", how)
    with pytest.raises(StoreError, match=words):
        engine.load_checkpoint(tmp_path / "saved", tag="global_step2")
    losses.append(train_step(engine, job, 3))
    assert losses == unbroken.losses
    assert_same_tensors(weights_of(engine), unbroken.weights)
    engine.destroy(remove=True)


def test_the_newest_complete_one_before_it_is_named(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path / "run")
    first, second, third = (tmp_path / "saved" / f"global_step{step}" for step in (1, 2, 3))
    for step in range(3):
        train_step(engine, models.GPT2, step)
        engine.save_checkpoint(tmp_path / "saved")
    for how, folder, advice in (
        ("a byte of a state", third, f"load {second}, the newest complete one before it"),
        ("cut short", second, f"load {first}, the newest complete one before it"),
        ("progress", third, f"load {first}, the newest complete one before it"),
        ("half a manifest", third, f"load {first}, the newest complete one beside it"),
        ("no states", first, "load another checkpoint"),
    ):
        harm(folder, how)
        with pytest.raises(StoreError, match=f"{folder}.*; {advice}$"):
            engine.load_checkpoint(folder)
    engine.destroy(remove=True)


def test_swap_files_that_are_damaged_are_not_saved(tmp_path: Path) -> None:
    job = models.GPT2
    engine = start(job, DISK, tmp_path / "run")
    train_step(engine, job, 0)
    engine.save_checkpoint(tmp_path / "saved")
    store = testing.inspect(engine).store
    assert store is not None
    flip_bit(*testing.inspect(engine).state_place(1, State.EXP_AVG, 100))
    with pytest.raises(OSError, match="checksum"):
        engine.save_checkpoint(tmp_path / "saved", tag="bad")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"global_step1", "latest"}
    engine.destroy(remove=True)


def test_each_byte_of_a_save_has_one_checksum_that_of_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's own checksum is compared with it, so that a read needs none."""
    engine = start(models.GPT2, DISK, tmp_path / "run")
    train_step(engine, models.GPT2, 0)
    engine.save_checkpoint(tmp_path / "saved")  # after all updates
    summed: dict[str, set[bool]] = {"read": set(), "write": set()}
    submit = IoQueue._submit

    def noted(queue: IoQueue, operation: str, *request: Any) -> Any:
        summed[operation].add(request[-2])
        return submit(queue, operation, *request)

    monkeypatch.setattr(IoQueue, "_submit", noted)
    engine.save_checkpoint(tmp_path / "saved", tag="again")
    assert summed == {"read": {False}, "write": {True}}
    engine.destroy(remove=True)


def test_damage_that_a_save_finds_makes_the_swap_files_suspect(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path / "run")
    train_step(engine, models.GPT2, 0)
    engine.save_checkpoint(tmp_path / "saved")
    store = testing.inspect(engine).store
    assert store is not None
    flip_bit(*testing.inspect(engine).state_place(1, State.EXP_AVG, 100))
    with pytest.raises(IoError, match=r"exp_avg of .*, slot [AB],.*checksum"):
        engine.save_checkpoint(tmp_path / "saved", tag="bad")
    assert (store.folders[0] / "suspect").exists(), "the next start reads all"
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"global_step1", "latest"}
    engine.destroy(remove=True)


def test_bytes_that_change_in_memory_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(models.GPT2, DISK, tmp_path / "run")
    train_step(engine, models.GPT2, 0)
    engine.save_checkpoint(tmp_path / "saved")
    left, write = [3], IoQueue.write

    def changed(queue: IoQueue, file: Any, offset: int, data: memoryview, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            data[len(data) // 2] ^= 1
        return write(queue, file, offset, data, **options)

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="but its swap files do: bytes have changed"):
        patch.setattr(IoQueue, "write", changed)
        engine.save_checkpoint(tmp_path / "saved", tag="bad")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"global_step1", "latest"}
    engine.save_checkpoint(tmp_path / "saved", tag="good")
    engine.destroy(remove=True)


def test_a_load_that_fails_half_way_stops_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last commit is whole: the run goes on from there."""
    job = models.GPT2._replace(steps=4)
    unbroken = run(job, DISK, tmp_path / "whole")
    engine = start(job, DISK, tmp_path / "run")
    losses = [train_step(engine, job, step) for step in range(2)]
    engine.save_checkpoint(tmp_path / "saved", tag="two")
    losses.append(train_step(engine, job, 2))

    def fails(*_: Any) -> None:
        raise IoError("states", 0, 1, 5, "write")

    assert testing.inspect(engine).store is not None
    monkeypatch.setattr(testing.inspect(engine).store, "commit", fails)
    with pytest.raises((IoError, EngineFailed)):
        engine.load_checkpoint(tmp_path / "saved")
    with pytest.raises(EngineFailed):
        train_step(engine, job, 3)
    engine.destroy()
    again = start(job, DISK, tmp_path / "run", resume="must")
    losses = losses[: again.global_steps] + [train_step(again, job, step) for step in range(again.global_steps, 4)]
    assert losses == unbroken.losses
    assert_same_tensors(weights_of(again), unbroken.weights)
    again.destroy(remove=True)


# -- disks --------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("known", [True, False])
def test_a_disk_without_room_keeps_what_was_there(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = models.GPT2
    engine = start(job, CPU, tmp_path / "run")
    with filesystems.disk(tmp_path, 16 << 20) as mount:
        train_step(engine, job, 0)
        engine.save_checkpoint(mount / "saved")
        weights = weights_of(engine)
        (mount / "filler").write_bytes(os.urandom(shutil.disk_usage(mount).free - (1 << 20)))
        sync(mount)
        free = shutil.disk_usage(mount).free
        train_step(engine, job, 1)
        if not known:
            monkeypatch.setattr(save, "find_shortage", lambda *_: None)
        with pytest.raises((StoreError, IoError), match=r"needs .* MiB.*has .* free" if known else "No space left"):
            engine.save_checkpoint(mount / "saved")
        assert {path.name for path in (mount / "saved").iterdir()} == {"global_step1", "latest"}
        assert shutil.disk_usage(mount).free >= free - 8192
        train_step(engine, job, 2)
        engine.load_checkpoint(mount / "saved")
        assert_same_tensors(weights_of(engine), weights)
    engine.destroy()


@pytest.mark.parametrize("make", [["mkfs.btrfs", "-q"], ["mkfs.xfs", "-q"]], ids=["btrfs", "xfs"])
def test_a_file_system_that_can_shares_the_bytes_with_the_swap_files(make: list[str], tmp_path: Path) -> None:
    """Until the run writes over them; the checkpoint stays as it was."""
    job = models.TINY._replace(accumulation=1)
    with filesystems.disk(tmp_path, 512 << 20, make) as mount:
        engine = start(job, DISK, mount / "run")
        train_step(engine, job, 0)
        weights = weights_of(engine)
        sync(mount)
        before = shutil.disk_usage(mount).free
        engine.save_checkpoint(mount / "saved")
        sync(mount)
        nbytes = (mount / "saved" / "global_step1" / "states.rank0.safetensors").stat().st_size
        assert nbytes > 30 << 20
        assert before - shutil.disk_usage(mount).free < nbytes / 4
        losses = [train_step(engine, job, step) for step in range(1, 4)]
        engine.load_checkpoint(mount / "saved")
        assert_same_tensors(weights_of(engine), weights)
        assert [train_step(engine, job, step) for step in range(1, 4)] == losses
        engine.destroy(remove=True)
