"""A change of `requires_grad` after `initialize` acts as in torch, or is an error with the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import EngineFailed, UsageError
from tests.support import models, rounding_bounds
from tests.support.modules.module_kinds import Layers
from tests.support.oracle import Job, PlainEngine, assert_same_tensors, config, run, start, train_step, weights_of

DISK = ("nvme", "nvme")
JOB = Job(Layers, models.mixture_loss, steps=8)
TWO = JOB._replace(accumulation=2, steps=4)
AREA = "Freezing and groups, after `offload.initialize`"


def gradually(engine: Any) -> list[float]:
    """Whole modules, one parameter of a unit, what is behind the loss and what is before it."""
    model, losses = engine.module, []
    for step in range(JOB.steps):
        if step == 0:
            model.requires_grad_(False)
            model.head.requires_grad_(True)
        elif step == 2:
            model.layers[2].requires_grad_(True)
            model.layers[1].weight.requires_grad_(True)
        elif step == 4:
            model.requires_grad_(True)
            model.layers[0].requires_grad_(False)
        elif step == 6:
            model.layers[0].requires_grad_(True)
            model.embedding.requires_grad_(False)
        losses += [train_step(engine, JOB, step), engine.get_global_grad_norm()]
    return losses


def between_forward_and_backward(engine: Any) -> list[float]:
    losses = []
    for step in range(4):
        loss = JOB.loss(engine, step, 0)
        engine.module.layers[1].requires_grad_(step % 2 == 0)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def between_micro_batches(engine: Any) -> list[float]:
    """What was added before counts, as in torch: its optimizers ask for the gradient alone."""
    losses = []
    for step in range(TWO.steps):
        for micro in range(2):
            loss = TWO.loss(engine, step, micro)
            engine.backward(loss)
            if micro == 0:
                engine.module.layers[1].requires_grad_(step % 2 == 0)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


LOOPS: dict[str, tuple[Callable[[Any], list[float]], Job]] = {
    "layers frozen and unfrozen between steps: no gradient, no decay, no step": (gradually, JOB),
    "frozen between a forward and its backward": (between_forward_and_backward, JOB),
    "frozen between two micro-batches": (between_micro_batches, TWO),
}
ROWS = [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in LOOPS]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.numeric
def test_changes_of_requires_grad_act_as_in_pytorch(name: str, dtype: str, tmp_path: Path) -> None:
    loop, job = LOOPS[name]
    job = job._replace(dtype=dtype)
    results = []
    for placement in (DISK, ("none", "none")):
        engine = start(job, placement, tmp_path / "-".join(placement))
        losses = loop(engine)
        results.append((losses, weights_of(engine)))
        counts = {
            segment.name: count
            for layout, mine in zip(
                testing.inspect(engine).layouts, testing.inspect(engine).parameter_steps, strict=True
            )
            for segment, count in zip(layout.segments, mine, strict=True)
        }
        engine.destroy(remove=True)
    assert results[0][0] == results[1][0]
    assert_same_tensors(results[0][1], results[1][1])
    if loop is gradually:
        assert [counts[name] for name in ("head.weight", "layers.2.bias", "layers.1.weight", "layers.1.bias")] == [
            8,
            6,
            6,
            4,
        ]
        assert [counts[name] for name in ("layers.0.weight", "embedding.weight")] == [2, 2]
    if dtype == "fp32":
        plain = PlainEngine(job)
        rounding_bounds.same_losses(results[0][0], loop(plain), job)
        rounding_bounds.same_weights(results[0][1], plain.module.state_dict(), job)


def test_what_is_frozen_meanwhile_is_resumed(tmp_path: Path) -> None:
    """It has its states all the while; how it is frozen is the loop's to say, as in torch."""

    def part(resume: Any, steps: range) -> tuple[list[float], dict[str, torch.Tensor]]:
        engine = start(JOB, DISK, tmp_path / "run", resume=resume)
        losses = []
        for step in steps:
            engine.module.layers[1].requires_grad_(step not in (2, 3, 4))
            losses.append(train_step(engine, JOB, step))
        weights = weights_of(engine)
        engine.destroy(remove=steps.stop == JOB.steps)
        return losses, weights

    unbroken = part("never", range(JOB.steps))
    first, second = part("never", range(4)), part("auto", range(4, JOB.steps))
    assert first[0] + second[0] == unbroken[0]
    assert_same_tensors(second[1], unbroken[1])


def test_nothing_left_to_train(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path / "frozen")
    engine.module.requires_grad_(False)
    with pytest.raises(UsageError, match="does not depend on any trainable parameter"):
        train_step(engine, JOB, 0)
    engine.module.requires_grad_(True)
    losses = [train_step(engine, JOB, step) for step in range(JOB.steps)]
    engine.destroy(remove=True)
    assert losses == run(JOB, DISK, tmp_path / "plain").losses


class Thawing(Layers):
    """Its forward unfreezes what was frozen."""

    thaws = False

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[1].register_forward_pre_hook(lambda module, _: module.requires_grad_(self.thaws) and None)


@pytest.mark.works(AREA, "what was frozen at `initialize` unfrozen, between steps or inside of a forward", "refused")
def test_what_was_frozen_cannot_train(tmp_path: Path) -> None:
    job = JOB._replace(model=Thawing)
    engine = start(job, DISK, tmp_path / "thawing")
    losses = [train_step(engine, job, 0)]
    for _ in range(2):
        engine.module.thaws = True
        with pytest.raises(UsageError, match=r"layers\.1\.weight was frozen .* set requires_grad before"):
            train_step(engine, job, 1)
        engine.module.thaws = False
    with pytest.raises(UsageError, match=r"layers\.1\.weight was frozen"):
        engine.module.layers[1].requires_grad_(True)
    assert not engine.module.layers[1].weight.requires_grad
    losses += [train_step(engine, job, step) for step in range(1, job.steps)]
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


class ThawingAndChanging(Layers):
    """Its forward unfreezes what was frozen, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[1].register_forward_pre_hook(lambda module, _: self.change(module))

    def change(self, module: nn.Module) -> None:
        with torch.no_grad():
            module.weight.mul_(2)
        module.requires_grad_(True)


def test_what_was_unfrozen_and_changed_stops_the_engine(tmp_path: Path) -> None:
    """The device's copy is no longer what is stored, so the next forward would use other weights."""
    job = JOB._replace(model=ThawingAndChanging)
    engine = start(job, DISK, tmp_path)
    with pytest.raises(UsageError, match=r"layers\.1\.weight was changed in place"):
        train_step(engine, job, 0)
    assert not engine.module.layers[1].weight.requires_grad
    with pytest.raises(EngineFailed):
        engine.step()
    engine.destroy()


def test_a_model_that_does_not_train(tmp_path: Path) -> None:
    """Frozen: an engine without states, whose weights still come from the disk."""
    torch.manual_seed(0)
    model = models.shallow().requires_grad_(False)
    with torch.no_grad():
        expected = model(input_ids=models.tokens(0, 0)).logits
    engine = offload.initialize(model=model, config=config(models.SHALLOW, DISK, tmp_path))[0]
    with torch.no_grad():
        assert torch.equal(engine(input_ids=models.tokens(0, 0)).logits.cpu(), expected)
    engine.destroy()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
