"""Starts an engine over a job, and trains it or its plain twin from the first step to the last."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.layout.flat_layout import lay_out
from offload.layout.units import find_units
from tests.support.oracle.job import DTYPES, Job, Result, config
from tests.support.oracle.plain_engine import PlainEngine


def plain_loop(job: Job) -> Result:
    """Trains `job` in ordinary PyTorch."""
    return trained(PlainEngine(job), job)


def start(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> offload.Engine:
    """Starts an engine over the job's model, with its generators seeded as the plain loop's."""
    torch.manual_seed(job.seed)
    model = job.model()
    return offload.initialize(model=model, config=config(job, placement, folder, **options))[0]


def room_for(job: Job, units: int, ranks: int = 1) -> int:
    """Bytes of the `units` largest units on the device, or more where several ranks share them.

    A unit of several ranks ends at a multiple of so many pages; each matrix of Muon and SinkGD begins at a page of its
    own; with narrow states a page has twice as many elements.
    """
    model = job.model()
    itemsize = DTYPES[job.dtype].itemsize
    layouts = []
    for unit in find_units(model).units:
        named = [(name, model.get_parameter(name)) for name in unit.parameters]
        matrices = [name for name, _ in named] if ranks > 1 and job.optimizer in ("Muon", "SinkGD") else None
        layouts.append(lay_out(unit.name, named, 2 * ranks if ranks > 1 else 1, matrices=matrices))
    return sum(sorted(layout.numel * itemsize for layout in layouts)[-units:])


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chunks of first weights, of gradients, of streamed units and of updates tiny, for tiny models."""
    testing.replace(monkeypatch, "size.chunk", 1024)
    testing.replace(monkeypatch, "size.first_weights", 8192)  # a page of states of one byte is 4096 elements
    testing.replace(monkeypatch, "size.tile_buffers", 3)  # else tiles are most of a tiny budget
    testing.replace(monkeypatch, "size.gradient_window", 8192)
    testing.replace(monkeypatch, "size.stream", 8192)
    testing.replace(monkeypatch, "size.update_tile", range(16_000, 48_000))


def least_host_memory(job: Job, folder: Path, placement: tuple[str, str] = ("nvme", "nvme"), **options: Any) -> int:
    """Returns the smallest host budget that works with whole tables, as the error names it."""
    try:
        start(job, placement, folder, host_memory=1, **({"vocabulary": "whole"} | options))
    except offload.errors.BudgetError as error:
        match = re.search(r"the least that works is [^(]*\((\d+) bytes\)", str(error))
        assert match is not None
        return int(match[1])
    raise AssertionError("one byte was enough")


def train_step(engine: offload.Engine | PlainEngine, job: Job, step: int) -> float:
    """Trains one step of `job` and returns the mean loss over its micro-batches."""
    loss = torch.zeros((), dtype=torch.float32, device="cpu")
    for micro in range(job.accumulation):
        part = job.loss(engine, step, micro)
        engine.backward(part)
        loss = loss + part.detach().float() / job.accumulation
        engine.step()
    return float(loss)


def accumulated_step(engine: Any, job: Job, step: int) -> float:
    """The same step by `Engine.accumulate`, in the order of the config's schedule."""
    parts = engine.accumulate(range(job.accumulation), lambda micro: job.loss(engine, step, micro))
    engine.step()
    loss = torch.zeros((), dtype=torch.float32, device="cpu")
    for part in parts:
        loss = loss + part.float() / job.accumulation
    return float(loss)


def trained(engine: offload.Engine | PlainEngine, job: Job, by: Callable[..., float] = train_step) -> Result:
    """Trains `job` from its first step to its last, `by` a function that trains one step."""
    losses, norms = [], []
    for step in range(job.steps):
        losses.append(by(engine, job, step))
        norms.append(engine.get_global_grad_norm())
    return Result(losses, norms, weights_of(engine))


def run(
    job: Job, placement: tuple[str, str], folder: Path, by: Callable[..., float] = train_step, **options: Any
) -> Result:
    """Trains `job` by the engine from its first step to its last, and remove its store."""
    engine = start(job, placement, folder, **options)
    try:
        return trained(engine, job, by)
    finally:
        engine.destroy(remove=True)


def weights_of(engine: offload.Engine | PlainEngine) -> dict[str, torch.Tensor]:
    """Weights and buffers of now: later steps leave them as they are."""
    return {name: value.clone() for name, value in engine.module.state_dict().items()}
