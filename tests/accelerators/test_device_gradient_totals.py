"""Gradients that fit on the device are added there over the micro-batches, move once a step, and change no bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import testing
from offload.engine import assembly
from offload.engine.gradient_transfer import DeviceToHost
from offload.sizes import GIB
from offload.swapper.memory.device import DeviceRoom
from offload.swapper.store import spill_file as scratch
from tests.micro_batches.test_gradient_accumulation import as_accelerate, as_ddp, counted, no_sync_with_steps
from tests.support import models
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.oracle import (
    Job,
    assert_same,
    assert_same_tensors,
    config,
    least_host_memory,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)

JOB = models.MIXTURE._replace(steps=3, accumulation=3, dtype="bf16")
ALL_UNITS = 1 << 24
"""Bytes of a device that has room for all weights and gradients of these models."""


def all_added(engine: offload.Engine) -> bool:
    return all(
        testing.inspect(engine).gradients_add_up_on_device(unit)
        for unit, part in enumerate(testing.inspect(engine).trainable)
        if part
    )


def gradient_bytes(engine: offload.Engine) -> int:
    """Of one micro-batch that reaches all parameters, in the dtype in which they are kept."""
    numel = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    return numel * testing.inspect(engine).gradient_dtype.itemsize


def late(patch: pytest.MonkeyPatch, seed: int = 0, lateness: float = 0.9, spare: int = 0) -> LateDevice:
    device = LateDevice(seed, lateness)
    device.spare = DeviceRoom(spare, 0)
    use_device(patch, device)
    return device


# -- what moves ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme"), ("none", "cpu")], ids="-".join)
def test_a_step_downloads_the_gradients_of_one_micro_batch(
    placement: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.GPT2._replace(accumulation=4, dtype="bf16")
    moved = {}
    for room in (ALL_UNITS, room_for(job, 100 if placement[0] == "none" else 3)):
        device = late(monkeypatch)
        engine = start(job, placement, tmp_path, device_memory=room)
        before = device.downloaded
        for step in range(3):
            train_step(engine, job, step)
        moved[all_added(engine)] = device.downloaded - before
        once = gradient_bytes(engine)
        engine.destroy(remove=True)
    squares = 8 * 3 * sum(1 for _ in job.model().parameters())
    assert moved[True] == 3 * once + squares, "in fp32, once"
    assert moved[False] == 3 * 4 * once // 2, "in bf16, after each micro-batch"


@pytest.mark.slow
def test_what_spills_moves_as_often_as_with_one_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    moved: dict[str, int] = {}
    for name in ("read", "write"):
        monkeypatch.setattr(scratch.SpillFile, name, counting(moved, name, getattr(scratch.SpillFile, name)))
    late(monkeypatch)
    results, bytes_moved = {}, {}
    for accumulation, room in ((4, ALL_UNITS), (4, room_for(models.GPT2, 3)), (1, ALL_UNITS)):
        job = models.GPT2._replace(accumulation=accumulation, steps=2)
        least = least_host_memory(job, tmp_path)
        engine = start(job, ("nvme", "nvme"), tmp_path, device_memory=room, host_memory=least)
        inspected = testing.inspect(engine)
        assert all(inspected.gradients_spill(unit) for unit in range(len(inspected.layouts)))
        key = accumulation, all_added(engine)
        moved |= {"read": 0, "write": 0}
        results[key] = trained(engine, job)
        bytes_moved[key] = dict(moved)
        engine.destroy(remove=True)
    assert_same(results[4, True], results[4, False])
    assert bytes_moved[4, True] == bytes_moved[1, False]
    assert all(bytes_moved[4, False][name] > 2 * bytes_moved[1, False][name] for name in moved)


def counting(moved: dict[str, int], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def counted(self: Any, *given: Any) -> Any:
        moved[name] += len(given[-1])
        return real(self, *given)

    return counted


def test_what_the_first_step_has_left_free_is_for_weights_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number of the user's. The first step adds on the host, the others on the device."""
    job = models.GPT2._replace(accumulation=3, dtype="bf16", steps=4)
    expected = run(job, ("none", "none"), tmp_path / "plain")
    device = late(monkeypatch, spare=GIB)
    engine = start(job, ("cpu", "cpu"), tmp_path)
    need, moved = testing.inspect(engine).device_need, list[int]()
    assert engine.device_memory < need.weights and not need.added(engine.device_memory)
    found = []
    with Ticks(device):
        for step in range(job.steps):
            before = device.downloaded
            found.append((train_step(engine, job, step), engine.get_global_grad_norm()))
            moved.append(device.downloaded - before)
            assert all_added(engine) and engine.device_memory == need.most
    assert found == list(zip(expected.losses, expected.norms, strict=True)) and device.broken == []
    assert_same_tensors(expected.weights, weights_of(engine))
    assert moved[0] > moved[1] == moved[2] == moved[3]
    engine.destroy(remove=True)


