"""Fine-tuning on two ranks: each learns its rows of every batch, and one model is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import rounding_bounds
from tests.support.model_folders import MARKING_TEMPLATE, make_folder, write_lines
from tests.support.processes.cli_process import begin, begin_ranks, finish, losses

TRAIN = "train --model model --data data.jsonl --seq-len 64 --device cpu --dtype fp32 --lr 3e-4 --steps 4".split()


def train(folder: Path, run: str, *options: str, ranks: int) -> list[float]:
    own = ("--run", run, "--nvme-path", run, "--log", f"{run}.jsonl", "--output", f"{run}-out", *options)
    own += ("--batch-size", str(4 // ranks))
    output = finish(*(begin_ranks(folder, *TRAIN, *own) if ranks == 2 else [begin(folder, *TRAIN, *own)]))
    assert output.count("saved in") == 1, "one rank speaks"
    return losses(folder / f"{run}.jsonl")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("options", "file"), [((), "model"), (("--lora", "r=4"), "adapter_model")])
def test_two_ranks_train_as_one(tmp_path: Path, options: tuple[str, ...], file: str) -> None:
    make_folder(tmp_path / "model", MARKING_TEMPLATE)
    lines = [
        {"text": f"{n} is a number, and {n + 1} is the next one after it, as far as anybody can tell"}
        for n in range(40)
    ]
    write_lines(tmp_path / "data.jsonl", lines)
    two, one = (train(tmp_path, name, *options, ranks=ranks) for name, ranks in (("two", 2), ("one", 1)))
    # Beside roundings to bf16: a mean of means, over rows that are nearly all learned.
    rounding_bounds.same_numbers(two, one, 2 * rounding_bounds.unit("bf16"))
    mine, theirs = (load_file(tmp_path / f"{name}-out" / f"{file}.safetensors") for name in ("two", "one"))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1.3e-3)  # four steps of Adam at 3e-4
