"""Ranks hold replicas of the model, each in shards (`mics_shard_size`): they train as one replica, with equal bits."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.aio import IoQueue, crc32c
from offload.distributed.process_group import Communication, Sent
from offload.errors import ConfigError
from offload.runs.inspection import inspect
from offload.runs.verify import CheckpointReport, RunChecking, open_checking
from offload.states import State
from offload.swapper.pager import WeightUpdates
from offload.swapper.store.inspection import look
from tests.checkpoints.test_resume_other_ranks import Case, begun, loaded, resumed, states_in
from tests.ranks.test_agreement import Experts
from tests.support import models, rounding_bounds
from tests.support.drives.fault_injection import flip_bit
from tests.support.modules.matrix_models import MUON
from tests.support.oracle import Job, Result, assert_same, assert_same_tensors, config, trained
from tests.support.ranks.rank_jobs import JOBS, rows_loss
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start, train

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")
JOB = JOBS["gpt2"]._replace(steps=2, lr=3e-4, shard_size=2)


# -- bits ---------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """What a rank has in the end."""

    result: Result
    checksums: dict[str, int]
    """Of its partition of each state of each unit."""


def train_and_look(job: Job, placement: tuple[str, str], folder: Path) -> Trained:
    engine = start(job, placement, folder)
    result = trained(engine, job)
    engine.synchronize()  # the last update, whose states are read here
    inspected, checksums = testing.inspect(engine), dict[str, int]()
    for unit, states in enumerate(inspected.state_bytes):
        for state in states:
            if state is not State.GRAD:
                checksums[f"{unit} {state.value}"] = crc32c(inspected.read_state(unit, state))
    engine.destroy(remove=True)
    return Trained(result, checksums)


SAME_ROWS = {
    "AdamW, sums of a step": models.GPT2._replace(model=JOB.model, dtype="bf16", stage=1, accumulation=2, steps=3),
    "Lamb, some frozen": models.MIXTURE._replace(optimizer="Lamb", lr=1e-2, steps=3),
    "Muon": MUON._replace(dtype="bf16", steps=2, clip=1.0),
    "an optimizer of torch": models.GPT2._replace(model=JOB.model, optimizer="torch.optim.NAdam", clip=0.0, steps=2),
}
"""Jobs in which all ranks have the same rows, so that the mean of their gradients is that of one, exactly."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SAME_ROWS)
def test_two_replicas_have_the_bits_of_one(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """Each rank has all states. Squares, norms and steps count once, whatever the number of replicas."""
    job = SAME_ROWS[name]
    alone = train_and_look(job, DISK, tmp_path / "one")
    for result, checksums in ranks.run(train_and_look, job._replace(shard_size=1), DISK, tmp_path / "both"):
        assert_same(result, alone.result)
        assert checksums == alone.checksums


@pytest.mark.numeric
@pytest.mark.works("Several ranks", "replicas of shards (`mics_shard_size`), in any tier", "right")
@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [2, 1])
def test_replicas_train_on_all_rows_and_stay_equal(shard_size: int, four: RankPool, tmp_path: Path) -> None:
    job = JOB._replace(accumulation=2, shard_size=shard_size)
    results_in_memory = four.run(train_and_look, job._replace(overlap=False), MEMORY, tmp_path / "memory")
    beside = four.run(train_and_look, job._replace(overlap=True), DISK, tmp_path / "disk")
    for rank, (result, checksums) in enumerate(results_in_memory):
        assert_same(result, beside[rank].result, "placements")
        assert checksums == results_in_memory[rank % shard_size].checksums
        assert shard_size == 1 or checksums != results_in_memory[1 - rank % 2].checksums
    losses = [sum(column) / 4 for column in zip(*(result.losses for result, _ in results_in_memory), strict=True)]
    alone = train(job._replace(shard_size=-1), DISK, tmp_path / "alone")
    rounding_bounds.same_training(results_in_memory[0].result._replace(losses=losses), alone, job, reordered=True)


def experts_of_one_rank() -> nn.Module:
    """Ranks use experts in other orders: expert 0 by rank 0 alone, 3 by rank 1 alone."""
    return Experts(((0, 1, 2), (2, 3, 1)))


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_without_gradients_of_a_unit_takes_those_of_the_other(
    stage: int, ranks: RankPool, tmp_path: Path
) -> None:
    """Whole gradients are summed in the memory of those that a rank has, be it for a step or for each micro-batch."""
    job = Job(experts_of_one_rank, rows_loss, steps=3, accumulation=2, stage=stage, overlap=True)
    single = ranks.run(train, job, DISK, tmp_path / "one replica")[0]
    results = ranks.run(train, job._replace(shard_size=1), DISK, tmp_path / "two")
    assert_same(*results)
    rounding_bounds.same_training(results[0], single, job, reordered=True)


