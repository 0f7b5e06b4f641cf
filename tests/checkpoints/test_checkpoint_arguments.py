"""Arguments of a save or a load: the name decides what is loaded, replaced or removed; wrong ones change nothing."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.checkpoint.files import checkpoints
from offload.errors import StoreError, UsageError
from offload.runs.import_checkpoint import open_foreign
from tests.checkpoints.checkpoint_runs import DISK, engine, folder, inspect, names, saved_checkpoint
from tests.support import models
from tests.support.oracle import start, train_step

__all__ = ["engine", "folder", "saved_checkpoint"]  # fixtures

CPU = ("cpu", "cpu")
MINE, CONVERT = r"client_state\['mine'\] is a .*", r": convert the value, as by vars\(args\)"

# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag",
    [
        *("", ".", "..", ".x", "a/b", "latest"),
        *(" a", "a ", "a\n", "\ta", "a\x07b", "a\u2028b", "a\ud800b", "a\x00b", "x" * 247, "ü" * 124),
    ],
)
def test_a_tag_that_is_no_name(tag: str, engine: offload.Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot name a folder") as promoted:
        engine.save_checkpoint(tmp_path / "saved", tag=tag)
    assert repr(tag) in str(promoted.value) and not (tmp_path / "saved").exists()


def test_a_save_among_the_swap_files_of_a_run_is_refused(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path / "swap")
    train_step(engine, models.GPT2, 0)
    run = tmp_path / "swap" / "default"
    before = sorted(run.rglob("*"))
    for where in (run, run / "rank0"):
        with pytest.raises(UsageError, match="which holds the swap files of a run: give a folder of checkpoints"):
            engine.save_checkpoint(where)
    assert sorted(run.rglob("*")) == before
    engine.save_checkpoint(tmp_path / "swap" / "checkpoints")
    engine.destroy(remove=True)


@pytest.mark.parametrize("tag", ["x" * 246, "ü" * 123, "two words", "日本", "latest.swp", "a.partial", "a.old"])
def test_a_tag_that_is_unusual(tag: str, engine: offload.Engine, folder: Path) -> None:
    for _ in range(2):
        engine.save_checkpoint(folder, tag=tag)
    engine.save_checkpoint(folder, tag="a", keep_last=1)
    assert names(folder) == {"a", "latest"}


@pytest.mark.parametrize("text", ["", "\n", "../one", "a\x07", ".a.partial"])
def test_a_latest_that_names_nothing(text: str, engine: offload.Engine, saved_checkpoint: Path, folder: Path) -> None:
    shutil.copytree(saved_checkpoint, folder / "one")
    (folder / "latest").write_text(text)
    with pytest.raises(StoreError, match=r"latest must contain the tag .* in the folder: one"):
        engine.load_checkpoint(folder)
    assert "latest must contain the tag" in inspect("verify", folder).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last must be .*, got 0"),
        ({"keep_last": "2"}, "keep_last must be .*, got '2'"),
        ({"keep_last": 1.5}, r"keep_last must be .*, got 1\.5"),
        ({"keep_last": True}, "keep_last must be .*, got True"),
        ({"keep_last": -1}, "keep_last must be .*, got -1"),
        ({"client_state": [1, 2]}, "client_state must be a dict or None, got list"),
        ({"client_state": []}, "client_state must be a dict or None, got list"),
        ({"client_state": "abc"}, "client_state must be a dict or None, got str"),
        ({"client_state": {"mine": torch.zeros(20_000)}}, f"{MINE}Tensor.*{CONVERT}"),
        ({"client_state": {"mine": argparse.Namespace(lr=1)}}, f"{MINE}Namespace.*{CONVERT}"),
        ({"client_state": {"mine": {1, 2}}}, f"{MINE}set.*{CONVERT}"),
        ({"client_state": {"a": {"big": 10**5000}}}, r"client_state\['a'\]\['big'\] is a whole number of 16610 bits"),
        ({"client_state": {10**5000: 1}}, "a key of client_state is a whole number"),
        ({"save_dir": None}, "save_dir must be a path.*NoneType"),
        ({"save_dir": b"saved"}, "save_dir must be a path.*bytes"),
        ({"save_dir": "a\0b"}, "save_dir is 'a.x00b'"),
        ({"save_dir": "a\ud800b"}, "save_dir is 'a.ud800b'"),
    ],
)
def test_what_cannot_be_meant(options: dict[str, Any], message: str, engine: offload.Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        engine.save_checkpoint(**{"save_dir": tmp_path / "saved", **options})
    assert not (tmp_path / "saved").exists()


def test_a_load_from_no_path(engine: offload.Engine) -> None:
    for path in (None, b"saved", 3):
        with pytest.raises(UsageError, match="load_dir must be a path"):
            engine.load_checkpoint(path)  # type: ignore[arg-type]


def test_a_number_too_long_for_a_commit_is_named(engine: offload.Engine, folder: Path) -> None:
    engine.client_state = {"big": 10**5000}
    try:
        with pytest.raises(UsageError, match=r"engine.client_state\['big'\] is a whole number"):
            engine.save_checkpoint(folder)
    finally:
        engine.client_state = {}
    engine.save_checkpoint(folder, client_state={"long": 10**4000})
    assert engine.load_checkpoint(folder)[1] == {"long": 10**4000}


def test_small_tensors_of_the_user_come_back_bit_for_bit(engine: offload.Engine, folder: Path) -> None:
    mine: dict[str, Any] = {
        "generator": torch.get_rng_state(),
        "best": torch.tensor(0.1, dtype=torch.float64),
        "half": [torch.arange(6).to(torch.bfloat16).view(2, 3).T],
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0),
    }
    engine.save_checkpoint(folder, client_state=mine)
    found = engine.load_checkpoint(folder)[1]
    assert found.keys() == mine.keys()
    pairs = [(found.pop("half")[0], mine.pop("half")[0]), *((found[name], mine[name]) for name in mine)]
    assert len(pairs) == 5
    for loaded, value in pairs:
        assert loaded.dtype == value.dtype and torch.equal(loaded, value)


@pytest.mark.parametrize("modify", [True, False])
def test_weights_that_are_gathered_are_not_saved(modify: bool, engine: offload.Engine, folder: Path) -> None:
    weight = engine.module.transformer.wte.weight
    with offload.gathered(weight, modify=modify):
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(UsageError, match=r"while transformer.wte.weight is gathered: leave the `with` block"):
                call(folder if call == engine.save_checkpoint else folder.parent / "other")
            break
    assert not names(folder)
    engine.save_checkpoint(folder)


def test_an_import_of_a_checkpoint_of_ours_says_who_reads_it(saved_checkpoint: Path) -> None:
    with pytest.raises(StoreError, match="is a checkpoint of offload itself: engine"):
        open_foreign(saved_checkpoint, None)


def test_a_save_within_a_forward_is_refused(tmp_path: Path) -> None:
    engine = start(models.GPT2, CPU, tmp_path / "run")

    class Saves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            engine.save_checkpoint(tmp_path / "saved")
            return x

    engine.module.transformer.drop = Saves()
    with pytest.raises(UsageError, match="between steps"):
        models.GPT2.loss(engine, 0, 0)
    assert not (tmp_path / "saved").exists() or not list((tmp_path / "saved").iterdir())
    engine.destroy()


# -- names --------------------------------------------------------------------------------------------


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
