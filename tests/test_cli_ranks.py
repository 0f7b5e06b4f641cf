"""`torchrun … -m offload train`: one command on several ranks, one voice, one log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAIN = ("train", "--dtype", "fp32", "--seq-len", "32", "--batch-size", "4", "--lr", "3e-4")


def torchrun(folder: Path, *options: str) -> subprocess.Popen[str]:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    command = (*torchrun, "-m", "--", "offload", *TRAIN, *options)
    return subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
    )


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def losses(log: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.py").write_text(Path(__file__).read_text() * 20)
    return tmp_path


def test_two_ranks_train_as_one(text: Path) -> None:
    options = ("--text", "text.py", "--steps", "8")
    ranks = torchrun(text, *options, "--nvme-path", "two", "--log", "two.jsonl")
    said, _ = ranks.communicate(timeout=120)
    assert ranks.returncode == 0, said
    assert said.count("parameters") == 1 and said.count("median step") == 1, "one rank speaks"
    one = (sys.executable, "-m", "offload", *TRAIN, *options, "--nvme-path", "one", "--log", "one.jsonl")
    subprocess.run(one, cwd=text, check=True, capture_output=True, env=environment(), timeout=120)
    # gpt2-tiny has dropout, of which each rank draws its own: the first loss alone is of the same weights and rows
    assert losses(text / "two.jsonl")[0] == pytest.approx(losses(text / "one.jsonl")[0], rel=2e-2)
    assert len(losses(text / "two.jsonl")) == 8


def test_a_killed_rank_ends_the_command_and_is_named(text: Path) -> None:
    options = ("--text", "text.py", "--steps", "100000", "--log", "log.jsonl")
    ranks = torchrun(text, *options)
    while not (text / "log.jsonl").exists() or len(losses(text / "log.jsonl")) < 3:
        assert ranks.poll() is None, ranks.communicate()[0]
        time.sleep(0.05)
    holder = (text / "swap" / "default" / "rank1" / "lock").read_text()
    os.kill(int(holder.split()[1]), signal.SIGKILL)
    began = time.monotonic()
    said, _ = ranks.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert ranks.returncode != 0
    assert "rank 1 (process" in said, said
    assert "was killed or has crashed" in said, said
    done = len(losses(text / "log.jsonl"))
    again = torchrun(text, "--text", "text.py", "--steps", str(done + 2), "--log", "log.jsonl", "--resume", "auto")
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert "going on after step" in said
    assert len(losses(text / "log.jsonl")) == done + 2
