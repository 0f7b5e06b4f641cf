"""A run that commits nothing leaves no swap files, however its process ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from tests import ROOT
from tests.support import models
from tests.support.oracle import start, train_step
from tests.support.processes import warm_process

DISK = ("nvme", "nvme")
PROGRAM = """
import os, pathlib, signal
from tests.support import models
from tests.support.oracle import start, train_step

engine = start(models.GPT2, ("nvme", "nvme"), pathlib.Path({folder!r}), durability="none")
train_step(engine, models.GPT2, 0)
print("trained", flush=True)
{end}
"""
ENDS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM)",
    "Ctrl-C": "raise KeyboardInterrupt",
    "an exception": "raise RuntimeError('of the loop')",
}


def named_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.sample(2)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_nothing_is_left_that_takes_room(end: str, tmp_path: Path) -> None:
    done = warm_process.python(PROGRAM.format(folder=str(tmp_path), end=end), cwd=ROOT)
    assert done.returncode != 0 and "trained" in done.stdout
    assert named_bytes(tmp_path) < 64 << 10
    assert not list(tmp_path.rglob("states"))
    engine = start(models.GPT2, DISK, tmp_path, durability="none")  # the same run begins again
    train_step(engine, models.GPT2, 0)
    engine.destroy()
    assert not named_bytes(tmp_path)


def test_leftovers_of_a_kill_are_reported_and_can_be_removed(tmp_path: Path) -> None:
    warm_process.python(PROGRAM.format(folder=str(tmp_path), end=ENDS["SIGKILL"]), cwd=ROOT)
    run = tmp_path / "default"
    result = CliRunner().invoke(app, ["inspect", str(run), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["ranks"][0]["damaged"] == []
    assert "nothing is committed" in CliRunner().invoke(app, ["inspect", str(run)]).output
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 2
    assert CliRunner().invoke(app, ["rm", str(run), "--yes"]).exit_code == 0 and not run.exists()
