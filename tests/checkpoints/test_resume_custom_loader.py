"""The guide's recipe for a DataLoader of one's own resumes as an unbroken run, with all that the loop draws."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import offload
from tests.support.processes import user_script

STEPS = 9


class Rows(Dataset[torch.Tensor]):
    """Draws for each row, in this process or in a worker."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 12) + 0.1 * torch.rand(4)


class Script:
    def __init__(self, folder: Path, workers: int, accumulation: int = 1) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(7)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
            "offload": {"nvme_path": str(folder), "device": "cpu", "resume": "auto"},
        }
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.engine = offload.initialize(model=model, config=config).engine
        order = torch.Generator().manual_seed(3)
        loader = DataLoader(Rows(), 2, shuffle=True, num_workers=workers, generator=order)
        self.batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for _ in range(self.engine.micro_steps):
            next(self.batches)
        self.engine.restore_generators()

    def draw(self) -> torch.Tensor:
        rows = next(self.batches)
        return rows + torch.randn_like(rows) * random.random() + float(np.random.rand())

    def step(self) -> list[float]:
        losses = []
        for _ in range(self.engine.gradient_accumulation_steps()):
            loss = self.engine(self.draw()).square().mean()
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.item())
        return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize(("workers", "accumulation"), [(0, 1), (2, 1), (0, 2)])
def test_draws_before_the_first_call_come_again(workers: int, accumulation: int, tmp_path: Path) -> None:
    unbroken = Script(tmp_path / "whole", workers, accumulation)
    expected = [unbroken.step() for _ in range(STEPS)]
    unbroken.engine.destroy()
    seen: list[list[float]] = []
    for stop, batch in ((2, False), (6, True), (STEPS, False)):
        script = Script(tmp_path / "cut", workers, accumulation)
        seen += [script.step() for _ in range(len(seen), stop)]
        if batch:
            script.draw()  # a batch was fetched and drawn for, and not trained on
        script.engine.destroy()
    assert seen == expected


def test_nothing_is_put_back_in_a_new_run_and_after_a_step(tmp_path: Path) -> None:
    script = Script(tmp_path, 0)
    for _ in range(2):
        before = torch.get_rng_state()
        script.engine.restore_generators()
        assert torch.equal(before, torch.get_rng_state())
        script.step()
    script.engine.destroy()


def test_a_checkpoint_of_a_run_without_a_loader_restores_the_generators(tmp_path: Path) -> None:
    """Also where the loader has restored others, of an earlier resume."""
    first = user_script.Script(tmp_path / "plain", user_script.Setup("plain 0"))
    first.step()
    first.engine.save_checkpoint(tmp_path / "saved")
    rows = torch.ones(user_script.MICRO, 6)
    expected = first.engine(rows)
    first.engine.destroy()
    second = user_script.Script(tmp_path / "ours")
    second.step()
    second.engine.destroy()
    second = user_script.Script(tmp_path / "ours")
    second.step()
    second.engine.load_checkpoint(tmp_path / "saved")
    assert torch.equal(second.engine(rows), expected)  # with the masks of the dropout
    second.engine.destroy()
