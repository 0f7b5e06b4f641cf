"""`offload export` writes over nothing, and leaves no part behind when it fails; a kill leaves one that is removed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.aio import IoQueue
from offload.cli.main import app
from offload.model_io.source import StoreSource
from offload.runs.export import export, make_plan
from tests.support import models
from tests.support.exported_runs import ended, exported, run, trained
from tests.support.oracle import processes, train_step


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run's folder."""
    ended(models.GPT2, tmp_path / "swap")
    return tmp_path / "swap" / "default"


def test_a_folder_that_holds_something_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for out, words in (("full", "exists already"), ("file", "exists already"), ("no/where", "there is no folder")):
        result = run(small, tmp_path / out)
        assert result.exit_code == 2 and words in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full", "swap"]
    (tmp_path / "empty").mkdir()
    exported(small, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_a_run_that_is_held_is_refused_with_its_holder(tmp_path: Path) -> None:
    engine = trained(models.GPT2, tmp_path / "swap")
    for command in (
        ["export", str(tmp_path / "swap/default"), str(tmp_path / "out")],
        ["verify", str(tmp_path / "swap/default")],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and f"in use by process {os.getpid()}" in result.stderr
        assert '"run"' not in result.stderr and "wait until it has ended" in result.stderr
    train_step(engine, models.GPT2, 2)
    engine.destroy()
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for path in (tmp_path / "photos", tmp_path / "none"):
        for command in (["export", str(path), str(tmp_path / "out")], ["verify", str(path)]):
            result = CliRunner().invoke(app, command)
            assert result.exit_code == 2 and result.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_a_run_without_its_files_is_refused_with_the_option_that_keeps_them(tmp_path: Path) -> None:
    trained(models.GPT2, tmp_path / "swap").finish({})
    run_folder = tmp_path / "swap" / "default"
    for command in (
        ["export", str(run_folder), str(tmp_path / "out")],
        ["convert", str(run_folder), "--moments", "int8"],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and "removed at the end" in result.stderr and "--keep" in result.stderr


def test_no_room_is_an_error_before_anything_is_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    result = run(small, tmp_path / "out")
    assert result.exit_code == 2 and "has 97.7 KiB free" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["swap"]


def test_damage_ends_it_and_leaves_nothing(small: Path, tmp_path: Path) -> None:
    states = small / "rank0" / "states"
    data = bytearray(states.read_bytes())
    for position in range(0, len(data), 4096):
        data[position] ^= 1
    states.write_bytes(data)
    result = run(small, tmp_path / "out")
    assert result.exit_code == 1 and "checksum" in result.stderr and "weight" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["swap"]


def _stalled(run: Path, out: Path) -> None:
    """An export that stops in the middle, until it is killed."""

    def stop(_: int) -> None:
        print("middle", flush=True)
        time.sleep(60)

    with IoQueue() as queue:
        source = StoreSource(run, queue)
        export(source, out, make_plan(source, None, 5_000_000), queue, stop)


def test_a_kill_leaves_a_partial_folder_that_the_next_export_removes(small: Path, tmp_path: Path) -> None:
    process = processes().Process(target=_stalled, args=(small, tmp_path / "out"))
    process.start()
    partial = tmp_path / "out.partial"
    deadline = time.monotonic() + 60
    while not (partial / "model.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    result = run(small, tmp_path / "out")
    assert result.exit_code == 2 and f"in use by process {process.pid}" in result.stderr
    process.kill()
    process.join()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.lock", "out.partial", "swap"]
    export_report = exported(small, tmp_path / "out")
    assert any(f"removed {partial}" in notice for notice in export_report["notices"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "swap"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_a_partial_folder_that_is_not_ours_stays(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis").write_text("dear")
    result = run(small, tmp_path / "out")
    assert result.exit_code == 2 and "thesis" in result.stderr
    assert (tmp_path / "out.partial" / "thesis").read_text() == "dear"


def test_a_run_of_one_slot_cannot_be_exported(tmp_path: Path) -> None:
    engine = trained(models.GPT2, tmp_path / "swap", durability="none")
    shutil.copytree(tmp_path / "swap", tmp_path / "left")  # as a kill leaves it
    engine.destroy()
    result = run(tmp_path / "left" / "default", tmp_path / "out")
    assert result.exit_code == 2 and '"durability": "none"' in result.stderr
