"""Commands look at runs and checkpoints, and remove or merge them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.sizes import format_size
from offload.swapper.store.inspection import allocated_nbytes
from tests.support import models
from tests.support.oracle import config, start, train_step

JOB = models.GPT2._replace(dtype="bf16")
DISK = ("nvme", "nvme")


def inspect(path: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def shown(path: Path) -> str:
    """The words, with one space between them."""
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0, result.output
    return re.sub(r"\s+", " ", result.stdout)


def begin(drive: Path, steps: int = 2, **options: Any) -> offload.Engine:
    engine = start(JOB, DISK, drive, **options)
    for step in range(steps):
        train_step(engine, JOB, step)
    return engine


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps that ended without being finished."""
    begin(tmp_path).destroy()
    return tmp_path / "default"


def test_a_run_is_described(run: Path) -> None:
    report = inspect(run)
    assert report["kind"] == "run" and report["path"] == str(run) and report["run"] == "default"
    assert report["model"] == {"class": "GPT2LMHeadModel", "parameters": 162368, "trainable": 162368, "units": 6}
    assert (report["mode"], report["world_size"], report["slots"]) == ("bf16", 1, 2)
    assert report["made_by"] == offload.__version__ and report["drives"] == [str(run.parent)]
    assert report["finished"] is None and report["leftovers"] == [] and report["missing_ranks"] == []
    (rank,) = report["ranks"]
    assert rank["holder"] is None and rank["damaged"] == [] and rank["other_format"] is None
    assert rank["states"] == ["weight", "residual", "exp_avg", "exp_avg_sq"]
    assert [(commit["epoch"], commit["blob"]) for commit in rank["commits"]] == [(2, "right"), (1, "right")]
    assert rank["commits"][0]["serial"] == rank["commits"][1]["serial"] + 1
    assert 0 <= rank["commits"][0]["age_seconds"] < 600 and rank["commits"][0]["time"].endswith("+00:00")
    on_disk = sum(path.stat().st_blocks * 512 for path in (run / "rank0").iterdir())
    assert report["allocated_bytes"] == rank["allocated_bytes"] == on_disk > 24 * 162368
    words = shown(run)
    for words_of_a_run in (
        "GPT2LMHeadModel, 162,368 parameters, 6 units",
        "used by nobody",
        "step 2,",
        "step 1,",
        "residual",
    ):
        assert words_of_a_run in words
    of_rank = inspect(run / "rank0")
    for commit in (*of_rank["ranks"][0]["commits"], *rank["commits"]):
        del commit["age_seconds"]
    assert of_rank["kind"] == "rank" and of_rank["ranks"] == [rank]
    # What a kill has left over.
    (run / "rank0" / "manifest.tmp").write_text("{")
    (run / "finished.tmp").write_text("{")
    shutil.copytree(run / "rank0", run / "rank3", ignore=shutil.ignore_patterns("*.tmp"))
    left = [str(run / "finished.tmp"), str(run / "rank0" / "manifest.tmp"), str(run / "rank3")]
    assert inspect(run)["leftovers"] == left and f"left over {run / 'finished.tmp'}" in shown(run)


def test_an_nvme_path_lists_its_runs_and_nothing_else(run: Path) -> None:
    drive = run.parent
    begin(drive, 1, run="other").destroy()
    begin(drive, 1, run="done").finish({})
    (drive / "photos" / "rank1").mkdir(parents=True)
    (drive / "photos" / "rank1" / "me.jpg").write_text("dear")
    (drive / "notes").mkdir()
    (drive / "notes" / "finished.json").write_text('{"title": "a thesis"}')
    (drive / "default.txt").write_text("dear")
    report = inspect(drive)
    assert report["kind"] == "nvme_path" and [run["run"] for run in report["runs"]] == ["default", "done", "other"]
    assert report["runs"][1]["finished"]["steps"] == 1 and report["runs"][1]["ranks"] == []
    words = shown(drive)
    assert "finished at step 1" in words and "photos" not in words and "notes" not in words
    assert shown(drive / "photos").startswith("there are no runs in")
    assert "finished.json notes it: --resume auto does not train the run again" in shown(drive / "done")


def test_no_folder_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in ("none", "file"):
        result = CliRunner().invoke(app, ["inspect", str(tmp_path / path)])
        assert result.exit_code == 2 and "there is no folder" in result.stderr


def test_a_run_that_trains_names_its_holder_and_goes_on(tmp_path: Path) -> None:
    engine = begin(tmp_path)
    for step in range(2, 5):
        rank = inspect(tmp_path / "default")["ranks"][0]
        assert f"process {os.getpid()} on" in rank["holder"] and rank["damaged"] == []
        assert rank["commits"][0]["epoch"] == step - 1, "the last step is durable when the next one ends"
        train_step(engine, JOB, step)
    assert f"process {os.getpid()} on" in shown(tmp_path)
    engine.destroy()
    assert inspect(tmp_path / "default")["ranks"][0]["commits"][0]["epoch"] == 5


