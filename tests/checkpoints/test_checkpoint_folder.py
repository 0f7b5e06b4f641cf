"""A folder of checkpoints keeps foreign files, takes one save at a time, and loses the leftovers of a kill."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offload
from offload import testing
from offload.checkpoint import directory, save
from offload.checkpoint.directory import begin_folder, end_folder, only_save, prune, saver, write_new
from offload.checkpoint.files import Manifest, checkpoints, read_manifest
from offload.errors import StoreError, UsageError
from tests.checkpoints.checkpoint_runs import CPU, DISK, engine, everything, folder, inspect, names, saved_checkpoint
from tests.support import models
from tests.support.oracle import start, train_step
from tests.support.processes import warm_process

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


@pytest.mark.sample(8)
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


@pytest.mark.parametrize("how", ["half a manifest", "another format", "a byte"])
def test_a_damaged_checkpoint_of_ours_is_replaced(
    how: str, engine: offload.Engine, saved_checkpoint: Path, folder: Path
) -> None:
    path = Path(shutil.copytree(saved_checkpoint, folder / "tag")) / "manifest.json"
    text = path.read_text()
    changed = {
        "half a manifest": text[:200],
        "another format": text.replace('"format": 1', '"format": 9'),
        "a byte": text.replace('"epoch": 1', '"epoch": 2'),
    }[how]
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
    other = warm_process.begin(["-c", _HOLDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        before = everything(folder)
        for tag in ("theirs", "mine"):
            with pytest.raises(StoreError, match=rf"process {other.pid} on .* \(theirs\) is saving into "):
                engine.save_checkpoint(folder, tag=tag, keep_last=1)
        assert everything(folder) == before
        assert f"process {other.pid}" in str(saver(folder))
        assert "of a save that is under way" in inspect("inspect", folder).output
        other.kill()
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
