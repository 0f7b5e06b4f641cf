"""What an engine answers at each point of a loop is DeepSpeed's: the values stated here are of its engine.py.

The rows are those of docs/reference/deepspeed-compatibility.md, "The engine". Points: before a forward, behind it,
behind the backward, behind `step()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import offload
from tests.support import models
from tests.support.oracle import Job, config
from tests.support.processes.device_process import engine_device

JOB = models.MIXTURE
LRS = [0.25, 0.25, 0.375, 0.5]
"""Of a linear WarmupLR of two steps from 0.25 to 0.5, after so many steps: its first step is that of iteration 0."""


class Point(NamedTuple):
    """What is asked at each point."""

    boundary: bool
    micro_steps: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    applied: bool
    normed: bool
    """Whether there is a norm."""
    lr: list[float]


def asked(engine: offload.Engine) -> Point:
    return Point(
        engine.is_gradient_accumulation_boundary(),
        engine.micro_steps,
        engine.global_steps,
        engine.global_samples,
        engine.skipped_steps,
        engine.was_step_applied(),
        engine.get_global_grad_norm() is not None,
        engine.get_lr(),
    )


def points(engine: offload.Engine, job: Job, steps: int) -> Iterator[Point]:
    """Four for each micro-batch."""
    for micro in range(steps * job.accumulation):
        yield asked(engine)
        loss = job.loss(engine, *divmod(micro, job.accumulation))
        yield asked(engine)
        engine.backward(loss)
        yield asked(engine)
        engine.step()
        yield asked(engine)


def begin(job: Job, folder: Path, samples: int = 1, **more: Any) -> offload.Engine:
    torch.manual_seed(0)
    content = config(job, ("none", "none"), folder) | {"train_micro_batch_size_per_gpu": samples} | more
    return offload.initialize(model=job.model(), config=content)[0]


SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.25, "warmup_max_lr": 0.5, "warmup_num_steps": 2, "warmup_type": "linear"},
}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_at_each_point_of_three_steps(accumulation: int, tmp_path: Path) -> None:
    """`micro_steps` grows at the end of each `step()`, and the boundary is the micro-batch that completes a step."""
    engine = begin(JOB._replace(accumulation=accumulation), tmp_path, samples=3, scheduler=SCHEDULER)
    expected, was_boundary = [], False
    for micro in range(3 * accumulation):
        for done, was in ((micro, was_boundary), (micro + 1, (micro + 1) % accumulation == 0)):
            steps = done // accumulation
            point = Point(
                (done + 1) % accumulation == 0, done, steps, 3 * accumulation * steps, 0, was, steps > 0, [LRS[steps]]
            )
            expected += [point] * (3 if done == micro else 1)
            was_boundary = was
    assert list(points(engine, JOB._replace(accumulation=accumulation), 3)) == expected
    engine.destroy()


def test_without_accumulation_every_point_is_at_a_boundary(tmp_path: Path) -> None:
    engine = begin(JOB._replace(accumulation=1), tmp_path)
    assert all(point.boundary for point in points(engine, JOB._replace(accumulation=1), 3))
    for _ in range(2):
        engine.backward(JOB.loss(engine, 0, 0))  # two backwards are one micro-batch
    engine.step()
    assert engine.is_gradient_accumulation_boundary() and engine.micro_steps == 4
    engine.destroy()


@pytest.mark.parametrize("word", [True, False])
def test_a_boundary_that_is_set_by_hand_holds_until_it_is_reset(word: bool, tmp_path: Path) -> None:
    engine = begin(JOB, tmp_path)
    engine.set_gradient_accumulation_boundary(word)
    found = list(points(engine, JOB, 1))
    assert {point.boundary for point in found} == {word}
    assert found[-1].micro_steps == 2 and found[-1].global_steps == (2 if word else 0)
    engine.set_gradient_accumulation_boundary(None)
    assert engine.is_gradient_accumulation_boundary() == (not word), "two of two have run, or a new step begins"
    engine.destroy()


def test_micro_batches_without_a_step_are_counted_by_the_next(tmp_path: Path) -> None:
    """Otherwise than DeepSpeed, which counts calls: a resumed run skips as many batches."""
    engine = begin(JOB._replace(accumulation=4), tmp_path)
    for is_boundary in (False, False, False, True):
        engine.set_gradient_accumulation_boundary(is_boundary)
        engine.backward(JOB.loss(engine, 0, 0))
    assert engine.micro_steps == 0
    engine.step()
    assert engine.micro_steps == 4 and engine.was_step_applied()
    engine.destroy()


def test_a_skipped_step_counts(tmp_path: Path) -> None:
    """In fp16, by the loss scale: global_steps and samples grow, the schedule stays."""
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "hysteresis": 1}
    job = JOB._replace(accumulation=1, dtype="fp16")
    engine = begin(job, tmp_path, fp16=fp16, scheduler=SCHEDULER)
    assert float(engine.scale(torch.ones(()))) == engine.loss_scale == 256
    engine.backward(job.loss(engine, 0, 0) * math.inf)
    engine.step()
    found = asked(engine)._replace(normed=True)
    assert found == Point(True, 1, 1, 1, 1, False, True, [0.25])
    assert engine.loss_scale == 128 and engine.fp16_enabled() and not engine.bfloat16_enabled()
    engine.destroy()


def test_what_a_commit_holds_is_up_to_the_boundary(tmp_path: Path) -> None:
    """Gradients of the micro-batches behind it are made again, so their batches are not to be skipped."""
    content = config(JOB, ("nvme", "nvme"), tmp_path, resume="auto")
    engine = offload.initialize(model=JOB.model(), config=content)[0]
    for micro in range(3):
        engine.backward(JOB.loss(engine, micro // 2, micro % 2))
        engine.step()
    assert engine.micro_steps == 3
    with torch.no_grad():
        engine.module.scale.mul_(2)  # an edit: the commit at the end is taken anew
    engine.destroy(remove=False)
    again = offload.initialize(model=JOB.model(), config=content)[0]
    assert (again.micro_steps, again.global_steps) == (2, 1)
    assert not again.is_gradient_accumulation_boundary() and not again.was_step_applied()
    again.destroy(remove=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_does_not_change_in_a_loop(dtype: str, tmp_path: Path) -> None:
    job = JOB._replace(dtype=dtype)
    engine = begin(job, tmp_path, samples=3, data_types={"grad_accum_dtype": "fp32"})
    for _ in points(engine, job, 1):
        sizes = (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )
        assert sizes == (6, 3, 2) and engine.zero_optimization_stage() == 3
        assert engine.bfloat16_enabled() == (dtype == "bf16") and not engine.fp16_enabled()
        assert engine.get_mom() == [(0.9, 0.999)]
        assert (engine.global_rank, engine.local_rank, engine.world_size) == (0, 0, 1)
        assert engine.device.type == engine_device()
        assert float(engine.scale(torch.ones(()))) == 1 and engine.training
    engine.set_train_batch_size(9)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (9, 3)
    assert engine.eval().training is False and engine.train().training is True
    engine.destroy()


def test_backward_gives_the_loss_over_the_accumulation(tmp_path: Path) -> None:
    engine = begin(JOB, tmp_path)
    loss = JOB.loss(engine, 0, 0)
    assert engine.backward(loss, retain_graph=True) == loss / 2
    assert engine.backward(loss, scale_wrt_gas=False) == loss
    engine.destroy()


def test_the_norm_is_that_before_the_clip_and_stays_until_the_next_step(tmp_path: Path) -> None:
    norms = []
    for clip in (0.0, 1e-3):
        engine = begin(JOB._replace(clip=clip), tmp_path)
        for _ in points(engine, JOB, 1):
            pass
        norms.append(engine.get_global_grad_norm())
        engine.backward(JOB.loss(engine, 1, 0))
        engine.step()
        assert engine.get_global_grad_norm() == norms[-1] and norms[-1] > 1e-3
        engine.destroy()
    assert norms[0] == norms[1]
