"""`offload convert` writes a run again with moments of another form, and never harms the run that it reads."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import offload
from offload import testing
from offload.cli.main import app
from offload.errors import IoError
from offload.swapper.store import Store
from tests.optim.test_int8_moments import assert_close_to_nearest
from tests.support import models
from tests.support.drives.fault_injection import flip_bit
from tests.support.oracle import Job, assert_same_tensors, start, train_step, weights_of
from tests.support.ranks.rank_pool import RankPool

DISK = ("nvme", "nvme")
JOB = models.GPT2._replace(dtype="bf16", steps=4)
RULES = {
    "AdamW": JOB,
    "Lion": JOB._replace(optimizer="Lion", lr=1e-4),
    "Adagrad": JOB._replace(optimizer="Adagrad", lr=1e-2),
}


def call(*given: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, given)])


def moments_of(engine: offload.Engine) -> dict[str, torch.Tensor]:
    states = engine.optimizer.state_dict()["state"]
    return {f"{number} {name}": torch.as_tensor(each) for number, row in states.items() for name, each in row.items()}


def trained(job: Job, folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A run of two steps: its weights and its moments."""
    engine = start(job, DISK, folder, **options)
    for step in range(2):
        train_step(engine, job, step)
    found = weights_of(engine), moments_of(engine)
    engine.destroy()
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def assert_converted(found: dict[str, torch.Tensor], before: dict[str, torch.Tensor], form: str) -> None:
    assert found.keys() == before.keys()
    for key, value in before.items():
        if form == "fp32" or key.endswith("step"):
            assert torch.equal(found[key], value), key
        elif form == "bf16":
            assert torch.equal(found[key], value.bfloat16().float()), key
        else:
            assert_close_to_nearest(found[key].view(-1), value.view(-1), key.endswith(("exp_avg_sq", "sum")))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("before", "after"), [("fp32", "int8"), ("int8", "fp32"), ("bf16", "int8"), ("int8", "bf16"), ("fp32", "bf16")]
)
def test_a_converted_run_goes_on(name: str, dtype: str, before: str, after: str, tmp_path: Path) -> None:
    """On two drives, with weights that are frozen: masters stay bit for bit, and so does what fp32 can hold."""
    job = RULES[name]._replace(dtype=dtype, model=with_a_frozen_part)
    drives = [str(tmp_path / each) for each in ("one", "two")]
    weights, moments = trained(job, tmp_path, moments=before, nvme_path=drives)
    kept = {each: files(Path(each) / "default") for each in drives}
    done = call(tmp_path / "one" / "default", "--moments", after)
    assert done.exit_code == 0, done.output
    assert f"moments in {after} in place of {before}" in done.output
    assert {each: files(Path(each) / "default") for each in drives} == kept, "the run is only read"
    engine = start(job, DISK, tmp_path, moments=after, nvme_path=drives, run=f"default-{after}", resume="must")
    assert engine.global_steps == 2
    assert_same_tensors(weights, weights_of(engine))
    assert_converted(moments_of(engine), moments, after)
    train_step(engine, job, 2)
    engine.destroy(remove=True)


def with_a_frozen_part() -> Any:
    model = JOB.model()
    model.transformer.wte.weight.requires_grad_(False)
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize(("before", "after"), [("fp32", "int8"), ("int8", "fp32")])
def test_units_of_several_chunks_are_converted(before: str, after: str, tmp_path: Path) -> None:
    """A unit of 2.1 million elements, whose parameters begin within blocks where moments are not in 8 bits."""
    job, folder = JOB._replace(model=lambda: models.gpt2(layers=1, width=416)), tmp_path / "my files"
    weights, moments = trained(job, folder, moments=before)
    done = call(folder / "default", "--moments", after, "--run", "other")
    assert done.exit_code == 0 and f"`offload rm '{folder}/default'` deletes" in done.output, "no line to paste"
    engine = start(job, DISK, folder, moments=after, run="other", resume="must")
    assert_same_tensors(weights, weights_of(engine))
    assert_converted(moments_of(engine), moments, after)
    engine.destroy(remove=True)


def test_there_and_back_is_the_same_run(tmp_path: Path) -> None:
    """fp32 holds every value of 8 bits, and they are encoded to the same codes: both runs train with the same bits."""
    trained(JOB, tmp_path, moments="int8")
    assert call(tmp_path / "default", "--moments", "fp32", "--run", "wide").exit_code == 0
    assert call(tmp_path / "wide", "--moments", "int8", "--run", "again").exit_code == 0
    results = []
    for run in ("default", "again"):
        engine = start(JOB, DISK, tmp_path, moments="int8", run=run, resume="must")
        for step in (2, 3):
            train_step(engine, JOB, step)
        results.append((weights_of(engine), moments_of(engine)))
        engine.destroy(remove=True)
    for one, other in zip(*results, strict=True):
        assert_same_tensors(one, other)


