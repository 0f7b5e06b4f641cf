"""Inputs of blocks keep to their memory on the device, on the host and on drives, and keep the bits on late streams."""

from __future__ import annotations

import errno
import gc
import logging
import math
import random
import re
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
from offload.swapper.memory.host_arena import HostMemory, process_memory
from offload.swapper.memory.limits import free_host_memory
from tests import device
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.modules.checkpointed import (
    JOB,
    WIDTH,
    batch,
    gives_back,
    kept,
    peak,
    running,
    small_inputs_move,
    stack,
    used,
)
from tests.support.oracle import Job, config, least_host_memory, room_for, run, train_step

pytestmark = pytest.mark.test_device


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


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


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "twice as many blocks with the same device memory: more of host memory or disk alone", "right")
@pytest.mark.parametrize("lateness", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_twice_the_depth_takes_host_memory_or_disk_alone(tier: str, lateness: float, tmp_path: Path) -> None:
    device.seed(3, lateness)
    peaks = {depth: _peaks(depth, tmp_path / str(depth), activations=tier) for depth in (8, 16)}
    for forward, whole, inputs in peaks.values():
        # The newest, the one before it, which is being copied, and the batch.
        assert forward == 3 * INPUT + FORWARD
        # The one in use, the next, which is being copied, and the batch. Gradients of three blocks may be leaving.
        assert whole <= 3 * INPUT + BACKWARD + 3 * WEIGHTS
        assert inputs["device"] == 2 * INPUT
    more = {name: peaks[16][2][name] - peaks[8][2][name] for name in ("host", "disk")}
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


@pytest.mark.sample(2)
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
    asked = config(job, ("cpu", "cpu"), tmp_path, activations="cpu", host_memory=1, vocabulary="whole")
    del asked["offload"]["nvme_path"]
    with pytest.raises(BudgetError) as caught:
        offload.initialize(model=job.model(), config=asked)
    match = re.search(r"the least that works is [^(]*\((\d+) bytes\)", str(caught.value))
    assert match is not None
    asked["offload"] |= {"host_memory": int(match[1]) + 2 * INPUT, "activation_memory": 2 * INPUT}
    torch.manual_seed(job.seed)
    with caplog.at_level(logging.WARNING, "offload"):
        engine = offload.initialize(model=job.model(), config=asked)[0]
        assert [train_step(engine, job, step) for step in range(job.steps)] == expected
        inputs = peak(engine)
        engine.destroy(remove=True)
    assert inputs["host"] == 2 * INPUT and inputs["disk"] == 0 and inputs["device"] >= 6 * INPUT
    assert sum("stay on the device" in record.message for record in caplog.records) == 1


# -- inputs of several sizes --------------------------------------------------------------------------


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


def test_without_a_budget_blocks_take_no_more_than_is_free_now() -> None:
    """What was free at the start may be in use by another process when inputs come."""
    blocks = HostBlocks(Device(torch.device("cpu")), HostMemory(), None, 1 << 60)
    assert blocks.room(PAGE) < free_host_memory()
    assert HostBlocks(Device(torch.device("cpu")), HostMemory(), None, 64 * PAGE).room(PAGE) == 64 * PAGE


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


DEPTH = 14
PLAIN = ("none", "none")


def _loss(model: Any, step: int, micro: int, rows: int = 64) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, micro, (rows, WIDTH))).square().mean()
    return loss


# -- what a step does ---------------------------------------------------------------------------------


def _plainly(engine: offload.Engine, step: int, chance: random.Random) -> None:
    engine.backward(_loss(engine, step, 0))


def _retained(engine: offload.Engine, step: int, chance: random.Random) -> None:
    loss = _loss(engine, step, 0)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


def _dropped(engine: offload.Engine, step: int, chance: random.Random) -> None:
    """Graphs that end while their inputs are on their way: before the backward, and in its middle."""
    _loss(engine, step, 1)
    middle = _loss(engine, step, 2)
    _loss(engine, step, 3)
    torch.autograd.grad(middle, list(engine.module.blocks[DEPTH - 3].parameters()))
    del middle
    engine.backward(_loss(engine, step, 0))


def _two(engine: offload.Engine, step: int, chance: random.Random) -> None:
    """Of two sizes, backward in either order."""
    losses = [_loss(engine, step, 0, 64), _loss(engine, step, 1, 80)]
    chance.shuffle(losses)
    for loss in losses:
        engine.backward(loss)


STEPS: dict[str, Callable[[offload.Engine, int, random.Random], None]] = {
    "plain": _plainly,
    "retained": _retained,
    "dropped": _dropped,
    "two": _two,
}


def _norms(play: str, seed: int, folder: Path, **options: Any) -> list[float]:
    chance = random.Random(seed)
    values = []
    with running(JOB._replace(model=stack(DEPTH)), folder, PLAIN, **options) as engine:
        for step in range(4):
            STEPS[play](engine, step, chance)
            engine.step()
            values.append(engine.get_global_grad_norm())
        values += [float(value.cpu().double().sum()) for value in engine.module.state_dict().values()]
        gc.collect()
        if "activations" in options:
            gives_back(engine)
    return values


@pytest.mark.sample(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lateness", [0.5, 0.95, 1.0])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("play", STEPS)
def test_inputs_on_their_way_keep_every_bit(
    play: str, tier: str, lateness: float, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`late` makes requests to the drive late as well; until a read has ended, its memory holds NaN."""
    seed = int(lateness * 100) + late
    expected = _norms(play, seed, tmp_path / "plain", device="cpu")
    if late:
        use_queue(monkeypatch, lambda: LateQueue(seed, 0.003))
    device.seed(seed, lateness)
    assert _norms(play, seed, tmp_path / "late", activations=tier) == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("lateness", [0.5, 1.0])
def test_an_input_that_is_changed_while_it_is_copied_is_refused(behind: int, lateness: float, tmp_path: Path) -> None:
    """The copy may have the old bytes, the new ones, or some of both."""
    device.seed(5, lateness)
    seen: list[torch.Tensor] = []

    def change(module: Any, args: Any, output: torch.Tensor) -> None:
        seen.append(args[0])
        if len(seen) == 6:
            with torch.no_grad():
                seen[5 - behind].mul_(2)

    with running(JOB._replace(model=stack(DEPTH)), tmp_path, PLAIN, activations="cpu") as engine:
        for block in engine.module.blocks:
            block.register_forward_hook(change)
        with pytest.raises(RuntimeError, match="was changed in place since the unit received it"):
            engine.backward(_loss(engine, 0, 0))


def test_memory_of_an_upload_that_nobody_waits_for_is_not_given_to_other_compute(tmp_path: Path) -> None:
    """The backward ends before it comes to the input that is on its way."""
    with running(JOB._replace(model=stack(DEPTH)), tmp_path, PLAIN, activations="cpu") as engine:
        for seed in range(8):
            device.seed(seed, 1.0)
            loss = _loss(engine, seed, 0)
            torch.autograd.grad(loss, list(engine.module.blocks[DEPTH - 3].parameters()))
            del loss
            kept(engine).recover()
            blocks = [torch.full((64, WIDTH), 7.0, device=engine.device) for _ in range(24)]
            torch.accelerator.synchronize()
            assert all(bool((other == 7.0).all()) for other in blocks)
