"""The device's memory has a fixed order of needs: it grows, is given back, and its end names the settings to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import offload
from offload import testing
from offload.errors import BudgetError, UsageError
from offload.layout.placement import ArenaHistory, DeviceNeed, growth, next_growth
from offload.sizes import GIB, MIB, PAGE, format_size
from offload.swapper.memory.device import DONE, AcceleratorDevice, CudaHostSide, Device, DeviceRoom, Shortages
from offload.swapper.memory.device_arena import DeviceArena
from tests.support import models
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.oracle import (
    Job,
    accumulated_step,
    assert_same,
    assert_same_tensors,
    room_for,
    run,
    start,
    train_step,
    trained,
    weights_of,
)


class SmallDevice(LateDevice):
    """A device of `total` bytes, with the counters of torch's allocator.

    Its arena is counted for as long as the memory is referenced; activations are what `need` says.
    """

    def __init__(self, total: int, seed: int = 0, lateness: float = 0.5) -> None:
        super().__init__(seed, lateness)
        self.total, self.emptied = total, 0
        self._kept = 0
        self._arena: list[tuple[StorageWeakRef, int]] = []
        self.counted = Shortages(0, 0)
        self.uncounted = False
        """True for a device whose allocator counts nothing."""

    @property
    def arena(self) -> int:
        """Bytes of all arenas that are referenced."""
        self._arena = [each for each in self._arena if not each[0].expired()]
        return sum(nbytes for _, nbytes in self._arena)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.total - self.arena:
            raise torch.OutOfMemoryError("CUDA out of memory: the arena")
        memory = super().allocate(nbytes)
        self._arena.append((StorageWeakRef(memory.untyped_storage()), nbytes))
        return memory

    def room(self) -> DeviceRoom:
        return DeviceRoom(max(self.total - self.arena - self._kept, 0), self._kept)

    def need(self, nbytes: int) -> None:
        """Allocates and frees activations of `nbytes`."""
        if nbytes > self.total - self.arena:
            retries, errors = self.counted
            self.counted = self.counted if self.uncounted else Shortages(retries + 1, errors + 1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        self._kept = max(self._kept, nbytes)

    def retry(self) -> None:
        """Counts an allocation for which torch freed its cache."""
        self.counted = self.counted._replace(retries=self.counted.retries + 1)

    def empty_cache(self) -> None:
        self.emptied += 1
        self._kept = 0


def use_small_device(monkeypatch: pytest.MonkeyPatch, device: SmallDevice, always: bool = True) -> None:
    """Engines made from now on use this device and its counters; `always` as in `use_device`."""
    use_device(monkeypatch, device, always)
    testing.replace(monkeypatch, "device.shortages", lambda _: device.counted)
    testing.replace(monkeypatch, "device.empty_cache", lambda _: device.empty_cache())


class Hungry:
    """The appetite of a module: the bytes of activations that its forward, or its backward, needs."""

    def __init__(self, device: SmallDevice, module: nn.Module) -> None:
        self._device = device
        self.forward = self.backward = 0
        self.calls = 0
        module.register_forward_hook(self._run)

    def _run(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.calls += 1
        self._device.need(self.forward)
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(self._unrun)

    def _unrun(self, gradient: torch.Tensor) -> None:
        self._device.need(self.backward)


TOTAL = 300 * MIB
"""Of a device: 256 MiB of it are always left free."""
JOB = models.GPT2._replace(steps=16)
CALM = 8

Made = tuple[offload.Engine, SmallDevice, Hungry]


def small(
    patch: pytest.MonkeyPatch,
    folder: Path,
    job: Job = JOB,
    placement: tuple[str, str] = ("cpu", "cpu"),
    always: bool = True,
    **options: Any,
) -> Made:
    """Returns an engine on a small device, with a module that is hungry in the middle of the model."""
    device = SmallDevice(TOTAL)
    use_small_device(patch, device, always)
    engine = start(job, placement, folder, **options)
    module = next(child for name, child in engine.module.named_modules() if name.endswith("h.1") or name == "body")
    return engine, device, Hungry(device, module)


def grown(made: Made, job: Job = JOB) -> list[float]:
    """Trains the first step, after which the arena has grown, and returns its loss."""
    engine, device, _ = made
    before = engine.device_memory
    losses = [train_step(engine, job, 0)]
    assert engine.device_memory > before and device.arena == engine.device_memory
    return losses


def too_much(made: Made) -> int:
    """Returns bytes of activations that fit beside the arena of the start alone."""
    engine, device, _ = made
    return device.total - testing.inspect(engine).device_arena.blocks[0][1].numel()


sizes = st.integers(0, 80 * GIB // PAGE).map(lambda pages: pages * PAGE)

GPT2 = models.GPT2


def full(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def in_forward(engine: Any) -> None:
    hook = engine.module.transformer.h[1].register_forward_pre_hook(full)
    try:
        GPT2.loss(engine, 0, 0)
    finally:
        hook.remove()


def in_backward(engine: Any) -> None:
    hook = engine.module.transformer.h[1].ln_1.weight.register_hook(full)
    try:
        engine.backward(GPT2.loss(engine, 0, 0))
    finally:
        hook.remove()


def in_the_move_of_the_batch(engine: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "device.inputs", full)
        GPT2.loss(engine, 0, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("act", [in_the_move_of_the_batch, in_forward, in_backward])
def test_an_out_of_memory_error_names_the_settings_to_change(act: Callable[[Any], None], tmp_path: Path) -> None:
    engine = start(GPT2, ("nvme", "nvme"), tmp_path)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried") as caught:
        act(engine)
    assert len(caught.value.args) == 1, "accelerate looks for its words in the only argument"
    for message in ("smaller micro-batches", '"activations": "auto"', '"device_memory" in the "offload" block'):
        assert message in str(caught.value)
    least = int(re.findall(r"least that works is [^(]*\((\d+) bytes\)", str(caught.value))[0])
    assert 0 < least < engine.device_memory
    train_step(engine, GPT2, 0)
    engine.destroy(remove=True)
    engine = start(GPT2, ("nvme", "nvme"), tmp_path, device_memory=least)
    with pytest.raises(torch.OutOfMemoryError, match="smaller micro-batches") as caught:
        act(engine)
    assert "device_memory" not in str(caught.value), "it is the least already"
    train_step(engine, GPT2, 0)
    engine.destroy(remove=True)
    with pytest.raises(BudgetError, match="device_memory"):
        start(GPT2, ("nvme", "nvme"), tmp_path, device_memory=least - 4096)


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "fraction", "expected"),
    [
        (20, 0, 0, 1.0, (20, 0)),
        (10, 12, 2, 1.0, (10, 10)),  # torch keeps 10 that nobody uses
        (70, 10, 4, 0.3, (14, 6)),  # the user has limited the process to 24 of 80
        (70, 30, 30, 0.3, (0, 0)),
    ],
)
def test_what_is_free_is_what_this_process_may_allocate(
    free: int,
    reserved: int,
    allocated: int,
    fraction: float,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {
        "mem_get_info": (free * GIB, 80 * GIB),
        "memory_reserved": reserved * GIB,
        "memory_allocated": allocated * GIB,
        "get_per_process_memory_fraction": fraction,
    }
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(torch, "Stream", lambda _: None)
    device = AcceleratorDevice(torch.device("cuda", 0), CudaHostSide(torch.device("cuda", 0)))
    assert device.room() == pytest.approx([each * GIB for each in expected], abs=1)
    assert device.free_bytes() == sum(device.room())


@pytest.mark.parametrize("integrated", [0, 1])
def test_a_gpu_says_whether_its_memory_is_the_hosts(integrated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run then leaves a fifth of the memory to it."""
    about = SimpleNamespace(is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch, "Stream", lambda _: None)
    device = AcceleratorDevice(torch.device("cuda", 0), CudaHostSide(torch.device("cuda", 0)))
    assert device.unified == bool(integrated) and not Device(torch.device("cpu")).unified


