"""Arguments of a save or a load that cannot be right are errors that change nothing; unusual names work."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import StoreError, UsageError
from offload.runs.import_checkpoint import open_foreign
from tests.checkpoints.checkpoint_runs import DISK, engine, folder, inspect, names, saved_checkpoint
from tests.support import models
from tests.support.oracle import start, train_step

__all__ = ["engine", "folder", "saved_checkpoint"]  # fixtures

# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag", [" a", "a ", "a\n", "\ta", "a\x07b", "a\u2028b", "a\ud800b", "a\x00b", "x" * 247, "ü" * 124]
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
        ({"keep_last": "2"}, "keep_last must be .*, got '2'"),
        ({"keep_last": 1.5}, r"keep_last must be .*, got 1\.5"),
        ({"keep_last": True}, "keep_last must be .*, got True"),
        ({"keep_last": -1}, "keep_last must be .*, got -1"),
        ({"client_state": [1, 2]}, "client_state must be a dict or None, got list"),
        ({"client_state": []}, "client_state must be a dict or None, got list"),
        ({"client_state": "abc"}, "client_state must be a dict or None, got str"),
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