def on_two_ranks(job: Job, folder: Path, run: str, moments: str) -> dict[str, torch.Tensor]:
    engine = start(job, DISK, folder, run=run, moments=moments, resume="auto")
    for step in range(engine.global_steps, 2):
        train_step(engine, job, step)
    found = moments_of(engine)
    engine.destroy()
    return found


def fails_for_rank_1(store: Store, step: int, contents: Any, real: Any = Store.commit) -> None:
    if store.folders[0].name == "rank1":
        raise IoError(str(store.folders[0]), 0, 4096, errno.ENOSPC)
    real(store, step, contents)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fp32", "int8"), ("int8", "bf16")])
def test_a_run_of_two_ranks_is_converted(before: str, after: str, ranks: RankPool, tmp_path: Path) -> None:
    job = JOB._replace(clip=0.0)
    one, _ = ranks.run(on_two_ranks, job, tmp_path, "default", before)
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "store.commit", fails_for_rank_1)
        assert call(tmp_path / "default", "--moments", after, "--run", "other").exit_code == 1
    assert not (tmp_path / "other").exists(), "a part of the new run is left"
    done = call(tmp_path / "default", "--moments", after, "--run", "other")
    assert done.exit_code == 0, done.output
    for found in ranks.run(on_two_ranks, job, tmp_path, "other", after):
        assert_converted(found, one, after)


def test_json_names_the_new_run(tmp_path: Path) -> None:
    trained(JOB, tmp_path)
    done = call(tmp_path / "default", "--moments", "int8", "--json")
    found = json.loads(done.stdout)
    assert found["run"] == str(tmp_path / "default-int8") and found["step"] == 2
    assert (found["before"], found["after"]) == (
        {"master": "fp32", "moments": "fp32"},
        {"master": "fp32", "moments": "int8"},
    )
    size = (tmp_path / "default-int8" / "rank0" / "states").stat().st_size
    assert found["nbytes"] == size < (tmp_path / "default" / "rank0" / "states").stat().st_size


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    trained(JOB, tmp_path)
    run = tmp_path / "default"
    plain = JOB._replace(optimizer="SGD", lr=0.05)
    trained(plain, tmp_path, run="plain")
    before = files(tmp_path)
    for given, message in (
        ((run, "--moments", "int4"), "'int4' is not one of"),
        ((run, "--moments", "fp32"), "has moments in fp32 already"),
        ((run, "--moments", "int8", "--run", "default"), "needs a name of its own"),
        ((run, "--moments", "int8", "--run", "a/b"), "letters, digits, '.', '_' and '-'"),
        ((run, "--moments", "int8", "--run", "my run"), "letters, digits, '.', '_' and '-'"),
        ((run, "--moments", "int8", "--run", "plain"), "plain"),
        ((tmp_path / "plain", "--moments", "int8"), "has no moments to convert"),
        ((tmp_path / "none", "--moments", "int8"), "there is no folder"),
    ):
        done = call(*given)
        assert done.exit_code == 2 and message in done.output, (given, done.output)
    assert files(tmp_path) == before


def test_a_damaged_run_is_not_converted(tmp_path: Path) -> None:
    trained(JOB, tmp_path)
    states = tmp_path / "default" / "rank0" / "states"
    for offset in range(0, states.stat().st_size, 4096):  # both slots of some state
        flip_bit(states, offset)
    done = call(tmp_path / "default", "--moments", "int8")
    assert done.exit_code == 2 and "is damaged, and is not converted" in done.output, done.output
    assert not (tmp_path / "default-int8").exists()


@pytest.mark.slow
def test_a_killed_conversion_leaves_the_run_and_can_be_made_again(tmp_path: Path) -> None:
    job = JOB._replace(model=lambda: models.gpt2(layers=8, width=256))
    weights, moments = trained(job, tmp_path)
    kept = files(tmp_path / "default")
    command = [sys.executable, "-m", "offload", "convert", str(tmp_path / "default"), "--moments", "int8"]
    chance = random.Random(0)
    killed = 0
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
        made = tmp_path / "default-int8" / "rank0"
        while process.poll() is None and not made.exists():  # it is about to write
            time.sleep(0.002)
        with_luck = chance.random() * 0.1
        time.sleep(with_luck)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() < 0
        assert files(tmp_path / "default") == kept
        if (made / "commit").exists() and process.returncode == 0:
            break
        if call(tmp_path / "default-int8").exit_code != 2:
            raise AssertionError("no form was given")
    assert killed
    if not _is_whole(tmp_path / "default-int8"):
        done = call(tmp_path / "default", "--moments", "int8")
        assert done.exit_code == 0, done.output
    engine = start(job, DISK, tmp_path, moments="int8", run="default-int8", resume="must")
    assert_same_tensors(weights, weights_of(engine))
    assert_converted(moments_of(engine), moments, "int8")
    engine.destroy(remove=True)


def _is_whole(run: Path) -> bool:
    return CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
