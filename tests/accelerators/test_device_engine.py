"""On a device with an address space and late streams of its own, random plans keep every bit of the plain CPU run.

The engine is the one that runs on a GPU: `AcceleratorDevice`, its streams, events and pinned memory. What it would do
wrong shows as other bits, or as a read of device memory, which ends the process.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.engine.data import to_device
from offload.errors import BudgetError, UsageError
from offload.sizes import MIB
from offload.swapper.memory import device as device_choice
from offload.swapper.memory import device as torch_allocator
from offload.swapper.memory.device import TorchHostSide
from offload.swapper.memory.device_arena import DeviceArena
from tests import device
from tests.accelerators.test_device_streams import JOBS, Plan, draw
from tests.device import module
from tests.frozen.test_quantized_weights import KINDS, job_subclasses
from tests.support import models
from tests.support.frozen_blocks import dequantized
from tests.support.least_budget import budget
from tests.support.oracle import (
    PLACEMENTS,
    Job,
    Result,
    assert_same,
    assert_same_tensors,
    least_host_memory,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)

pytestmark = pytest.mark.test_device


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    device.set_total_memory(4 << 30)
    device.set_pin_limit(None)
    torch.accelerator.synchronize()
    torch.accelerator.memory.empty_cache()


def on_device(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> Result:
    engine = start(job, placement, folder, **options)
    try:
        assert engine.device.type == "test"
        return trained(engine, job)
    finally:
        engine.destroy(remove=True)


def check(plan: Plan, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    if plan.pieces:
        small_pieces(monkeypatch)
    expected = run(plan.job, ("none", "none"), folder / "plain", device="cpu")
    options = dict(plan.options)
    options |= budget(plan.job, plan.placement, "device_memory", plan.device, folder, **options)
    options |= budget(plan.job, plan.placement, "host_memory", plan.host, folder, **options)
    device.set_pin_limit(chance.choice([None, None, 0, 40 * MIB]))
    device.seed(seed, plan.lateness)
    before = device.counter(device.RUN)
    assert_same(expected, on_device(plan.job, plan.placement, folder / "late", **options), str(plan))
    assert device.counter(device.RUN) - before > 200


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_every_placement_keeps_every_bit(name: str, placement: tuple[str, str], tmp_path: Path) -> None:
    job = JOBS[name]._replace(steps=3, accumulation=2, dtype="bf16")
    expected = run(job, ("none", "none"), tmp_path / "plain", device="cpu")
    for seed, lateness in enumerate((0.5, 1.0)):
        device.seed(seed, lateness)
        options = {} if "none" in placement else {"device_memory": room_for(job, 2 + seed)}
        assert_same(expected, on_device(job, placement, tmp_path / str(seed), **options))


@pytest.mark.parametrize("integrated", [False, True])
def test_budgets_of_memory_that_the_host_shares_are_one_sum(
    integrated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "integrated", integrated)
    expected = run(models.GPT2, ("none", "none"), tmp_path / "plain", device="cpu")
    engine = start(models.GPT2, ("cpu", "cpu"), tmp_path / "shared")
    planned = engine.memory_report()["planned"]
    assert planned["host_budget"] == engine.host_memory
    assert planned["device_budget"] == (engine.device_memory if integrated else 0)
    assert any("(of one memory)" in line for line in engine.notices) == integrated
    assert_same(expected, trained(engine, models.GPT2))
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(24))
def test_a_random_plan_keeps_every_bit(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(draw(random.Random(seed)), seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1500))
def test_a_storm_of_random_plans(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(draw(random.Random(seed)), seed, tmp_path, monkeypatch)


@pytest.mark.sample(1)
@pytest.mark.parametrize("durability", ["none", "step"])
def test_what_lives_on_the_device_keeps_every_bit(durability: str, tmp_path: Path) -> None:
    """States on the device are copied to the host for their update: there are no kernels for this device."""
    job = JOBS["gpt2"]._replace(steps=3, accumulation=2, dtype="bf16")
    expected = run(job, ("none", "none"), tmp_path / "plain", device="cpu")
    device.seed(2, 0.9)
    options = {"device_memory": 16 * MIB, "durability": durability}
    assert_same(expected, on_device(job, ("none", "none"), tmp_path / "late", **options))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_with_the_least_host_memory_every_bit_is_kept(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients spill, and units come in pieces that are copied while the next are read."""
    small_pieces(monkeypatch)
    job = JOBS["gpt2"]._replace(steps=3, accumulation=2, dtype="bf16")
    expected = run(job, ("none", "none"), tmp_path / "plain", device="cpu")
    least = least_host_memory(job, tmp_path / "least")
    device.seed(seed, 1.0 if seed == 3 else 0.9)
    assert_same(expected, on_device(job, ("nvme", "nvme"), tmp_path / "late", host_memory=least))


