"""A contender as it trains: its model, its data, and the times of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.bench.drive import kernel_bytes
from offload.bench.measure import peak_resident, random_ids
from offload.bench.train.plan import Job
from offload.presets import build

UNCOUNTED = 2
"""Steps at the start of a turn that are not timed: no update runs beside the first, which records the access order."""

Batch = dict[str, torch.Tensor]


class Step(NamedTuple):
    """A step's loss, the mean over its micro-batches, and its seconds: all, and those of each phase if known."""

    loss: float
    seconds: float
    forward: float | None = None
    backward: float | None = None
    update: float | None = None


class Trainer(NamedTuple):
    """A model and its optimizer, ready to train."""

    parameters: int
    vocabulary: int
    step: Callable[[Sequence[Batch]], Step]
    settle: Callable[[], None] = lambda: None
    """Waits for the updates that still run after a step."""
    moved: Callable[[], tuple[int, int]] | None = None
    """Returns the bytes read from and written to files so far; None if only Linux counts them."""
    close: Callable[[], None] = lambda: None


def model_of(name: str) -> nn.Module:
    """Returns a preset's model on the CPU in fp32, with the same weights in each process and no dropout.

    Contenders draw random numbers in different orders, so their losses could not be compared with dropout.
    """
    torch.manual_seed(0)
    model = build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def batches_of(job: Job, vocabulary: int) -> list[Batch]:
    """Returns the micro-batches of every step: the same tokens again, so that a wrong update shows in the next loss."""
    shape = (job.batch_size, job.seq_len)
    ids = [random_ids(shape, vocabulary, seed).to(job.device) for seed in range(job.micro_batches)]
    return [{"input_ids": each, "labels": each} for each in ids]


def in_phases(
    job: Job,
    batches: Sequence[Batch],
    forward: Callable[[Batch], torch.Tensor],
    backward: Callable[[torch.Tensor], Any],
    update: Callable[[bool], Any],
) -> Step:
    """Makes a step and returns its loss and times.

    Args:
        job: the work of the turn.
        batches: the step's micro-batches.
        forward: returns the loss of a micro-batch.
        backward: adds the gradients of a loss.
        update: ends a micro-batch; receives True for the last one of the step.
    """
    spent, losses = [0.0] * 3, list[torch.Tensor]()
    for index, batch in enumerate(batches):
        # Nothing but the calls lies between two readings, so the phases sum to the step.
        times = [time.perf_counter()]
        loss = forward(batch)
        times.append(time.perf_counter())
        backward(loss)
        times.append(time.perf_counter())
        update(index == len(batches) - 1)
        times.append(time.perf_counter())
        losses.append(loss.detach())  # read at the end: each read waits for the device
        spent = [total + end - start for total, (start, end) in zip(spent, pairwise(times), strict=True)]
    start = time.perf_counter()
    mean = float(torch.stack(losses).mean())  # waits for the device, as a loop that logs does
    seconds = sum(spent) + time.perf_counter() - start
    # A GPU is still busy with a phase when the call returns.
    return Step(mean, seconds, *spent) if job.device == "cpu" else Step(mean, seconds)


def take_turn(job: Job, begin: Callable[[Job], Trainer]) -> dict[str, Any]:
    """Trains for the steps of a turn and returns the figures.

    Bytes are those of the steps after the first, by the contender's own count or else by Linux's.
    """
    start = time.perf_counter()
    trainer = begin(job)
    try:
        batches = batches_of(job, trainer.vocabulary)
        first = trainer.step(batches)
        started = time.perf_counter() - start
        # An update that still runs would count its bytes to the steps after it.
        trainer.settle()
        moved, counted = trainer.moved or kernel_bytes, UNCOUNTED - 1
        before = moved()
        steps = [trainer.step(batches) for _ in range(counted + job.steps)]
        trainer.settle()
        after = moved()
        peak = peak_resident()  # before `close`, which allocates too
    finally:
        trainer.close()
    read = written = None
    if before is not None and after is not None:
        read, written = ((now - then) / len(steps) for then, now in zip(before, after, strict=True))
    return {
        "parameters": trainer.parameters,
        "losses": [first.loss, *(step.loss for step in steps)],
        "seconds": [step.seconds for step in steps[counted:]],
        **{
            f"{phase}_seconds": [getattr(step, phase) for step in steps[counted:]]
            for phase in ("forward", "backward", "update")
        },
        "seconds_to_first_step": started,
        "peak_host_bytes": peak,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if job.device == "cuda" else None,
        "read_bytes": read,
        "written_bytes": written,
    }
