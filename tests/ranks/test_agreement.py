"""Ranks decide the next collective from the intents of all; ranks that differ get an error on every rank."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import offload
from offload import testing
from offload.distributed.agreement import Collective, NextCollective, RankIntent, Rounds, next_collective
from offload.distributed.process_group import Communication
from offload.engine import setup
from offload.errors import BudgetError, ConfigError, EngineFailed, RankError, UsageError
from offload.swapper.pager import UnitState
from tests.support import models, rounding_bounds
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import (
    Job,
    Result,
    accumulated_step,
    assert_same,
    assert_same_tensors,
    config,
    trained,
    weights_of,
)
from tests.support.param_states import gpt2
from tests.support.ranks.rank_jobs import JOBS, my_rows, rows_loss
from tests.support.ranks.rank_pool import RankPool, rank_and_size, shared_pool, start, train

FREE = (Collective.USE, Collective.REDUCE)
TOGETHER = (Collective.STEP, Collective.EDIT, Collective.END, Collective.MEAN)

free = st.builds(RankIntent, st.sampled_from(FREE), st.integers(0, 3), st.booleans())
together = st.builds(RankIntent, st.sampled_from(TOGETHER), st.integers(-1, 3))


def goes_on(intent: RankIntent, choice: NextCollective) -> bool:
    """Returns True if a rank with this intent has what it needs by the end of the round."""
    return intent.kind is Collective.USE if choice.next is None else intent.same(choice.next)


@st.composite
def programs(draw: st.DrawFn) -> list[list[RankIntent]]:
    """What each rank is going to do: the same things together, and between them whatever it likes."""
    shared = draw(st.lists(together, max_size=4))
    ranks = draw(st.integers(2, 4))
    return [
        [
            intent
            for common in [*shared, RankIntent(Collective.STEP)]
            for intent in [*draw(st.lists(free, max_size=6)), common]
        ]
        for _ in range(ranks)
    ]


def test_a_gather_comes_before_a_reduction_which_waits_for_all_uses() -> None:
    """Which gradients are reduced together must not depend on the gathers of other ranks."""
    reduce, missing = RankIntent(Collective.REDUCE, 1), RankIntent(Collective.USE, 2)
    ready = missing._replace(ready=True)
    assert next_collective([reduce, missing, ready]) == NextCollective(missing)
    assert next_collective([reduce, ready, ready]) == NextCollective(None)
    assert next_collective([reduce, RankIntent(Collective.STEP)]) == NextCollective(reduce)


@given(programs())
def test_every_program_comes_to_its_end(programs: list[list[RankIntent]]) -> None:
    at = [0] * len(programs)
    done: list[RankIntent] = []
    while any(position < len(program) for position, program in zip(at, programs, strict=True)):
        # A rank cannot be past its end while another is not: the last intent is one that all must have.
        intents = [program[position] for position, program in zip(at, programs, strict=True)]
        choice = next_collective(intents)
        assert choice is not None, f"nothing can be next of {intents}"
        moved = [rank for rank, intent in enumerate(intents) if goes_on(intent, choice)]
        for rank in moved:
            at[rank] += 1
        assert moved, "every round brings somebody on"
        if choice.next is None:
            assert all(intents[rank].ready for rank in moved), "nobody uses what it has not"
        else:
            done.append(choice.next)
            if choice.next.kind in TOGETHER:
                assert len(moved) == len(programs), "what must be done together is done together"
    common = [intent for intent in programs[0] if intent.kind in TOGETHER]
    assert [intent for intent in done if intent.kind in TOGETHER] == common
    for program in programs:
        needed = [
            intent
            for intent in program
            if intent.kind is Collective.REDUCE or (intent.kind is Collective.USE and not intent.ready)
        ]
        assert all(any(intent.same(other) for other in done) for intent in needed)


@given(st.lists(st.tuples(st.sampled_from(FREE), st.integers(0, 3)), max_size=8), st.integers(2, 4), st.data())
def test_ranks_on_one_path_move_together(path: list[tuple[Collective, int]], ranks: int, data: st.DataObject) -> None:
    """Whatever each has on its device: none runs ahead, so collectives of the user's own may stand anywhere between."""
    for kind, unit in path:
        choice = next_collective([RankIntent(kind, unit, data.draw(st.booleans())) for _ in range(ranks)])
        assert choice is not None and choice.next is not None and choice.next.same(RankIntent(kind, unit))


