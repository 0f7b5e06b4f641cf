"""The name of a checkpoint decides which one is loaded, replaced or removed; wrong names are refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from torch import nn

from offload import testing
from offload.checkpoint.files import checkpoints
from offload.errors import StoreError, UsageError
from tests.support import models
from tests.support.oracle import start, train_step

CPU = ("cpu", "cpu")


def test_the_latest_a_named_one_and_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(models.GPT2, CPU, tmp_path / "run")
    assert engine.load_checkpoint(tmp_path / "saved") == (None, {})
    assert "no checkpoint was loaded" in caplog.text
    with pytest.raises(StoreError, match=r"no checkpoint x .*: none"):
        engine.load_checkpoint(tmp_path / "saved", tag="x")
    for step in range(3):
        train_step(engine, models.GPT2, step)
        engine.save_checkpoint(tmp_path / "saved", save_latest=step < 2)
    assert (tmp_path / "saved" / "latest").read_text() == "global_step2"
    assert engine.load_checkpoint(tmp_path / "saved")[0] == str(tmp_path / "saved" / "global_step2")
    assert engine.global_steps == 2
    with pytest.raises(StoreError, match="global_step1, global_step2, global_step3"):
        engine.load_checkpoint(tmp_path / "saved", tag="global_step4")
    assert engine.load_checkpoint(tmp_path / "saved" / "global_step3")[0] is not None and engine.global_steps == 3
    (tmp_path / "saved" / "theirs").mkdir()
    with pytest.raises(StoreError, match="not a checkpoint of offload"):
        engine.load_checkpoint(tmp_path / "saved", tag="theirs")
    engine.destroy()


def test_calls_that_cannot_be_right(tmp_path: Path) -> None:
    job = models.GPT2
    engine = start(job, CPU, tmp_path / "run")
    for tag in ("", ".", "..", ".x", "a/b", "latest"):
        with pytest.raises(UsageError, match="cannot name a folder"):
            engine.save_checkpoint(tmp_path / "saved", tag=tag)
    with pytest.raises(UsageError, match=r"keep_last must be .*, got 0"):
        engine.save_checkpoint(tmp_path / "saved", keep_last=0)
    for value in (torch.zeros(20_000), argparse.Namespace(lr=1), {1, 2}):
        with pytest.raises(UsageError, match=r"client_state\['mine'\] is a .*: convert the value, as by vars\(args\)"):
            engine.save_checkpoint(tmp_path / "saved", client_state={"mine": value})

    class Saves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            engine.save_checkpoint(tmp_path / "saved")
            return x

    engine.module.transformer.drop = Saves()
    with pytest.raises(UsageError, match="between steps"):
        job.loss(engine, 0, 0)
    assert not (tmp_path / "saved").exists() or not list((tmp_path / "saved").iterdir())
    engine.destroy()


def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    engine = start(models.GPT2, CPU, tmp_path / "run")
    (tmp_path / "saved" / "mine").mkdir(parents=True)
    (tmp_path / "saved" / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(StoreError, match="is not a checkpoint of offload"):
        engine.save_checkpoint(tmp_path / "saved", tag="mine")
    assert (tmp_path / "saved" / "mine" / "thesis.txt").read_text() == "all of it"
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["mine"]
    engine.destroy()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_checkpoint_of_the_same_name_is_replaced(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        testing.replace(monkeypatch, "folder.exchange", lambda *_: False)
    engine = start(models.GPT2, CPU, tmp_path / "run")
    for step in range(2):
        train_step(engine, models.GPT2, step)
        engine.save_checkpoint(tmp_path / "saved", tag="best")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"best", "latest"}
    assert checkpoints(tmp_path / "saved")["best"].step == 2
    engine.destroy()


def test_keep_last_removes_the_oldest_of_ours_and_nothing_else(tmp_path: Path) -> None:
    folder, job = tmp_path / "saved", models.GPT2
    engine = start(job, CPU, tmp_path / "run")
    engine.save_checkpoint(folder, tag="base", save_latest=False)
    (folder / "global_step9").mkdir()
    (folder / "notes").write_text("")
    (folder / ".other.partial").mkdir()
    (folder / ".other.partial" / "thesis.txt").write_text("all of it")
    for step in range(4):
        train_step(engine, job, step)
        engine.save_checkpoint(folder, keep_last=2)
    there = {".other.partial", "global_step9", "latest", "notes"}
    assert {path.name for path in folder.iterdir()} == {*there, "global_step3", "global_step4"}
    engine.load_checkpoint(folder, tag="global_step3")
    engine.save_checkpoint(folder, tag="again", keep_last=1)
    assert {path.name for path in folder.iterdir()} == {*there, "again"}, "what was saved stays, whatever its epoch"
    engine.destroy()