NEED = DeviceNeed(least=GIB, most=10 * GIB, unit=GIB, weights=10 * GIB)


@pytest.mark.parametrize(
    ("nbytes", "room", "more"),
    [
        (3 * GIB, (100 * GIB, 0), 7 * GIB),  # no more than all units need
        (3 * GIB, (5 * GIB, 4 * GIB), 3 * GIB - 256 * MIB),  # half of what activations took stays free
        (3 * GIB, (GIB + 255 * MIB, 0), 0),  # no unit would fit
        (3 * GIB, (GIB, 20 * GIB), 0),
        (10 * GIB, (100 * GIB, 0), 0),
        (3 * GIB, (0, 0), 0),
    ],
)
def test_the_arena_grows_into_what_the_first_step_has_left_free(nbytes: int, room: tuple[int, int], more: int) -> None:
    assert growth(nbytes, NEED, DeviceRoom(*room)) == more


def test_beyond_all_weights_the_arena_grows_by_complete_gradient_totals() -> None:
    need = replace(NEED, most=14 * GIB, totals=((3, GIB), (1, 2 * GIB), (2, GIB)))
    for free, more in ((8 * GIB, 7), (9 * GIB, 8), (10 * GIB, 9), (10.5 * GIB, 10), (100 * GIB, 11)):
        assert growth(3 * GIB, need, DeviceRoom(int(free), 0)) == more * GIB
    assert growth(3 * GIB, need, DeviceRoom(11 * GIB, 3 * GIB)) == 7 * GIB, "as much as activations took stays free"
    nothing_moves = DeviceNeed(least=GIB, most=3 * GIB, unit=0, weights=GIB, totals=((0, 2 * GIB),))
    assert growth(GIB, nothing_moves, DeviceRoom(2 * GIB, 0)) == 0
    assert growth(GIB, nothing_moves, DeviceRoom(3 * GIB, 0)) == 2 * GIB


