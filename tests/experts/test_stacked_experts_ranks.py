"""Stacked experts that are units of their own, on two ranks whose tokens visit different ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.states import State
from tests.support import rounding_bounds
from tests.support.modules.mixtures import qwen, visits
from tests.support.oracle import Job, Result, assert_same, assert_same_tensors, weights_of
from tests.support.ranks.rank_jobs import my_rows
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start, train

DISK, HOST = ("nvme", "nvme"), ("cpu", "cpu")
STACK = "model.layers.0.mlp.experts.down_proj"


def rows_of_few_tokens(model: Any, step: int, micro: int) -> torch.Tensor:
    """The loss of this rank's row of two: two tokens, which visit at most four of sixteen experts in a layer."""
    ids = my_rows(torch.randint(128, (2, 2), generator=torch.Generator().manual_seed(100 * step + micro)))
    return model(input_ids=ids, labels=ids).loss


JOB = Job(partial(qwen, 16), rows_of_few_tokens, steps=2, lr=3e-4, params=(("eps", 1e-6),))
"""Queries of two tokens have gradients that are differences of near terms: a small eps would step along noise."""


# -- the numbers --------------------------------------------------------------------------------------


def in_both_ways(job: Job, folder: Path) -> tuple[Result, Result]:
    """Whole stacks in host memory, and experts on disk with little room on the device and in host memory."""
    whole = train(job, HOST, folder / "whole", experts="whole")
    on_disk = train(job, DISK, folder / "disk", device_memory="300KB")
    assert_same(on_disk, train(job, HOST, folder / "host"), "placements")
    return whole, on_disk


@pytest.mark.numeric
@pytest.mark.works("Several ranks", "stacked experts, of which each rank visits others, one by one", "right")
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_numbers_are_those_of_whole_stacks(accumulation: int, ranks: RankPool, tmp_path: Path) -> None:
    """Bit for bit with one micro-batch. Of more, gradients of two ranks are added in an order of the paths."""
    job = JOB._replace(accumulation=accumulation, clip=0.0)
    (whole, one), (_, other) = ranks.run(in_both_ways, job, tmp_path)
    assert_same(one, other, "ranks")
    if accumulation == 1:
        assert one.losses == whole.losses
        assert_same_tensors(one.weights, whole.weights)
    rounding_bounds.same_weights(one.weights, whole.weights, job, reordered=True)


def visited_and_moved(job: Job, folder: Path) -> tuple[Result, set[str], set[str], set[str]]:
    """The result, the experts that this rank has visited, and those of which it has read and written states."""
    engine = start(job, DISK, folder, device_memory="300KB", experts="visited")
    inspected, moved = testing.inspect(engine), {"read": set[str](), "write": set[str]()}
    store = inspected.store
    assert store is not None
    losses: list[float] = []
    with pytest.MonkeyPatch.context() as patch, visits(engine.module) as seen:
        for way, names in moved.items():
            real = getattr(store, way)

            def told(unit: int, state: State, *args: Any, _real: Any = real, _names: Any = names, **more: Any) -> Any:
                _names.add(inspected.layouts[unit].name)
                return _real(unit, state, *args, **more)

            patch.setattr(store, way, told)
        for step in range(job.steps):
            loss = job.loss(engine, step, 0)
            engine.backward(loss)
            losses.append(engine.mean(float(loss.detach())))
            engine.step()
        testing.settle(engine, commit=False)
    result = Result(losses, [], weights_of(engine))
    engine.destroy(remove=True)
    return result, seen, *({name for name in names if name.endswith("]")} for names in moved.values())


@pytest.mark.numeric
def test_ranks_read_and_update_what_any_of_them_visits(ranks: RankPool, tmp_path: Path) -> None:
    """And no other expert, whose weights keep their bits; one rank with both rows has the same numbers."""
    found = ranks.run(visited_and_moved, JOB, tmp_path / "two")
    (one, seen, read, written), (other, more, *moved) = found
    assert seen != more, "both ranks visit the same"
    assert read == written == seen | more == moved[0] == moved[1]
    assert_same_tensors(one.weights, other.weights, "ranks")
    torch.manual_seed(JOB.seed)
    first = JOB.model().state_dict()[STACK]
    for expert in range(16):
        same = torch.equal(one.weights[STACK][expert], first[expert])
        assert same == (f"{STACK.rpartition('.')[0]}[{expert}]" not in seen | more)
    alone = train(JOB, DISK, tmp_path / "one", experts="visited")
    rounding_bounds.same_losses(one.losses, alone.losses, JOB)
    rounding_bounds.same_weights(one.weights, alone.weights, JOB, reordered=True)


# -- values and files ---------------------------------------------------------------------------------


def read_and_set(folder: Path) -> None:
    """Each rank reads and sets the whole stack, and its partitions of the rows."""
    engine = start(JOB, DISK, folder)
    stack = engine.module.get_parameter(STACK)
    engine.backward(JOB.loss(engine, 0, 0))
    gradient = offload.safe_get_full_grad(stack)
    assert gradient is not None and bool(gradient.any())
    offload.safe_set_full_grad(stack, gradient * 2)
    twice = offload.safe_get_full_grad(stack)
    assert twice is not None and torch.equal(twice, gradient * 2)
    engine.step()
    values = torch.randn(stack.shape, generator=torch.Generator().manual_seed(1))
    offload.safe_set_full_fp32_param(stack, values)
    local = offload.safe_get_local_fp32_param(stack)
    assert local is not None and 0 < local.numel() < stack.numel()
    offload.safe_set_local_fp32_param(stack, local + 1)
    found = offload.safe_get_full_fp32_param(stack)
    assert found is not None and torch.equal(found.cpu(), values + 1)
    with pytest.raises(offload.errors.OffloadError):  # on one rank alone; the other has the shape that it should
        offload.safe_set_local_fp32_param(stack, local if rank_and_size()[0] else local[1:])
    with offload.gathered(stack, modify=True):
        stack.data[3] = 7.0
    assert bool((stack.detach().clone()[3] == 7).all())
    with offload.gathered(stack, modify=True):
        if rank_and_size()[0] == 0:
            stack.data[5] = 8.0
    assert bool((stack.detach().clone()[5] == 8).all())
    engine.destroy(remove=True)


@pytest.mark.slow
def test_values_are_read_and_set_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(read_and_set, tmp_path)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    engine = start(JOB, DISK, folder / "run")
    for step in range(2):
        engine.backward(JOB.loss(engine, step, 0))
        engine.step()
    engine.save_checkpoint(folder / "saved")
    engine.destroy()
    engine = start(JOB, DISK, folder / "run", resume="must")
    weights = weights_of(engine)
    engine.load_checkpoint(folder / "saved")
    assert engine.global_steps == 2
    assert_same_tensors(weights_of(engine), weights)
    engine.destroy(remove=True)
    return weights


@pytest.mark.sample(1)
@pytest.mark.parametrize("experts", ["each", "whole"])
def test_a_checkpoint_of_two_ranks_loads_on_one(experts: str, ranks: RankPool, tmp_path: Path) -> None:
    weights = ranks.run(saved, tmp_path)[0]
    engine = start(JOB._replace(seed=5), HOST, tmp_path / "one", experts=experts)
    engine.load_checkpoint(tmp_path / "saved")
    assert_same_tensors(weights_of(engine), weights)
    engine.destroy(remove=True)
