"""Two processes train one model: each holds half of every unit, and together they equal one process."""

from __future__ import annotations

import contextlib
import datetime
import gc
import random
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import offload
from offload import testing
from offload.errors import NumericsError
from offload.torch_internals import top_saved_tensor_hooks
from tests.support import models, rounding_bounds
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import PLACEMENTS, Job, Result, assert_same, assert_same_tensors, config, room_for, weights_of
from tests.support.param_states import gpt2
from tests.support.ranks.rank_jobs import JOBS, language_rows_loss, rows_loss
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start, train

DISK = ("nvme", "nvme")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.numeric
def test_two_ranks_equal_one_rank_with_the_complete_batch(name: str, ranks: RankPool, tmp_path: Path) -> None:
    job = JOBS[name]._replace(steps=4, lr=3e-4)
    alone = train(job, DISK, tmp_path / "one")
    for result in ranks.run(train, job, DISK, tmp_path / "two"):
        rounding_bounds.same_training(result, alone, job, reordered=True)


def train_in_all(job: Job, folder: Path) -> Result:
    """Nine placements, of which each must give the bits of the first."""
    first: Result | None = None
    for number, placement in enumerate(PLACEMENTS):
        result = train(job, placement, folder / str(number))
        first = first or result
        assert_same(first, result, f"{placement}")
    assert first is not None
    return first


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "mixture"])
def test_same_bits_in_every_placement(name: str, dtype: str, ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(train_in_all, JOBS[name]._replace(steps=3, dtype=dtype), tmp_path)
    assert_same(one, other, "the two ranks")


def train_late(job: Job, folder: Path, device_memory: int) -> Result:
    """I/O that is up to 10 ms late, on each rank at other moments, with little room on the device."""
    with pytest.MonkeyPatch.context() as patch:
        use_queue(patch, lambda: LateQueue(rank_and_size()[0], 0.01))
        return train(job, DISK, folder, device_memory=device_memory)


@pytest.mark.slow
@pytest.mark.parametrize("units", [1, 2])
def test_same_bits_where_each_rank_is_late_by_itself(units: int, ranks: RankPool, tmp_path: Path) -> None:
    job = JOBS["gpt2"]._replace(steps=3, dtype="bf16", accumulation=2)
    expected = ranks.run(train, job, DISK, tmp_path / "at once")[0]
    room = room_for(job, units) + 4 * room_for(job, 1) + 2 * units * 8192  # the second is for reductions
    for late in ranks.run(train_late, job, tmp_path / "late", room):
        assert_same(expected, late)


def train_on_a_late_device(job: Job, folder: Path, placement: tuple[str, str]) -> Result:
    """On a device beside the host, where parts of gradients are added, and updated if all is there.

    Its memory is not hidden from the host, on which gloo carries out the collectives.
    """
    from tests.support.devices.late_device import LateDevice, use_device

    device = LateDevice(rank_and_size()[0], 0.5)
    with pytest.MonkeyPatch.context() as patch:
        use_device(patch, device)
        result = train(job, placement, folder, device_memory=1 << 24)
    assert device.broken == []
    return result


@pytest.mark.parametrize(("name", "stage"), [("gpt2", 1), ("mixture", 3)])
def test_same_bits_on_a_device_beside_the_host(name: str, stage: int, ranks: RankPool, tmp_path: Path) -> None:
    job = JOBS[name]._replace(steps=2, dtype="bf16", accumulation=3, stage=stage)
    expected = ranks.run(train, job, DISK, tmp_path / "disk")[0]
    for placement in (("none", "none"), ("nvme", "nvme")):
        for late in ranks.run(train_on_a_late_device, job, tmp_path / "-".join(placement), placement):
            assert_same(expected, late)


def give_memory_back(job: Job, folder: Path) -> Result:
    """On a device whose arena grows after the first step, and is given back on each rank at another moment."""
    from offload.engine import setup
    from offload.swapper.memory.device import DeviceRoom
    from tests.support.devices.late_device import LateDevice

    rank = rank_and_size()[0]
    real, device = setup.open_device, LateDevice(rank, 0.5)
    device.spare = DeviceRoom(1 << 30, 0)
    setup.open_device = lambda _: device  # type: ignore[assignment]
    try:
        engine = start(job, ("cpu", "cpu"), folder)
        at_first, sizes, losses = engine.device_memory, list[int](), list[float]()
        for step in range(job.steps):
            for micro in range(job.accumulation):
                loss = job.loss(engine, step, micro)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
                if (step, micro) == (1 + rank, rank):
                    engine.empty_partition_cache()
                # All units are on all devices by the second evaluation, and ranks do not ask each other any more.
                for _ in range(3):
                    with torch.no_grad():
                        losses.append(float(job.loss(engine, step, micro)))
                    if step == 3:
                        engine.empty_partition_cache()
            sizes.append(engine.device_memory)
        assert sizes[0] > at_first and sizes[3:] == [at_first] * (job.steps - 3)
        weights = weights_of(engine)
        engine.destroy(remove=True)
    finally:
        setup.open_device = real
    assert device.broken == []
    return Result(losses, [], weights)


@pytest.mark.slow
def test_each_rank_gives_device_memory_back_by_itself(ranks: RankPool, tmp_path: Path) -> None:
    job = models.GPT2._replace(loss=language_rows_loss, steps=5, dtype="bf16", accumulation=2)
    one, other = ranks.run(give_memory_back, job, tmp_path / "given")
    assert_same_tensors(one.weights, other.weights)
    expected = ranks.run(train, job, DISK, tmp_path / "disk")[0]
    assert_same_tensors(expected.weights, one.weights)


THREE_BLOCKS = models.GPT2._replace(loss=language_rows_loss)
"""More than the device has room for, below."""


def meet_outside(folder: Path, room: int) -> list[float]:
    """Losses of steps and evaluations with collectives of the user's own in between, on ranks with other arenas."""
    engine = start(THREE_BLOCKS, DISK, folder, device_memory=room)
    testing.inspect(engine).device_arena.space.scatter = random.Random(rank_and_size()[0])
    losses = []

    def add_up(loss: torch.Tensor) -> None:
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))

    for layer in engine.module.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.register_forward_hook(lambda *_: dist.barrier())
    for step in range(3):
        loss = THREE_BLOCKS.loss(engine, step, 0)
        add_up(loss)
        engine.backward(loss)
        engine.step()
        for batch in range(4):
            with torch.no_grad():
                add_up(THREE_BLOCKS.loss(engine, step, batch))
    engine.destroy(remove=True)
    return losses