def test_an_arena_that_has_grown_changes_no_bit_and_uploads_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = models.GPT2._replace(steps=4)
    results, uploads, sizes = {}, {}, {}
    for free in (0, GIB):
        device = LateDevice(0, 0.9)
        device.spare = DeviceRoom(free, 0)
        with monkeypatch.context() as patch, caplog.at_level("INFO", "offload"):
            use_device(patch, device)
            engine = start(job, ("cpu", "cpu"), tmp_path)
            at_first = engine.device_memory
            with Ticks(device):
                results[free] = trained(engine, job)
            uploads[free], sizes[free] = device.copies - device.downloads, engine.device_memory
            assert str(engine.memory_report())
            engine.destroy(remove=True)
        assert device.broken == [] and sizes[0] == at_first
    assert_same(results[0], results[GIB])
    assert sizes[GIB] > sizes[0] and uploads[GIB] < uploads[0]
    assert f"device memory grows from {format_size(sizes[0])} to {format_size(sizes[GIB])}" in caplog.text


def test_what_comes_into_grown_memory_waits_for_compute_that_was_under_way() -> None:
    """torch may have had it for an activation that a kernel still reads."""
    device = LateDevice(0, 1.0)
    arena = DeviceArena(PAGE, device)
    device.tick([], [])
    start, stop = arena.grow(2 * PAGE)
    block = arena.take_at(start, stop - start)
    assert [event.done() for event in block.after] == [False]
    arena.give(block, DONE, DONE)
    block.after[0].wait()
    assert arena.take_at(start, PAGE).after == ()


def test_where_another_takes_the_memory_first_it_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice(0, 0.0)
    device.spare = DeviceRoom(GIB, 0)
    use_device(monkeypatch, device)
    engine = start(GPT2, ("cpu", "cpu"), tmp_path)
    before = engine.device_memory
    testing.replace(monkeypatch, "device.allocate", refused)
    train_step(engine, GPT2, 0)
    train_step(engine, GPT2, 1)
    assert engine.device_memory == before
    engine.destroy(remove=True)


