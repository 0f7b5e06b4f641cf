"""A training by the ranks of a launcher, `launched_training.py FOLDER STEPS`, which resumes what there is.

In the folder each rank leaves its process (`pidN`), a line for each step (`stepsN`: number and loss), the error that
ended it (`errorN`) and, in the end, all weights (`weightsN`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import offload
from offload.errors import RankError
from tests.support.oracle import weights_of


def _config(folder: Path) -> dict[str, object]:
    disk = {"device": "nvme", "nvme_path": str(folder / "swap")}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk},
        "offload": {"resume": "auto", "seed": 1},
    }


def _rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(1000 * step + rank))


def main(folder: Path, steps: int) -> None:
    rank = int(os.environ["RANK"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    try:
        engine = offload.initialize(model=model, config=_config(folder))[0]
        with (folder / f"steps{rank}").open("a") as lines:
            while engine.global_steps < steps:
                step = engine.global_steps
                loss = (engine(_rows(step, rank)) - 1).square().mean()
                engine.backward(loss)
                engine.step()
                print(json.dumps([step, loss.item()]), file=lines, flush=True)
        torch.save(weights_of(engine), folder / f"weights{rank}")
        engine.destroy()
    except RankError as error:
        (folder / f"error{rank}").write_text(str(error))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