# -- bits ---------------------------------------------------------------------------------------------


class Twice(models.Mixture):
    """Each block runs in two regions of its own, so that a backward gives its gradients twice."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) * self.scale
        for block in self.blocks:
            for _ in range(2):
                hidden = hidden + checkpoint(block, hidden, use_reentrant=True)
        return self.head(hidden)


JOBS = {
    "gpt2, tied": models.GPT2._replace(steps=3, accumulation=3),
    "experts of some micro-batches": JOB,
    "one parameter twice": JOB._replace(model=Twice, accumulation=2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulates", [None, "bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("name", JOBS)
def test_the_bits_are_those_of_sums_on_the_host(
    name: str, dtype: str, accumulates: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOBS[name]._replace(dtype=dtype)
    if accumulates not in (None, dtype):
        pytest.skip("a dtype of another mode")
    found = []
    for seed, device in enumerate((None, LateDevice(0, 0.9), LateDevice(1, 1.0))):
        with monkeypatch.context() as patch:
            if device is not None:
                use_device(patch, device)
            torch.manual_seed(job.seed)
            settings = config(job, ("nvme", "cpu"), tmp_path / f"{seed}", device_memory=ALL_UNITS)
            settings["data_types"]["grad_accum_dtype"] = accumulates
            engine = offload.initialize(model=job.model(), config=settings)[0]
            assert all_added(engine) == (device is not None or engine.device.type != "cpu")
            if device is None:
                found.append(trained(engine, job))
            else:
                with Ticks(device):
                    found.append(trained(engine, job))
                assert device.broken == []
            engine.destroy(remove=True)
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.mark.sample(1)
@pytest.mark.parametrize("loop", [as_accelerate, as_ddp, no_sync_with_steps])
def test_the_caller_of_a_boundary_changes_no_bit(
    loop: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOB._replace(accumulation=4)
    found = []
    for how in (counted, loop):
        device = late(monkeypatch)
        engine = start(job, ("cpu", "cpu"), tmp_path, device_memory=ALL_UNITS)
        moved = device.downloaded
        with Ticks(device):
            for step in range(3):
                how(engine, job, step)
        found.append((engine.get_global_grad_norm(), device.downloaded - moved, weights_of(engine)))
        engine.destroy(remove=True)
        assert device.broken == []
    assert found[0][:2] == found[1][:2]
    assert_same_tensors(found[0][2], found[1][2])


def more_than_the_count(engine: offload.Engine, job: Job, step: int) -> None:
    """The word of the user comes only when all backwards have run; what had left is added on the host."""
    engine.set_gradient_accumulation_boundary(step == 1)
    for micro in range(5):
        engine.backward(job.loss(engine, step, micro))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def read_and_set(engine: offload.Engine, job: Job, step: int) -> None:
    """In the middle of a step: zero, look, set, and go on."""
    weights = [weight for weight in engine.module.parameters() if weight.requires_grad]
    engine.backward(job.loss(engine, step, 0))
    engine.zero_grad()
    engine.backward(job.loss(engine, step, 1))
    engine.step()
    seen = [offload.safe_get_full_grad(weight) for weight in weights[::2]]
    assert any(gradient is not None and gradient.any() for gradient in seen)
    offload.safe_set_full_grad(weights[1], torch.ones(weights[1].shape))
    offload.safe_set_full_grad(weights[2], torch.ones(weights[2].shape))
    with torch.no_grad():
        weights[3].mul_(0.5)  # an edit: an update without a gradient
    for micro in range(2, 4):
        engine.backward(job.loss(engine, step, micro))
        engine.step()
    assert engine.global_steps == step + 1


def one_at_the_end(engine: offload.Engine, job: Job, step: int) -> None:
    """From the second step on each is one micro-batch, which nothing is added to."""
    for micro in range(job.accumulation if step == 0 else 1):
        engine.backward(job.loss(engine, step, micro))
        engine.step()
    if step == 0:
        engine.set_train_batch_size(1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("loop", [more_than_the_count, read_and_set, one_at_the_end])
def test_what_a_loop_does_in_the_middle_changes_no_bit(
    loop: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed, device in enumerate((None, LateDevice(0, 0.9))):
        with monkeypatch.context() as patch:
            if device is not None:
                use_device(patch, device)
            engine = start(JOB, ("cpu", "nvme"), tmp_path / f"{seed}", device_memory=ALL_UNITS)
            norms = []
            with Ticks(device or LateDevice(0, 0.0)):
                for step in range(3):
                    loop(engine, JOB, step)
                    norms.append(engine.get_global_grad_norm())
            assert all_added(engine) == (device is not None or engine.device.type != "cpu")
            assert device is None or device.broken == []
            found.append((norms, weights_of(engine)))
            engine.destroy(remove=True)
    assert found[0][0] == found[1][0]
    assert_same_tensors(found[0][1], found[1][1])


def test_a_step_that_is_skipped_leaves_nothing_of_its_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp16 a loss of inf in the first of two micro-batches."""
    job = JOB._replace(dtype="fp16", accumulation=2)

    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        return job.loss(model, step, micro) * (float("inf") if (step, micro) == (1, 0) else 1.0)

    found = []
    for seed, device in enumerate((None, LateDevice(0, 0.9))):
        with monkeypatch.context() as patch:
            if device is not None:
                use_device(patch, device)
            engine = start(job, ("nvme", "nvme"), tmp_path / f"{seed}", device_memory=ALL_UNITS)
            for step in range(4):
                train_step(engine, job._replace(loss=loss), step)
            assert engine.skipped_steps == 1
            found.append((engine.get_global_grad_norm(), weights_of(engine)))
            engine.destroy(remove=True)
    assert found[0][0] == found[1][0]
    assert_same_tensors(found[0][1], found[1][1])