def refused(*_: Any) -> Any:
    raise BudgetError("somebody has it")


def test_the_user_may_ask_for_it_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine, device, _ = small(monkeypatch, tmp_path)
    assert engine.empty_partition_cache() == 0 and device.emptied == 1, "torch's own cache goes all the same"
    at_first = engine.device_memory
    grown(made)
    more = engine.device_memory - at_first
    with caplog.at_level("INFO", "offload"):
        assert engine.empty_partition_cache() == more
    assert "as asked: the engine gives back" in caplog.text
    assert engine.device_memory == device.arena == at_first and engine.empty_partition_cache() == 0
    assert str(engine.memory_report())
    refused: list[str] = []

    def ask(*_: Any) -> None:
        with pytest.raises(UsageError, match="between steps"):
            engine.empty_partition_cache()
        refused.append("")

    hook = engine.module.transformer.h[0].register_forward_hook(ask)
    train_step(engine, JOB, 1)
    hook.remove()
    assert refused
    engine.destroy(remove=True)


def test_the_arena_grows_again_after_calm_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOB._replace(steps=12)
    expected = run(job, ("none", "none"), tmp_path / "plain")
    engine, device, _ = small(monkeypatch, tmp_path)
    at_first = engine.device_memory
    sizes, losses = [], []
    with Ticks(device):
        for step in range(job.steps):
            losses.append(train_step(engine, job, step))
            sizes.append(engine.device_memory)
            if step == 2:
                engine.empty_partition_cache()
    more = sizes[0]
    assert sizes == [more] * 3 + [at_first] * (CALM - 1) + [more] * (job.steps - CALM - 2) and more > at_first
    assert losses == expected.losses and device.broken == []
    assert_same_tensors(expected.weights, weights_of(engine))
    engine.destroy(remove=True)


def test_a_budget_of_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, device, hungry = small(monkeypatch, tmp_path, device_memory=8 * MIB)
    before = engine.device_memory
    train_step(engine, JOB, 0)
    hungry.forward = device.total
    with pytest.raises(torch.OutOfMemoryError, match="smaller micro-batches"):
        JOB.loss(engine, 1, 0)
    hungry.forward = 0
    train_step(engine, JOB, 1)
    assert engine.device_memory == before and engine.empty_partition_cache() == 0
    engine.destroy(remove=True)


def test_a_run_sees_few_shortages_whatever_its_batches_are() -> None:
    """The arena of 80 GiB grows after each calm time, and each time a longer batch comes that has no room."""
    total, need = 80 * GIB, DeviceNeed(least=GIB, most=79 * GIB, unit=256 * MIB, weights=79 * GIB)
    history, arena, beside = ArenaHistory(), GIB, list[int]()
    for _ in range(10_000):
        history = history.after_step()
        room = DeviceRoom(total - arena - 10 * MIB, 10 * MIB)
        more = next_growth(arena, need, room, history)
        if history.wait == 0:
            history = history.after_growth(more, room)
        arena += more
        if history.grown:
            beside.append(history.beside)
            history = history.after_return(DeviceRoom(total - arena, 0), short=True)
            arena = GIB
    assert 3 < len(beside) < 16
    assert all(later >= 1.5 * before for before, later in pairwise(beside))


