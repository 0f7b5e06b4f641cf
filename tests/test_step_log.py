"""The key "log" makes any loop write a line for each step, and a resumed loop continues after the committed step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import offload
from offload.report.figures import figures
from offload.report.log import read_log
from tests.support.oracle import config, train_step
from tests.test_drive_wear import DISK, JOB, begin


def test_any_loop_writes_a_log_that_goes_on_where_it_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    engine = begin(tmp_path, durability={"every": 2}, log=str(path), drive_tbw=5)
    for step in range(3):
        train_step(engine, JOB, step)
    engine._core.components.meter.close()  # all is written, and the third step was never committed
    engine._core.shutdown.abandon(remove=False)
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