@given(st.lists(together, min_size=2, max_size=4))
def test_what_must_be_the_same_and_is_not_can_never_be(intents: list[RankIntent]) -> None:
    same = all(intent.same(intents[0]) for intent in intents)
    assert (next_collective(intents) is None) == (not same)


def test_a_gather_for_another_rank_is_tried_again_once_there_is_room() -> None:
    """The other rank waits for it, whatever this rank needs itself."""
    served: list[int] = []

    def serve(unit: int) -> None:
        served.append(unit)
        if len(served) == 1:
            raise BudgetError("no room")

    def collect(mine: list[int], _: str) -> list[list[int]]:
        return [mine, [int(field) for field in RankIntent(Collective.USE, 1, ready=len(served) > 1)]]

    two: Any = SimpleNamespace(
        rank=0, size=2, mesh=SimpleNamespace(shards=2), gathers=True, collect=collect, fail=RankError
    )
    callbacks: Any = SimpleNamespace(pending_unit=lambda: -1, serve_gather=serve)
    agreement = Rounds(SimpleNamespace(ranks=two), ["a", "b"], callbacks)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(BudgetError) if not served else contextlib.nullcontext():
            agreement.agree(0, lambda: UnitState(unit=True, all=False, ahead=-1))
    assert served == [1, 1] and not agreement.interrupted


DISK = ("nvme", "nvme")


# -- different paths ----------------------------------------------------------------------------------


class Experts(nn.Module):
    """A layer whose experts are units of their own; each rank goes through others, in another order."""

    def __init__(self, paths: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 61)
        self.paths = paths

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for expert in self.paths[rank_and_size()[0]]:
            hidden = hidden + self.experts[expert](hidden)
        return self.head(hidden)


def other_order() -> nn.Module:
    return Experts(((0, 1, 2), (2, 0, 3)))


class Parts(nn.Module):
    """A block, which is one unit; each rank goes through other parts of it."""

    def __init__(self) -> None:
        super().__init__()
        # Names of their own: the modules of a list would be units.
        self.part_0, self.part_1, self.part_2, self.part_3 = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for number in ((0, 2, 3), (1, 3))[rank_and_size()[0]]:
            hidden = hidden + self.get_submodule(f"part_{number}")(hidden)
        return hidden


def other_parts() -> nn.Module:
    """A rank has no gradients of parts at the start of a unit, in it, and at its end: others have used the memory."""
    return nn.Sequential(nn.Embedding(61, 64), Parts(), Parts(), Parts(), nn.Linear(64, 61))


OTHER_PATHS = {
    "modules": Job(other_order, rows_loss, steps=3),
    "parts of a unit": Job(other_parts, rows_loss, steps=3),
    "parts of a unit, stage 1": Job(other_parts, rows_loss, steps=3, accumulation=2, stage=1),
}


@pytest.mark.works("Several ranks", "experts that only some ranks use, in any order", "right")
@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OTHER_PATHS)
def test_ranks_may_use_different(name: str, ranks: RankPool, tmp_path: Path) -> None:
    job = OTHER_PATHS[name]
    rank0, rank1 = ranks.run(train, job, DISK, tmp_path)
    assert_same(rank0, rank1)
    rounding_bounds.same_training(rank0, train_alone(job), job, reordered=True)


def look_while_others_update(folder: Path) -> float:
    """Rank 0 takes the weights at once after a step, which rank 1, whose requests are late, has not updated yet."""
    job = JOBS["gpt2"]._replace(steps=1)
    with pytest.MonkeyPatch.context() as patch:
        if rank_and_size()[0] == 1:
            use_queue(patch, lambda: LateQueue(0, 0.05))
        engine = start(job, DISK, folder)
    engine.backward(job.loss(engine, 0, 0))
    engine.step()
    if engine.global_rank == 0:
        engine.module.state_dict()
    engine.mean(0.0)
    mean = engine.mean(float(engine.global_rank))  # to serve others has left nothing half done
    engine.destroy(remove=True)
    return mean


