"""Updates under the backward in tests: made for certain, whatever the machine does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import offload
from offload import testing
from offload.engine.update import SpeculationCounts, UpdateWorker
from tests.support.oracle import Job, PlainEngine


def worker_of(engine: offload.Engine) -> UpdateWorker:
    """Returns the update worker of an engine that trains."""
    worker = testing.inspect(engine).update_worker
    assert worker is not None
    return worker


def counts(engine: offload.Engine) -> SpeculationCounts:
    """Returns the hits and misses so far."""
    return worker_of(engine).offers.counts


def finish_step_before(engine: offload.Engine) -> None:
    """Waits for the updates and the commit of the step before: until then no update begins under a backward."""
    testing.settle(engine)


def backward(engine: Any, loss: torch.Tensor, retain_graph: bool = False) -> None:
    """Runs a backward under which, on an engine, all updates begin and end that may begin."""
    if isinstance(engine, PlainEngine):
        engine.backward(loss, retain_graph=retain_graph)
        return
    finish_step_before(engine)
    engine.backward(loss, retain_graph=retain_graph)
    testing.settle_early_updates(engine)


def train_step(
    engine: Any, job: Job, step: int, between: Callable[[Any, int], None] | None = None, more: int = 0
) -> float:
    """Trains one step, and returns the loss.

    Args:
        engine: an engine, or the plain loop.
        job: the job.
        step: number of the step.
        between: called with engine and step between the last backward and `step()`.
        more: number of further backwards through the graph of the last micro-batch.
    """
    total = torch.zeros(())
    for micro in range(job.accumulation):
        loss = job.loss(engine, step, micro)
        last = micro == job.accumulation - 1
        for again in range(1 + (more if last else 0)):
            backward(engine, loss, retain_graph=last and again < more)
        total = total + loss.detach().float() / job.accumulation
        if last and between is not None:
            between(engine, step)
        engine.step()
    return float(total)
