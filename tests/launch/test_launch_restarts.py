"""`torchrun --max-restarts` starts ranks again after a kill, and they continue from the last commit, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.support.oracle import assert_same_tensors
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import free_port

SCRIPT = ROOT / "tests" / "launch" / "launched_training.py"
pytestmark = pytest.mark.timeout(1200)


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def unbroken(folder: Path, steps: int) -> None:
    """Trains on two ranks without a launcher."""
    folder.mkdir()
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = [str(SCRIPT), str(folder), str(steps)]
    ranks = [
        warm_process.begin(arguments, env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **meeting))
        for rank in range(2)
    ]
    assert [rank.wait(600) for rank in ranks] == [0, 0]


def begin(folder: Path, steps: int, restarts: int) -> warm_process.Process:
    """Starts two ranks under torchrun; all three are forked, so that a start takes a tenth of a second."""
    python = warm_process.commands(folder / "commands") / "python"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    return warm_process.begin(
        ["-m", *torchrun, "--no-python", str(python), str(SCRIPT), str(folder), str(steps)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def steps_of(folder: Path, rank: int) -> list[list[float]]:
    path = folder / f"steps{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill(folder: Path, rank: int, before: set[int]) -> int:
    """Kills a rank that none has killed before, as soon as there is one, and returns its process."""
    path = folder / f"pid{rank}"
    while True:
        text = path.read_text() if path.exists() else ""
        if text and int(text) not in before:
            try:
                os.kill(int(text), signal.SIGKILL)
                return int(text)
            except ProcessLookupError:
                pass  # torchrun has ended it, since the other rank was killed
        time.sleep(0.005)


def killed(folder: Path, steps: int, kills: int, longest: float) -> None:
    """Trains under torchrun, and kills a rank so many times, each at a random moment after the one before.

    Args:
        folder: where the ranks leave what they did.
        steps: number of steps.
        kills: number of kills and of restarts.
        longest: seconds to the next kill, at most; 0 for the third step.
    """
    folder.mkdir()
    chance, done = random.Random(kills), set[int]()
    run = begin(folder, steps, kills)
    try:
        for _ in range(kills):
            wait, began = chance.uniform(0, longest), time.monotonic()
            # Also while ranks start: a start takes part of these seconds.
            while time.monotonic() - began < wait or (not longest and len(steps_of(folder, 0)) < 3):
                assert run.poll() is None, run.communicate()[0]
                time.sleep(0.005)
            done.add(kill(folder, chance.randrange(2), done))
        output, _ = run.communicate(timeout=600)
    finally:
        run.terminate()
    assert run.returncode == 0, output


@pytest.mark.parametrize(
    ("steps", "kills"), [(6, 1), pytest.param(900, 30, marks=pytest.mark.slow)], ids=["once", "30 times"]
)
@pytest.mark.works("Several ranks", "`torchrun --max-restarts`, SIGKILL of ranks, resume of all", "right")
def test_killed_ranks_continue_bit_for_bit(steps: int, kills: int, tmp_path: Path) -> None:
    unbroken(tmp_path / "whole", steps)
    killed(tmp_path / "killed", steps, kills, 4.0 if kills > 1 else 0.0)
    for rank in range(2):
        whole, again = (dict(map(tuple, steps_of(tmp_path / name, rank))) for name in ("whole", "killed"))
        assert again == whole and len(whole) == steps
        weights = [torch.load(tmp_path / name / f"weights{rank}", weights_only=True) for name in ("whole", "killed")]
        assert_same_tensors(*weights)