def test_a_rank_that_serves_others_waits_for_its_own_updates(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(look_while_others_update, tmp_path) == [0.5, 0.5]


def save_at_the_end(folder: Path) -> int:
    """Rank 0 takes the weights while rank 1 is closing its engine already; a loop with `zero_grad` in it."""
    job = JOBS["gpt2"]._replace(steps=2)
    engine = start(job, DISK, folder)
    for step in range(job.steps):
        engine.zero_grad()
        engine.backward(job.loss(engine, step, 0))
        engine.step()
    seen = 0
    if engine.global_rank == 0:
        time.sleep(0.3)
        seen = sum(value.numel() for value in engine.module.state_dict().values())
    engine.destroy(remove=True)
    return seen


@pytest.mark.works("Several ranks", "`torch.save(state_dict())` on one rank before the end", "right")
def test_one_rank_may_save_while_others_close(ranks: RankPool, tmp_path: Path) -> None:
    seen, nothing = ranks.run(save_at_the_end, tmp_path)
    assert seen > 0 and nothing == 0


def late_zero_grad(folder: Path) -> list[float]:
    """Rank 0 evaluates, serves rank 1's whole next micro-batch meanwhile, and then calls `zero_grad` for itself."""
    job = JOBS["gpt2"]._replace(steps=3)
    engine = start(job, DISK, folder)
    norms = []
    for step in range(job.steps):
        if engine.global_rank == 0 and step:
            engine.module.state_dict()
        engine.zero_grad()
        engine.backward(job.loss(engine, step, 0))
        engine.step()
        norms.append(engine.get_global_grad_norm() or 0.0)
    engine.destroy(remove=True)
    return norms


def test_zero_grad_leaves_what_others_have_given(ranks: RankPool, tmp_path: Path) -> None:
    rank0, rank1 = ranks.run(late_zero_grad, tmp_path / "late")
    assert rank0 == rank1 == ranks.run(train, JOBS["gpt2"]._replace(steps=3), DISK, tmp_path / "plain")[0].norms


def interrupt_a_wait() -> None:
    """Sends Ctrl-C as soon as the main thread is in a round, whose end needs the other rank."""
    main = threading.main_thread().ident
    while not any(
        "/distributed/agreement.py" in frame.f_code.co_filename
        for frame, _ in traceback.walk_stack(sys._current_frames()[main])
    ):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(folder: Path) -> str:
    """A Ctrl-C while a rank waits for the others, which the user catches."""
    rank, _ = rank_and_size()
    job = JOBS["gpt2"]
    engine = start(job, DISK, folder)
    message = ""
    try:
        engine.backward(job.loss(engine, 0, 0))
        caught = folder / "caught"
        if rank == 1:
            threading.Thread(target=interrupt_a_wait, daemon=True).start()
        for _ in range(5000 if rank == 0 else 0):
            if caught.exists():
                break
            time.sleep(0.01)
        try:
            engine.step()
        except KeyboardInterrupt:
            caught.touch()
            engine.step()
        job.loss(engine, 1, 0)
    except (RankError, EngineFailed) as error:
        message = str(error)
    finally:
        with contextlib.suppress(RankError):
            engine.destroy()
    return message


def test_an_interrupt_between_ranks_ends_the_run_on_all(ranks: RankPool, tmp_path: Path) -> None:
    rank0, rank1 = ranks.run(interrupted, tmp_path)
    assert re.search(r"rank 1 \(process .*\) has ended", rank0)
    assert "stopped" in rank1


ROOM = "64MiB"
"""On the device for all units of each model here."""
RAM = ("cpu", "cpu")


def sent_by_step(job: Job, folder: Path, scatter: bool = False, **options: Any) -> tuple[list[Communication], Result]:
    """Trains, and returns what each step sent; `scatter` gives each rank's arena an order of its own."""
    engine = start(job, RAM, folder, device_memory=ROOM, **options)
    if scatter:
        testing.inspect(engine).device_arena.space.scatter = random.Random(rank_and_size()[0])
    counts = [engine.communication()]
    losses, norms = [], []
    for step in range(job.steps):
        loss = 0.0
        for micro in range(job.accumulation):
            part = job.loss(engine, step, micro)
            engine.backward(part)
            engine.step()
            loss += float(part.detach()) / job.accumulation
        losses.append(loss)
        norms.append(engine.get_global_grad_norm() or 0.0)
        counts.append(engine.communication())
    weights = weights_of(engine)
    engine.destroy(remove=True)
    sent = [after.since(before) for before, after in itertools.pairwise(counts)]
    return sent, Result(losses, norms, weights)


def test_a_recorded_step_has_one_round_for_its_gathers(ranks: RankPool, tmp_path: Path) -> None:
    job = JOBS["gpt2"]._replace(steps=3)
    for sent, _ in ranks.run(sent_by_step, job, tmp_path, True):
        units = sent[-1].weights.collectives
        # The first step records the order, and asks at each use and after each gather.
        assert sent[0].agreement.collectives > 3 * units
        for step in sent[1:]:
            assert step.weights.collectives == sent[0].weights.collectives, "each unit is gathered once"
            assert step.gradients.collectives == units
            # One for all gathers, one for each reduction, and one for the step.
            assert step.agreement.collectives == 2 + units


# -- other paths --------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Layers of which each rank passes some, in another order, in the steps of `PATHS`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.head = nn.Linear(64, 61)
        self.step = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in PATHS.get(self.step, (SAME_PATH,) * 3)[rank_and_size()[0]]:
            hidden = hidden + self.layers[layer](hidden)
        return self.head(hidden)


SAME_PATH = (0, 1, 2, 3)
PATHS = {2: (SAME_PATH, (0, 1, 3), (0, 2)), 4: ((0, 1, 3), (1, 4, 2, 0), SAME_PATH), 5: (SAME_PATH, (1, 2, 3), (2, 3))}
"""Of each rank: some leave out a layer; later each takes another way, one through a layer that nobody has used."""


def frozen_at_the_start() -> nn.Module:
    model = Branching()
    model.embedding.requires_grad_(False)
    return model


def branching_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    """Ranks take the ways of a step in its last micro-batch, the second where there are two."""
    getattr(model, "module", model).step = step if micro == 1 else -1
    ids = my_rows(models.tokens(step, micro, (6, 16), 61))  # two or three ranks divide six rows
    return models.token_loss(model(ids), ids)


def branching_loss_at_once(model: Any, step: int, micro: int) -> torch.Tensor:
    getattr(model, "module", model).step = step
    return rows_loss(model, step, micro)


BRANCHING = Job(Branching, branching_loss_at_once, steps=7)
TWICE = Job(Branching, branching_loss, steps=7, accumulation=2)


def train_alone(job: Job, size: int = 2) -> Result:
    """Returns what the losses of all ranks give one process of plain PyTorch."""
    torch.manual_seed(job.seed)
    model = job.model()
    adamw = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=job.weight_decay)
    losses, norms = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(size))
        for step in range(job.steps):
            total = torch.zeros(())
            for rank, micro in itertools.product(range(size), range(job.accumulation)):
                patch.setenv("RANK", str(rank))
                total = total + job.loss(model, step, micro) / size / job.accumulation
            total.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), job.clip)))
            adamw.step()
            adamw.zero_grad()
            losses.append(float(total.detach()))
    return Result(losses, norms, model.state_dict())