@given(sizes, sizes, sizes, sizes, sizes, st.lists(st.tuples(st.integers(0, 9), sizes), max_size=4))
def test_growth_leaves_room_for_the_largest_need_that_is_known(
    nbytes: int, most: int, free: int, kept: int, peak: int, totals: list[tuple[int, int]]
) -> None:
    need = DeviceNeed(least=0, most=nbytes + most, unit=PAGE, weights=nbytes + most // 2, totals=tuple(totals))
    room = DeviceRoom(free, kept)
    more = next_growth(nbytes, need, room, ArenaHistory(peak=peak, wait=0))
    assert 0 <= more <= max(free, 0)
    if more:
        assert free + kept - more >= 1.5 * max(peak, kept) - PAGE
    assert next_growth(nbytes, need, room, ArenaHistory(wait=0)) == growth(nbytes, need, room), "the first, as planned"
    assert next_growth(nbytes, need, room, ArenaHistory(peak=peak, wait=1)) == 0
    assert next_growth(nbytes, need, room, ArenaHistory(peak=peak, wait=None)) == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("job", [JOB, Job(models.gpt2_dropout, models.language_loss)], ids=["plain", "dropout"])
@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme"), ("none", "cpu")], ids="-".join)
def test_a_forward_that_does_not_fit_is_repeated_with_more_memory_and_the_same_bits(
    placement: tuple[str, str], job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    job = job._replace(steps=4)
    expected = run(job, ("none", "none"), tmp_path / "plain")
    made = engine, device, hungry = small(monkeypatch, tmp_path, job, placement)
    at_first = engine.device_memory
    with Ticks(device):
        losses = [train_step(engine, job, 0)]
        after = engine.device_memory
        assert (after > at_first) == (placement[0] != "none")
        for step in range(1, job.steps):
            hungry.forward = too_much(made) if step == 2 and placement[0] != "none" else 0
            losses.append(train_step(engine, job, step))
    assert losses == expected.losses and device.broken == []
    assert_same_tensors(expected.weights, weights_of(engine))
    if placement[0] != "none":
        assert engine.device_memory == device.arena == at_first
        lines = [r.getMessage() for r in caplog.records if "gives back" in r.getMessage()]
        assert len(lines) == 1 and "a forward, which runs once more" in lines[0]
        assert hungry.calls == job.steps + 1
    engine.destroy(remove=True)


def test_a_forward_that_fits_nowhere_fails_after_one_repetition_with_the_old_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine, device, hungry = small(monkeypatch, tmp_path)
    grown(made)
    hungry.calls, hungry.forward = 0, device.total
    with pytest.raises(torch.OutOfMemoryError, match=r"smaller micro-batches.*expandable_segments:True") as caught:
        train_step(engine, JOB, 1)
    assert hungry.calls == 2 and len(caught.value.args) == 1
    engine.destroy(remove=True)


class Counting(nn.Module):
    """A model with a buffer, or other things, that its forward changes."""

    def __init__(self, changes: str) -> None:
        super().__init__()
        self.changes = changes
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.body = nn.BatchNorm1d(64) if changes == "running statistics" else nn.Identity()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: Any, cache: Any = None) -> torch.Tensor:
        if self.changes == "a buffer":
            self.seen += 1
        if self.changes == "another buffer":
            self.seen = self.seen + 1
        if self.changes == "an input":
            batch += 1
        if self.changes in ("a list", "an object"):
            cache.append(batch)
        for layer in self.layers[:3]:
            batch = layer(batch)
        batch = self.body(batch)
        for layer in self.layers[3:]:
            batch = layer(batch)
        return batch.square().mean()


class Cache:
    def __init__(self) -> None:
        self.append = [].append


def counting_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + micro))
    changes = model.module.changes
    given: list[Any] = (
        [batch, [] if changes == "a list" else Cache()] if changes in ("a list", "an object") else [batch]
    )
    return model(*given)  # type: ignore[no-any-return]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes", ["nothing", "a buffer", "another buffer", "running statistics", "an input", "a list", "an object"]
)
def test_a_forward_that_has_changed_something_is_not_repeated_but_the_next_one_fits(
    changes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(lambda: Counting(changes), counting_loss)
    made = engine, _, hungry = small(monkeypatch, tmp_path, job)
    grown(made, job)
    hungry.calls, hungry.forward = 0, too_much(made)
    if changes == "nothing":
        train_step(engine, job, 1)
        assert hungry.calls == 2
    else:
        before = engine.device_memory
        with pytest.raises(torch.OutOfMemoryError, match=r"gives back .* with its next call.*expandable_segments"):
            train_step(engine, job, 1)
        assert hungry.calls == 1
        train_step(engine, job, 1)
        assert engine.device_memory < before
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("uncounted", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_backward_that_does_not_fit_fails_and_its_repetition_fits(
    accumulation: int, uncounted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With totals of gradients in grown memory, in the middle of a step, too."""
    job = JOB._replace(accumulation=accumulation, steps=4, dtype="bf16" if accumulation > 1 else "fp32")
    expected = run(job, ("none", "none"), tmp_path / "plain")
    made = engine, device, hungry = small(monkeypatch, tmp_path, job)
    device.uncounted = uncounted
    at_first = engine.device_memory
    with Ticks(device):
        losses = grown(made, job)
        for step in range(1, job.steps):
            if step == 2:
                for micro in range(accumulation):
                    loss = job.loss(engine, step, micro)
                    hungry.backward = too_much(made) if micro == accumulation - 1 else 0
                    if hungry.backward:
                        with pytest.raises(torch.OutOfMemoryError, match=r"gives back .* with its next call"):
                            engine.backward(loss)
                        del loss
                    else:
                        engine.backward(loss)
                        engine.step()
                engine.zero_grad()
                assert engine.device_memory == device.arena == at_first
            losses.append(train_step(engine, job, step))
    assert losses == expected.losses and device.broken == []
    assert_same_tensors(expected.weights, weights_of(engine))
    engine.destroy(remove=True)


def test_totals_on_the_device_survive_memory_that_is_given_back_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOB._replace(accumulation=3, steps=4, dtype="bf16")
    expected = run(job, ("none", "none"), tmp_path / "plain")
    made = engine, device, hungry = small(monkeypatch, tmp_path, job)
    with Ticks(device):
        losses, norms = grown(made, job), [engine.get_global_grad_norm()]
        for step in range(1, job.steps):
            total = torch.zeros(())
            for micro in range(3):
                hungry.forward = too_much(made) if (step, micro) == (2, 1) else 0
                if hungry.forward:
                    assert testing.inspect(engine).gradient_totals, "there is something to lose"
                part = job.loss(engine, step, micro)
                engine.backward(part)
                total = total + part.detach().float() / 3
                engine.step()
            losses.append(float(total))
            norms.append(engine.get_global_grad_norm())
    assert losses == expected.losses and norms == expected.norms and device.broken == []
    assert_same_tensors(expected.weights, weights_of(engine))
    engine.destroy(remove=True)


TURNS = JOB._replace(accumulation=3, steps=4)


def test_micro_batches_that_take_turns_have_the_memory_that_a_grown_arena_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps before show one micro-batch's activations alone: a loop of calls, and the schedule's own trial."""
    expected = run(TURNS, ("none", "none"), tmp_path / "plain")
    made = engine, _, hungry = small(monkeypatch, tmp_path, TURNS, always=False, schedule="layer_major")
    losses = grown(made, TURNS)
    losses.append(accumulated_step(engine, TURNS, 1))
    assert engine.device_memory > (at_first := testing.inspect(engine).device_arena.blocks[0][1].numel())
    hungry.forward = too_much(made)
    losses.append(accumulated_step(engine, TURNS, 2))
    assert engine.device_memory == at_first and engine.schedule == "layer_major"
    losses.append(accumulated_step(engine, TURNS, 3))
    assert losses == expected.losses
    assert_same_tensors(expected.weights, weights_of(engine))
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fits", [True, False])
def test_beside_weights_that_stay_the_first_step_shows_whether_micro_batches_may_take_turns(
    fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(TURNS, ("none", "none"), tmp_path / "plain")
    device = SmallDevice(TOTAL)
    use_small_device(monkeypatch, device, always=False)

    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        device.need(device.total // (4 if fits else 2))
        return TURNS.loss(model, step, micro)

    # No byte beyond the weights, so that no total of gradients has room there.
    engine = start(TURNS, ("none", "cpu"), tmp_path, device_memory=room_for(TURNS, 99))
    assert engine.schedule == "layer_major"
    losses, sent = [], []
    with caplog.at_level("INFO", "offload"):
        for step in range(TURNS.steps):
            before = device.downloaded
            losses.append(accumulated_step(engine, TURNS._replace(loss=loss), step))
            sent.append(device.downloaded - before)
    assert engine.schedule == ("layer_major" if fits else "micro_batch_major")
    assert sent[2] == sent[3] and (sent[0] > 2.9 * sent[2]) is fits, "three micro-batches send each gradient once"
    assert ("one after the other: activations of 3 micro-batches take 450.0 MiB" in caplog.text) is not fits
    assert losses == expected.losses
    assert_same_tensors(expected.weights, weights_of(engine))
    engine.destroy(remove=True)


def test_an_error_of_the_model_itself_is_found_in_torchs_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of `generate`, which calls the model and not the engine."""
    made = engine, device, hungry = small(monkeypatch, tmp_path)
    at_first = engine.device_memory
    grown(made)
    hungry.forward = too_much(made)
    with torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError):
            engine.module(torch.zeros(1, 4, dtype=torch.long))
        engine.module(torch.zeros(1, 4, dtype=torch.long))
    assert engine.device_memory == device.arena == at_first
    engine.destroy(remove=True)


def test_memory_comes_back_at_the_end_of_a_step_in_which_torch_freed_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    made = engine, device, _ = small(monkeypatch, tmp_path)
    at_first = engine.device_memory
    grown(made)
    loss = JOB.loss(engine, 1, 0)
    device.retry()
    engine.backward(loss)
    assert engine.device_memory > at_first, "in the middle of a step units would only come again"
    engine.step()
    assert engine.device_memory == device.arena == at_first
    assert "the last step was short of device memory" in caplog.text
    engine.destroy(remove=True)


def test_a_view_of_weights_in_use_delays_the_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine, device, _ = small(monkeypatch, tmp_path)
    at_first = engine.device_memory
    grown(made)
    held: list[torch.Tensor] = []
    blocks = engine.module.transformer.h
    hooks = [b.register_forward_hook(lambda m, *_: held.append(m.mlp.c_fc.weight.detach()[:1])) for b in blocks]
    engine(torch.zeros(1, 4, dtype=torch.long))
    for hook in hooks:
        hook.remove()
    more = engine.device_memory
    assert engine.empty_partition_cache() == 0 and engine.device_memory == more
    values = [each.clone() for each in held]
    engine(torch.zeros(1, 4, dtype=torch.long))
    assert all(torch.equal(a, b) for a, b in zip(values, held, strict=True))
    held.clear()
    engine(torch.zeros(1, 4, dtype=torch.long))
    assert engine.device_memory == device.arena == at_first
    engine.destroy(remove=True)


def test_memory_is_not_given_to_torch_before_copies_into_it_have_ended() -> None:
    """torch would use it at once for compute, which does not wait for the stream of uploads."""
    device = LateDevice(0, 1.0)
    arena = DeviceArena(PAGE, device)
    start, stop = arena.grow(2 * PAGE)
    block = arena.take_at(start, stop - start)
    assert arena.shrink() == 0, "somebody is in it"
    source = torch.ones(2 * PAGE, dtype=torch.uint8)
    copied = device.upload(arena.view(block), source)
    arena.give(block, copied, DONE)
    assert not copied.done() and arena.shrink() == 2 * PAGE and copied.done()
    assert arena.nbytes == PAGE and arena.shrink() == 0 and len(arena.blocks) == 1
    again, _ = arena.grow(PAGE)
    assert again > start and arena.take(PAGE) is not None
