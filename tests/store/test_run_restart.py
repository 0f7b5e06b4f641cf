"""A script that ran once can run again: a closed run is replaced, a killed one or one of another job is protected."""

from __future__ import annotations

import itertools
import logging
import logging.handlers
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.deepspeed.engine import DeepSpeedEngine
from offload.errors import StoreError
from tests.support.drives.fault_injection import die
from tests.support.models import GPT2, MIXTURE
from tests.support.oracle import Result, assert_same, config, dies, start, train_step, weights_of
from tests.support.ranks import rank_pool

DISK = ("nvme", "nvme")
JOB = GPT2._replace(steps=2)


def script(folder: Path, remove: bool | None = None, **options: object) -> tuple[Result, tuple[str, ...]]:
    """What a script does: all of `JOB`, and the end; what it gave and was told."""
    engine = start(JOB, DISK, folder, **options)
    losses = [train_step(engine, JOB, step) for step in range(engine.global_steps, JOB.steps)]
    result = Result(losses, [], weights_of(engine))
    engine.destroy(remove)
    return result, engine.notices


def _killed(folder: Path) -> None:
    engine = start(JOB, DISK, folder)
    train_step(engine, JOB, 0)
    engine.module.state_dict()
    train_step(engine, JOB, 1)
    die()


def test_it_is_replaced_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, messages = script(tmp_path)
    assert not any("is replaced" in line for line in messages)
    (left,) = [record.getMessage() for record in caplog.records if "the run is kept in" in record.getMessage()]
    assert '"resume": "auto" goes on from there, a start without it begins anew in its place if the job is' in left
    again, messages = script(tmp_path)
    (line,) = [line for line in messages if "is replaced" in line]
    assert re.match(r"the run in \S+ \(\S+ \w+\), which was closed at its end, is replaced; ", line)
    assert_same(first, again)
    engine = start(JOB, ("cpu", "nvme"), tmp_path, host_memory="64MiB")
    assert any("is replaced" in line for line in engine.notices), "tiers and budgets make no other job"
    engine.destroy(remove=True)


def test_one_that_is_to_be_kept_is_refused_and_unharmed(tmp_path: Path) -> None:
    """An export protects it as before: it did not end."""
    first, _ = script(tmp_path, remove=False)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "default"), str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    with pytest.raises(StoreError, match=r'"resume": "auto".*"resume": "restart".*offload rm'):
        script(tmp_path)
    assert_same(Result([], [], first.weights), script(tmp_path, resume="must")[0])


OTHERS = {
    "learning rate": (JOB._replace(lr=3e-4), r"learning rates \[0\.001\] is now \[0\.0003\]"),
    "batch": (JOB._replace(accumulation=2), "accumulation 1 is now 2"),
    "seed": (JOB._replace(seed=7), "seed 0 is now 7"),
    "dtype": (JOB._replace(dtype="bf16"), 'layout/mode is "fp32" in the run and "bf16" here'),
    "optimizer": (JOB._replace(optimizer="Adagrad"), "optimizer adam is now adagrad"),
    "model": (MIXTURE._replace(steps=2), "model GPT2LMHeadModel.* is now Mixture.*, .*layout/"),
}
"""Jobs other than `JOB`, and how an error tells the difference."""
ARITHMETIC: tuple[tuple[dict[str, Any], str], ...] = (
    ({"torch_autocast": {"enabled": True}}, "autocast off is now bf16"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "dtype of sums of gradients auto is now bf16"),
)
"""Keys of a config that compute otherwise."""


def test_one_of_another_job_is_refused_and_unharmed(tmp_path: Path) -> None:
    first, _ = script(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "default").rglob("*") if path.name != "lock"}
    how = r'"run" in the "offload" block.*"resume": "restart" there.*offload export \S+/default FOLDER'
    for job, words in OTHERS.values():
        with pytest.raises(StoreError, match=f"holds a run that ended at step 2 and .*{words}.*{how}"):
            start(job, DISK, tmp_path)
    for block, words in ARITHMETIC:
        with pytest.raises(StoreError, match=words):
            offload.initialize(model=JOB.model(), config=config(JOB, DISK, tmp_path) | block)
    assert before == {path: path.stat().st_mtime_ns for path in before}, "nothing was touched"
    job = OTHERS["learning rate"][0]
    start(job, DISK, tmp_path, run="other").destroy()
    assert_same(Result([], [], first.weights), script(tmp_path, resume="must")[0])
    engine = start(job, DISK, tmp_path, resume="restart")
    assert any("is replaced" in line for line in engine.notices)
    engine.destroy(remove=True)


