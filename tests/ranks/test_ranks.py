"""Two processes train one model: each holds half of every unit, and together they equal one process."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import random
import re
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import offload
from offload import testing
from offload.distributed.process_group import CollectiveWork, Communication, ProcessGroup, Sent
from offload.distributed.reduce_scatter import ReduceScatterAccumulator
from offload.errors import BudgetError, NumericsError, OffloadError, RankError
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.sizes import align_up
from offload.torch_internals import top_saved_tensor_hooks
from tests.support import models, rounding_bounds
from tests.support.oracle import (
    PLACEMENTS,
    Job,
    Result,
    accumulated_step,
    assert_same,
    assert_same_tensors,
    config,
    room_for,
    trained,
    weights_of,
)
from tests.support.param_states import gpt2
from tests.support.ranks.rank_jobs import JOBS, language_rows_loss, my_rows, rows_loss
from tests.support.ranks.rank_pool import RankPool, pool, rank_and_size, start, train
from tests.support.sampling import drawn

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")


def train_in_all(job: Job, folder: Path, placements: list[tuple[str, str]]) -> Result:
    """Each placement must give the bits of the first."""
    first: Result | None = None
    for number, placement in enumerate(placements):
        result = train(job, placement, folder / str(number))
        first = first or result
        assert_same(first, result, f"{placement}")
    assert first is not None
    return first


SUMS = JOBS["gpt2"]._replace(stage=1, accumulation=3, steps=2, lr=3e-4)
CASES = {
    **{name: job._replace(steps=2, lr=3e-4) for name, job in JOBS.items()},
    "gpt2, bf16": JOBS["gpt2"]._replace(steps=2, lr=3e-4, dtype="bf16"),
    "mixture, bf16": JOBS["mixture"]._replace(steps=2, lr=3e-4, dtype="bf16"),
    "sums": SUMS,
    "sums, bf16": SUMS._replace(dtype="bf16"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.numeric
def test_two_ranks_equal_one_rank_in_every_placement(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """Within the bound of the order of additions; placements and ranks bit for bit."""
    job = CASES[name]
    rank0, rank1 = ranks.run(train_in_all, job, tmp_path, drawn(PLACEMENTS, 2))
    assert_same(rank0, rank1, "the two ranks")
    rounding_bounds.same_training(rank0, train(job, DISK, tmp_path / "one"), job, reordered=True)


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
            layer.register_full_backward_hook(lambda *_: dist.barrier())
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
    rank0, rank1 = ranks.run(meet_outside, tmp_path, room)
    assert rank0 == rank1 and len(rank0) == 15


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
        counts = [threads_of_groups()]
        for number in range(2):
            engine = start(job, DISK, folder / str(number))
            counts.append(threads_of_groups())
            engine.destroy(remove=True)
            deadline = time.monotonic() + 60  # the kernel lists a thread for a moment after it was joined
            while threads_of_groups() > counts[0] and time.monotonic() < deadline:
                time.sleep(0.01)
            counts.append(threads_of_groups())
    finally:
        gc.enable()
    return counts


def test_the_threads_of_an_engines_groups_end_with_it(ranks: RankPool, tmp_path: Path) -> None:
    """Each wakes a hundred times a second. No collection of cycles is needed."""
    for before, during, after, later, end in ranks.run(
        threads_after_engines, JOBS["gpt2"]._replace(shard_size=1), tmp_path
    ):
        assert before == after == end and during == later > before


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
    job = JOBS["gpt2"]._replace(steps=2)
    rank0, rank1 = ranks.run(train_with_short_waits, job, tmp_path)
    assert_same(rank0, rank1)


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
            for values, numbers in loader:
                loss = engine(values).float().square().mean()
                engine.backward(loss * (float("nan") if epoch and engine.global_rank == poisoned else 1.0))
                engine.step()
                losses.append(engine.mean(float(loss.detach())))
                rows.append(numbers.tolist())
    except NumericsError as error:
        error_message = str(error)
    engine.destroy(remove=True)
    return losses, rows, error_message


@pytest.mark.numeric
def test_the_loader_gives_each_rank_its_rows_and_a_nan_on_one_is_an_error_on_all(
    ranks: RankPool, tmp_path: Path
) -> None:
    alone, all_rows, _ = train_from_a_loader(tmp_path / "one", -1)
    (losses, rows, message), (same, row_numbers, message_of_rank1) = ranks.run(train_from_a_loader, tmp_path / "two", 1)
    assert losses == same and len(losses) == 4
    rounding_bounds.same_numbers(losses, alone[:4], rounding_bounds.sum_error(rounding_bounds.POSITIONS))
    assert [a + b for a, b in zip(rows, row_numbers, strict=True)] == all_rows[:4]
    assert message.startswith("the gradient norm of step 5 is nan") and message_of_rank1 == message


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
    rank0, rank1 = ranks.run(edit, tmp_path, everywhere, dtype)
    assert_same_tensors(rank0, rank1)


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
    (mine, all_have), (weights_of_rank1, have_too) = ranks.run(given_different_weights, tmp_path)
    assert not torch.equal(mine, weights_of_rank1)
    assert torch.equal(all_have, mine) and torch.equal(have_too, mine)


FP32 = 4
# -- parameters that only some micro-batches use ------------------------------------------------------

PATHS = (((0, 1), (1,), (2,)), ((1,), (2,), ()))
"""Of each rank and micro-batch. Nobody uses the last expert, and the first has no gradient in a last micro-batch."""


class Experts(nn.Module):
    """A layer whose experts are units of their own, behind a frozen embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 64).requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 61)

    def forward(self, ids: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
        hidden = self.embedding(ids)
        for expert in path:
            hidden = hidden + self.experts[expert](hidden)
        return self.head(hidden)


def uneven_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = my_rows(models.tokens(step, micro, (4, 16), 61))
    return models.token_loss(model(ids, PATHS[rank_and_size()[0]][micro]), ids)


UNEVEN = Job(Experts, uneven_loss, accumulation=3, steps=2)


def train_by_schedule(job: Job, schedule: str, folder: Path) -> Result:
    engine = start(job, MEMORY, folder, schedule=schedule)
    assert engine.schedule == schedule
    result = trained(engine, job, accumulated_step)
    engine.destroy(remove=True)
    return result


@pytest.mark.numeric
def test_parameters_of_some_micro_batches_and_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """As in stage 3, where each micro-batch is reduced, unless they take turns."""
    expected = ranks.run(train_by_schedule, UNEVEN, "micro_batch_major", tmp_path)
    for stage, schedule in ((0, "micro_batch_major"), (3, "layer_major")):
        results = ranks.run(train_by_schedule, UNEVEN._replace(stage=stage), schedule, tmp_path)
        for left, right in zip(results, expected, strict=True):
            rounding_bounds.same_training(left, right, UNEVEN, reordered=True)


def train_again(job: Job, schedule: str, folder: Path) -> Result:
    """Fails on all ranks in the first micro-batch of each step, drops all gradients, and makes the step again."""
    failed = set[int]()

    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        value = job.loss(model, step, micro)
        if micro == 0 and step not in failed:
            failed.add(step)
            raise ValueError
        return value

    def step_again(engine: Any, job: Job, step: int) -> float:
        with pytest.raises(ValueError):
            accumulated_step(engine, job, step)
        engine.zero_grad()
        return accumulated_step(engine, job, step)

    engine = start(job, MEMORY, folder, schedule=schedule)
    result = trained(engine, job._replace(loss=loss), step_again)
    engine.destroy(remove=True)
    return result


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_fails_on_all_ranks_is_made_again(stage: int, ranks: RankPool, tmp_path: Path) -> None:
    """Some ranks have contributed gradients by then, and some have not."""
    job = UNEVEN._replace(stage=stage, steps=3)
    expected = ranks.run(train_by_schedule, job, "layer_major", tmp_path)
    for left, right in zip(ranks.run(train_again, job, "layer_major", tmp_path), expected, strict=True):
        assert_same(left, right)


# -- between micro-batches ----------------------------------------------------------------------------


def plainly(engine: offload.Engine, micro: int) -> None:
    """Does nothing."""


def some_parameters(engine: offload.Engine) -> list[nn.Parameter]:
    """Returns parameters of several units."""
    return list(engine.module.parameters())[::9]


def start_over_and_replace(engine: offload.Engine, micro: int) -> None:
    """Makes the gradients of the first micro-batch again; later replaces those so far by what they are."""
    if micro == 0:
        engine.zero_grad()
        engine.backward(SUMS.loss(engine, engine.global_steps, micro))
        return
    for parameter in some_parameters(engine):
        gradient = offload.safe_get_full_grad(parameter)
        assert gradient is not None
        offload.safe_set_full_grad(parameter, gradient)


def train_with(between: Callable[[offload.Engine, int], None], folder: Path) -> Result:
    """Trains the job in the way of DDP: all micro-batches but the last of a step are in `no_sync`."""
    engine = start(SUMS, MEMORY, folder)
    losses, norms = [], []
    for step in range(SUMS.steps):
        before = engine.communication()
        with engine.no_sync():
            for micro in range(SUMS.accumulation - 1):
                engine.backward(SUMS.loss(engine, step, micro))
                if between is plainly:
                    assert engine.communication().gradients == before.gradients
                between(engine, micro)
        loss = SUMS.loss(engine, step, SUMS.accumulation - 1)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm() or 0.0)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return Result(losses, norms, weights)


