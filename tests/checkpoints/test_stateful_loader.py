"""A registered loader that has a state goes on behind the last batch that was trained, whatever the loop has drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offload
from offload.engine.state import RegisteredObjects
from offload.errors import UsageError

STEPS = 11
ROWS = TensorDataset(torch.arange(64.0).view(32, 2) / 64)


class Shuffled:
    """A loader with a state, of which a tensor is a part; it draws each pass by its own generator."""

    def __init__(self, size: int) -> None:
        self.size, self.given, self.generator = size, 0, torch.Generator().manual_seed(5)
        self.before = self.generator.get_state()

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        self.before = self.generator.get_state()
        batches = torch.randperm(len(ROWS), generator=self.generator).split(self.size)
        while self.given < len(batches):
            self.given += 1
            yield list(ROWS[batches[self.given - 1]])
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.generator.set_state(state["generator"])


def stateful(workers: int) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    # A generator that the loader does not share: it draws a seed for each iterator that it makes, so one more where a
    # run resumes at the end of a pass.
    order = module.sampler.RandomSampler(ROWS, generator=torch.Generator().manual_seed(5))
    return module.StatefulDataLoader(ROWS, 4, sampler=order, num_workers=workers)


LOADERS = {"own": lambda: Shuffled(4), "torchdata": lambda: stateful(0), "torchdata, workers": lambda: stateful(2)}


def train(folder: Path, loader: Any, until: int) -> list[float]:
    """Trains until a batch has been drawn for step `until`, which is not made."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        "offload": {"nvme_path": str(folder), "device": "cpu", "resume": "auto"},
    }
    torch.manual_seed(0)
    engine = offload.initialize(model=nn.Linear(2, 1), config=config).engine
    engine.register_for_checkpointing(loader)
    losses: list[float] = []
    while True:
        for (rows,) in loader:
            if engine.global_steps == until:
                engine.destroy()
                return losses
            loss = engine(rows).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))


@pytest.mark.works("Recovery", "a registered loader that has a state, torchdata's StatefulDataLoader too", "right")
@pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata 0.11 calls what torch 2.13 deprecates
@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_loop_goes_on_behind_the_last_batch_that_was_trained(name: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", LOADERS[name](), STEPS)
    parts = [train(tmp_path / "parts", LOADERS[name](), until) for until in (3, 8, 10, STEPS)]
    assert [loss for part in parts for loss in part] == whole


def test_a_tensor_that_is_large_is_refused_when_it_is_registered() -> None:
    class Large(Shuffled):
        def state_dict(self) -> dict[str, Any]:
            return {"rows": torch.zeros(20_000)}

    with pytest.raises(UsageError, match=r"\['rows'\] is a torch.Tensor; .* at most 64 KiB"):
        RegisteredObjects().add([Large(4)])