@pytest.mark.parametrize(
    "job",
    [
        BRANCHING._replace(overlap=False),
        TWICE,
        TWICE._replace(stage=1, overlap=True, shard_size=1),
        TWICE._replace(stage=1, model=frozen_at_the_start),
    ],
)
@pytest.mark.sample(3)
@pytest.mark.works("Several ranks", "a step in which a rank leaves the path of the steps before", "right")
@pytest.mark.numeric
def test_a_rank_may_leave_the_path_in_any_step(job: Job, ranks: RankPool, tmp_path: Path) -> None:
    """Each gradient counts once. In stage 1 no reduction is added for those that come later."""
    expected = train_alone(job)
    (sent, rank0), (_, rank1) = ranks.run(sent_by_step, job, tmp_path)
    assert_same_tensors(rank0.weights, rank1.weights)
    means = [sum(pair) / 2 for pair in zip(rank0.losses, rank1.losses, strict=True)]
    rounding_bounds.same_training(Result(means, rank0.norms, rank0.weights), expected, job, reordered=True)
    reductions = [step.gradients.collectives for step in sent]
    assert reductions[2] == reductions[1] == reductions[5], "a rank that leaves out a layer waits for the next of all"


def asking_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    """Each rank asks for the mean of a number in the middle of the backward of a branch."""
    layer = getattr(model, "module", model).layers[0]
    with contextlib.ExitStack() as entered:
        if hasattr(model, "mean"):
            hook = layer.register_forward_hook(
                lambda _, __, out: out.register_hook(lambda _: model.mean(1.0) and None) and None
            )
            entered.callback(hook.remove)
        return branching_loss(model, step, micro)


