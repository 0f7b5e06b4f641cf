"""A checkpoint that is damaged, killed or too large is named and changes nothing."""

from __future__ import annotations

import logging
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.aio import IoQueue
from offload.checkpoint import directory, save
from offload.errors import EngineFailed, IoError, StoreError
from offload.fileio import buffered_copy as flow
from offload.states import State
from tests.checkpoints.checkpoint_runs import DISK as MEMORY_DISK
from tests.support import models
from tests.support.drives import filesystems
from tests.support.drives.fault_injection import die, flip_bit
from tests.support.drives.filesystems import sync
from tests.support.oracle import assert_same_tensors, config, dies, processes, run, start, train_step, weights_of

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
    left = [3]

    def changed(
        write: Callable[..., Any], queue: IoQueue, file: Any, offset: int, data: memoryview, **options: Any
    ) -> Any:
        left[0] -= 1
        if not left[0]:
            data[len(data) // 2] ^= 1
        return write(queue, file, offset, data, **options)

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="but its swap files do: bytes have changed"):
        testing.intercept(patch, "io.write", changed)
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
            testing.replace(monkeypatch, "disk.shortage_of_checkpoint", lambda *_: None)
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


JOB = models.DROPOUT._replace(dtype="bf16", steps=4)
KILLED_CPU = ("cpu", "cpu")
_REPLACES = ("all but the old one", "the old one goes", "the old one is empty", "between two renames")
"""Moments of a save of a tag that is there already."""


def before(module: Any, name: str, call: int = 1) -> Callable[[], None]:
    """Die at the `call`th call of a function."""

    def install() -> None:
        real, left = getattr(module, name), [call]

        def counted(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                die()
            return real(*arguments, **named)

        setattr(module, name, counted)

    return install


def after(module: Any, name: str) -> Callable[[], None]:
    """Die when a function returns."""

    def install() -> None:
        real = getattr(module, name)
        setattr(module, name, lambda *a, **n: (real(*a, **n), die()))

    return install


def without_exchange() -> None:
    directory.exchange = lambda *_: False


def between_renames() -> None:
    without_exchange()
    before(directory.os, "rename", 2)()


def after_renames() -> None:
    without_exchange()
    before(directory, "sync_folder", 2)()


MOMENTS: dict[str, Callable[[], None]] = {
    "the folder was made": after(save, "begin_folder"),
    "states are written": before(save, "crc32c_joined", 9),
    "states are there": after(save, "_write_states"),
    "the manifest is missing": before(save, "end_folder"),
    "nothing has its name": before(directory, "sync_folder"),
    "it has its name": before(directory, "sync_folder", 2),
    "latest follows": before(directory.os, "replace"),
    "all but the old one": before(directory, "delete"),
    "the old one goes": before(directory.os, "unlink", 3),  # the first is of `.latest.<tag>`
    "the old one is empty": before(directory.os, "rmdir"),
    "between two renames": between_renames,
    "after two renames": after_renames,
}


def save_and_die(folder: Path, moment: str | None, same_tag: bool, pipe: Any) -> None:
    """Save after each step for ever, or die at a moment of the second save."""
    logging.disable(logging.CRITICAL)
    engine = start(JOB, KILLED_CPU, folder / "run")
    for step in range(1000):
        train_step(engine, JOB, step)
        if step and moment is not None:
            MOMENTS[moment]()
        engine.save_checkpoint(folder / "saved", tag="best" if same_tag else None, keep_last=2)
        pipe.send(step + 1)


def goes_on(folder: Path, least: int, same_tag: bool) -> int:
    """Load the latest in a new process' engine and compare it with an unbroken run; the step that it was saved at."""
    torch.manual_seed(99)
    engine = offload.initialize(model=JOB.model(), config=config(JOB, KILLED_CPU, folder / "other"))[0]
    path, _ = engine.load_checkpoint(folder / "saved")
    assert path is not None and engine.global_steps >= least
    step = engine.global_steps
    losses = [train_step(engine, JOB, each) for each in range(step, step + 2)]
    tag = Path(path).name.strip(".").removesuffix(".old") if same_tag else None
    engine.save_checkpoint(folder / "saved", tag=tag, keep_last=1)
    assert len([path for path in (folder / "saved").iterdir() if path.name != "latest"]) == 1, "all that was left goes"
    engine.load_checkpoint(folder / "saved")
    assert engine.global_steps == step + 2
    engine.destroy()
    unbroken = start(JOB, KILLED_CPU, folder / "whole")
    assert [train_step(unbroken, JOB, each) for each in range(step + 2)][step:] == losses
    unbroken.destroy()
    return step


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("moment", "same_tag"),
    [(moment, same) for moment in MOMENTS for same in (False, True) if same or moment not in _REPLACES],
)
def test_killed_at_each_moment(moment: str, same_tag: bool, tmp_path: Path) -> None:
    receiver, sender = processes().Pipe(duplex=False)
    dies(save_and_die, tmp_path, moment, same_tag, sender)
    assert receiver.recv() == 1 and not receiver.poll(), "it died in the second save"
    named = moment in ("latest follows", "it has its name", "after two renames")
    gone = moment in ("all but the old one", "the old one goes", "the old one is empty")
    step = goes_on(tmp_path, 1, same_tag)
    assert step == (2 if gone or (named and same_tag) else 1)


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        for layer in self.layers[1:3]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def half_frozen_loss(model: nn.Module, step: int, _: int) -> torch.Tensor:
    return model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("others", [False, True], ids=["the same frozen weights", "others"])
def test_a_load_with_frozen_weights_takes_one_set_of_buffers(
    others: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.GPT2._replace(model=HalfFrozen, loss=half_frozen_loss)
    engine = start(job, MEMORY_DISK, tmp_path / "one")
    train_step(engine, job, 0)
    engine.save_checkpoint(tmp_path / "saved")
    expected = weights_of(engine)
    engine.destroy(remove=True)
    engine = start(job._replace(seed=4711 if others else job.seed), MEMORY_DISK, tmp_path / "two")
    now, most = [0], [0]
    real = flow.aligned_empty

    def counted(nbytes: int) -> memoryview:
        memory = real(nbytes)
        now[0] += nbytes
        most[0] = max(most[0], now[0])
        weakref.finalize(memory, lambda: now.__setitem__(0, now[0] - nbytes))
        return memory

    testing.replace(monkeypatch, "checkpoint.buffer", counted)
    wrote: list[str] = []
    real_put = type(testing.inspect(engine).store).write

    def write(store: Any, unit: int, state: Any, *rest: Any) -> Any:
        wrote.append(testing.inspect(engine).sizes[unit].title)
        return real_put(store, unit, state, *rest)

    monkeypatch.setattr(type(testing.inspect(engine).store), "write", write)
    engine.load_checkpoint(tmp_path / "saved")
    assert most[0] == flow.BUFFERS * flow.BUFFER_NBYTES
    assert any("layers.1" in title for title in wrote) == others
    assert_same_tensors(expected, engine.module.state_dict())
    engine.destroy(remove=True)