@pytest.mark.numeric
def test_gradients_may_be_read_replaced_and_dropped_between_micro_batches(ranks: RankPool, tmp_path: Path) -> None:
    """A read reduces what has added up so far, which changes the order of the additions alone."""
    expected = ranks.run(train_with, plainly, tmp_path)
    for left, right in zip(ranks.run(train_with, start_over_and_replace, tmp_path), expected, strict=True):
        rounding_bounds.same_training(left, right, SUMS, reordered=True)


class Chain(nn.Sequential):
    """More layers than a small arena holds."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(32, 32) for _ in range(8)))


def chain_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    seed = 8 * step + micro + 100 * rank_and_size()[0]
    rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = model(rows).pow(2).mean()
    return loss


class Around(Chain):
    """Two parameters of one unit: the first is used before all layers, the last after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.linspace(0.5, end, 32)) for end in (1, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(rows + self.first) * self.last
        return result


def train_in_turns(job: Job, schedule: str, folder: Path) -> tuple[Result, int]:
    """Returns the result, and the reductions of all steps."""
    engine = start(job, ("cpu", "cpu"), folder, schedule=schedule)
    assert engine.schedule == schedule
    result = trained(engine, job, accumulated_step)
    reductions = engine.communication().gradients.collectives
    engine.destroy(remove=True)
    return result, reductions


@pytest.mark.parametrize(
    ("job", "parts"),
    [(SUMS, 0), (SUMS._replace(model=Around, loss=chain_loss, optimizer="SGD", lr=0.1), 1)],
    ids=["gpt2", "around"],
)
def test_micro_batches_that_take_turns_change_no_bit(job: Job, parts: int, ranks: RankPool, tmp_path: Path) -> None:
    """In turns, `parts` units a step are sent in two parts: all sums of one parameter before those of the other."""
    (one_by_one, reductions), _ = ranks.run(train_in_turns, job, "micro_batch_major", tmp_path)
    (in_turns, as_many), _ = ranks.run(train_in_turns, job, "layer_major", tmp_path)
    assert_same(one_by_one, in_turns)
    assert reductions == as_many - job.steps * parts == job.steps * len(find_units(job.model()).units)


def gathers_of_steps(stage: int, folder: Path) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Returns the gathers of weights in each step, and the weights after the last. No memory is named."""
    job = SUMS._replace(stage=stage, model=Chain, loss=chain_loss)
    engine = start(job, ("none", "cpu"), folder, schedule="micro_batch_major")
    gathers = []
    for step in range(job.steps):
        before = engine.communication()
        engine.accumulate(range(job.accumulation), functools.partial(job.loss, engine, step))
        engine.step()
        gathers.append(engine.communication().since(before).weights.collectives)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return gathers, weights


def test_stages_1_and_2_gather_each_weight_once_a_step_and_stage_3_for_each_use(
    ranks: RankPool, tmp_path: Path
) -> None:
    expected: dict[str, torch.Tensor] | None = None
    for stage in (2, 3):  # these two reduce each micro-batch, so their bits are equal
        gathers, weights = ranks.run(gathers_of_steps, stage, tmp_path)[0]
        assert all(count == 8 for count in gathers) if stage == 2 else min(gathers) > 2 * 8, gathers
        assert_same_tensors(weights, expected or weights)
        expected = weights


def notices_and_gathers(folder: Path) -> tuple[list[str], int]:
    job = SUMS._replace(stage=2, model=Chain, loss=chain_loss)
    engine = start(job, ("none", "cpu"), folder, device_memory=160 * 1024, schedule="micro_batch_major")
    notices = [str(notice) for notice in engine.notices]
    trained(engine, job)
    gathers = engine.communication().weights.collectives
    engine.destroy(remove=True)
    return notices, gathers


def test_a_line_says_where_weights_do_not_fit_and_are_gathered_as_in_stage_3(ranks: RankPool, tmp_path: Path) -> None:
    notices, gathers = ranks.run(notices_and_gathers, tmp_path)[0]
    assert any("the device has no room for all weights" in line and "as in stage 3" in line for line in notices)
    assert gathers > 2 * 8 * SUMS.steps


# -- buckets ------------------------------------------------------------------------------------------


class Uneven(nn.Sequential):
    """One large layer between small ones."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 1024), nn.Linear(1024, 32))
        self.append(nn.Linear(32, 32))


def train_in_buckets(job: Job, folder: Path) -> tuple[Result, list[Communication]]:
    """Returns the result, and what each step sends."""
    engine = start(job, ("none", "cpu"), folder, schedule="micro_batch_major")
    sent: list[Communication] = []

    def step_of(engine: offload.Engine, job: Job, step: int) -> float:
        before = engine.communication()
        loss = accumulated_step(engine, job, step)
        sent.append(engine.communication().since(before))
        return loss

    result = trained(engine, job, step_of)
    engine.destroy(remove=True)
    return result, sent


@pytest.mark.works("Several ranks", "small units in one gather (`allgather_bucket_size`)", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [1, 2])
def test_small_units_share_a_gather_and_change_no_bit(stage: int, ranks: RankPool, tmp_path: Path) -> None:
    job = SUMS._replace(model=Uneven, loss=chain_loss, stage=stage, steps=3, dtype="fp32")
    expected = ranks.run(train_in_buckets, job, tmp_path)
    joined = ranks.run(train_in_buckets, job._replace(bucket=3 * 4096), tmp_path)
    for (alone, result), (together, fewer) in zip(expected, joined, strict=True):
        assert_same(alone, together)
        # Three small layers of 4,096 elements with their padding, two large ones, and a small one.
        assert (result[2].weights.collectives, fewer[2].weights.collectives) == (6, 4)
        assert fewer[2].weights.nbytes == result[2].weights.nbytes


def bucket_notices(folder: Path, size: int) -> list[str]:
    job = SUMS._replace(model=Uneven, loss=chain_loss, stage=2)
    content = config(job, ("none", "cpu"), folder)
    content["zero_optimization"]["reduce_bucket_size"] = size
    engine = offload.initialize(model=job.model(), config=content)[0]
    notices = [str(notice) for notice in engine.notices if "reduce_bucket_size" in str(notice)]
    engine.destroy(remove=True)
    return notices


def test_a_unit_above_reduce_bucket_size_has_a_notice(ranks: RankPool, tmp_path: Path) -> None:
    largest = 32 * 1024 + 1024
    assert ranks.run(bucket_notices, tmp_path, largest) == [[], []]
    for notices in ranks.run(bucket_notices, tmp_path, largest - 1):
        (notice,) = notices
        assert f"{largest} elements at most, more than reduce_bucket_size ({largest - 1})" in notice


# -- a world of one -----------------------------------------------------------------------------------


def train_alone(job: Job, folder: Path, collectives: bool) -> tuple[Result, Communication]:
    """Trains on one rank that has no process group of its own making."""
    if dist.is_initialized():
        dist.destroy_process_group()
    engine = start(job, ("none", "cpu"), folder, debug={"poison": True, "collectives": collectives})
    result, sent = trained(engine, job), engine.communication()
    engine.destroy(remove=True)
    return result, sent


@pytest.mark.works("Several ranks", 'every collective in a world of one (`"debug": {"collectives": true}`)', "right")
def test_a_process_that_trains_alone_calls_every_collective_if_asked(tmp_path: Path) -> None:
    with pool(1) as single:
        for stage, reductions in ((1, 1), (2, 2), (3, 2)):
            job = SUMS._replace(stage=stage, accumulation=2, steps=2)
            units, runs = len(find_units(job.model()).units), job.steps * reductions
            [(expected, silent)] = single.run(train_alone, job, tmp_path, False)
            [(result, sent)] = single.run(train_alone, job, tmp_path, True)
            assert_same(expected, result)
            assert silent == Communication()
            assert sent.gradients == Sent(units * runs, 0)
            assert (
                sent.weights.collectives >= units * job.steps and sent.agreement.collectives and not sent.total.nbytes
            )


# -- memory -------------------------------------------------------------------------------------------


def test_the_device_budget_holds_the_whole_gradients(ranks: RankPool, tmp_path: Path) -> None:
    """All gradients and those that a rank receives of one unit, in place of two buffers of the largest unit."""
    messages = [ranks.run(least_budget, tmp_path, SUMS._replace(stage=stage))[0] for stage in (1, 2)]
    least = [int(re.findall(r"least that works is .*?\((\d+) bytes\)", message)[0]) for message in messages]
    model = SUMS.model()
    gradients = [unit.trainable_stop * FP32 for unit in layouts_of(model, find_units(model), 2)]
    assert least[0] - least[1] == (sum(gradients) + max(gradients)) - 2 * max(gradients)
    assert 'set "stage": 2, which reduces each micro-batch' in messages[0] and "twice its gradients" in messages[1]


TWO_STEPS = JOBS["gpt2"]._replace(steps=2, lr=3e-4)


class Late:
    """An exchange that begins only when somebody needs its values."""

    def __init__(self, begin: Callable[[], CollectiveWork]) -> None:
        self._begin = begin

    def order_compute(self) -> None:
        self._begin().order_compute()


def train_late(job: Job, placement: tuple[str, str], folder: Path) -> Result:
    """Until an exchange is waited for, nothing is received, and what changes of the memory to be sent is sent."""

    def late(
        exchange: Any, ranks: ProcessGroup, received: torch.Tensor, sent: torch.Tensor | None, senders: Any
    ) -> Any:
        received.view(torch.uint8).fill_(0xFF)  # NaN in any dtype, and the scale of a block of codes
        return Late(lambda: exchange(ranks, received, sent, senders))

    with pytest.MonkeyPatch.context() as patch:
        testing.intercept(patch, "ranks.exchange", late)
        return train(job, placement, folder)


@pytest.mark.parametrize(("stage", "accumulation"), [(3, 2), (1, 3)])
def test_an_exchange_beside_the_backward_changes_no_bit(
    stage: int, accumulation: int, ranks: RankPool, tmp_path: Path
) -> None:
    """In stage 3 each micro-batch is sent from a bucket, in stage 1 the sums of a step."""
    job = TWO_STEPS._replace(stage=stage, accumulation=accumulation)
    at_once = ranks.run(train, job._replace(overlap=False), MEMORY, tmp_path / "at once")
    beside = ranks.run(train_late, job._replace(overlap=True), DISK, tmp_path / "beside")
    for left, right in zip(at_once, beside, strict=True):
        assert_same(left, right)


# -- failures -----------------------------------------------------------------------------------------


def fail_in_the_additions(folder: Path, starts_over: bool) -> tuple[str, list[float]]:
    """Rank 1 has no memory for a sum at the end of its first backward. Returns its error, and the norms."""
    engine = start(TWO_STEPS, MEMORY, folder)
    gradients, error_message, norms = testing.inspect(engine).gradients, "", list[float]()
    assert isinstance(gradients, ReduceScatterAccumulator)

    def short(put: Any, *arguments: Any) -> None:
        put(*arguments)
        raise torch.OutOfMemoryError

    def fall_short(finish: Any, *arguments: Any) -> None:
        testing.intercept(patch, "ranks.reduce", short)
        finish(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if rank_and_size()[0] == 1:
            testing.intercept(patch, "ranks.finish_reduce", fall_short)
        with contextlib.suppress(torch.OutOfMemoryError):
            engine.backward(TWO_STEPS.loss(engine, 0, 0))
    try:
        if starts_over:
            engine.zero_grad()
        for step in range(TWO_STEPS.steps):
            engine.backward(TWO_STEPS.loss(engine, step, 0))
            engine.step()
            norms.append(engine.get_global_grad_norm() or 0.0)
    except RankError as error:
        error_message = str(error)
    with contextlib.suppress(OffloadError):
        engine.destroy()
    return error_message, norms


def test_gradients_that_were_added_up_in_part_are_dropped_or_end_the_run(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(train, TWO_STEPS, MEMORY, tmp_path)[0].norms
    assert ranks.run(fail_in_the_additions, tmp_path, True) == [("", expected)] * 2
    (rank0, _), (rank1, _) = ranks.run(fail_in_the_additions, tmp_path, False)
    assert re.match(
        r"rank 1 \(process .*\) has ended: it has failed while it added gradients up\. Rank 0 cannot", rank0
    )
    assert rank1.startswith("rank 1 has stopped, and the others with it: it has failed while it added gradients up")


# -- memory -------------------------------------------------------------------------------------------


def least_budget(folder: Path, job: Job) -> str:
    """Returns the error of an engine with no room on its device for a whole table of words."""
    with pytest.raises(BudgetError) as caught:
        start(job, DISK, folder, device_memory=4096, vocabulary="whole")
    return str(caught.value)


@pytest.mark.parametrize(("stage", "buffers"), [(3, 2), (1, 1)])
def test_the_device_budget_holds_a_second_set_of_buffers(
    stage: int, buffers: int, ranks: RankPool, tmp_path: Path
) -> None:
    """A bucket and what is received of it; in stages 0 and 1 the sums are sent, and need no bucket."""
    job = TWO_STEPS._replace(stage=stage, accumulation=2)
    messages = [ranks.run(least_budget, tmp_path, job._replace(overlap=each))[0] for each in (True, False, None)]
    assert messages[2] == messages[stage < 2], "stage 3 overlaps unless the config says otherwise"
    with_it, without = (int(re.findall(r"least that works is .*?\((\d+) bytes\)", each)[0]) for each in messages[:2])
    model = job.model()
    largest = max(unit.trainable_stop * FP32 for unit in layouts_of(model, find_units(model), 2))
    assert with_it - without == buffers * align_up(largest)
    assert ("four times its gradients" in messages[0]) == (stage == 3)


class Step(NamedTuple):
    """The second step of one rank."""

    sent: Communication
    measured: dict[str, float]
    """On rank 0 alone."""
    units: list[int]
    """Elements of each unit, all of which train."""
    mean: Communication
    """Sent by `engine.mean`."""


def second_step(folder: Path, stage: int, accumulation: int, schedule: str = "micro_batch_major") -> Step:
    """Trains two steps with room for all units on the device; the first records the order of uses."""
    job = JOBS["gpt2"]._replace(stage=stage, accumulation=accumulation, steps=2)
    options = {"device_memory": "64MiB", "log": str(folder / "log"), "schedule": schedule}
    engine = start(job, ("cpu", "cpu"), folder, **options)
    before = engine.communication()
    for step in range(job.steps):
        before = engine.communication()
        engine.accumulate(range(job.accumulation), functools.partial(job.loss, engine, step))
        engine.step()
    after = engine.communication()
    engine.mean(1.0)
    traffic = Step(
        sent=after.since(before),
        measured=dict(engine.measured),
        units=[layout.trainable_stop for layout in testing.inspect(engine).layouts],
        mean=engine.communication().since(after),
    )
    engine.destroy(remove=True)
    return traffic


@pytest.mark.parametrize(
    ("stage", "accumulation", "schedule", "reductions"),
    [(3, 4, "micro_batch_major", 4), (3, 4, "layer_major", 1), (1, 4, "micro_batch_major", 1)],
)
def test_a_step_sends_what_the_formulas_of_zero_say(
    stage: int, accumulation: int, schedule: str, reductions: int, ranks: RankPool, tmp_path: Path
) -> None:
    """The volumes of ZeRO's paper (arXiv 1910.02054, section 7.2) for n ranks, where nothing is gathered twice.

    An all-gather of W bytes makes each rank send (n - 1) / n of them, and so does a reduce-scatter of G bytes, which is
    an exchange here. Weights stay on the device until the update: they are gathered once a step, not once a use.
    Gradients are reduced for each micro-batch, or, in stages 0 and 1 and where micro-batches take turns, once for each
    step.
    """
    steps = ranks.run(second_step, tmp_path, stage, accumulation, schedule)
    for traffic in steps:
        shard_nbytes = sum(traffic.units) * FP32 // 2
        assert traffic.sent.weights == Sent(len(traffic.units), shard_nbytes)
        assert traffic.sent.gradients == Sent(len(traffic.units) * reductions, shard_nbytes * reductions)
        # Statistics of the step: their length, then four numbers and a bitmap of each unit's gradients. Ranks that take
        # turns ask each other for the order: a number, behind its length.
        assert traffic.sent.messages.collectives == (4 if schedule == "layer_major" else 2)
        assert traffic.sent.parameters == Sent()
        # One round for the mean, of eight numbers; then the value in JSON, behind its length.
        assert traffic.mean == Communication(agreement=Sent(1, 8 * 8), messages=Sent(2, 8 + len("1.0")))
    first, last = steps
    assert (first.measured["collectives"], first.measured["sent_bytes"]) == first.sent.total and not last.measured


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "reductions"), [(1, 1), (2, 4)])
def test_four_ranks_gather_once_a_step_and_reduce_as_the_stage_says(
    stage: int, reductions: int, four: RankPool, tmp_path: Path
) -> None:
    for result in four.run(second_step, tmp_path, stage, 4):
        shard_nbytes = sum(result.units) * FP32 * 3 // 4
        assert result.sent.weights == Sent(len(result.units), shard_nbytes)
        assert result.sent.gradients == Sent(len(result.units) * reductions, shard_nbytes * reductions)


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [1, 2])
def test_four_ranks_of_a_low_stage_equal_one_rank_in_every_placement(
    stage: int, four: RankPool, tmp_path: Path
) -> None:
    job = SUMS._replace(stage=stage)
    result = four.run(train_in_all, job, tmp_path, [MEMORY, DISK])[0]
    rounding_bounds.same_training(result, train(job, DISK, tmp_path / "one"), job, reordered=True)