def in_lives(job: Job, lives: tuple[int, ...], folder: Path, room: str = ROOM, more: Mapping[str, str] = {}) -> Result:
    """Trains up to each number of steps of `lives`, by an engine that resumes what the one before has committed."""
    losses, norms, weights = [], [], {}
    for steps in lives:
        engine = start(job, DISK, folder, device_memory=room, resume="auto", durability="step", **more)
        while engine.global_steps < steps:
            losses.append(accumulated_step(engine, job, engine.global_steps))
            norms.append(engine.get_global_grad_norm() or 0.0)
        weights = weights_of(engine)
        engine.destroy(remove=steps == lives[-1])
    return Result(losses, norms, weights)


def same_in_all_lives(job: Job, ranks: RankPool, folder: Path) -> None:
    unbroken = ranks.run(in_lives, job, (5,), folder / "unbroken")
    # The first step of a life asks before each gather, as all do where not all units fit on the device.
    lives = [("resumed", (2, 4, 5), ROOM)]
    if job.stage == 3:
        lives.append(("little room", (5,), "180KiB"))
    for name, steps, room in lives:
        for expected, result in zip(unbroken, ranks.run(in_lives, job, steps, folder / name, room), strict=True):
            assert_same(expected, result)


FIVE = TWICE._replace(steps=5)
LEAVING = {
    "stage 1": FIVE._replace(stage=1),
    "stage 1, 16 bits": FIVE._replace(stage=1, dtype="bf16"),
    "replicas of a shard": FIVE._replace(stage=1, shard_size=1),
    "stage 2": FIVE._replace(stage=2, overlap=True),
    "stage 3": FIVE,
    "stage 3, 16 bits": FIVE._replace(dtype="bf16", overlap=False),
    "a question in a backward": FIVE._replace(loss=asking_loss),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LEAVING)
