"""A folder of checkpoints keeps foreign files and takes one save at a time; damage and kills change nothing."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import subprocess
import threading
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
from offload.checkpoint.directory import begin_folder, end_folder, only_save, prune, saver, write_new
from offload.checkpoint.files import Manifest, checkpoints, read_manifest
from offload.errors import EngineFailed, IoError, StoreError, UsageError
from offload.fileio import buffered_copy as flow
from offload.states import State
from tests.checkpoints.checkpoint_runs import CPU, DISK, engine, everything, folder, inspect, names, saved_checkpoint
from tests.support import models
from tests.support.drives import filesystems
from tests.support.drives.fault_injection import die, dies_before, flip_bit
from tests.support.drives.filesystems import sync
from tests.support.oracle import assert_same_tensors, config, dies, processes, run, start, train_step, weights_of
from tests.support.processes import warm_process
from tests.support.processes.process_measures import CountedBuffers

__all__ = ["engine", "folder", "saved_checkpoint"]  # fixtures

# -- what is not ours ---------------------------------------------------------------------------------


def a_manifest_of_others(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"other": 1}')
    (path / "data").write_text("all of it")


def only_a_manifest_of_others(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"other": 1}')


def a_thesis(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("all of it")


def a_thesis_in_a_checkpoint(path: Path, saved_checkpoint: Path) -> None:
    shutil.copytree(saved_checkpoint, path)
    (path / "thesis.txt").write_text("all of it")


def a_folder_in_a_checkpoint(path: Path, saved_checkpoint: Path) -> None:
    shutil.copytree(saved_checkpoint, path)
    (path / "states.rank7.safetensors").mkdir()


def a_file(path: Path, _: Path) -> None:
    path.write_text("all of it")


def a_link_to_a_checkpoint(path: Path, saved_checkpoint: Path) -> None:
    shutil.copytree(saved_checkpoint, path.parent / "linked")
    path.symlink_to("linked")


def a_link_to_nothing(path: Path, _: Path) -> None:
    path.symlink_to("nothing")


OTHERS: tuple[Callable[[Path, Path], None], ...] = (
    a_manifest_of_others,
    only_a_manifest_of_others,
    a_thesis,
    a_thesis_in_a_checkpoint,
    a_folder_in_a_checkpoint,
    a_file,
    a_link_to_a_checkpoint,
    a_link_to_nothing,
)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ["tag", ".tag.partial", ".tag.old", ".tag.removed"])
@pytest.mark.parametrize("make", OTHERS)
def test_what_is_not_ours_is_refused_and_stays(
    make: Callable[[Path, Path], None], name: str, engine: offload.Engine, saved_checkpoint: Path, folder: Path
) -> None:
    make(folder / name, saved_checkpoint)
    before = everything(folder)
    with pytest.raises(StoreError, match=rf"{name} (exists|is|has|would)"):
        engine.save_checkpoint(folder, tag="tag")
    assert everything(folder) == before and (folder / name).is_symlink() == ("link" in make.__name__)
    if name != "tag":  # a save of another tag leaves it alone, and goes on
        engine.save_checkpoint(folder, tag="another")
        assert before.items() <= everything(folder).items()


def test_the_swap_files_of_a_run_are_no_checkpoint(engine: offload.Engine, tmp_path: Path) -> None:
    run = start(models.GPT2, DISK, tmp_path)
    train_step(run, models.GPT2, 0)
    run.destroy()
    before = everything(tmp_path / "default")
    with pytest.raises(UsageError, match="holds the swap files of a run"):
        engine.save_checkpoint(tmp_path / "default", tag="rank0")
    assert everything(tmp_path / "default") == before
    rank = tmp_path / "default" / "rank0"
    shutil.copytree(rank, tmp_path / "backup")
    for path in (rank, tmp_path / "backup"):
        for command in (["verify", path], ["export", path, tmp_path / "out"]):
            result = inspect(*command)
            assert result.exit_code == 2 and f"give the run's folder, {path.parent}" in result.output, result.output
        with pytest.raises(StoreError, match="swap files of one rank"):
            engine.load_checkpoint(path)
    assert "rank 0" in inspect("inspect", rank).output
    assert "swap files of one rank" in inspect("inspect", tmp_path / "backup").output


def test_a_manifest_of_others_is_no_checkpoint_to_look_at(engine: offload.Engine, folder: Path) -> None:
    a_manifest_of_others(folder / "site", folder)
    assert json.loads(inspect("inspect", folder / "site", "--json").stdout)["kind"] == "nvme_path"
    assert "neither swap files" in inspect("verify", folder / "site").output
    assert engine.load_checkpoint(folder / "site") == (None, {})


def test_a_damaged_checkpoint_of_ours_is_replaced(engine: offload.Engine, saved_checkpoint: Path, folder: Path) -> None:
    path = Path(shutil.copytree(saved_checkpoint, folder / "tag")) / "manifest.json"
    text = path.read_text()
    for changed in (text[:200], text.replace('"format": 1', '"format": 9'), text.replace('"epoch": 1', '"epoch": 2')):
        assert changed != text
        path.write_text(changed)
        engine.save_checkpoint(folder, tag="tag")
        assert names(folder) == {"tag", "latest"} and read_manifest(folder / "tag").step == 1


def test_what_is_not_of_a_checkpoint_keeps_it_from_being_pruned(
    engine: offload.Engine, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for tag in ("one", "two"):
        engine.save_checkpoint(folder, tag=tag)
    (folder / "one" / "thesis.txt").write_text("all of it")
    before = everything(folder / "one")
    engine.save_checkpoint(folder, tag="three", keep_last=1)
    assert everything(folder / "one") == before and names(folder) == {"one", "three", "latest"}
    assert "the checkpoint one is kept: thesis.txt" in caplog.text


def test_latest_that_is_a_folder_is_refused(engine: offload.Engine, folder: Path) -> None:
    (folder / "latest").mkdir()
    with pytest.raises(StoreError, match="latest is a folder"):
        engine.save_checkpoint(folder, tag="tag")
    assert names(folder) == {"latest"}
    engine.save_checkpoint(folder, tag="tag", save_latest=False)
    with pytest.raises(StoreError, match=r"cannot read .*latest"):
        engine.load_checkpoint(folder)


# -- one at a time ------------------------------------------------------------------------------------


_HOLDS = """
import sys
from pathlib import Path
from offload.checkpoint.directory import only_save
with only_save(Path(sys.argv[1]), "theirs"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_that_saves_is_named(engine: offload.Engine, folder: Path) -> None:
    (folder / ".theirs.partial").mkdir()  # what it is writing
    holder = warm_process.begin(["-c", _HOLDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        before = everything(folder)
        for tag in ("theirs", "mine"):
            with pytest.raises(StoreError, match=rf"process {holder.pid} on .* \(theirs\) is saving into "):
                engine.save_checkpoint(folder, tag=tag, keep_last=1)
        assert everything(folder) == before
        assert f"process {holder.pid}" in str(saver(folder))
        assert "of a save that is under way" in inspect("inspect", folder).output
        holder.kill()
    assert saver(folder) is None and (folder / directory.LOCK).exists()
    engine.save_checkpoint(folder, tag="mine")
    assert names(folder) == {"mine", "latest"}


def test_two_engines_of_one_process(engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused, and the first ends as if nobody had come."""
    second = start(models.GPT2, CPU, tmp_path)
    written, go_on = threading.Event(), threading.Event()
    real = save._write_states

    def write(*arguments: Any) -> Any:
        result = real(*arguments)
        written.set()
        assert go_on.wait(60)
        return result

    testing.replace(monkeypatch, "checkpoint.write_states", write)
    first = threading.Thread(target=second.save_checkpoint, args=(tmp_path / "saved", "tag"))
    first.start()
    assert written.wait(60)
    testing.replace(monkeypatch, "checkpoint.write_states", real)
    for tag in ("tag", "another"):
        with pytest.raises(StoreError, match=f"process {os.getpid()} .*is saving into "):
            engine.save_checkpoint(tmp_path / "saved", tag=tag)
    go_on.set()
    first.join()
    assert names(tmp_path / "saved") == {"tag", "latest"}
    assert engine.load_checkpoint(tmp_path / "saved")[0] == str(tmp_path / "saved" / "tag")
    second.destroy()


def test_a_file_system_without_locks_is_warned_of(
    engine: offload.Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuses)
    engine.save_checkpoint(folder, tag="tag")
    assert "cannot be locked" in caplog.text and names(folder) == {"tag", "latest"}


# -- others are faster --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "name"), [("rename", "one"), ("listdir", ".one.removed"), ("unlink", "manifest.json")]
)
def test_what_has_gone_by_itself_is_no_error(
    moment: str,
    name: str,
    engine: offload.Engine,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another process deletes what is about to be deleted."""
    engine.save_checkpoint(folder, tag="one")
    real, came = getattr(os, moment), []

    def faster(path: Any, *rest: Any, **named: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        if Path(path).name == name and not came:
            came.append(path)
            subprocess.run(["rm", "-r", folder / "one" if moment == "rename" else folder / ".one.removed"], check=True)
        return real(path, *rest, **named)

    monkeypatch.setattr(os, moment, faster)
    engine.save_checkpoint(folder, tag="two", keep_last=1)
    assert came and names(folder) == {"two", "latest"} and not caplog.records


def test_a_prune_that_fails_is_a_warning(
    engine: offload.Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.save_checkpoint(folder, tag="one")
    real = os.rename

    def refuses(source: Any, target: Any) -> None:
        if Path(source).name == "one":
            raise OSError(30, "Read-only file system")
        real(source, target)

    monkeypatch.setattr(os, "rename", refuses)
    assert engine.save_checkpoint(folder, tag="two", keep_last=1)
    assert (folder / "latest").read_text() == "two" and names(folder) == {"one", "two", "latest"}
    assert "the checkpoint one is kept: cannot remove" in caplog.text


# -- what a kill has left -----------------------------------------------------------------------------


def test_every_leftover_goes_with_the_next_save_whatever_its_tag(
    engine: offload.Engine, saved_checkpoint: Path, folder: Path
) -> None:
    for name in ("kept", ".kept.old", ".a.partial", ".b.removed"):
        shutil.copytree(saved_checkpoint, folder / name)
    (folder / ".a.partial" / "manifest.json").write_text("")  # a power cut
    (folder / ".b.removed" / "progress.rank0.safetensors").unlink()
    (folder / ".c.partial").mkdir()
    (folder / ".latest.d").write_text("d")
    (folder / ".latest.swp").write_text("b0VIM 9.0")
    output = inspect("inspect", folder).output
    assert output.count("left over; the next save removes it") == 5
    engine.save_checkpoint(folder, tag="new")
    assert names(folder) == {"kept", "new", "latest", ".latest.swp"}
    assert "left over" not in inspect("inspect", folder).output


def test_one_that_was_set_aside_gets_its_name_again(
    engine: offload.Engine, saved_checkpoint: Path, folder: Path
) -> None:
    """Of any tag: a save died between two renames."""
    shutil.copytree(saved_checkpoint, folder / ".a.old")
    assert "left over; the next save gives it its name" in inspect("inspect", folder).output
    engine.save_checkpoint(folder, tag="new")
    assert names(folder) == {"a", "new", "latest"} and engine.load_checkpoint(folder, tag="a")[0] is not None


def test_one_that_was_set_aside_outlives_what_is_damaged(
    engine: offload.Engine, saved_checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testing.replace(monkeypatch, "folder.exchange", lambda *_: False)
    for name in ("a", ".a.old"):
        shutil.copytree(saved_checkpoint, folder / name)
    (folder / "a" / "states.rank0.safetensors").unlink()
    engine.save_checkpoint(folder, tag="new")
    assert (folder / ".a.old").exists()
    engine.save_checkpoint(folder, tag="a")
    assert names(folder) == {"a", "new", "latest"}


def test_a_folder_that_is_made_outlives_a_power_cut(
    engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has made it: a script makes the folder of its checkpoints a moment before the first save."""
    synced: list[Path] = []
    testing.intercept(monkeypatch, "folder.sync", lambda sync, path: (synced.append(path), sync(path)))
    (tmp_path / "a").mkdir()
    engine.save_checkpoint(tmp_path / "a" / "b" / "saved", tag="tag")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)


# -- which one goes -----------------------------------------------------------------------------------


EMPTY = {"mode": "fp32-adam", "world_size": 1, "units": []}
"""The description of a model without parameters."""


def write(folder: Path, tag: str, epoch: int, created: str) -> None:
    with only_save(folder, tag):
        partial = begin_folder(folder / tag)
        write_new(partial / "manifest.json", Manifest(epoch, created, True, EMPTY, {}, {}).pack())
        end_folder(folder / tag, latest=True)


def test_what_was_saved_first_goes_first_whatever_its_step(folder: Path) -> None:
    """A run went back to an earlier checkpoint, and saves the new branch."""
    for second, (tag, epoch) in enumerate([("a1", 1), ("a2", 2), ("a3", 3), ("b2", 2)]):
        write(folder, tag, epoch, f"2026-01-01T00:00:0{second}+00:00")
    assert prune(folder, 2, "b2") == ["a1", "a2"]
    write(folder, "same", 1, "2026-01-01T00:00:02+00:00")
    assert list(checkpoints(folder)) == ["same", "a3", "b2"], "of one moment, the earlier step"


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
    for how, place, advice in (
        ("a byte of a state", third, f"load {second}, the newest complete one before it"),
        ("cut short", second, f"load {first}, the newest complete one before it"),
        ("progress", third, f"load {first}, the newest complete one before it"),
        ("half a manifest", third, f"load {first}, the newest complete one beside it"),
        ("no states", first, "load another checkpoint"),
    ):
        harm(place, how)
        with pytest.raises(StoreError, match=f"{place}.*; {advice}$"):
            engine.load_checkpoint(place)
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
    job = models.GPT2
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
        train_step(engine, job, 2)
    engine.destroy()
    again = start(job, DISK, tmp_path / "run", resume="must")
    losses = losses[: again.global_steps] + [
        train_step(again, job, step) for step in range(again.global_steps, job.steps)
    ]
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
        losses = [train_step(engine, job, step) for step in range(1, 3)]
        engine.load_checkpoint(mount / "saved")
        assert_same_tensors(weights_of(engine), weights)
        assert [train_step(engine, job, step) for step in range(1, 3)] == losses
        engine.destroy(remove=True)


JOB = models.DROPOUT._replace(dtype="bf16")
_REPLACES = ("all but the old one", "the old one goes", "the old one is empty", "between two renames")
"""Moments of a save of a tag that is there already."""


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
    dies_before(directory.os, "rename", 2)()


def after_renames() -> None:
    without_exchange()
    dies_before(directory, "sync_folder", 2)()


MOMENTS: dict[str, Callable[[], None]] = {
    "the folder was made": after(save, "begin_folder"),
    "states are written": dies_before(save, "crc32c_joined", 9),
    "states are there": after(save, "_write_states"),
    "the manifest is missing": dies_before(save, "end_folder"),
    "nothing has its name": dies_before(directory, "sync_folder"),
    "it has its name": dies_before(directory, "sync_folder", 2),
    "latest follows": dies_before(directory.os, "replace"),
    "all but the old one": dies_before(directory, "delete"),
    "the old one goes": dies_before(directory.os, "unlink", 3),  # the first is of `.latest.<tag>`
    "the old one is empty": dies_before(directory.os, "rmdir"),
    "between two renames": between_renames,
    "after two renames": after_renames,
}


def save_and_die(folder: Path, moment: str | None, same_tag: bool, pipe: Any) -> None:
    """Save after each step for ever, or die at a moment of the second save."""
    logging.disable(logging.CRITICAL)
    engine = start(JOB, CPU, folder / "run")
    for step in range(1000):
        train_step(engine, JOB, step)
        if step and moment is not None:
            MOMENTS[moment]()
        engine.save_checkpoint(folder / "saved", tag="best" if same_tag else None, keep_last=2)
        pipe.send(step + 1)


def goes_on(folder: Path, least: int, same_tag: bool) -> int:
    """Load the latest in a new process' engine and compare it with an unbroken run; the step that it was saved at."""
    torch.manual_seed(99)
    engine = offload.initialize(model=JOB.model(), config=config(JOB, CPU, folder / "other"))[0]
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
    unbroken = start(JOB, CPU, folder / "whole")
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


@pytest.mark.parametrize("differs", [False, True], ids=["the same frozen weights", "differs"])
def test_a_load_with_frozen_weights_takes_one_set_of_buffers(
    differs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.GPT2._replace(model=HalfFrozen, loss=half_frozen_loss)
    engine = start(job, DISK, tmp_path / "one")
    train_step(engine, job, 0)
    engine.save_checkpoint(tmp_path / "saved")
    expected = weights_of(engine)
    engine.destroy(remove=True)
    engine = start(job._replace(seed=4711 if differs else job.seed), DISK, tmp_path / "two")
    buffers = CountedBuffers(flow.aligned_empty)
    testing.replace(monkeypatch, "checkpoint.buffer", buffers)
    wrote: list[str] = []
    real_put = type(testing.inspect(engine).store).write

    def write(store: Any, unit: int, state: Any, *rest: Any) -> Any:
        wrote.append(testing.inspect(engine).sizes[unit].title)
        return real_put(store, unit, state, *rest)

    monkeypatch.setattr(type(testing.inspect(engine).store), "write", write)
    engine.load_checkpoint(tmp_path / "saved")
    assert buffers.most == flow.BUFFERS * flow.BUFFER_NBYTES
    assert any("layers.1" in title for title in wrote) == differs
    assert_same_tensors(expected, engine.module.state_dict())
    engine.destroy(remove=True)
