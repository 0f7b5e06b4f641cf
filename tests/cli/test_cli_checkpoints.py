"""`inspect`, `verify` and `export` accept a checkpoint as they accept a run, and name every damage."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.fileio.safetensors_stream import read_header
from tests.support import models
from tests.support.exported_runs import FROZEN, LLAMA, tensors
from tests.support.oracle import Job, assert_same_tensors, start, train_step
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_pool import RankPool

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")


def run(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*map(str, arguments)])


def report_of(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def save(job: Job, folder: Path, placement: tuple[str, str] = DISK, steps: int = 1, **options: Any) -> None:
    """A run of some steps that saves each; its swap files lie beside."""
    engine = start(job, placement, folder / "swap")
    for step in range(steps):
        train_step(engine, job, step)
        engine.save_checkpoint(folder / "saved", **options)
    engine.destroy()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    save(models.GPT2._replace(dtype="bf16"), folder, steps=2)
    return folder / "saved"


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    """Two checkpoints of one rank."""
    return Path(shutil.copytree(made, tmp_path / "saved"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


# -- inspect ------------------------------------------------------------------------------------------


def test_a_folder_of_checkpoints_lists_them(saved: Path) -> None:
    (saved / ".global_step3.partial").mkdir()
    (saved / "notes").mkdir()
    report = report_of("inspect", saved)
    assert (report["kind"], report["latest"]) == ("checkpoints", "global_step2")
    assert [(each["tag"], each["epoch"]) for each in report["checkpoints"]] == [
        ("global_step1", 1),
        ("global_step2", 2),
    ]
    assert report["leftovers"] == [str(saved / ".global_step3.partial")]
    words = run("inspect", saved).output
    assert re.search(r"global_step2 +2 +GPT2LMHeadModel, 162,368 +bf16 +1 .* latest", words)
    assert ".global_step3.partial" in words and "notes" not in words


def test_one_checkpoint_tells_of_itself(saved: Path) -> None:
    report = report_of("inspect", saved / "global_step1")
    assert report["kind"] == "checkpoint" and report["epoch"] == 1 and not report["damaged"]
    assert report["model"] == {"class": "GPT2LMHeadModel", "parameters": 162368, "trainable": 162368, "units": 6}
    assert (report["mode"], report["world_size"], report["frozen_weights"]) == ("bf16", 1, True)
    assert report["made_by"] == offload.__version__
    assert report["bytes"] == sum(path.stat().st_size for path in (saved / "global_step1").iterdir())
    assert "GPT2LMHeadModel, 162,368 parameters, 6 units" in run("inspect", saved / "global_step1").output


# -- verify -------------------------------------------------------------------------------------------


def test_every_tensor_that_differs_is_named(saved: Path) -> None:
    path = saved / "global_step2" / "states.rank0.safetensors"
    places, _ = read_header(path)
    for name in ("0.weight", "3.exp_avg"):
        flip(path, places[name].offset + places[name].tensor.nbytes - 1)
    report = report_of("verify", saved, code=1)
    assert not report["whole"] and [wrong["path"] for wrong in report["files"]] == [str(path)] * 2
    words = run("verify", saved).output
    assert "checksum of 0.weight is" in words and "checksum of 3.exp_avg is" in words
    assert "damaged in 2 places" in words
    assert report_of("verify", saved / "global_step1")["whole"]


@pytest.mark.parametrize(
    ("file", "how", "words"),
    [
        ("progress.rank0.safetensors", "flip", "progress.rank0.safetensors is damaged"),
        ("states.rank0.safetensors", "cut", "bytes, expected"),
        ("states.rank0.safetensors", "remove", "No such file"),
        ("progress.rank0.safetensors", "remove", "No such file"),
    ],
)
def test_a_file_that_is_not_what_was_written(file: str, how: str, words: str, saved: Path) -> None:
    path = saved / "global_step2" / file
    if how == "flip":
        flip(path, path.stat().st_size - 3)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    report = report_of("verify", saved, code=1)
    assert len(report["files"]) == 1 and words in report["files"][0]["path"] + report["files"][0]["reason"]


def test_a_manifest_that_is_damaged_cannot_be_verified(saved: Path) -> None:
    flip(saved / "global_step2" / "manifest.json", 300)
    result = run("verify", saved)
    assert result.exit_code == 2 and "global_step2/manifest.json" in result.output


def test_what_is_neither_run_nor_checkpoint_is_refused(tmp_path: Path) -> None:
    for command in (["verify", tmp_path], ["export", tmp_path, tmp_path / "out"]):
        result = run(*command)
        assert result.exit_code == 2 and "neither swap files" in result.output and "nor a checkpoint" in result.output
    (tmp_path / "latest").write_text("global_step7")
    result = run("verify", tmp_path)
    assert result.exit_code == 2 and "there is no checkpoint global_step7" in result.output


# -- export -------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("placement", [DISK, MEMORY], ids=["disk", "memory"])
@pytest.mark.parametrize("job", [models.GPT2, LLAMA, FROZEN], ids=["tied", "llama", "frozen"])
def test_a_checkpoint_gives_what_its_run_gives(
    job: Job, placement: tuple[str, str], dtype: str, tmp_path: Path
) -> None:
    job = job._replace(dtype="bf16")
    save(job, tmp_path, placement)
    report_of("export", tmp_path / "saved", tmp_path / "of-checkpoint", "--dtype", dtype)
    swap = tmp_path
    if placement == MEMORY:
        save(job, tmp_path / "again")
        swap = tmp_path / "again"
    report_of("export", swap / "swap" / "default", tmp_path / "of-run", "--dtype", dtype)
    ours, theirs = tensors(tmp_path / "of-checkpoint"), tensors(tmp_path / "of-run")
    assert_same_tensors(ours, theirs)
    config = [(tmp_path / name / "config.json").read_text() for name in ("of-checkpoint", "of-run")]
    assert config[0] == config[1]


def test_frozen_weights_that_were_not_saved_are_reported(tmp_path: Path) -> None:
    save(FROZEN, tmp_path, exclude_frozen_parameters=True)
    report = report_of("export", tmp_path / "saved", tmp_path / "out")
    model = FROZEN.model()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert tensors(tmp_path / "out").keys() == dict(model.named_parameters()).keys() - frozen
    assert f"{len(frozen)} frozen weights are not in the files" in " ".join(report["notices"])
    assert report["parameters"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert "without those that are frozen" in run("inspect", tmp_path / "saved" / "global_step1").output
    assert report_of("verify", tmp_path / "saved")["whole"]


def test_damage_ends_an_export_and_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    path = saved / "global_step2" / "states.rank0.safetensors"
    places, _ = read_header(path)
    flip(path, places["2.weight"].offset)
    result = run("export", saved, tmp_path / "out")
    assert result.exit_code == 1 and "2.weight" in result.output and str(path) in result.output
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    assert run("export", saved / "global_step1", tmp_path / "out").exit_code == 0


def _on_ranks(folder: Path) -> None:
    job = FROZEN._replace(dtype="bf16")
    engine = rank_pool.start(job, DISK, folder / "swap")
    train_step(engine, job, 0)
    engine.save_checkpoint(folder / "saved")
    engine.destroy()


def test_the_shards_of_all_ranks_are_merged(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_on_ranks, tmp_path)
    report_of("export", tmp_path / "swap" / "default", tmp_path / "of-run", "--dtype", "fp32")
    report_of("export", tmp_path / "saved", tmp_path / "of-checkpoint", "--dtype", "torch.float32")
    ours, theirs = tensors(tmp_path / "of-checkpoint"), tensors(tmp_path / "of-run")
    assert_same_tensors(ours, theirs)
    assert report_of("verify", tmp_path / "saved")["world_size"] == 2
    flip(tmp_path / "saved" / "global_step1" / "progress.rank1.safetensors", 3000)
    assert "progress.rank1" in run("verify", tmp_path / "saved").output


# -- beside a run -------------------------------------------------------------------------------------


def test_the_swap_files_of_a_run_win_over_checkpoints_in_its_folder(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path / "swap")
    train_step(engine, models.GPT2, 0)
    engine.save_checkpoint(tmp_path / "saved")
    train_step(engine, models.GPT2, 1)
    engine.destroy(remove=False)
    place = tmp_path / "swap" / "default"
    shutil.copytree(tmp_path / "saved", place, dirs_exist_ok=True)
    assert report_of("verify", place)["step"] == 2
    assert report_of("export", place, tmp_path / "model")["step"] == 2
    assert report_of("inspect", place)["kind"] == "run"
    assert report_of("verify", place / "global_step1")["step"] == 1


# -- a Trainer's output folder ------------------------------------------------------------------------


def test_the_checkpoints_of_a_trainer_are_found_in_its_output_folder(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step in (5, 40):
        (out / f"checkpoint-{step}").mkdir(parents=True)
        (saved / f"global_step{1 if step == 5 else 2}").rename(out / f"checkpoint-{step}" / f"global_step{step}")
        (out / f"checkpoint-{step}" / "latest").write_text(f"global_step{step}")
    (out / "checkpoint-45" / ".global_step45.partial").mkdir(parents=True)  # cut short by a kill
    (out / "checkpoint-best").mkdir()
    report = report_of("inspect", out)
    assert (report["kind"], report["latest"]) == ("checkpoints", "checkpoint-40/global_step40")
    assert [each["tag"] for each in report["checkpoints"]] == [
        "checkpoint-5/global_step5",
        "checkpoint-40/global_step40",
    ]
    assert re.search(r"checkpoint-40/global_step40 .* latest", run("inspect", out).output)
    assert report_of("verify", out)["path"] == str(out / "checkpoint-40" / "global_step40")
    assert report_of("export", out, tmp_path / "model")["step"] == 2
