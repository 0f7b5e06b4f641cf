"""After an exception anywhere that the user caught, training continues with the right bits, and nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import BudgetError
from tests.models.test_module_kinds import DISK
from tests.support import models
from tests.support.modules.module_kinds import AdaptersRecomputed
from tests.support.modules.recomputed_regions import ReentrantRegion, Region
from tests.support.oracle import Job, room_for, run, start, train_step


class Boom(Exception):
    """The user's own."""


KINDS: dict[str, type[BaseException]] = {
    "an exception": Boom,
    "Ctrl-C": KeyboardInterrupt,
    "out of memory": torch.OutOfMemoryError,
}


def raiser(kind: type[BaseException]) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise kind("thrown on purpose")

    return fail


def in_forward(engine: Any, job: Job, kind: type[BaseException]) -> None:
    hook = engine.module.layers[2].register_forward_pre_hook(raiser(kind))
    try:
        job.loss(engine, 0, 0)
    finally:
        hook.remove()


def on_device(engine: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the model, to which the user brings the ids: the engine alone moves what it is given."""
    return lambda ids: engine.module(ids.to(engine.device))


def in_a_forward_of_the_model(engine: Any, job: Job, kind: type[BaseException]) -> None:
    """The user calls the model, not the engine."""
    hook = engine.module.layers[2].register_forward_hook(raiser(kind))
    try:
        job.loss(on_device(engine), 0, 0)
    finally:
        hook.remove()


def at_the_start_of_backward(engine: Any, job: Job, kind: type[BaseException]) -> None:
    loss = job.loss(engine, 0, 0)
    loss.grad_fn.register_prehook(raiser(kind))  # type: ignore[union-attr]
    engine.backward(loss)


def in_backward(engine: Any, job: Job, kind: type[BaseException]) -> None:
    hook = engine.module.layers[1].register_full_backward_hook(raiser(kind))
    try:
        engine.backward(job.loss(engine, 0, 0))
    finally:
        hook.remove()


def in_a_gradient_hook(engine: Any, job: Job, kind: type[BaseException]) -> None:
    weight = next(p for p in engine.module.layers[1].parameters() if p.requires_grad)
    hook = weight.register_hook(raiser(kind))
    try:
        engine.backward(job.loss(engine, 0, 0))
    finally:
        hook.remove()


def in_recomputation(engine: Any, job: Job, kind: type[BaseException]) -> None:
    loss = job.loss(engine, 0, 0)
    hook = engine.module.layers[1][0].register_forward_hook(raiser(kind))
    try:
        engine.backward(loss)
    finally:
        hook.remove()


PLACES: dict[str, tuple[Callable[[Any, Job, type[BaseException]], None], Callable[[], nn.Module]]] = {
    "in a forward": (in_forward, Region),
    "in a forward of the model itself": (in_a_forward_of_the_model, Region),
    "at the start of a backward": (at_the_start_of_backward, Region),
    "in a backward": (in_backward, Region),
    "in a hook of the user on a gradient": (in_a_gradient_hook, Region),
    "in a recomputation": (in_recomputation, Region),
    "in a reentrant recomputation": (in_recomputation, ReentrantRegion),
}

ROWS = [
    pytest.param(place, kind, id=f"{kind} {place}", marks=pytest.mark.works("Recovery", f"{kind} {place}", "right"))
    for place in PLACES
    for kind in KINDS
]


def seeded_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    """Dropout that depends on the step alone, however often it is begun."""
    torch.manual_seed(100 * step + micro)
    return models.mixture_loss(model, step, micro)


def assert_nothing_left(engine: offload.Engine) -> None:
    """No use is open, and every lease that is out is one that the pager knows of."""
    inspected = testing.inspect(engine)
    assert not any(inspected.pins) and inspected.unaccounted_memory() == {"host": 0, "device": 0}
    assert not inspected.live_views
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_a_hook_of_the_user_kept_from_the_engine_is_dropped(kind: str, tmp_path: Path) -> None:
    """A hook from before `initialize` runs first, so what it raises leaves the gradient in `.grad`."""
    raises = False

    def fail(parameter: torch.Tensor) -> None:
        if raises:
            raise KINDS[kind]("thrown on purpose")

    def hooked() -> nn.Module:
        model = Region()
        for parameter in model.layers[1].parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(fail)
        return model

    job = Job(hooked, seeded_loss, steps=2)
    norms = []
    for thrown in (False, True):
        engine = start(job, DISK, tmp_path)
        if thrown:
            raises = True
            with pytest.raises(KINDS[kind]):
                engine.backward(job.loss(engine, 0, 0))
            raises = False
            engine.zero_grad()
        for step in range(job.steps):
            train_step(engine, job, step)
            norms.append(engine.get_global_grad_norm())
        engine.destroy(remove=True)
    assert norms[:2] == norms[2:]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("place", "kind"), ROWS)
def test_training_continues_after_an_exception(place: str, kind: str, dtype: str, tmp_path: Path) -> None:
    fail, model = PLACES[place]
    job = Job(model, seeded_loss, steps=4, dtype=dtype)
    before = threading.active_count()
    engine = start(job, DISK, tmp_path / "thrown", device_memory=room_for(job, 2))
    losses = []
    for step in range(job.steps):
        with pytest.raises(KINDS[kind]):
            fail(engine, job, KINDS[kind])
        engine.zero_grad()
        losses.append(train_step(engine, job, step))
    testing.settle(engine, commit=False)
    assert_nothing_left(engine)
    engine.destroy(remove=True)
    assert threading.active_count() == before
    assert losses == run(job, DISK, tmp_path / "plain").losses


@pytest.mark.works("Recovery", "Ctrl-C in a forward, then only `model(...)` and `optimizer.step()`", "right")
def test_without_a_call_of_the_engine(tmp_path: Path) -> None:
    """After a KeyboardInterrupt torch calls no hooks, so what was entered is left open until the model runs again."""
    job = Job(Region, seeded_loss, steps=4)
    engine = start(job, DISK, tmp_path / "thrown", device_memory=room_for(job, 2))
    losses = []
    for step in range(job.steps):
        with pytest.raises(KeyboardInterrupt):
            in_a_forward_of_the_model(engine, job, KeyboardInterrupt)
        loss = job.loss(on_device(engine), step, 0)
        loss.backward()
        engine.optimizer.step()
        losses.append(float(loss.detach()))
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


def test_after_a_forward_that_is_refused_another_thread_may_run_the_model(tmp_path: Path) -> None:
    job = models.GPT2
    engine = start(job, DISK, tmp_path / "refused")
    with pytest.raises(offload.UsageError, match=r"torch\.autograd\.grad instead"):
        torch.func.grad(lambda factor: factor * job.loss(engine, 0, 0).detach())(torch.ones(()))
    losses: list[float] = []
    thread = threading.Thread(target=lambda: losses.append(train_step(engine, job, 0)))
    thread.start()
    thread.join(60)
    engine.destroy(remove=True)
    assert losses == run(job._replace(steps=1), DISK, tmp_path / "plain").losses


@pytest.mark.works("Recovery", "a budget that a module inside of others exceeds", "right")
def test_a_budget_that_a_nested_site_exceeds(tmp_path: Path) -> None:
    """The error comes from a pre-hook inside of other sites; what those hold is given back exactly once."""
    job = models.GPT2
    engine = start(job, DISK, tmp_path / "tight")
    pager = testing.inspect(engine).pager
    real = pager.acquire
    losses = []
    for step in range(job.steps):

        def refuse(unit: int, **safe: bool) -> torch.Tensor:
            if unit == 3:
                raise BudgetError("no room")
            return real(unit, **safe)

        pager.acquire = refuse  # type: ignore[method-assign]
        with pytest.raises(BudgetError):
            job.loss(engine, step, 0)
        pager.acquire = real  # type: ignore[method-assign]
        assert not any(testing.inspect(engine).pins)
        losses.append(train_step(engine, job, step))
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


@pytest.mark.works("Recovery", "an interrupted `destroy()`, called again", "right")
def test_destroy_can_be_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = models.GPT2
    engine = start(job, DISK, tmp_path / "cut")
    losses = [train_step(engine, job, step) for step in range(3)]
    with monkeypatch.context() as patch:
        testing.replace(patch, "pager.close", raiser(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.destroy()
    engine.destroy()
    again = start(job, DISK, tmp_path / "cut", resume="must")
    losses += [train_step(again, job, step) for step in range(3, job.steps)]
    again.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


@pytest.mark.works("Recovery", "LoRA: an exception in a recomputation of frozen weights", "right")
def test_frozen_weights_after_an_exception(tmp_path: Path) -> None:
    job = Job(AdaptersRecomputed, models.mixture_loss, steps=4)
    engine = start(job, DISK, tmp_path / "thrown", device_memory=room_for(job, 2))
    losses = []
    for step in range(job.steps):
        loss = job.loss(engine, 0, 0)
        hook = engine.module.layers[1].base[2].register_forward_hook(raiser(Boom))
        with pytest.raises(Boom):
            engine.backward(loss)
        hook.remove()
        engine.zero_grad()
        losses.append(train_step(engine, job, step))
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses
