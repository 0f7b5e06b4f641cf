"""An input is kept once, however many blocks take it; weights, batches and inputs of a frozen prefix are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import models
from tests.support.modules.checkpointed import (
    INPUT,
    JOB,
    MEMORY,
    WIDTH,
    Block,
    Stack,
    batch,
    running,
    small_inputs_move,
    used,
)
from tests.support.oracle import Job, assert_same, run, start, train_step
from tests.support.processes.device_process import engine_device

AREA = "Activation checkpointing"
TIERS = ("cpu", "nvme")


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


def _job(model: type[nn.Module]) -> Job:
    return JOB._replace(model=model)


class Rewrapped(Stack):
    """Each input goes to two blocks: as it is, and as a view of another shape."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            hidden = first(hidden) + second(hidden.view(4, -1, WIDTH)).view(-1, WIDTH)
        return hidden


@pytest.mark.works(AREA, "views of one input: kept once", "right")
@pytest.mark.parametrize("tier", TIERS)
def test_views_of_an_input_are_kept_once(tier: str, tmp_path: Path) -> None:
    job = _job(Rewrapped)
    plain = run(job, MEMORY, tmp_path / "plain")
    with running(job, tmp_path / tier, activations=tier) as engine:
        losses = [train_step(engine, job, step) for step in range(job.steps)]
        assert losses == plain.losses
        loss = job.loss(engine, 9, 0)
        assert sum(used(engine).values()) == len(engine.module.blocks) // 2 * INPUT
        del loss


class Overwritten(Stack):
    """Memory that is an input twice, with other values. The graph of the first is alive, and never run backward."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        self.unused: list[torch.Tensor] = []
        for block in self.blocks:
            self.unused.append(block(hidden))
            hidden.mul_(0.5)
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("tier", TIERS)
def test_memory_that_has_changed_is_another_input(tier: str, tmp_path: Path) -> None:
    job = _job(Overwritten)
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


@pytest.mark.works(AREA, "an encoder's output for all layers of a decoder: kept once", "right")
@pytest.mark.parametrize("tier", TIERS)
def test_the_output_of_an_encoder_is_kept_once(tier: str, tmp_path: Path) -> None:
    job = Job(models.t5, models.translation_loss)
    with running(job, tmp_path, activations=tier) as engine:
        loss = job.loss(engine, 0, 0)
        hidden = 2 * 32 * 32 * 4
        layers = 2 * 2
        # Each layer's hidden states, and once the encoder's. Position biases of the two stacks are inputs of the second
        # layers: 4 heads of 32 x 32.
        biases = 2 * (4 * 32 * 32 * 4)
        assert sum(used(engine).values()) == (layers + 1) * hidden + biases
        engine.backward(loss)


@pytest.mark.works(AREA, "LoRA: no input of a frozen prefix is kept", "right")
@pytest.mark.parametrize("tier", TIERS)
def test_no_input_of_a_frozen_prefix_is_kept(tier: str, tmp_path: Path) -> None:
    def frozen_prefix() -> nn.Module:
        model = Stack()
        model.first.requires_grad_(False)
        model.blocks[:5].requires_grad_(False)
        return model

    job = JOB._replace(model=frozen_prefix)
    plain = run(job, MEMORY, tmp_path / "plain")
    with running(job, tmp_path / tier, activations=tier) as engine:
        loss = job.loss(engine, 0, 0)
        # The first block that trains has an input without a graph, which stays where it is.
        assert sum(used(engine).values()) == 2 * INPUT
        engine.backward(loss)
        engine.step()
        assert float(loss.detach()) == plain.losses[0]
        assert [train_step(engine, job, step) for step in (1, 2)] == plain.losses[1:]


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
def test_weights_and_batches_are_never_copied(tier: str, tmp_path: Path) -> None:
    """A block whose inputs are the batch, one that needs a gradient, and a weight of another module."""

    class Blends(Block):
        def forward(self, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(hidden + sum(each.sum() for each in others) * 1e-3)

    class Blended(Stack):
        def block(self, index: int) -> nn.Module:
            return Blends()

        def forward(self, batch: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            hidden = batch
            for block in self.blocks:
                hidden = block(hidden, batch, asked, self.first.weight)
            return hidden

    def loss(model: Any, step: int, micro: int) -> torch.Tensor:
        found: torch.Tensor = model(batch(step), batch(7).requires_grad_()).square().mean()
        return found

    job = JOB._replace(model=Blended, loss=loss)
    plain = run(job, MEMORY, tmp_path / "plain")
    engine = start(job, ("nvme", "nvme"), tmp_path / tier, activations=tier)
    assert [train_step(engine, job, step) for step in range(job.steps)] == plain.losses
    alive = job.loss(engine, 5, 0)
    # The first block has the batch itself. What needs a gradient is computed on a device: it is a copy of the user's.
    assert sum(used(engine).values()) == (7 + (engine_device() != "cpu")) * INPUT
    del alive
    engine.destroy(remove=True)