def test_one_of_another_loss_scale_is_refused(tmp_path: Path) -> None:
    job = JOB._replace(dtype="fp16", loss_scale=16)
    engine = start(job, DISK, tmp_path)
    train_step(engine, job, 0)
    engine.destroy()
    with pytest.raises(StoreError, match=r"loss scale 16\.0 is now 8\.0"):
        start(job._replace(loss_scale=8), DISK, tmp_path)


def _goes_back(engine: offload.Engine, folder: Path) -> None:
    """Loads a checkpoint at the end, as the Trainer loads its best one."""
    engine.save_checkpoint(folder)
    train_step(engine, JOB, 1)
    engine.load_checkpoint(folder)


SAVES: dict[str, Callable[[Any, Path], object]] = {
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "save_pretrained": lambda engine, folder: engine.save_pretrained(folder),
    "save_16bit_model": lambda engine, folder: engine.save_16bit_model(folder),
    "accelerate": lambda engine, folder: DeepSpeedEngine(engine)._zero3_consolidated_16bit_state_dict(),
    "load_checkpoint": _goes_back,
    "export": lambda engine, folder: None,
    "nothing": lambda engine, folder: None,
}


def test_one_whose_last_step_was_saved_is_replaced_by_any_job(tmp_path: Path) -> None:
    """As DeepSpeed's scripts end, whose swap folder is shared by all of them. So is one that made no step."""
    jobs = itertools.cycle((JOB, OTHERS["learning rate"][0]))
    for number, (how, save) in enumerate(SAVES.items()):
        engine = start(next(jobs), DISK, tmp_path)
        assert any("is replaced" in line for line in engine.notices) is (number > 0), how
        if how != "nothing":
            train_step(engine, JOB, 0)
        save(engine, tmp_path / how)
        engine.destroy()
        if how == "export":
            done = CliRunner().invoke(app, ["export", str(tmp_path / "default"), str(tmp_path / how)])
            assert done.exit_code == 0, done.output
    start(OTHERS["model"][0], DISK, tmp_path).destroy(remove=True)


def _edited(engine: offload.Engine, folder: Path) -> None:
    engine.save_checkpoint(folder)
    parameter = next(engine.module.parameters())
    with offload.gathered(parameter, modifier_rank=0), torch.no_grad():
        parameter.add_(1.0)


def _stepped(engine: offload.Engine, folder: Path) -> None:
    engine.save_checkpoint(folder)
    train_step(engine, JOB, 1)


def _set(engine: offload.Engine, folder: Path) -> None:
    engine.module.load_state_dict({name: each + 1 for name, each in engine.module.state_dict().items()})


@pytest.mark.parametrize(("work", "steps"), [(_stepped, 1), (_edited, 1), (_set, 0)])
def test_one_that_went_on_after_it_was_saved_is_refused(
    work: Callable[[offload.Engine, Path], None], steps: int, tmp_path: Path
) -> None:
    """Also after another process has opened it and changed nothing; weights may be set without a step."""
    engine = start(JOB, DISK, tmp_path)
    for step in range(steps):
        train_step(engine, JOB, step)
    work(engine, tmp_path / "saved")
    engine.destroy()
    start(JOB, DISK, tmp_path, resume="must").destroy()
    with pytest.raises(StoreError, match=r"holds a run that ended at step \d"):
        start(OTHERS["learning rate"][0], DISK, tmp_path)


