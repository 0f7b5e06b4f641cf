"""The device's memory is used by a fixed order of needs, and its end is an error that names the settings to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import testing
from offload.errors import BudgetError
from offload.layout.placement import DeviceNeed, growth
from offload.sizes import GIB, MIB, PAGE, format_size
from offload.swapper.memory.device import DONE, AcceleratorDevice, CudaHostSide, DeviceRoom
from offload.swapper.memory.device_arena import DeviceArena
from tests.support import models
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.oracle import assert_same, start, train_step, trained

JOB = models.GPT2


def full(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def in_forward(engine: Any) -> None:
    hook = engine.module.transformer.h[1].register_forward_pre_hook(full)
    try:
        JOB.loss(engine, 0, 0)
    finally:
        hook.remove()


def in_backward(engine: Any) -> None:
    hook = engine.module.transformer.h[1].ln_1.weight.register_hook(full)
    try:
        engine.backward(JOB.loss(engine, 0, 0))
    finally:
        hook.remove()


def in_the_move_of_the_batch(engine: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "device.inputs", full)
        JOB.loss(engine, 0, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("act", [in_the_move_of_the_batch, in_forward, in_backward])
def test_an_out_of_memory_error_names_the_settings_to_change(act: Callable[[Any], None], tmp_path: Path) -> None:
    engine = start(JOB, ("nvme", "nvme"), tmp_path)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried") as caught:
        act(engine)
    assert len(caught.value.args) == 1, "accelerate looks for its words in the only argument"
    for message in ("smaller micro-batches", '"activations": "auto"', '"device_memory" in the "offload" block'):
        assert message in str(caught.value)
    least = int(re.findall(r"least that works is [^(]*\((\d+) bytes\)", str(caught.value))[0])
    assert 0 < least < engine.device_memory
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    engine = start(JOB, ("nvme", "nvme"), tmp_path, device_memory=least)
    with pytest.raises(torch.OutOfMemoryError, match="smaller micro-batches") as caught:
        act(engine)
    assert "device_memory" not in str(caught.value), "it is the least already"
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    with pytest.raises(BudgetError, match="device_memory"):
        start(JOB, ("nvme", "nvme"), tmp_path, device_memory=least - 4096)


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


def test_nothing_comes_and_goes_so_nothing_grows() -> None:
    assert growth(GIB, DeviceNeed(least=GIB, most=GIB, unit=0, weights=GIB), DeviceRoom(100 * GIB, 0)) == 0


def test_an_arena_that_has_grown_changes_no_bit_and_uploads_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = models.GPT2._replace(steps=4)
    found, uploads, sizes = {}, {}, {}
    for free in (0, GIB):
        device = LateDevice(0, 0.9)
        device.spare = DeviceRoom(free, 0)
        with monkeypatch.context() as patch, caplog.at_level("INFO", "offload"):
            use_device(patch, device)
            engine = start(job, ("cpu", "cpu"), tmp_path)
            at_first = engine.device_memory
            with Ticks(device):
                found[free] = trained(engine, job)
            uploads[free], sizes[free] = device.copies - device.downloads, engine.device_memory
            assert str(engine.memory_report())
            engine.destroy(remove=True)
        assert device.broken == [] and sizes[0] == at_first
    assert_same(found[0], found[GIB])
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
    engine = start(JOB, ("cpu", "cpu"), tmp_path)
    before = engine.device_memory
    testing.replace(monkeypatch, "device.allocate", refused)
    train_step(engine, JOB, 0)
    train_step(engine, JOB, 1)
    assert engine.device_memory == before
    engine.destroy(remove=True)


def refused(*_: Any) -> Any:
    raise BudgetError("somebody has it")
