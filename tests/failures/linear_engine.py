"""The smallest engine with states on disk, for scripts and processes that end in some way.

It imports no tests: a spawned process imports all that its function's module does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload


def start(folder: Path, **options: Any) -> offload.Engine:
    torch.manual_seed(0)
    content = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
        "offload": {"device": "cpu", **options},
    }
    return offload.initialize(model=nn.Linear(8, 4), config=content)[0]


def train(engine: offload.Engine) -> None:
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()


def train_in_a_process(_: int, folder: Path, fails: bool) -> None:
    """Commits a step, and ends as `fails` says, without a call of `destroy`."""
    train(start(folder))
    if fails:
        raise ValueError("a bad batch")
