"""Inputs of blocks take the device memory of a formula, host memory within its budget, and drives for the rest."""

from __future__ import annotations

import errno
import gc
import logging
import math
import random
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.activations.kept_inputs import _MOST_SHARED, HostBlocks, KeptInputs, Staging
from offload.aio import DirectFile
from offload.config import load_config
from offload.engine.micro_batches import PassSchedule
from offload.errors import BudgetError, IoError
from offload.sizes import MIB, PAGE
from offload.swapper.memory.device import Device
from offload.swapper.memory.host_arena import HostArena, HostMemory, process_memory
from tests import device
from tests.support.modules.checkpointed import JOB, WIDTH, batch, gives_back, kept, peak, running, stack, used
from tests.support.oracle import Job, config, least_host_memory, room_for, run, train_step

pytestmark = pytest.mark.test_device
AREA = "Activation checkpointing"
ROWS = 1024
INPUT = ROWS * WIDTH * 4
"""Bytes of a block's input, of its output, and of their gradients."""
WEIGHTS = (2 * 2 * WIDTH * WIDTH + 3 * WIDTH) * 4
"""Bytes of a block's gradients."""


def large_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, micro, (ROWS, WIDTH))).square().mean()
    return loss


def _deep(depth: int) -> Job:
    return JOB._replace(model=stack(depth), loss=large_loss)


# -- the device ---------------------------------------------------------------------------------------

FORWARD = 4 * INPUT
"""Of a block, beside its input: what `up` and `tanh` return, twice as wide each."""
BACKWARD = 7 * INPUT
"""Of a block, beside its input: what `tanh` has returned, its gradient and that of `up`, and that of the output."""


def _peaks(depth: int, folder: Path, **options: Any) -> tuple[int, int, dict[str, int]]:
    """Returns the most bytes of a forward and of its step, beside what is there before, and of inputs by tier."""
    job = _deep(depth)
    with running(job, folder, ("cpu", "cpu"), device_memory=room_for(job, 2), **options) as engine:
        train_step(engine, job, 0)
        gc.collect()
        torch.accelerator.synchronize()
        before = device.memory()["allocated"]
        device.reset_peak_memory()
        loss = job.loss(engine, 1, 0)
        forward = device.memory()["max_allocated"] - before
        engine.backward(loss)
        del loss
        whole = device.memory()["max_allocated"] - before
        engine.step()
        return forward, whole, peak(engine)


