"""The key "log" makes any loop write a line for each step, and a resumed loop continues after the committed step."""

from __future__ import annotations

import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.metrics.meter import StepMeter, Stepped
from offload.metrics.writers import Reporter
from offload.report.figures import figures
from offload.report.log import read_log
from tests.store.test_store import DISK, JOB, begin
from tests.support.oracle import config, train_step


def test_any_loop_writes_a_log_that_goes_on_where_it_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    engine = begin(tmp_path, durability={"every": 2}, log=str(path), drive_tbw=5)
    for step in range(3):
        train_step(engine, JOB, step)
    testing.abandon(engine, remove=False)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    engine = begin(tmp_path, durability={"every": 2}, log=str(path), resume="must", drive_tbw=5)
    for step in range(2, 4):
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "about" in line] == [1, 3]
    assert lines[0]["about"]["drive_tbw"] == 5 and lines[3]["drives"][str(tmp_path / "a")] > 0
    found = figures(read_log(path))
    assert found["resumed_at"] == [3] and found["torn_lines"] == 0 and found["drives"][0]["rated_bytes"] == 5e12


def test_a_log_that_would_take_the_place_of_another_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("my precious notes\n")
    with pytest.raises(offload.ConfigError, match="not the log of a run"):
        begin(tmp_path, log=str(tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == "my precious notes\n" and not (tmp_path / "a" / "default").exists()


def test_numbers_of_the_last_step_can_be_asked_for(tmp_path: Path) -> None:
    content = config(JOB, DISK, tmp_path / "a") | {"wall_clock_breakdown": True, "steps_per_print": 0}
    engine = offload.initialize(model=JOB.model(), config=content).engine
    assert engine.measured == {}
    loss = train_step(engine, JOB, 0)
    assert engine.measured["loss"] == loss and engine.measured["forward_seconds"] > 0
    engine.destroy(remove=True)


def test_an_evaluation_is_a_line_behind_its_step(tmp_path: Path) -> None:
    """A resumed loop trains some steps again, and their evaluations are those of the second time."""
    path, csv = tmp_path / "log.jsonl", {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "run"}

    def run(steps: range, **more: Any) -> None:
        content = config(JOB, DISK, tmp_path / "a", durability={"every": 2}, log=str(path), **more)
        engine = offload.initialize(model=JOB.model(), config=content | {"csv_monitor": csv}).engine
        for step in steps:
            train_step(engine, JOB, step)
            with engine.evaluation() as found:
                found.loss = torch.tensor(step + len(more) / 2)
            with engine.evaluation():
                pass  # without a loss there is nothing to write
        testing.abandon(engine, remove=False)

    run(range(3))
    run(range(2, 4), resume="must")
    log = read_log(path)
    assert [(line["step"], line["eval_loss"]) for line in log.steps] == [(1, 0.0), (2, 1.0), (3, 2.5), (4, 3.5)]
    assert all(line["eval_seconds"] >= 0 for line in log.steps) and figures(log)["eval_loss"]["last"] == 3.5
    assert (tmp_path / "csv" / "run" / "Offload_eval_loss.csv").read_text() == (
        "step,eval_loss\n1,0.0\n2,1.0\n3,2.5\n4,3.5\n"
    )


def test_an_evaluation_before_the_first_step_is_in_no_file(tmp_path: Path) -> None:
    """That step cuts the files: what is in them before it belongs to an earlier run."""
    engine = begin(tmp_path, log=str(tmp_path / "log.jsonl"))
    with engine.evaluation() as found:
        found.loss = 1.0
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    log = read_log(tmp_path / "log.jsonl")
    assert len(log.steps) == 1 and "eval_loss" not in log.steps[0] and log.truncated_lines == 0


def test_what_an_evaluation_costs_is_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"read": 0, "nanoseconds": 0}
    testing.replace(monkeypatch, "clock.steps", lambda: spent["nanoseconds"])

    def spend(read: int, seconds: int) -> None:
        spent["read"] += read
        spent["nanoseconds"] += seconds * 10**9

    reporter = Reporter(None, {})
    meter = StepMeter(torch.device("cpu"), lambda: (spent["read"], 0), tuple, None, False, reporter)
    meter.begin()
    for step in range(1, 3):
        spend(10, 1)
        with meter.pause():
            spend(1000, 60)
        meter.end_step(Stepped(step, step, 0.1, 1.0, 0))
        assert meter.measured["read_bytes"] == 10 and meter.measured["seconds"] == 1
    meter.close()


def test_a_start_and_a_resume_are_told_without_any_configuration_of_logging(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = begin(tmp_path)
    train_step(engine, JOB, 0)
    engine.destroy()
    begun = capsys.readouterr().err
    assert re.search(r"^offload: fp32 on cpu: weights on disk, states on disk; host ", begun, re.MULTILINE)
    assert "resuming" not in begun
    engine = begin(tmp_path, resume="auto")
    assert f"offload: resuming after step 1 of the run in {tmp_path}/a/default\n" in capsys.readouterr().err
    train_step(engine, JOB, 1)
    engine.save_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
    assert f"offload: loaded {tmp_path}/saved/global_step2: weights alone, as asked\n" in capsys.readouterr().err
    engine.destroy(remove=True)
    logging.getLogger("offload").setLevel(logging.ERROR)
    begin(tmp_path).destroy(remove=True)
    assert capsys.readouterr().err == ""


def test_a_load_says_where_the_loader_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that nobody skips in a loop what the loader has skipped already."""
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "offload": {"nvme_path": str(tmp_path), "run": "loader"},
    }
    for load in (False, True):
        model = torch.nn.Linear(3, 1)
        started = offload.initialize(model=model, config=settings, training_data=list(torch.ones(10, 3)))
        engine = started.engine
        if load:
            engine.load_checkpoint(tmp_path / "saved")
        else:
            for rows in itertools.islice(iter(started.loader), 2):
                engine.backward(engine(rows).sum())
                engine.step()
            engine.save_checkpoint(tmp_path / "saved")
        engine.destroy(remove=True)
    assert "goes on after step 2, and training_data after sample 4 of pass 0: skip no" in capsys.readouterr().err
