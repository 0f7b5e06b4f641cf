"""`offload rm` deletes a run on every drive, asks first, and refuses folders that are no run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from tests.support import models
from tests.support.oracle import config, train_step

DISK = ("nvme", "nvme")


@pytest.fixture
def drives(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "first"), str(tmp_path / "second")]


def begin(drives: list[str]) -> offload.Engine:
    engine = offload.initialize(
        model=models.gpt2(), config=config(models.GPT2, DISK, Path(drives[0]), nvme_path=drives)
    )[0]
    train_step(engine, models.GPT2, 0)
    return engine


def test_it_deletes_on_every_drive(drives: list[str]) -> None:
    begin(drives).destroy()
    folders = [Path(drive, "default") for drive in drives]
    assert all(folder.is_dir() for folder in folders)
    result = CliRunner().invoke(app, ["rm", str(folders[0]), "--yes"])
    assert result.exit_code == 0, result.output
    assert not any(folder.exists() for folder in folders)


def test_rm_tells_a_script_what_to_pass(drives: list[str]) -> None:
    begin(drives).destroy()
    folder = str(Path(drives[0], "default"))
    refused = CliRunner().invoke(app, ["rm", folder, "--json"])
    assert refused.exit_code == 2 and "--yes" in refused.stderr and Path(folder).is_dir()
    done = json.loads(CliRunner().invoke(app, ["rm", folder, "--json", "--yes"]).stdout)
    assert done["path"] == folder and len(done["folders"]) == 2 and done["nbytes"] > 0 and not done["strangers"]
    assert not Path(folder).exists()


def test_rm_asks_before_it_deletes(drives: list[str]) -> None:
    begin(drives).destroy()
    folder = Path(drives[0], "default")
    for answer in ("n\n", "\n", ""):
        assert CliRunner().invoke(app, ["rm", str(folder)], input=answer).exit_code == 1
        assert folder.is_dir()
    assert CliRunner().invoke(app, ["rm", str(folder)], input="y\n").exit_code == 0
    assert not folder.exists()


def test_a_run_that_is_held_stays(drives: list[str]) -> None:
    engine = begin(drives)
    result = CliRunner().invoke(app, ["rm", str(Path(drives[0], "default")), "--yes"])
    assert result.exit_code == 2 and "in use by process" in result.stderr
    assert '"run"' not in result.stderr and "wait until it has ended" in result.stderr
    train_step(engine, models.GPT2, 1)
    engine.destroy(remove=True)


def test_a_finished_run_has_a_note_to_delete(drives: list[str]) -> None:
    begin(drives).finish({})
    assert CliRunner().invoke(app, ["rm", str(Path(drives[0], "default")), "--yes"]).exit_code == 0
    assert not Path(drives[0], "default").exists()


def test_what_is_no_run_stays(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one").write_text("dear")
    for path, words in ((tmp_path / "photos", "not a run folder"), (tmp_path / "none", "there is no folder")):
        result = CliRunner().invoke(app, ["rm", str(path), "--yes"])
        assert result.exit_code == 2 and words in result.stderr
    assert (tmp_path / "photos" / "one").read_text() == "dear"


def test_version_and_help_are_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{offload.__version__}\n"
    for arguments in ([], ["--help"]):
        result = CliRunner().invoke(app, arguments)
        assert "train" in result.output and "rm" in result.output and result.exit_code in (0, 2)


def test_it_names_what_goes_and_what_a_kill_has_left(drives: list[str]) -> None:
    begin(drives).destroy()
    run = Path(drives[0], "default")
    (run / "finished.tmp").write_text("{")
    result = CliRunner().invoke(app, ["rm", str(run)], input="y\n")
    for drive in drives:
        assert str(Path(drive, "default", "rank0")) in result.stdout
    assert f"{run / 'finished.tmp'} (left by a kill)" in result.stdout and "MiB)" in result.stdout
    assert not run.exists()


def test_what_is_not_of_the_run_stays(drives: list[str]) -> None:
    begin(drives).destroy()
    run = Path(drives[0], "default")
    (run / "thesis.txt").write_text("dear")
    result = CliRunner().invoke(app, ["rm", str(run), "--yes"])
    assert result.exit_code == 0 and "thesis.txt" in result.stdout
    assert [path.name for path in run.iterdir()] == ["thesis.txt"] and not Path(drives[1], "default").exists()


def test_another_run_that_has_taken_its_place_on_a_drive_stays(drives: list[str]) -> None:
    """The second drive was mounted elsewhere, and another run of the same name lies there now."""
    begin(drives).destroy()
    shutil.rmtree(Path(drives[1], "default"))
    begin(drives[1:]).destroy()
    assert CliRunner().invoke(app, ["rm", str(Path(drives[0], "default")), "--yes"]).exit_code == 0
    assert not Path(drives[0], "default").exists() and Path(drives[1], "default", "rank0", "commit").is_file()


def test_a_drive_that_is_not_there_is_said(drives: list[str]) -> None:
    begin(drives).destroy()
    Path(drives[1]).rename(f"{drives[1]} elsewhere")
    result = CliRunner().invoke(app, ["rm", str(Path(drives[0], "default")), "--yes"])
    assert result.exit_code == 1 and str(Path(drives[1], "default", "rank0")) in result.stderr
    assert not Path(drives[0], "default").exists()


def test_the_drives_are_known_without_the_manifest(drives: list[str]) -> None:
    begin(drives).destroy()
    Path(drives[0], "default", "rank0", "manifest.json").unlink()
    assert CliRunner().invoke(app, ["rm", str(Path(drives[0], "default")), "--yes"]).exit_code == 0
    assert not any(Path(drive, "default").exists() for drive in drives)