@pytest.mark.sample(1)
@pytest.mark.parametrize("lateness", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("depth", [4, 8])
def test_inputs_that_stay_and_one_block_are_all_that_a_step_takes(depth: int, lateness: float, tmp_path: Path) -> None:
    device.seed(depth, lateness)
    forward, whole, _ = _peaks(depth, tmp_path, activations="device")
    inputs = (depth + 1) * INPUT  # with the batch
    assert forward == inputs + FORWARD
    assert 0 <= whole - inputs - BACKWARD <= WEIGHTS


@pytest.mark.sample(2)
@pytest.mark.works(AREA, "twice as many blocks with the same device memory: more of host memory or disk alone", "right")
@pytest.mark.parametrize("lateness", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_twice_the_depth_takes_host_memory_or_disk_alone(tier: str, lateness: float, tmp_path: Path) -> None:
    device.seed(3, lateness)
    found = {depth: _peaks(depth, tmp_path / str(depth), activations=tier) for depth in (8, 16)}
    for forward, whole, inputs in found.values():
        # The newest, the one before it, which is being copied, and the batch.
        assert forward == 3 * INPUT + FORWARD
        # The one in use, the next, which is being copied, and the batch. Gradients of three blocks may be leaving.
        assert whole <= 3 * INPUT + BACKWARD + 3 * WEIGHTS
        assert inputs["device"] == 2 * INPUT
    more = {name: found[16][2][name] - found[8][2][name] for name in ("host", "disk")}
    assert more == {"host": 8 * INPUT, "disk": 0} if tier == "cpu" else {"host": 0, "disk": 8 * INPUT}


def test_auto_leaves_inputs_on_a_device_with_room_and_moves_them_off_a_full_one(tmp_path: Path) -> None:
    job = _deep(60)
    with running(job, tmp_path / "room", ("cpu", "cpu"), device_memory=room_for(job, 2), activations="auto") as engine:
        train_step(engine, job, 0)
        assert peak(engine)["device"] == 60 * INPUT and peak(engine)["host"] == 0
    gc.collect()
    torch.accelerator.memory.empty_cache()
    device.set_total_memory(12 * MIB)
    try:
        with running(
            job, tmp_path / "full", ("cpu", "cpu"), device_memory=room_for(job, 2), activations="auto"
        ) as engine:
            train_step(engine, job, 0)
            assert 0 < peak(engine)["device"] < 60 * INPUT and peak(engine)["host"] > 0
    finally:
        device.set_total_memory(4 << 30)


# -- host memory --------------------------------------------------------------------------------------


def _watch(engine: offload.Engine) -> list[int]:
    """Notes the host memory of the process at every block's forward and recomputation."""
    taken: list[int] = []
    for block in engine.module.blocks:
        block.register_forward_hook(lambda *_: taken.append(process_memory().taken_bytes))
    return taken


@pytest.mark.sample(3)
@pytest.mark.works(AREA, "an explicit `host_memory`: inputs keep within it", "right")
@pytest.mark.parametrize("tier", ["cpu", "nvme", "auto"])
@pytest.mark.parametrize("memory", [None, 3 * MIB, 5 * INPUT])
def test_an_explicit_host_budget_holds(tier: str, memory: int | None, tmp_path: Path) -> None:
    job = _deep(16)
    expected = run(job, ("none", "none"), tmp_path / "plain").losses
    budget = least_host_memory(job, tmp_path / "least") + 4 * MIB
    options = {"host_memory": budget, "activation_memory": memory, "device_memory": room_for(job, 2)}
    before = process_memory().taken_bytes
    with running(job, tmp_path / "tier", ("nvme", "nvme"), activations=tier, **options) as engine:
        taken = _watch(engine)
        assert [train_step(engine, job, step) for step in range(job.steps)] == expected
        assert before < max(taken) <= budget
        if memory is not None and tier == "cpu":
            assert 0 < sum(arena.nbytes for arena in kept(engine).arenas) <= memory
            assert peak(engine)["disk"] > 0
        gives_back(engine)


@pytest.mark.works(AREA, "more `activation_memory` than `host_memory` leaves", "refused")
def test_more_activation_memory_than_is_left_is_refused(tmp_path: Path) -> None:
    job = _deep(4)
    budget = least_host_memory(job, tmp_path / "least")
    options = {"host_memory": budget + MIB, "activations": "cpu"}
    with pytest.raises(BudgetError, match=r'"activation_memory" is 2\.0 MiB, but only 1\.0 MiB'):
        run(job, ("nvme", "nvme"), tmp_path / "over", activation_memory=2 * MIB, **options)
    run(job, ("nvme", "nvme"), tmp_path / "fits", activation_memory=MIB, **options)


@pytest.mark.works(AREA, "no host memory and no drive for an input: it stays on the device, with one warning", "right")
def test_without_a_drive_inputs_that_do_not_fit_stay_on_the_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = _deep(8)
    expected = run(job, ("none", "none"), tmp_path / "plain").losses
    asked = config(job, ("cpu", "cpu"), tmp_path, activations="cpu", host_memory=1)
    del asked["offload"]["nvme_path"]
    with pytest.raises(BudgetError) as caught:
        offload.initialize(model=job.model(), config=asked)
    found = re.search(r"the least that works is [^(]*\((\d+) bytes\)", str(caught.value))
    assert found is not None
    asked["offload"] |= {"host_memory": int(found[1]) + 2 * INPUT, "activation_memory": 2 * INPUT}
    torch.manual_seed(job.seed)
    with caplog.at_level(logging.WARNING, "offload"):
        engine = offload.initialize(model=job.model(), config=asked)[0]
        assert [train_step(engine, job, step) for step in range(job.steps)] == expected
        inputs = peak(engine)
        engine.destroy(remove=True)
    assert inputs["host"] == 2 * INPUT and inputs["disk"] == 0 and inputs["device"] >= 6 * INPUT
    assert sum("stay on the device" in record.message for record in caplog.records) == 1


def test_host_memory_for_all_inputs_is_allocated_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    slab: Callable[..., Any] = HostBlocks._slab

    def counted(blocks: HostBlocks, size: int, count: int) -> Any:
        counts.append(count)
        return slab(blocks, size, count)

    testing.replace(monkeypatch, "input.slab", counted)
    job = _deep(8)
    asked = config(job, ("cpu", "cpu"), tmp_path, activations="cpu")
    for whole in (True, False):
        asked["activation_checkpointing"] = {"contiguous_memory_optimization": whole}
        engine = offload.initialize(model=job.model(), config=asked)[0]
        train_step(engine, job, 0)
        engine.destroy(remove=True)
    assert counts[0] == 8 and len(counts[1:]) > 1


# -- inputs of several sizes --------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["wide", "narrow"])
def test_blocks_of_memory_of_one_size_make_room_for_another(first: str, tmp_path: Path) -> None:
    """Inputs of 5 pages and of 4: neither fits what the other leaves, and a retained graph needs them all."""

    def loss(model: Any, step: int, micro: int) -> torch.Tensor:
        sizes = (80, 64) if first == "wide" else (64, 80)
        found = [model(batch(step, rows, (rows, WIDTH))).square().mean() for rows in sizes]
        total: torch.Tensor = found[0] + found[1]
        return total

    job = JOB._replace(model=stack(8), loss=loss)

    def norms(folder: Path, **options: Any) -> list[float]:
        found = []
        with running(job, folder, **options) as engine:
            for step in range(3):
                total = job.loss(engine, step, 0)
                for _ in range(3):
                    engine.backward(total, retain_graph=True)
                del total
                engine.step()
                found.append(engine.get_global_grad_norm())
            if options:
                gives_back(engine)
        return found

    assert norms(tmp_path / "tier", activations="nvme") == norms(tmp_path / "plain")


def test_an_input_that_lost_its_host_memory_to_another_engine_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(_deep(12), tmp_path, activations="nvme") as engine:
        loss = large_loss(engine, 0, 0)
        assert used(engine)["disk"] > 0
        testing.replace(monkeypatch, "input.take", lambda *_: None)
        with pytest.raises(BudgetError, match="of an input of a checkpointed unit, which is on disk"):
            engine.backward(loss)
        monkeypatch.undo()
        engine.zero_grad()
        del loss
        train_step(engine, _deep(12), 0)
        gives_back(engine)


def test_host_memory_of_other_lengths_is_freed_at_once(tmp_path: Path) -> None:
    with running(_deep(8), tmp_path, activations="nvme") as engine:
        closed: list[weakref.ref[HostArena]] = []
        gc.collect()
        gc.disable()
        try:
            for step, rows in enumerate(range(64, 64 * 9, 64)):
                loss = engine(batch(step, 0, (rows, WIDTH))).square().mean()
                closed += [weakref.ref(arena) for arena in kept(engine).arenas]
                engine.backward(loss)
                engine.step()
                del loss
            used_now = kept(engine).arenas
            assert len(closed) > 2 * len(used_now)
            assert all(ref() is None or ref() in used_now for ref in closed), "a closed arena is referenced"
        finally:
            gc.enable()


# -- the drive ----------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("rising", [True, False])
def test_lengths_that_change_leave_no_files_behind(rising: bool, tmp_path: Path) -> None:
    depth = 16
    lengths = sorted((64 + 16 * index for index in range(48)), reverse=not rising)
    largest = max(lengths) * WIDTH * 4
    with running(_deep(depth), tmp_path, activations="nvme") as engine:
        for step, rows in enumerate(lengths):
            loss = engine(batch(step, 0, (rows, WIDTH))).square().mean()
            engine.backward(loss)
            engine.step()
            del loss
        gives_back(engine)
        slots = kept(engine)._staging._slots
        assert slots is not None
        # Files double, and a slot is up to twice as large as its input.
        assert 0 < slots.nbytes <= 4 * depth * largest
        assert len(slots._files) <= 4


def test_a_drive_with_room_for_some_slots_alone_gives_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _deep(16)
    with running(job, tmp_path / "whole", activations="nvme") as engine:
        expected = [train_step(engine, job, step) for step in range(job.steps)]
        needed = peak(engine)["disk"]
    with running(job, tmp_path / "part", activations="nvme") as engine:
        # An input in one of the four buffers may have a slot as well.
        reserve, left = DirectFile.reserve, [needed + 4 * INPUT]

        def part(file: DirectFile, nbytes: int) -> None:
            if nbytes > left[0]:
                raise IoError(str(file.path), 0, nbytes, errno.ENOSPC, "write")
            left[0] -= nbytes
            reserve(file, nbytes)

        testing.replace(monkeypatch, "file.reserve", part)
        assert [train_step(engine, job, step) for step in range(job.steps)] == expected


@pytest.mark.parametrize("shorter", [False, True])
def test_host_memory_of_ever_new_lengths_is_that_of_the_longest(shorter: bool) -> None:
    blocks = HostBlocks(Device(torch.device("cpu")), HostMemory(), None, None)
    chance = random.Random(1)
    pages = sorted((chance.randint(1, 64) for _ in range(60)), reverse=shorter)
    for count in pages:
        for block in [blocks.take(count * PAGE) for _ in range(12)]:
            assert block is not None and block.buffer.nbytes >= count * PAGE
            block.release()
        assert blocks.nbytes <= 16 * max(pages) * PAGE, "slabs double, so twelve blocks have at most sixteen"
        assert len(blocks._slabs) == 1, "sizes of which no block is left are forgotten"
    blocks.close()


def test_inputs_that_graphs_have_dropped_leave_few_entries_behind() -> None:
    """Although a forward always begins before the graph of the last is gone, with inputs of another size."""
    cpu = Device(torch.device("cpu"))
    staging = Staging(HostBlocks(cpu, HostMemory(), None, None), None)
    keeps = {"staging": staging, "device_limit": lambda _: math.inf, "schedule": PassSchedule()}
    inputs = KeptInputs((), load_config({"offload": {"activations": "cpu"}}), cpu, **keeps)
    leaf = torch.ones(4 * PAGE, requires_grad=True)
    first, newest = inputs.keep(leaf * 1.0), None
    for numel in range(PAGE, PAGE + 500):
        newest = inputs.keep(leaf[:numel] * 1.0)
        alive = len(inputs._alive())
        assert alive <= 3 and len(inputs._kept) <= 2 * alive + _MOST_SHARED + 1
        assert len(inputs._shared) <= alive + _MOST_SHARED
    assert first is not None and newest is not None
    assert torch.equal(inputs.fetch(first), leaf.detach())
    inputs.close()
