"""A fine-tuning that is killed goes on bit for bit: documents, adapters with dropout, and the model that it saves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.folders import MARKING_TEMPLATE, make_folder, write_lines

COMMAND = "-m offload train --model model --data chats.jsonl --seq-len 64 --batch-size 2 --device cpu --lr 1e-2".split()
ADAPTERS = ("--lora", "r=4,dropout=0.1,targets=all-linear")


def start(folder: Path, run: str, *options: str) -> subprocess.Popen[str]:
    own = ("--run", run, "--log", f"{run}.jsonl", "--save", f"{run}-out", *options)
    return subprocess.Popen(
        [sys.executable, *COMMAND, *own],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )


def losses(log: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("options", [(), ADAPTERS], ids=["whole", "adapters"])
def test_killed_and_gone_on(tmp_path: Path, options: tuple[str, ...]) -> None:
    make_folder(tmp_path / "model", MARKING_TEMPLATE, attention_dropout=0.1)
    lines = [
        {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": f"{n}, no?"}]}
        for n in range(20)
    ]
    write_lines(tmp_path / "chats.jsonl", lines)
    options += ("--steps", "40")
    killed = start(tmp_path, "killed", *options)
    while len(losses(tmp_path / "killed.jsonl")) < 5:
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    reached = len(losses(tmp_path / "killed.jsonl"))
    assert reached < 40 and not (tmp_path / "killed-out").exists()
    ends = [start(tmp_path, "killed", *options, "--resume", "must"), start(tmp_path, "whole", *options)]
    said = [end.communicate(timeout=120)[0] for end in ends]
    assert [end.returncode for end in ends] == [0, 0], said
    assert "going on after step" in said[0] and "other" not in said[0]
    assert losses(tmp_path / "killed.jsonl") == losses(tmp_path / "whole.jsonl") and losses(tmp_path / "whole.jsonl")
    name = "adapter_model.safetensors" if "--lora" in options else "model.safetensors"
    saved = [(tmp_path / f"{run}-out" / name).read_bytes() for run in ("killed", "whole")]
    assert saved[0] == saved[1]