# -- bytes --------------------------------------------------------------------------------------------


class Step(NamedTuple):
    sent: Communication
    units: list[tuple[int, int]]
    """Elements of each unit that train, and of its frozen region."""
    updated: list[int]
    """Those that this rank updates."""


def second_step(job: Job, folder: Path, **options: Any) -> Step:
    """Trains two steps with room for all units on the device; the first records the order of uses."""
    engine = start(job, ("cpu", "cpu"), folder, device_memory="64MiB", **options)
    before = engine.communication()
    for step in range(2):
        before = engine.communication()
        engine.backward(job.loss(engine, step, 0))
        engine.step()
    inspected = testing.inspect(engine)
    traffic = Step(
        sent=engine.communication().since(before),
        units=[(layout.trainable_stop, layout.numel - layout.trainable_stop) for layout in inspected.layouts],
        updated=list(map(len, inspected.trainable)),
    )
    engine.destroy(remove=True)
    return traffic


@pytest.mark.slow
def test_weights_cross_no_replica_and_gradients_do_as_sums_of_a_shard(four: RankPool, tmp_path: Path) -> None:
    """With s shards and r replicas a rank sends (s - 1) / s of weights and of gradients to its replica.

    An all-reduce of its shard's sums, in fp32, makes it send 2 (r - 1) / r of them to ranks of other replicas.
    """
    fp32, bf16 = 4, 2
    for result in four.run(second_step, JOB._replace(sent="bf16"), tmp_path):
        numel = sum(trainable for trainable, _ in result.units)
        assert result.updated == [trainable // 2 for trainable, _ in result.units]
        assert result.sent.weights == Sent(len(result.units), numel // 2 * fp32)
        assert result.sent.gradients == Sent(2 * len(result.units), numel // 2 * bf16 + numel // 2 * fp32)


def trained_with_late_updates(job: Job, folder: Path) -> Result:
    """Trains in memory; each unit is updated some time after its step has returned."""
    at_once = WeightUpdates.device_tier

    def late(self: WeightUpdates, unit: int) -> torch.Tensor:
        time.sleep(0.03)
        return at_once(self, unit)

    with pytest.MonkeyPatch.context() as patches:
        testing.replace(patches, "weights.device_tier", late)
        return train(job, MEMORY, folder)


def test_whole_weights_are_used_after_their_update(ranks: RankPool, tmp_path: Path) -> None:
    """Their units never leave the device, so that no gather makes a use wait for the update."""
    job = JOB._replace(shard_size=1)
    in_time = ranks.run(train, job, MEMORY, tmp_path / "in time")
    for result, expected in zip(ranks.run(trained_with_late_updates, job, tmp_path / "late"), in_time, strict=True):
        assert_same(result, expected)


def test_whole_states_send_no_weights_and_twice_their_gradients(ranks: RankPool, tmp_path: Path) -> None:
    """With one shard, as DDP does: an all-reduce makes each of n ranks send 2 (n - 1) / n of all gradients, in fp32."""
    for result in ranks.run(second_step, JOB._replace(shard_size=1), tmp_path):
        whole = [trainable for trainable, _ in result.units]
        assert result.updated == whole, "each rank updates all"
        assert result.sent.weights == Sent(0, 0)
        assert result.sent.gradients == Sent(len(whole), sum(whole) * 4)


# -- files --------------------------------------------------------------------------------------------


def intact(path: Path) -> int:
    """Compares all bytes of a run or a checkpoint with their checksums, and returns the number of ranks."""
    with contextlib.closing(open_checking(path)) as checking, IoQueue() as queue:
        report = checking.run(queue, lambda _: None)
    assert report.whole
    return report.world_size if isinstance(report, CheckpointReport) else len(report.ranks)


@pytest.mark.slow
@pytest.mark.works("Several ranks", "another `mics_shard_size`, or number of replicas, at a resume", "right")
def test_files_of_two_replicas_are_those_of_any_arrangement(four: RankPool, ranks: RankPool, tmp_path: Path) -> None:
    """One replica saves a checkpoint, with the generators of all ranks; each rank has swap files of its own."""
    two = Case(JOBS["gpt2"]._replace(dtype="bf16", shard_size=2))
    four.run(begun, two, tmp_path)
    run, saved = tmp_path / "swap" / "default", tmp_path / "saved"
    states = states_in(run)
    names = {path.name for path in next(saved.glob("*/manifest.json")).parent.iterdir()}
    of_ranks = {f"progress.rank{rank}.safetensors" for rank in range(4)}
    assert names == {"manifest.json", "states.rank0.safetensors", "states.rank1.safetensors", *of_ranks}
    assert intact(saved) == intact(run) == inspect(run)["world_size"] == 4 and not inspect(run)["leftovers"]
    for copy in ("again", "lost"):
        shutil.copytree(tmp_path / "swap", tmp_path / copy / "swap")
    same = four.run(resumed, two, tmp_path / "again")
    for (_, losses, weights, notices), result in zip(same, four.run(loaded, two, tmp_path), strict=True):
        assert losses == result[0] and not any("rank 0" in notice for notice in notices)
        assert_same_tensors(weights, result[1])
    lost = dataclasses.replace(two, job=two.job._replace(shard_size=-1))
    shutil.rmtree(tmp_path / "lost" / "swap" / "default" / "rank3")
    assert_same_tensors(states, ranks.run(resumed, lost, tmp_path / "lost")[0][0])
    after, by_load = four.run(resumed, lost, tmp_path), four.run(loaded, lost, tmp_path)
    assert_same_tensors(states, after[0][0])
    for (_, losses, weights, notices), result in zip(after, by_load, strict=True):
        assert losses == result[0]
        assert_same_tensors(weights, result[1])
        assert any(n.startswith("resharded from 4 ranks (2 replicas of 2 shards) to 4 ranks: ") for n in notices)
    assert sorted(path.name for path in run.iterdir()) == [f"rank{rank}" for rank in range(4)]


# -- errors -------------------------------------------------------------------------------------------


def refused(folder: Path, key: str, sizes: tuple[int, int]) -> str:
    """Returns this rank's error of a start with its own size."""
    with pytest.raises(ConfigError) as error:
        start(JOB._replace(**{"shard_size": -1, key: sizes[rank_and_size()[0]]}), MEMORY, folder)
    return str(error.value)


def train_and_leave(job: Job, folder: Path) -> None:
    engine = start(job, DISK, folder, durability="step")
    trained(engine, job)
    engine.destroy()


@pytest.mark.parametrize("shard_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_damage_of_a_rank_is_mended_from_one_with_the_same_shard(
    shard_size: int, ranks: RankPool, tmp_path: Path
) -> None:
    """And not from one with another."""
    ranks.run(train_and_leave, JOB._replace(shard_size=shard_size), tmp_path)
    run = tmp_path / "default"
    files = look(run / "rank1")
    assert files.manifest is not None
    place = files.manifest.spec.places()[0][State.EXP_AVG][files.commits[0].record.slots[0]]
    flip_bit(run / "rank1" / "states", place.offset(100))
    with IoQueue() as queue, contextlib.closing(RunChecking(run, repair=True)) as checking:
        report = checking.run(queue)
    (damage,) = report.ranks[1].damages
    assert report.whole is (shard_size == 1) and report.ranks[0].damages == ()
    assert damage.mended == ("" if shard_size == 2 else f"slot {damage.slot} of {run / 'rank0'}")


@pytest.mark.parametrize(("key", "name"), [("shard_size", "mics_shard_size"), ("node", "zero_hpz_partition_size")])
def test_a_size_that_does_not_fit_is_an_error_on_every_rank(
    key: str, name: str, ranks: RankPool, tmp_path: Path
) -> None:
    for message in ranks.run(refused, tmp_path, key, (3, 3)):
        assert message.startswith(f"zero_optimization.{name} is 3, ") and "a divisor of 2" in message
    for message in ranks.run(refused, tmp_path, key, (1, 2)):
        assert message.startswith(f"the {name} of rank 1 and of rank 0 differ: 2, not 1; ")
    with pytest.raises(ConfigError, match="1 rank cannot be divided"):
        job = JOB._replace(**{"shard_size": -1, key: 2})
        offload.initialize(model=job.model(), config=config(job, MEMORY, tmp_path))
