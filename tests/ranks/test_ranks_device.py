"""Ranks whose devices have memory and streams of their own: every placement has the bits of the others."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.distributed import process_group
from tests import device
from tests.ranks import device_transport
from tests.ranks.test_ranks_replicas import experts_of_one_rank
from tests.support.oracle import PLACEMENTS, Job, Result, assert_same
from tests.support.processes import device_process
from tests.support.ranks.rank_jobs import JOBS, rows_loss
from tests.support.ranks.rank_pool import RankPool, meet, serve, train

JOB = JOBS["gpt2"]._replace(steps=2, dtype="bf16", accumulation=2)
CASES = {
    "stage 3": JOB,
    "stage 2": JOB._replace(stage=2),
    "stage 1, sums sent in bf16": JOB._replace(stage=1, sent="bf16"),
    "stage 0, whole states, sums beside the backward": JOB._replace(stage=0, shard_size=1, overlap=True, dtype="fp32"),
    "ranks without gradients of a unit": Job(
        experts_of_one_rank, rows_loss, steps=2, accumulation=2, stage=1, overlap=True, shard_size=1
    ),
    "experts": JOBS["mixture"]._replace(steps=2, dtype="bf16"),
    "small units in one gather": JOB._replace(stage=2, overlap=True, bucket=1 << 30),
    "weights and gradients in codes": JOB._replace(quantized="weights gradients"),
}


def _serve(device_type: str, rank: int, size: int, port: int, pipe: Any) -> None:
    meet(rank, size, port)
    device_process.compute_on(device_type)
    if device_type == device.NAME:
        device.seed(rank)
    # Between ranks is NCCL where each has a GPU.
    if device_type == "cuda" and torch.cuda.device_count() >= size:
        torch.cuda.set_device(rank)
    else:
        device_transport.register(device_type)
        process_group.device_backend = lambda _: device_transport.NAME
    dist.init_process_group("gloo")
    serve(pipe)


class DeviceRankPool(RankPool):
    """Ranks whose engines compute on a device of this type."""

    def __init__(self, device_type: str, size: int = 2) -> None:
        self.target = functools.partial(_serve, device_type)
        super().__init__(size)


def train_in(job: Job, folder: Path, placements: Sequence[tuple[str, str]], collectives: bool = False) -> list[Result]:
    """Trains in one placement after the other; weights come back on the CPU."""
    options = {"device_memory": 1 << 24, "debug": {"poison": True, "collectives": collectives}}
    results = [train(job, each, folder / "-".join(each), **options) for each in placements]
    return [
        result._replace(weights={name: weight.to("cpu") for name, weight in result.weights.items()})
        for result in results
    ]


# -- on the test device, whose streams are late -------------------------------------------------------


@pytest.fixture(scope="module")
def late() -> Iterator[RankPool]:
    with closing(DeviceRankPool("test")) as two:
        yield two


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_on_a_cpu(name: str, late: RankPool, ranks: RankPool, tmp_path: Path) -> None:
    job, placements = CASES[name], [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")]
    expected = ranks.run(train, job, ("cpu", "cpu"), tmp_path / "cpu")[0]
    for results in late.run(train_in, job, tmp_path / "device", placements):
        for placement, result in zip(placements, results, strict=True):
            assert_same(expected, result, f"{placement}")


# -- a world of one -----------------------------------------------------------------------------------


def same_bits_alone(device_type: str, folder: Path) -> None:
    """One process calls each collective of stages 1 to 3, and has the bits of one that calls none."""
    with closing(DeviceRankPool(device_type, 1)) as single:
        for stage in (1, 2, 3):
            job, memory, disk = JOB._replace(stage=stage), ("none", "none"), ("nvme", "nvme")
            [[silent]] = single.run(train_in, job, folder, [memory])
            [[loud]] = single.run(train_in, job, folder, [memory if stage == 2 else disk], True)
            assert_same(silent, loud, f"stage {stage}")


def test_a_process_that_trains_alone_has_the_same_bits_with_every_collective(tmp_path: Path) -> None:
    same_bits_alone("test", tmp_path)


@pytest.mark.gpu
def test_a_process_that_trains_alone_has_the_same_bits_with_nccl(tmp_path: Path) -> None:
    same_bits_alone("cuda", tmp_path)


# -- on a GPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[RankPool]:
    with closing(DeviceRankPool("cuda")) as two:
        yield two


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_every_placement_on_a_gpu(name: str, on_gpu: RankPool, tmp_path: Path) -> None:
    rank0, rank1 = on_gpu.run(train_in, CASES[name], tmp_path, PLACEMENTS)
    for placement, result, same in zip(PLACEMENTS, rank0, rank1, strict=True):
        assert_same(rank0[0], result, f"{placement}")
        assert_same(result, same, "the two ranks")
