"""A training script as users write one, with a loader, schedules and objects, which can stop and resume anywhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

import offload
from tests.support.oracle import assert_same_tensors, weights_of

SAMPLES, MICRO, ACCUMULATION, STEPS = 20, 2, 2, 13
"""Five steps are a pass."""


class Net(nn.Module):
    """A model whose dropout draws from torch's generator and whose BatchNorm keeps its means in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.last = nn.Linear(16, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


class Rows(Dataset[torch.Tensor]):
    """Rows of numbers; `draws` adds noise of each generator, as augmentations do. `loaded` says which were loaded."""

    def __init__(self, samples: int = SAMPLES, draws: bool = False) -> None:
        self.rows = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
        self.draws, self.loaded = draws, []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        noise = torch.randn(6) + random.random() + float(np.random.rand()) if self.draws else 0.0
        return self.rows[index] + 0.1 * noise


def step_schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


class Setup(NamedTuple):
    """The parts of a script that a test chooses."""

    source: str = "ours"
    """"ours", or "plain" with so many workers, such as "plain 2"."""
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    """Given to initialize."""
    registered: Callable[[torch.optim.Optimizer], Any] | None = None
    """Made and stepped by the user."""
    draws: bool = False
    config: dict[str, Any] = {}  # noqa: RUF012  # never changed
    samples: int = SAMPLES

    def title(self) -> str:
        """Returns the name of a test, the same in every process."""
        names = (made.__name__ if made else "no" for made in (self.schedule, self.registered))
        return f"{self.source}, {', '.join(names)}, {'draws' if self.draws else 'draws nothing'}"


PLAIN = Setup()


class Script:
    """A training script, which starts, makes steps, and ends."""

    def __init__(self, folder: Path, setup: Setup = PLAIN, resume: str = "auto") -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(5)
        self.data = Rows(setup.samples, setup.draws)
        content = {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme"},
                "offload_optimizer": {"device": "nvme"},
            },
        }
        block = {"nvme_path": str(folder), "device": "cpu", "resume": resume, "debug": {"poison": True}}
        config = {**content, **setup.config, "offload": {**block, **setup.config.get("offload", {})}}
        ours = setup.source == "ours"
        self.engine, self.optimizer, self.loader, _ = offload.initialize(
            model=Net(), lr_scheduler=setup.schedule, config=config, training_data=self.data if ours else None
        )
        self.scheduler = None
        if setup.registered is not None:
            self.scheduler = setup.registered(self.optimizer)
            self.engine.register_for_checkpointing(self.scheduler)
        self.batches = self._ours() if ours else self._plain(int(setup.source.removeprefix("plain ")))

    def _ours(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader

    def _plain(self, workers: int) -> Iterator[torch.Tensor]:
        order = torch.Generator().manual_seed(3)
        loader = DataLoader(self.data, MICRO, shuffle=True, drop_last=True, num_workers=workers, generator=order)
        passes = itertools.chain.from_iterable(itertools.repeat(loader))
        return itertools.islice(passes, self.engine.micro_steps, None)

    def step(self) -> tuple[float, float]:
        """Returns the sum of the losses, and the norm."""
        total = 0.0
        for _ in range(ACCUMULATION):
            loss = self.engine(next(self.batches)).square().mean()
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item()
        if self.scheduler is not None:
            self.scheduler.step()
        norm = self.engine.get_global_grad_norm()
        assert norm is not None
        return total, norm

    def end(self) -> dict[str, torch.Tensor]:
        weights = weights_of(self.engine)
        self.engine.destroy()
        return weights


def train(folder: Path, setup: Setup, breaks: tuple[int, ...] = (), steps: int = STEPS) -> tuple[Any, ...]:
    """Returns losses and norms, learning rates and weights; the script ends and starts at each of `breaks`."""
    seen = []
    script = Script(folder, setup)
    for step in range(steps):
        if step in breaks:
            script.end()
            script = Script(folder, setup)
            assert script.engine.global_steps == step
        seen.append(script.step())
    rates = script.engine.get_lr()
    return seen, rates, script.end()


def assert_equal(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    assert left[:2] == right[:2]
    assert left[2].keys() == right[2].keys()
    assert_same_tensors(right[2], left[2])


def multi_step(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Returns a schedule that keeps its milestones by number."""
    return lr_scheduler.MultiStepLR(optimizer, [2, 6, 9], gamma=0.5)


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 20)]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Moves the betas too."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=20)


# -- the user's own -----------------------------------------------------------------------------------


class Counter:
    """An object of the user with a state."""

    def __init__(self, count: Any = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