def test_one_of_which_nothing_is_known_is_refused(tmp_path: Path) -> None:
    script(tmp_path)
    for note in ('{"steps": 2}', "{"):
        (tmp_path / "default" / "closed.json").write_text(note)
        with pytest.raises(StoreError, match=r"its note closed\.json does not say what it was"):
            script(tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("steps", [0, JOB.steps])
def test_one_that_ended_without_destroy_is_replaced(
    steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    engine = start(JOB, DISK, tmp_path)
    for step in range(steps):
        train_step(engine, JOB, step)
    caplog.clear()
    testing.leave(engine)
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"at step {steps}: " in line and "a start without it begins anew" in line
    _, messages = script(tmp_path)
    assert any("which was closed at its end, is replaced" in line for line in messages)


@pytest.mark.parametrize("how", ["exception", "failed engine"])
def test_one_that_ended_by_an_error_is_protected(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    engine = start(JOB, DISK, tmp_path)
    train_step(engine, JOB, 0)
    if how == "exception":
        monkeypatch.setattr(sys, "last_value", ValueError("of the script"), raising=False)
    else:
        testing.fail(engine, RuntimeError("of the test"))
    caplog.clear()
    testing.leave(engine)
    (line,) = (record.getMessage() for record in caplog.records if "is kept in" in record.getMessage())
    assert "a start without it is refused while the run is there" in line
    with pytest.raises(StoreError, match="holds a run that did not end"):
        script(tmp_path)


def _goes_on_and_dies(folder: Path) -> None:
    start(JOB, DISK, folder, resume="auto")
    die()


def test_one_that_was_killed_is_refused_and_restarted_by_a_word(tmp_path: Path) -> None:
    dies(_killed, tmp_path)
    with pytest.raises(StoreError, match="holds a run that did not end"):
        script(tmp_path)
    restarted, messages = script(tmp_path, resume="restart")
    assert any("which did not end, is replaced" in line for line in messages)
    begun, messages = script(tmp_path / "other", resume="restart")
    assert not any("is replaced" in line for line in messages), "nothing was there"
    assert_same(restarted, begun)
    dies(_goes_on_and_dies, tmp_path)
    with pytest.raises(StoreError, match="holds a run that did not end"):
        script(tmp_path)


def test_a_run_that_trains_is_reported_as_such(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path)
    train_step(engine, JOB, 0)
    testing.settle(engine)
    for resume in ("never", "restart"):
        with pytest.raises(StoreError, match=r"in use by process \d+ on .*; call destroy\(\) on that engine of"):
            script(tmp_path, resume=resume)
    engine.destroy(remove=True)


def _on_ranks(folder: Path) -> tuple[Result, tuple[str, ...]]:
    engine = rank_pool.start(JOB, DISK, folder)
    losses = [train_step(engine, JOB, step) for step in range(JOB.steps)]
    result = Result(losses, [], weights_of(engine))
    engine.destroy()
    return result, engine.notices


def _exits_on_ranks(folder: Path) -> list[str]:
    sys.__dict__.pop("last_value", None)
    engine = rank_pool.start(JOB, DISK, folder)
    train_step(engine, JOB, 0)
    records = logging.handlers.BufferingHandler(99)
    logging.getLogger("offload").addHandler(records)
    testing.leave(engine)
    logging.getLogger("offload").removeHandler(records)
    return [record.getMessage() for record in records.buffer]


@pytest.mark.slow
def test_on_several_ranks_rank_0_notes_the_end_for_all(tmp_path: Path) -> None:
    with rank_pool.pool(2) as ranks:
        (line,), lines_of_rank1 = ranks.run(_exits_on_ranks, tmp_path)
    assert "a start without it begins anew" in line and lines_of_rank1 == []


def _refused_on_ranks(folder: Path) -> str:
    with pytest.raises(StoreError) as refused:
        rank_pool.start(OTHERS["learning rate"][0], DISK, folder)
    return str(refused.value)


@pytest.mark.slow
def test_on_several_ranks_another_job_is_refused_on_each_and_the_same_replaces(
    ranks: rank_pool.RankPool, tmp_path: Path
) -> None:
    first = ranks.run(_on_ranks, tmp_path)
    words = ranks.run(_refused_on_ranks, tmp_path)
    assert words[0].startswith(f"{tmp_path}/default holds a run that ended at step 2 and that nothing has saved")
    assert words[1].startswith(f"rank 0 could not replace the run, so no rank did: StoreError: {words[0][:40]}")
    again = ranks.run(_on_ranks, tmp_path)
    for (left, _), (right, _) in zip(first, again, strict=True):
        assert_same(left, right)
    messages = [any("is replaced" in line for line in notices) for _, notices in again]
    assert messages == [True, False], "the first rank says it for all"