@pytest.mark.works("Several ranks", "collectives of your own in a loss, between layers, in an evaluation", "right")
def test_collectives_of_the_users_own(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank has other units on its device; none runs ahead of one that lacks something."""
    room = room_for(THREE_BLOCKS, 3) + 4 * room_for(THREE_BLOCKS, 1)
    one, other = ranks.run(meet_outside, tmp_path, room)
    assert one == other and len(one) == 15


def threads_of_groups() -> int:
    """Returns the threads of torch's process groups in this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text())
    return sum("gloo" in name for name in names)


def threads_after_engines(job: Job, folder: Path) -> list[int]:
    """Returns them before the first engine, while there is one, and after each of two has ended."""
    gc.collect()
    gc.disable()
    try:
        found = [threads_of_groups()]
        for number in range(2):
            engine = start(job, DISK, folder / str(number))
            found.append(threads_of_groups())
            engine.destroy(remove=True)
            deadline = time.monotonic() + 10  # the kernel lists a thread for a moment after it was joined
            while threads_of_groups() > found[0] and time.monotonic() < deadline:
                time.sleep(0.01)
            found.append(threads_of_groups())
    finally:
        gc.enable()
    return found


@pytest.mark.parametrize("shard_size", [2, 1])
def test_the_threads_of_an_engines_groups_end_with_it(shard_size: int, ranks: RankPool, tmp_path: Path) -> None:
    """Each wakes a hundred times a second. No collection of cycles is needed."""
    for before, one, after, other, end in ranks.run(
        threads_after_engines, JOBS["gpt2"]._replace(shard_size=shard_size), tmp_path
    ):
        assert before == after == end and one == other > before


def begin_under_hooks(folder: Path) -> tuple[bool, bool]:
    """Begins a gather while saved tensors go through hooks; returns whether they are active after it, and live on."""
    engine = start(JOBS["gpt2"], DISK, folder)
    group, hooks = testing.inspect(engine).ranks, [lambda tensor: tensor, lambda tensor: tensor]
    assert group is not None
    dead = weakref.ref(hooks[0])
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        work = group.gather_parts(torch.empty(2), torch.empty(1))
        active = top_saved_tensor_hooks() == tuple(hooks)
    hooks.clear()
    lives = dead() is not None
    work.wait()
    engine.destroy(remove=True)
    return active, lives


def test_a_collective_under_way_does_not_keep_the_hooks_of_who_began_it(ranks: RankPool, tmp_path: Path) -> None:
    """Those of checkpointing hold the graph of a forward, and the next wait may be in another step."""
    assert ranks.run(begin_under_hooks, tmp_path) == [(True, False)] * 2


def train_with_short_waits(job: Job, folder: Path) -> Result:
    """Waits are cut so finely that collectives end just as a slice of the wait does."""
    from offload.distributed import process_group

    real, process_group._SLICE = process_group._SLICE, datetime.timedelta(milliseconds=1)
    try:
        return train(job, DISK, folder)
    finally:
        process_group._SLICE = real


def test_a_wait_that_ends_at_its_interval_is_no_failure(ranks: RankPool, tmp_path: Path) -> None:
    job = JOBS["gpt2"]._replace(steps=10)
    one, other = ranks.run(train_with_short_waits, job, tmp_path)
    assert_same(one, other)


def train_from_a_loader(folder: Path, poisoned: int) -> tuple[list[float], list[list[int]], str]:
    """Losses and rows of two epochs of `training_data`; the rank `poisoned` has a NaN loss in the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    data = TensorDataset(torch.arange(64.0).view(16, 4) / 64, torch.arange(16))
    content = config(Job(nn.Module, rows_loss), DISK, folder)
    content["train_micro_batch_size_per_gpu"] = 4 // rank_and_size()[1]
    engine, _, loader, _ = offload.initialize(model=model, config=content, training_data=data)
    losses, rows, error_message = [], [], ""
    try:
        for epoch in range(2):
            for values, which in loader:
                loss = engine(values).float().square().mean()
                engine.backward(loss * (float("nan") if epoch and engine.global_rank == poisoned else 1.0))
                engine.step()
                losses.append(engine.mean(float(loss.detach())))
                rows.append(which.tolist())
    except NumericsError as error:
        error_message = str(error)
    engine.destroy(remove=True)
    return losses, rows, error_message


@pytest.mark.numeric
def test_the_loader_gives_each_rank_its_rows(ranks: RankPool, tmp_path: Path) -> None:
    alone, all_rows, _ = train_from_a_loader(tmp_path / "one", -1)
    (losses, rows, _), (same, others, _) = ranks.run(train_from_a_loader, tmp_path / "two", -1)
    assert losses == same
    rounding_bounds.same_numbers(losses, alone, rounding_bounds.sum_error(rounding_bounds.POSITIONS))
    assert [a + b for a, b in zip(rows, others, strict=True)] == all_rows


def test_a_nan_on_one_rank_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    for losses, _, error_message in ranks.run(train_from_a_loader, tmp_path, 1):
        assert len(losses) == 4 and error_message.startswith("the gradient norm of step 5 is nan")


def edit(folder: Path, everywhere: bool, dtype: str) -> dict[str, torch.Tensor]:
    """Weights are set under `gathered` on rank 0 alone, and all loaded; other ranks would have set something else."""
    engine = start(JOBS["llama"]._replace(dtype=dtype), DISK, folder)
    rank = engine.global_rank
    weight = engine.module.get_parameter("model.embed_tokens.weight")
    with offload.gathered(engine.module, modify=True), torch.no_grad():
        if everywhere or rank == 0:
            weight.fill_(0.25 + rank)
    state = {name: value * 2 for name, value in engine.module.state_dict().items()}
    assert bool((state["model.embed_tokens.weight"] == 0.5).all())
    engine.module.load_state_dict(state)
    loaded = weights_of(engine)
    for name, value in loaded.items():
        assert torch.equal(value, state[name]), name
    engine.destroy(remove=True)
    return loaded


@pytest.mark.sample(1)
@pytest.mark.parametrize(("everywhere", "dtype"), [(False, "bf16"), (True, "bf16"), (True, "fp16"), (True, "fp32")])
@pytest.mark.works("Several ranks", "`offload.gathered(modify=True)` with `if rank == 0:` inside", "right")
def test_edits_of_the_lowest_rank_count(everywhere: bool, dtype: str, ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(edit, tmp_path, everywhere, dtype)
    assert_same_tensors(one, other)


def given_different_weights(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """No seed: each rank has drawn its own weights."""
    rank, _ = rank_and_size()
    torch.manual_seed(rank)
    model = gpt2()
    mine = model.get_parameter("transformer.wte.weight").detach().clone()
    engine = offload.initialize(model=model, config=config(JOBS["gpt2"], DISK, folder))[0]
    theirs = engine.module.state_dict()["transformer.wte.weight"].clone()
    engine.destroy(remove=True)
    return mine, theirs


def test_weights_of_rank_0_count(ranks: RankPool, tmp_path: Path) -> None:
    (mine, all_have), (other, have_too) = ranks.run(given_different_weights, tmp_path)
    assert not torch.equal(mine, other)
    assert torch.equal(all_have, mine) and torch.equal(have_too, mine)
