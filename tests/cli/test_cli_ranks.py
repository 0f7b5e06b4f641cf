"""`torchrun … -m offload train` is one command on several ranks with one output and one log."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes.cli_process import begin, begin_ranks, begin_torchrun, evaluated, finish, losses

TRAIN = ("train", "--dtype", "fp32", "--seq-len", "32", "--lr", "3e-4")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.py").write_text(Path(__file__).read_text() * 20)
    return tmp_path


def test_two_ranks_train_as_one(text: Path) -> None:
    options = ("--text", "text.py", "--steps", "3", "--no-output")
    two = ("--nvme-path", "two", "--log", "two.jsonl", "--batch-size", "2")
    output = finish(*begin_ranks(text, *TRAIN, *options, *two))
    assert output.count("parameters") == 1 and output.count("median step") == 1, "one rank speaks"
    one = ("--nvme-path", "one", "--log", "one.jsonl", "--batch-size", "4")
    finish(begin(text, *TRAIN, *options, *one))
    # gpt2-tiny has dropout, of which each rank draws its own: the first loss alone is of the same weights and rows
    assert losses(text / "two.jsonl")[0] == pytest.approx(losses(text / "one.jsonl")[0], rel=2e-2)
    assert len(losses(text / "two.jsonl")) == 3
    # On the same held-out rows, of which each rank has half, after a step in which dropout was another.
    assert evaluated(text / "two.jsonl")[0] == pytest.approx(evaluated(text / "one.jsonl")[0], rel=2e-2)


# tests/launch/test_launch_restarts.py kills a rank under torchrun, tests/ranks/test_ranks_lost.py names one.
@pytest.mark.slow
def test_a_killed_rank_ends_the_command_and_is_named(text: Path) -> None:
    options = ("--text", "text.py", "--steps", "100000", "--log", "log.jsonl", "--batch-size", "2")
    ranks = begin_torchrun(text, *TRAIN, *options)
    while len(losses(text / "log.jsonl")) < 3:
        assert ranks.poll() is None, ranks.communicate()[0]
        time.sleep(0.05)
    holder = (text / "swap" / "default" / "rank1" / "lock").read_text()
    os.kill(int(holder.split()[1]), signal.SIGKILL)
    output, _ = ranks.communicate(timeout=60)
    assert ranks.returncode != 0
    assert "rank 1 (process" in output, output
    assert "was killed or has crashed" in output, output
    done = len(losses(text / "log.jsonl"))
    more = (
        "--text",
        "text.py",
        "--steps",
        str(done + 2),
        "--log",
        "log.jsonl",
        "--resume",
        "auto",
        "--batch-size",
        "2",
    )
    output = finish(*begin_ranks(text, *TRAIN, *more))
    assert "resuming after step" in output
    assert len(losses(text / "log.jsonl")) == done + 2