def test_where_the_device_sums_no_squares_the_host_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without kernels of ours: totals then go through staging buffers."""
    expected = run(JOB, ("cpu", "cpu"), tmp_path)
    make = assembly._downloads

    def made(*given: Any) -> DeviceToHost:
        downloads = make(*given)
        downloads.sums = False
        return downloads

    testing.replace(monkeypatch, "gradient.downloads", made)
    device = late(monkeypatch)
    engine = start(JOB, ("cpu", "cpu"), tmp_path, device_memory=ALL_UNITS)
    with Ticks(device):
        assert_same(expected, trained(engine, JOB))
    assert all_added(engine) and device.broken == []
    engine.destroy(remove=True)


def test_where_the_cpu_computes_nothing_is_added_elsewhere(tmp_path: Path) -> None:
    engine = start(JOB, ("cpu", "cpu"), tmp_path, device_memory=ALL_UNITS, device="cpu")
    assert not any(
        testing.inspect(engine).gradients_add_up_on_device(unit) for unit in range(len(testing.inspect(engine).layouts))
    )
    engine.destroy(remove=True)


def test_a_total_on_its_way_at_a_ctrl_c_is_not_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the wait for a total that was sent; then the step goes on, while the copy takes its time."""
    go = threading.Event()
    testing.replace(
        monkeypatch, "gradient.begin_download", lambda self, real=DeviceToHost._begin: go.wait(60) and real(self)
    )
    found = []
    for interrupted in (False, True):
        go.set()
        device = late(monkeypatch)
        engine = start(JOB, ("cpu", "cpu"), tmp_path, device_memory=ALL_UNITS)
        with Ticks(device):
            engine.backward(JOB.loss(engine, 0, 0))
            engine.step()
            if interrupted:
                go.clear()
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    testing.replace(patch, "gradient.drain", stopped)
                    offload.safe_get_full_grad(next(iter(engine.module.parameters())))
            engine.backward(JOB.loss(engine, 0, 1))
            go.set()
            engine.step()
            engine.backward(JOB.loss(engine, 0, 2))
            engine.step()
        assert device.broken == [] and engine.global_steps == 1
        found.append((engine.get_global_grad_norm(), weights_of(engine)))
        engine.destroy(remove=True)
    assert found[0][0] == found[1][0]
    assert_same_tensors(found[0][1], found[1][1])


def stopped(*_: Any) -> None:
    raise KeyboardInterrupt
