"""What the ranks of a storm divide beside states: each sequence, each layer, or the model into stages of a pipeline.

sequence    a group of ranks calls the model with one batch, of which each computes a part of the tokens
tensor      torch divides layers among the ranks of a row, which compute one batch together
pipeline    each rank has some layers, and a schedule of torch makes the forwards and backwards of a step
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import offload
from offload.errors import OffloadError
from tests.support.oracle import Job
from tests.support.ranks import pipelines, sequence_parallel, tensor_parallel

PLANS = ("weights", "sequence")
"""Ways in which torch divides the layers of `tensor_parallel.Net`."""
SCHEDULES = {"GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "InterleavedZeroBubble": 4, "ZBVZeroBubble": 4}
"""Schedules of torch, each with the stages of a pipeline of two ranks."""

Loss = Callable[[Any, int, int], torch.Tensor]


class Division(NamedTuple):
    """How ranks divide a model, or its batches, beside ZeRO."""

    what: str = ""
    """"sequence", "tensor" or "pipeline"; empty where ranks divide states alone."""
    parts: int = 1
    """Ranks that share a batch."""
    how: str = ""
    """Of layers one of `PLANS`, of a pipeline the schedule."""

    @property
    def of_torch(self) -> bool:
        """True if the model makes collectives of its own, of which the engine knows nothing."""
        return self.what in ("tensor", "pipeline")

    def model(self, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Returns a function that makes this rank's part of a model."""
        if self.what == "tensor":
            return lambda: tensor_parallel.divided(make(), self.how, self.parts)
        if self.what == "pipeline":
            return lambda: pipelines.stages_of(pipelines.JOB._replace(model=make), self.grid())
        return make

    def loss(self, rows: Loss) -> Loss:
        """Returns the loss of this rank, where `rows` is that of ranks which share no batch."""
        if self.what == "sequence":
            return functools.partial(sequence_parallel.grouped_loss, size=self.parts)
        if self.what == "tensor":
            return functools.partial(tensor_parallel.row_loss, size=self.parts)
        return rows

    def grid(self) -> pipelines.Plan:
        """Returns the grid of a pipeline."""
        return pipelines.Plan(self.how, self.parts, SCHEDULES[self.how])


class Pipeline:
    """The forwards and backwards of one engine over stages, by one schedule in the whole life."""

    def __init__(self, engine: offload.Engine, job: Job, division: Division) -> None:
        self._engine, self._job, self._grid = engine, job, division.grid()
        self._schedule = pipelines.schedule_of(engine, job, self._grid)
        self._held = engine.module.indices

    def step(self, step: int) -> list[float]:
        """Trains a step, and returns the loss of each micro-batch; none where the last stage is another rank's."""
        rows = pipelines.mine(self._job, self._grid, step)
        losses = pipelines.run(self._schedule, rows, self._held, self._grid.stages - 1)
        self._engine.step()
        return losses

    def evaluate(self, step: int) -> list[float]:
        """Returns the losses of a batch without a backward, by a schedule of its own."""
        schedule = pipelines.schedule_of(self._engine, self._job, self._grid)
        rows, losses = pipelines.mine(self._job, self._grid, step), []
        last = self._grid.stages - 1 in self._held
        schedule.eval(*([rows] if 0 in self._held else []), target=rows if last else None, losses=losses)
        return [float(loss) for loss in losses]


def is_of_a_lost_rank(error: BaseException) -> bool:
    """Returns whether torch's own collective has failed, or an error of the library came out of a schedule of torch."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OffloadError) or "gloo" in str(cause) or "onnection" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def mine_of(value: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a divided tensor; another tensor as it is."""
    local = getattr(value, "to_local", None)
    return value if local is None else local()