# -- communication_data_type --------------------------------------------------------------------------

COUNTED = JOBS["gpt2"]._replace(steps=2, accumulation=2)


def train_in_bf16(job: Job, folder: Path, rounds: bool) -> tuple[Result, int]:
    """Trains fp32 weights; gradients are rounded to bf16 by hooks of the user, or on their way. Returns bytes sent."""
    engine = start(job, ("none", "none"), folder)
    if rounds:
        for parameter in engine.module.parameters():
            parameter.register_hook(lambda gradient: gradient.bfloat16().float())
    result = trained(engine, job)
    nbytes = engine.communication().gradients.nbytes
    engine.destroy(remove=True)
    return result, nbytes


def only_the_first_micro_batch(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    return COUNTED.loss(model, step, micro) * (micro == 0)


def test_gradients_are_rounded_to_the_dtype_in_which_they_are_sent(ranks: RankPool, tmp_path: Path) -> None:
    """Once, from the backward into a bucket, or from a sum; the mean is that of the rounded values in fp32."""
    expected = ranks.run(train_in_bf16, COUNTED, tmp_path, True)
    in_bf16 = COUNTED._replace(sent="bf16")
    for (left, nbytes), (right, twice) in zip(
        ranks.run(train_in_bf16, in_bf16, tmp_path, False), expected, strict=True
    ):
        assert_same(left, right)
        assert 2 * nbytes == twice
    first_alone = in_bf16._replace(loss=only_the_first_micro_batch)
    both_sums = ranks.run(train_in_bf16, first_alone, tmp_path, False)
    sums = ranks.run(train_in_bf16, first_alone._replace(stage=1, overlap=True), tmp_path, False)
    for (left, nbytes), (right, twice) in zip(sums, both_sums, strict=True):
        assert_same(left, right)
        assert 2 * nbytes == twice, "in stage 1 each step is reduced"