def test_an_old_format_is_reported(run: Path) -> None:
    path = run / "rank0" / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format": 1, "about": {"offload": "0.0.9"}}))
    (run / "rank0" / "commit").write_bytes(b"OFFLDREC" + (1).to_bytes(4, "little") + bytes(8180))
    rank = inspect(run)["ranks"][0]
    assert rank["other_format"] == "format 1, made by offload 0.0.9; this version reads format 3 to 5"
    assert rank["damaged"] == [] and "format 1" in shown(run) and "format 1" in shown(run.parent)
    for command in ("verify", "export"):
        arguments = [command, str(run)] + ([str(run.parent / "out")] if command == "export" else [])
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and "format 1, made by offload 0.0.9" in result.stderr


# -- what a start tells of ----------------------------------------------------------------------------


def notices(engine: offload.Engine) -> list[str]:
    return [notice for notice in engine.notices if "that no process uses" in notice]


def test_a_start_tells_of_other_runs_that_nobody_holds(run: Path) -> None:
    drive = run.parent
    other_engine = begin(drive, 1, run="second")
    (message,) = notices(other_engine)
    taken = format_size(allocated_nbytes([run / "rank0"]))
    assert message.startswith(f"1 other run that no process uses takes {taken}: ") and str(run) in message
    assert f"`offload inspect {drive}`" in message and "`offload rm`" in message
    third = begin(drive, 1, run="third")
    (message,) = notices(third)
    assert str(run) in message and "second" not in message, "one that is held is no leftover"
    other_engine.destroy(remove=True)
    third.destroy(remove=True)
    assert run.is_dir(), "nothing is deleted"
    again = begin(drive, 0, resume="must")
    assert notices(again) == [], "its own run is no other"
    again.destroy()


@pytest.fixture
def drives(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "first"), str(tmp_path / "second")]


def begin_rm(drives: list[str]) -> offload.Engine:
    engine = offload.initialize(
        model=models.gpt2(), config=config(models.GPT2, DISK, Path(drives[0]), nvme_path=drives)
    )[0]
    train_step(engine, models.GPT2, 0)
    return engine


def rm(*arguments: str | Path, answer: str | None = None) -> Any:
    return CliRunner().invoke(app, ["rm", *map(str, arguments)], input=answer)


def test_rm_asks_and_deletes_on_every_drive(drives: list[str]) -> None:
    engine, folder = begin_rm(drives), Path(drives[0], "default")
    held = rm(folder, "--yes")
    assert held.exit_code == 2 and "in use by process" in held.stderr
    assert '"run"' not in held.stderr and "wait until it has ended" in held.stderr
    train_step(engine, models.GPT2, 1)
    engine.destroy()
    told = rm(folder, "--json")
    assert told.exit_code == 2 and "--yes" in told.stderr, "a script is told what to pass"
    for answer in ("n\n", "\n", ""):
        assert rm(folder, answer=answer).exit_code == 1 and folder.is_dir()
    assert rm(folder, answer="y\n").exit_code == 0
    assert not any(Path(drive, "default").exists() for drive in drives)
    begin_rm(drives).finish({})  # which leaves a note
    assert folder.is_dir() and rm(folder, "--yes").exit_code == 0 and not folder.exists()


def test_what_is_not_of_the_run_stays(drives: list[str]) -> None:
    begin_rm(drives).destroy()
    run = Path(drives[0], "default")
    (run / "thesis.txt").write_text("dear")
    done = json.loads(rm(run, "--json", "--yes").stdout)
    assert done["path"] == str(run) and len(done["folders"]) == 2 and done["nbytes"] > 0
    assert done["strangers"] == ["thesis.txt"]
    assert [path.name for path in run.iterdir()] == ["thesis.txt"] and not Path(drives[1], "default").exists()


def test_another_run_that_has_taken_its_place_on_a_drive_stays(drives: list[str]) -> None:
    """The second drive was mounted elsewhere, and another run of the same name lies there now."""
    begin_rm(drives).destroy()
    shutil.rmtree(Path(drives[1], "default"))
    begin_rm(drives[1:]).destroy()
    assert CliRunner().invoke(app, ["rm", str(Path(drives[0], "default")), "--yes"]).exit_code == 0
    assert not Path(drives[0], "default").exists() and Path(drives[1], "default", "rank0", "commit").is_file()


def test_a_drive_that_is_not_there_is_said(drives: list[str]) -> None:
    begin_rm(drives).destroy()
    Path(drives[1]).rename(f"{drives[1]} elsewhere")
    result = CliRunner().invoke(app, ["rm", str(Path(drives[0], "default")), "--yes"])
    assert result.exit_code == 1 and str(Path(drives[1], "default", "rank0")) in result.stderr
    assert not Path(drives[0], "default").exists()


def test_the_drives_are_known_without_the_manifest(drives: list[str]) -> None:
    begin_rm(drives).destroy()
    Path(drives[0], "default", "rank0", "manifest.json").unlink()
    assert CliRunner().invoke(app, ["rm", str(Path(drives[0], "default")), "--yes"]).exit_code == 0
    assert not any(Path(drive, "default").exists() for drive in drives)