def test_an_accelerator_of_which_only_torch_is_known_keeps_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(device_choice.HOST_SIDES, device.NAME, TorchHostSide)
    device_choice.open_device.cache_clear()
    job = JOBS["gpt2"]._replace(steps=3, accumulation=2, dtype="bf16")
    expected = run(job, ("none", "none"), tmp_path / "plain", device="cpu")
    device.seed(1, 0.9)
    assert_same(expected, on_device(job, ("nvme", "nvme"), tmp_path / "late", device_memory=room_for(job, 2)))
    device_choice.open_device.cache_clear()


def test_a_batch_in_pinned_memory_of_the_caller_may_be_refilled_after_the_call() -> None:
    device.seed(0, 1.0)
    batch = models.tokens(0, 0).pin_memory()
    expected = batch.clone()
    moved = to_device({"ids": batch}, torch.device("test"))
    batch.zero_()
    assert torch.equal(moved["ids"].cpu(), expected)


def test_memory_is_unpinned_when_the_copies_out_of_it_have_ended() -> None:
    device.seed(0, 1.0)
    accelerator = device_choice.open_device(torch.device("test", 0))
    source = torch.frombuffer(accelerator.allocate_host(8192).buffer, dtype=torch.uint8).fill_(3)
    assert accelerator.register([source]) == (8192,)
    there = accelerator.allocate(8192)
    accelerator.upload(there, source)
    accelerator.unregister([source])
    source.fill_(4)
    torch.accelerator.synchronize()
    assert there.cpu().unique().tolist() == [3]


@pytest.mark.parametrize("kept", [False, True])
def test_memory_of_the_arena_is_not_written_before_compute_that_still_reads_it(kept: bool) -> None:
    """torch hands out memory that was freed while compute that reads it is queued."""
    device.seed(0, 1.0)
    accelerator = device_choice.open_device(torch.device("test", 0))
    source = torch.frombuffer(accelerator.allocate_host(4 * MIB).buffer, dtype=torch.uint8).fill_(3)
    freed = torch.ones(4 * MIB, dtype=torch.uint8, device="test")
    accelerator.synchronize()
    address, total = freed.data_ptr(), freed.sum()
    del freed
    arena = DeviceArena(4 * MIB, accelerator)
    assert arena.blocks[0][1].data_ptr() == address, "or this shows nothing"
    if kept:
        accelerator.copy(arena.keep(4 * MIB), source)
    else:
        buffer = arena.take_at(0, 4 * MIB)
        accelerator.upload(arena.view(buffer), source, buffer.after).wait()
    assert total.item() == 4 * MIB and arena.blocks[0][1].cpu().unique().tolist() == [3]


def test_the_counters_and_the_figures_of_torchs_allocator_are_the_devices(tmp_path: Path) -> None:
    where = torch.device("test", 0)
    before = torch_allocator.shortages(where)
    engine = start(models.GPT2, ("cpu", "cpu"), tmp_path)
    train_step(engine, models.GPT2, 0)
    report = engine.memory_report()
    assert report["allocator"]["allocated"] == report["device"]["allocated"] == device.memory()["allocated"]
    assert 0 < report["device"]["arena"] <= report["device"]["allocated"]
    assert "torch's allocator: " in str(report)
    engine.destroy(remove=True)
    device.set_total_memory(max(device.memory()["reserved"], MIB))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, dtype=torch.uint8, device="test")
    assert torch_allocator.shortages(where) == (before.retries + 1, before.errors + 1)


