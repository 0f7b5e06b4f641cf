"""A fine-tuning that was killed resumes bit for bit: documents, adapters with dropout, and the saved model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.model_folders import MARKING_TEMPLATE, make_folder, write_lines
from tests.support.processes import warm_process
from tests.support.processes.cli_process import begin, finish, losses

TRAIN = "train --model model --data chats.jsonl --seq-len 64 --batch-size 2 --device cpu --lr 1e-2 --steps 40".split()
ADAPTERS = ("--lora", "r=4,dropout=0.1,targets=all-linear")


def start(folder: Path, run: str, *options: str) -> warm_process.Process:
    return begin(folder, *TRAIN, "--run", run, "--log", f"{run}.jsonl", "--save", f"{run}-out", *options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [(), ADAPTERS], ids=["whole", "adapters"])
def test_killed_and_gone_on(tmp_path: Path, options: tuple[str, ...]) -> None:
    make_folder(tmp_path / "model", MARKING_TEMPLATE, attention_dropout=0.1)
    lines = [
        {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": f"{n}, no?"}]}
        for n in range(20)
    ]
    write_lines(tmp_path / "chats.jsonl", lines)
    killed = start(tmp_path, "killed", *options)
    while len(losses(tmp_path / "killed.jsonl")) < 5:
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.002)
    killed.kill()
    killed.communicate()
    reached = len(losses(tmp_path / "killed.jsonl"))
    assert reached < 40 and not (tmp_path / "killed-out").exists()
    ends = [start(tmp_path, "killed", *options, "--resume", "must"), start(tmp_path, "whole", *options)]
    outputs = [finish(end) for end in ends]
    assert "resuming after step" in outputs[0] and "other settings" not in " ".join(outputs[0].split())
    assert losses(tmp_path / "killed.jsonl") == losses(tmp_path / "whole.jsonl") and losses(tmp_path / "whole.jsonl")
    name = "adapter_model.safetensors" if "--lora" in options else "model.safetensors"
    saved = [(tmp_path / f"{run}-out" / name).read_bytes() for run in ("killed", "whole")]
    assert saved[0] == saved[1]
