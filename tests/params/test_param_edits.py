"""An edit between steps is kept exactly: its precision, its master, its commit, and one write for each unit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from tests.params.param_actions import DISK
from tests.support import rounding_bounds
from tests.support.oracle import PlainEngine, assert_same_tensors, room_for, run, start, train_step
from tests.support.param_states import GPT2

# -- what an edit is ----------------------------------------------------------------------------------


def test_precision_of_a_loaded_state_is_kept(tmp_path: Path) -> None:
    """fp32 values become the masters of a bf16 model, not only its weights: the residual takes what bf16 has not."""
    job = GPT2._replace(dtype="bf16", steps=3)
    torch.manual_seed(1)
    exact = {name: value.clone() for name, value in job.model().state_dict().items()}
    engine = start(job, DISK, tmp_path / "loaded")
    engine.module.load_state_dict(exact)
    loaded = [train_step(engine, job, step) for step in range(job.steps)]
    engine.destroy(remove=True)
    assert loaded == run(job._replace(seed=1), DISK, tmp_path / "built").losses


def test_edits_of_one_unit_are_written_together(tmp_path: Path) -> None:
    """A whole `load_state_dict` writes each state once, however many parameters a unit has."""
    engine = start(GPT2, DISK, tmp_path)
    state = {name: value * 0.5 for name, value in engine.module.state_dict().items()}
    before = engine.io_bytes().written
    engine.module.load_state_dict(state)
    written = engine.io_bytes().written - before
    states = 12 * sum(layout.numel for layout in testing.inspect(engine).layouts)
    assert states <= written <= 1.4 * states, "only tied names, which come last, may write their unit once more"
    engine.destroy(remove=True)


def test_an_edit_in_bf16_is_the_master_too(tmp_path: Path) -> None:
    """What changed has nothing beyond bf16 any more: the same as the same values given in fp32."""
    job = GPT2._replace(dtype="bf16")

    def losses(name: str, edit: Callable[[torch.Tensor], None]) -> list[float]:
        engine = start(job, DISK, tmp_path / name)
        found = [train_step(engine, job, step) for step in range(2)]
        with torch.no_grad():
            for parameter in engine.module.parameters():
                edit(parameter)
        found += [train_step(engine, job, step) for step in range(2, job.steps)]
        engine.destroy(remove=True)
        return found

    in_place = losses("in place", lambda parameter: parameter.mul_(0.5))
    assert in_place == losses("given", lambda parameter: parameter.copy_(parameter.detach().float() * 0.5))


def test_what_an_edit_leaves_alone_keeps_its_master(tmp_path: Path) -> None:
    """In bf16: written back unchanged, nothing changes, the bits beyond bf16 neither."""
    job = GPT2._replace(dtype="bf16")
    engine = start(job, DISK, tmp_path / "same")
    losses = []
    for step in range(job.steps):
        with torch.no_grad():
            engine.module.transformer.h[1].mlp.c_fc.weight.mul_(1.0)
        engine.module.load_state_dict(engine.module.state_dict())
        losses.append(train_step(engine, job, step))
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, ("cpu", "nvme"), ("none", "nvme")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.works(
    "Looking at weights and editing them, between steps", "an edit, then `destroy()` and resume", "right"
)
def test_an_edit_is_committed(dtype: str, placement: tuple[str, str], tmp_path: Path) -> None:
    """With the next step, or at the end: a run that was edited and resumed goes on as the unbroken one."""
    job = GPT2._replace(dtype=dtype)

    def edit(engine: offload.Engine) -> None:
        with torch.no_grad():
            for parameter in engine.module.transformer.h[1].parameters():
                parameter.mul_(0.5)

    unbroken = start(job, placement, tmp_path / "whole")
    cut = start(job, placement, tmp_path / "cut")
    expected, found = [], []
    for step in range(3):
        expected.append(train_step(unbroken, job, step))
        found.append(train_step(cut, job, step))
    edit(unbroken)
    edit(cut)
    cut.destroy()
    cut = start(job, placement, tmp_path / "cut", resume="must")
    assert cut.global_steps == 3
    for step in range(3, job.steps):
        expected.append(train_step(unbroken, job, step))
        found.append(train_step(cut, job, step))
    assert found == expected
    assert_same_tensors(cut.module.state_dict(), unbroken.module.state_dict())
    unbroken.destroy(remove=True)
    cut.destroy(remove=True)


@pytest.mark.numeric
def test_an_edit_in_the_middle_of_accumulation(tmp_path: Path) -> None:
    """Gradients that were added stay, as in torch."""
    job = GPT2._replace(accumulation=2)

    def loop(engine: Any) -> list[float]:
        losses = []
        for step in range(3):
            for micro in range(2):
                loss = job.loss(engine, step, micro)
                engine.backward(loss)
                losses.append(float(loss.detach()))
                if micro == 0:
                    with torch.no_grad():
                        engine.module.transformer.h[0].mlp.c_fc.weight.mul_(0.9)
                engine.step()
        return losses

    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 2))
    rounding_bounds.same_losses(loop(engine), loop(PlainEngine(job)), job)
    engine.destroy(remove=True)