class Wide(nn.Module):
    """Layers so large that what the arena grows by is a segment of its own in torch's allocator: 10 MiB or more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(10))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def wide_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    batch = torch.randn(2, 1024, generator=torch.Generator().manual_seed(step * 10 + micro))
    return model(batch.to("cpu" if isinstance(model, nn.Module) else model.device)).float().square().mean()


def test_a_step_whose_backward_ran_out_of_memory_is_repeated_with_the_same_bits(tmp_path: Path) -> None:
    """In torch's own allocator. The memory that the arena had grown into is what the repetition needs."""
    job = Job(Wide, wide_loss, steps=3, accumulation=2, dtype="bf16")
    expected = run(job, ("none", "none"), tmp_path / "plain", device="cpu")
    device.set_total_memory(360 * MIB)  # 256 of them stay free, and what torch keeps differs between runs
    device.seed(4, 0.9)
    engine = start(job, ("cpu", "cpu"), tmp_path / "late")
    at_first = engine.device_memory
    losses = [train_step(engine, job, 0)]
    grown, sizes = engine.device_memory, list[int]()
    assert grown > at_first

    def hungry(gradient: torch.Tensor) -> None:
        """Needs a little more than what is free beside the arena that has grown."""
        if not sizes:
            torch.accelerator.memory.empty_cache()
            sizes.append(module.mem_get_info()[0] + 4096)
        torch.empty(sizes[0], dtype=torch.uint8, device=engine.device)

    def watch(block: Any, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(hungry)

    def micro_batch(number: int) -> torch.Tensor:
        loss = job.loss(engine, 1, number)
        engine.backward(loss)
        engine.step()
        return loss.detach().float() / 2

    micro_batch(0)
    hook = engine.module.layers[2].register_forward_hook(watch)
    with pytest.raises(torch.OutOfMemoryError, match=r"gives back .* stay in the step\. Call zero_grad\(\)"):
        micro_batch(1)
    assert engine.device_memory == grown
    engine.zero_grad()
    assert engine.device_memory == at_first
    losses.append(float(micro_batch(0) + micro_batch(1)))
    hook.remove()
    losses.append(train_step(engine, job, 2))
    assert losses == expected.losses
    assert_same_tensors(expected.weights, weights_of(engine))
    engine.destroy(remove=True)


def test_what_gathered_does_not_find_room_for_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    """All memory is taken twice: by the parameters themselves, and by what the user makes of them in the block."""
    job = Job(Wide, wide_loss, steps=2, dtype="bf16")
    expected = run(job, ("none", "none"), tmp_path / "plain", device="cpu")
    engine = start(job, ("cpu", "cpu"), tmp_path / "late", device_memory=8 * MIB)
    losses = [train_step(engine, job, 0)]
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    torch.accelerator.synchronize()
    torch.accelerator.memory.empty_cache()
    device.set_total_memory(device.memory()["reserved"] + 11 * MIB)  # the weights take 20
    for modify in (False, True):
        words = (
            r"20 gathered parameters would take 20\.0 MiB .* less is free: gather fewer at a time, or lower device_m"
        )
        with pytest.raises(BudgetError, match=words):
            offload.gathered(engine.module, modify=modify).__enter__()
    last = engine.module.layers[9]
    with offload.gathered(last, modify=True), torch.no_grad():
        last.weight.mul_(2)
        last.bias.mul_(2)
        taken = []
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(2 * MIB, dtype=torch.uint8, device="test"))
    del taken
    doubled = {name: 2 * value if name.startswith("layers.9") else value for name, value in before.items()}
    assert_same_tensors(doubled, engine.module.state_dict())
    with offload.gathered(last, modify=True), torch.no_grad():
        last.weight.div_(2)
        last.bias.div_(2)
    losses.append(train_step(engine, job, 1))
    assert losses == expected.losses
    engine.destroy(remove=True)