def test_a_rank_that_leaves_the_path_adds_up_the_same_in_each_life(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """Neither the steps of a life before it nor the room on the device decide which gradients are added together."""
    same_in_all_lives(LEAVING[name], ranks, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LEAVING)
def test_three_ranks_that_leave_the_path_add_up_the_same_in_each_life(name: str, tmp_path: Path) -> None:
    with shared_pool(3) as three:
        same_in_all_lives(LEAVING[name], three, tmp_path)


IN_TURNS = {"schedule": "layer_major"}


class Caching(Branching):
    """A model whose first forward in a process stores a value."""

    scale: float | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = 1.0
        return super().forward(ids) * self.scale


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_step_takes_turns_though_its_first_forward_stores_a_value(
    stage: int, ranks: RankPool, tmp_path: Path
) -> None:
    """The first step of the run has shown that the value is harmless; without turns ranks add in another order."""
    job = Job(Caching, rows_loss, stage=stage, steps=4, accumulation=3)
    unbroken = ranks.run(in_lives, job, (4,), tmp_path / "unbroken", ROOM, IN_TURNS)
    resumed = ranks.run(in_lives, job, (2, 4), tmp_path / "resumed", ROOM, IN_TURNS)
    for expected, result in zip(unbroken, resumed, strict=True):
        assert_same(expected, result)


def again_after(micro: int, job: Job, folder: Path) -> Result:
    """Trains after a first step whose loss of a micro-batch has failed on all ranks."""

    def loss(number: int) -> torch.Tensor:
        value = job.loss(engine, 0, number)
        if number == micro:
            raise ZeroDivisionError
        return value

    engine = start(job, DISK, folder, device_memory=ROOM, **IN_TURNS)
    with contextlib.suppress(ZeroDivisionError):
        engine.accumulate(range(job.accumulation), loss)
    engine.zero_grad()
    result = trained(engine, job, accumulated_step)
    engine.destroy(remove=True)
    return result


@pytest.mark.parametrize(("stage", "micro"), [(2, 0), (2, 2), (3, 0), (3, 1), (2, 3), (3, 3)])
def test_a_first_step_that_is_made_again_adds_up_as_its_first_try_would(
    stage: int, micro: int, ranks: RankPool, tmp_path: Path
) -> None:
    """The first try has stored the value, which is not new any more."""
    job = Job(Caching, rows_loss, stage=stage, steps=2, accumulation=3)
    calm = ranks.run(in_lives, job, (2,), tmp_path / "calm", ROOM, IN_TURNS)
    for expected, result in zip(calm, ranks.run(again_after, micro, job, tmp_path / "again"), strict=True):
        assert_same(expected, result)


class KeepingOnOneRank(Branching):
    """A model that stores a value in each forward, on the second rank alone."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if rank_and_size()[0] == 1:
            self.seen = 1
        return super().forward(ids)


def in_memory(job: Job, folder: Path) -> Result:
    engine = start(job, ("none", "none"), folder)
    result = trained(engine, job, accumulated_step)
    engine.destroy(remove=True)
    return result


@pytest.mark.parametrize("stage", [2, 3])
def test_a_value_that_one_rank_stores_decides_the_order_of_all(stage: int, ranks: RankPool, tmp_path: Path) -> None:
    job = Job(KeepingOnOneRank, rows_loss, stage=stage, steps=3, accumulation=3)
    memory = ranks.run(in_memory, job, tmp_path / "memory")
    for name, lives in (("unbroken", (3,)), ("resumed", (1, 3))):
        lived = ranks.run(in_lives, job, lives, tmp_path / name, ROOM, {"activations": "device"})
        for expected, result in zip(memory, lived, strict=True):
            assert_same(expected, result, name)


def in_order(job: Job, folder: Path, schedule: str) -> tuple[bool, Result]:
    engine = start(job, DISK, folder, device_memory="400KiB", activations="auto", schedule=schedule)
    result, turns = trained(engine, job, accumulated_step), testing.inspect(engine).takes_turns
    engine.destroy(remove=True)
    return turns, result


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_order_that_is_chosen_for_the_user_adds_up_as_the_plain_one(
    dtype: str, ranks: RankPool, tmp_path: Path
) -> None:
    """The room for units decides whether "auto" lets micro-batches take turns."""
    job = JOBS["gpt2"]._replace(accumulation=3, steps=2, dtype=dtype)
    (turns, chosen), _ = ranks.run(in_order, job, tmp_path / "chosen", "auto")
    (loops, plain), _ = ranks.run(in_order, job, tmp_path / "plain", "micro_batch_major")
    assert turns and not loops
    assert_same(plain, chosen)


# -- ranks that differ --------------------------------------------------------------------------------


def with_a_buffer() -> nn.Module:
    model = gpt2()
    model.register_buffer("seen", torch.zeros(3), persistent=False)
    return model


def with_a_frozen_norm() -> nn.Module:
    model = gpt2()
    model.get_parameter("transformer.ln_f.bias").requires_grad_(False)
    return model


WRONG: dict[str, Any] = {
    "parameters": lambda job: job._replace(model=with_a_frozen_norm),
    "buffers": lambda job: job._replace(model=with_a_buffer),
    "buffer_dtype": lambda job: job._replace(buffers="same"),
    "fp16": lambda job: job._replace(dtype="fp16", loss_scale=2 * job.loss_scale),
    "stage": lambda job: job._replace(stage=1),
    "overlap_comm": lambda job: job._replace(overlap=False),
    "zero_quantized_weights": lambda job: job._replace(quantized="weights"),
    "zero_quantized_nontrainable_weights": lambda job: job._replace(quantized="nontrainable_weights"),
    "zero_quantized_gradients": lambda job: job._replace(quantized="gradients"),
    "communication_data_type": lambda job: job._replace(sent="bf16"),
}
"""Changes of a job on one rank alone."""


def wrong(folder: Path, what: str) -> str:
    """The error that this rank gets."""
    rank, _ = rank_and_size()
    job = JOBS["gpt2"]._replace(accumulation=1 + (what == "accumulation" and rank))
    try:
        if what == "model" and rank:
            job = JOBS["llama"]
        if what in WRONG and rank:
            job = WRONG[what](job)
        elif what == "fp16":
            job = job._replace(dtype="fp16")
        options_of = {"config": {"no such key": 1}, "schedule": {"schedule": "micro_batch_major"}}
        options = options_of.get(what, {}) if rank else {}
        early = mock.patch.object(setup, "load_config", side_effect=KeyboardInterrupt)
        with early if what == "ctrl-c" and rank else contextlib.nullcontext():
            engine = start(job, DISK, folder, **options)
    except (ConfigError, RankError, KeyboardInterrupt) as error:
        return str(error)
    try:
        if what == "step":
            if rank == 0:
                engine.destroy(remove=True)
            else:
                loss = job.loss(engine, 0, 0)
                engine.backward(loss)
                engine.step()
        if what == "end":
            engine.destroy(remove=rank == 1)
        if what in ("lr", "zero_grad"):
            engine.optimizer.param_groups[0]["lr"] = 0.01 * (1 + (what == "lr" and rank))
            engine.backward(job.loss(engine, 0, 0))
            if what == "zero_grad" and rank == 1:
                engine.zero_grad()
            engine.step()
        if what == "edit":
            if rank == 0:
                with torch.no_grad():
                    engine.module.get_parameter("lm_head.weight").fill_(0)
            engine.destroy(remove=True)
        if what == "micro-batches":
            for _ in range(1 + rank):
                engine.backward(job.loss(engine, 0, 0))
            engine.step()
    except (RankError, UsageError) as error:
        return str(error)
    finally:
        try:
            engine.destroy(remove=True)
        except RankError:
            pass
    return ""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("model", ("the units of rank 1 and of rank 0 differ",) * 2),
        ("accumulation", ("the batch of rank 1 and of rank 0 differ",) * 2),
        *((what, (f"the {what} of rank 1 and of rank 0 differ",) * 2) for what in (*WRONG, "schedule")),
        ("parameters", (r"differ: \['transformer.ln_f.bias', \[\d+\], False\], not \[.*, True\]; give",) * 2),
        ("step", (r"rank 0 closes its engine; rank 1 is at step\(\)",) * 2),
        ("end", ("rank 0 keeps its store; rank 1 deletes its store: all ranks must do the same",) * 2),
        ("lr", (r"differ in their learning rates or other settings of the optimizer \(checksums\): \d+, \d+",) * 2),
        ("zero_grad", (r"rank 0 is at step\(\); rank 1 drops its gradients \(zero_grad\)",) * 2),
        ("config", ("rank 1 has ended before it created its engine: ConfigError", "unknown key")),
        ("ctrl-c", ("rank 1 has ended before it created its engine: KeyboardInterrupt", "")),
        ("edit", ("rank 0 changes the weights of .*; rank 1 closes its engine",) * 2),
        ("micro-batches", ("the ranks differ in their micro-batches since the last boundary: 1, 2",) * 2),
    ],
)
def test_ranks_that_disagree_get_an_error_on_every_rank(
    what: str, messages: tuple[str, str], ranks: RankPool, tmp_path: Path
) -> None:
    for message, pattern in zip(ranks.run(wrong, tmp_path, what), messages, strict=True):
        assert re.search(pattern, message), message


def start_with_samples(folder: Path) -> str:
    """The error of ranks with data sets of different lengths."""
    rank, _ = rank_and_size()
    content, data = config(JOBS["gpt2"], DISK, folder), TensorDataset(torch.zeros(20 + 8 * rank, 4))
    with pytest.raises(ConfigError) as error:
        offload.initialize(model=nn.Linear(4, 4), config=content, training_data=data)
    return str(error.value)


def test_data_sets_of_different_lengths_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(start_with_samples, tmp_path):
        assert message.startswith("training_data= contains 20 samples on rank 0 and 28 on rank 1: give every rank")


class Failed:
    """A collective that has ended, and not well."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> None:
        raise RuntimeError("connection closed")


def test_a_collective_that_has_failed_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was gathered ahead may have failed long before anybody waits for it."""
    from offload.distributed.process_group import CollectiveWork, ProcessGroup

    ranks = object.__new__(ProcessGroup)
    testing.replace(monkeypatch, "ranks.blame", lambda self, error: RankError(f"gone: {error}"))
    with pytest.raises(RankError, match="gone: connection closed"):
        CollectiveWork(ranks, Failed(), "gather weights").wait()
