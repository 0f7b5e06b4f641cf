"""A gradient that nobody else refers to waits for its update as autograd has made it, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.torch_internals import StorageUsers, owns_its_memory
from tests.support import models
from tests.support.oracle import (
    Job,
    assert_same,
    assert_same_tensors,
    config,
    run,
    small_pieces,
    start,
    train_step,
    weights_of,
)
from tests.support.processes.device_process import engine_device

JOB = models.MIXTURE._replace(accumulation=1, clip=0.5)
MEMORY, DISK = ("cpu", "cpu"), ("nvme", "nvme")
pytestmark = [
    pytest.mark.skipif(not StorageUsers.counted(), reason="this build of torch counts no users of a storage"),
    pytest.mark.skipif(engine_device() != "cpu", reason="gradients leave a device that the host cannot address"),
]

KINDS: dict[str, tuple[Job, dict[str, Any]]] = {
    "AdamW": (JOB, {}),
    "AdamW in bf16, int8 moments": (JOB._replace(dtype="bf16"), {"moments": "int8"}),
    "Lamb": (JOB._replace(optimizer="Lamb", lr=1e-2), {}),
    "Muon": (JOB._replace(optimizer="Muon", lr=1e-2), {}),
    "NAdam of torch": (JOB._replace(optimizer="NAdam"), {}),
}


@pytest.fixture(autouse=True)
def every_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps gradients of any size."""
    testing.replace(monkeypatch, "size.kept_gradient", 1)


def kept(engine: offload.Engine) -> int:
    parts = testing.inspect(engine)
    return sum(len(parts.gradients_kept(unit)) for unit in range(len(parts.layouts)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("placement", [MEMORY, DISK, ("none", "none")], ids=["memory", "disk", "device"])
def test_bits_are_those_of_copies(
    name: str, placement: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever optimizer reads them, in tiles that begin and end within parameters."""
    small_pieces(monkeypatch)
    job, options = KINDS[name]
    counts = []

    def step(engine: Any, job: Job, number: int) -> float:
        engine.backward(loss := job.loss(engine, number, 0))
        counts.append(kept(engine))
        engine.step()
        return float(loss.detach())

    own = run(job, placement, tmp_path / "own", step, **options)
    assert min(counts) > 0
    testing.replace(monkeypatch, "size.kept_gradient", 1 << 40)
    copied = run(job, placement, tmp_path / "copied", step, **options)
    assert counts[-1] == 0
    assert_same(own, copied)


def test_updates_under_the_backward_read_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are made again, because a further gradient arrives."""

    def two_losses(engine: Any, job: Job, step: int) -> float:
        for micro in range(1 + (step == 2)):
            engine.backward(job.loss(engine, step, micro))
        engine.step()
        return 0.0

    job = JOB._replace(clip=0.0)
    own = run(job, DISK, tmp_path / "own", two_losses, speculate=True)
    testing.replace(monkeypatch, "size.kept_gradient", 1 << 40)
    assert_same(own, run(job, DISK, tmp_path / "copied", two_losses, speculate=False))


def trained_with(
    engine: offload.Engine, between: Callable[[offload.Engine], object]
) -> tuple[dict[str, torch.Tensor], float | None]:
    """Trains two steps, with a call between backward and step, and returns weights and the last norm."""
    for number in range(2):
        engine.backward(JOB.loss(engine, number, 0))
        between(engine)
        engine.step()
    result = weights_of(engine), engine.get_global_grad_norm()
    engine.destroy(remove=True)
    return result


def scale(engine: offload.Engine) -> None:
    weight = engine.module.head.weight
    value = offload.safe_get_full_grad(weight)
    assert value is not None
    offload.safe_set_full_grad(weight, value * 3)
    assert torch.equal(offload.safe_get_full_grad(weight), value * 3)  # type: ignore[arg-type]


def drop_and_repeat(engine: offload.Engine) -> None:
    engine.zero_grad()
    assert kept(engine) == 0
    engine.backward(JOB.loss(engine, 7, 0))


def again(engine: offload.Engine) -> None:
    engine.backward(JOB.loss(engine, 7, 0))
    engine.backward(JOB.loss(engine, 8, 0))


@pytest.mark.parametrize("between", [scale, drop_and_repeat, again])
def test_what_happens_before_the_step_has_the_bits_of_copies(
    between: Callable[[offload.Engine], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = trained_with(start(JOB, MEMORY, tmp_path / "own"), between)
    testing.replace(monkeypatch, "size.kept_gradient", 1 << 40)
    copied = trained_with(start(JOB, MEMORY, tmp_path / "copied"), between)
    assert_same_tensors(own[0], copied[0])
    assert own[1] == copied[1]


def test_a_gradient_that_the_user_holds_is_copied(tmp_path: Path) -> None:
    """What the user does with it changes no step, and no step changes it."""

    def two_steps(folder: Path, spoils: bool) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(JOB.seed)
        model, held = JOB.model(), list[torch.Tensor]()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def hold(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            held.append(parameter.grad)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hold)
        engine = offload.initialize(model=model, config=config(JOB, MEMORY, folder))[0]
        for number in range(2):
            engine.backward(JOB.loss(engine, number, 0))
            assert kept(engine) == 0
            for gradient in held if spoils else ():
                gradient.fill_(7.0)
            engine.step()
        weights = weights_of(engine)
        engine.destroy(remove=True)
        return weights, held

    weights, held = two_steps(tmp_path / "spoiled", True)
    assert held and all(bool((gradient == 7.0).all()) for gradient in held)
    assert_same_tensors(weights, two_steps(tmp_path / "left", False)[0])


def test_micro_batches_before_the_last_are_added_up_in_one_place(tmp_path: Path) -> None:
    engine = start(models.MIXTURE, MEMORY, tmp_path)
    train_step(engine, models.MIXTURE, 0)
    engine.backward(models.MIXTURE.loss(engine, 1, 0))
    engine.step()
    assert kept(engine) == 0
    engine.backward(models.MIXTURE.loss(engine, 1, 1))
    assert kept(engine) == 0
    engine.step()
    engine.destroy(remove=True)


def test_memory_that_something_else_may_write_to_is_not_its_own() -> None:
    fresh = torch.ones(4, 8)
    assert owns_its_memory(fresh)
    view, foreign = fresh.view(-1), torch.ones(16)
    assert not owns_its_memory(fresh) and not owns_its_memory(view)
    for tensor in (
        foreign[:8],
        torch.ones(8, 4).t(),
        torch.ones(4).expand(2, 4),
        torch.from_numpy(np.ones(4, dtype=np.float32)),
        torch.ones(4).to_sparse(),
        nn.Parameter(torch.ones(4)),
        torch.ones(4, device="meta"),
        torch.ones(4, dtype=torch.complex64).conj().imag,
    ):
        assert not owns_its_memory(tensor)