def test_a_capture_of_a_graph_is_refused_at_each_call_before_it_changes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.GPT2._replace(steps=2)
    expected = run(job, ("none", "none"), tmp_path / "plain", device="cpu")
    engine = start(job, ("cpu", "cpu"), tmp_path / "late")

    def refused(call: Callable[[], Any]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "capturing", True)
            with pytest.raises(UsageError, match="graph cannot be captured"):
                call()

    losses = []
    for step in range(job.steps):
        refused(lambda step=step: job.loss(engine, step, 0))
        loss = job.loss(engine, step, 0)
        refused(lambda loss=loss: engine.backward(loss))
        refused(loss.backward)
        engine.backward(loss)
        refused(engine.optimizer.step if step else engine.step)
        refused(engine.zero_grad)
        refused(next(engine.module.parameters()).sum)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses == expected.losses
    assert_same_tensors(expected.weights, weights_of(engine))
    engine.destroy(remove=True)


@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("none", "none")], ids=str)
def test_destroy_frees_the_devices_memory_at_once(placement: tuple[str, str], tmp_path: Path) -> None:
    """An engine is a part of reference cycles, which Python finds when it likes; another engine needs the memory."""
    gc.collect()
    gc.disable()
    try:
        before = module.memory_allocated()
        engine = start(JOBS["gpt2"]._replace(accumulation=2), placement, tmp_path)
        train_step(engine, JOBS["gpt2"]._replace(accumulation=2), 0)
        assert module.memory_allocated() - before > engine.device_memory // 2
        engine.destroy(remove=True)
        assert module.memory_allocated() - before < 64 << 10
    finally:
        gc.enable()


# -- frozen weights that are stored as codes ----------------------------------------------------------

CODED = models.LORA._replace(dtype="bf16", steps=3, accumulation=2)


@pytest.mark.sample(1)
@pytest.mark.works("Frozen weights in 4 and 8 bits", "a device with streams of its own (that of the tests)", "right")
@pytest.mark.parametrize("placement", [("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme")], ids=str)
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_blocks_of_frozen_weights_keep_every_bit(form: str, placement: tuple[str, str], tmp_path: Path) -> None:
    expected = run(dequantized(CODED, form), ("none", "none"), tmp_path / "values", device="cpu")
    for seed, lateness in enumerate((0.5, 1.0)):
        device.seed(seed, lateness)
        options = {"device_memory": 2 * room_for(CODED, 2 + seed)}
        assert_same(expected, on_device(CODED, placement, tmp_path / str(seed), frozen=form, **options))


def test_blocks_of_frozen_weights_are_streamed_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(dequantized(CODED, "nf4"), ("none", "none"), tmp_path / "values", device="cpu")
    small_pieces(monkeypatch)
    device.seed(3, 0.95)
    result = on_device(CODED, ("nvme", "nvme"), tmp_path / "late", frozen="nf4", host_memory="3MiB")
    assert_same(expected, result)


@pytest.mark.sample(1)
@pytest.mark.works(
    "Weights that another library has quantized", "a device with streams of its own (that of the tests)", "right"
)
@pytest.mark.parametrize("placement", [("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme")], ids=str)
@pytest.mark.parametrize("kind", ["wrapper", "wrapper of a wrapper", "parameters of integers"])
def test_weights_of_other_libraries_keep_every_bit(kind: str, placement: tuple[str, str], tmp_path: Path) -> None:
    """And come back in their format, which these wrappers lose when they are moved as a whole."""
    job = job_subclasses(KINDS[kind])._replace(accumulation=2)
    expected = run(job, ("none", "none"), tmp_path / "memory", device="cpu")
    for seed, lateness in enumerate((0.5, 1.0)):
        device.seed(seed, lateness)
        # Room for all where weights are on the device; else for two or three units of six.
        options = {} if placement[0] == "none" else {"device_memory": (60 + 24 * seed) << 10}
        result = on_device(job, placement, tmp_path / str(seed), **options)
        assert (expected.losses, expected.norms) == (result.losses, result.norms)
    torch.manual_seed(job.seed)
    stored, engine = job.model().state_dict(), start(job, placement, tmp_path)
    for name, value in engine.module.state_dict().items():
        assert type(value) is type(stored[name]) and value.device.type == "cpu"
        assert torch.equal(value * 1, stored[name] * 1), name
    engine.destroy(remove=True)
