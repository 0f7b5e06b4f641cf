"""Counts the micro-batches of a step. Each stage of a process runs the backward of every micro-batch.

    stage 0    forward 0  forward 1  ...  backward 0  backward 1          a micro-batch counts when all stages of the
    stage 2               forward 0  ...  backward 0        backward 1    process have run its backward

Without a pipeline an engine counts backwards, one or more for each micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from offload.engine.access import ParamAccess
from offload.engine.micro_batches import PassSchedule, StageCalls
from offload.errors import UsageError
from offload.parallel.stages import PipelineStages
from offload.states import State


class StageRun(PassSchedule):
    """The micro-batches that a schedule of torch runs through the stages of one process.

    Belongs to the thread that runs the model.
    """

    counts_backwards = False

    def __init__(self, stages: PipelineStages) -> None:
        self._stages = stages
        self._done: dict[int, set[int]] = {}
        """For each micro-batch that is not complete the stages that have run its backward."""
        self._undivided: set[int] = set()
        """Stages whose schedule has not yet asked for gradients that are divided by the number of micro-batches."""

    def pipeline_stages(self, device: torch.device, calls: StageCalls) -> list[Any]:
        if not dist.is_initialized():
            raise UsageError("pipeline_stages() needs a process group: call torch.distributed.init_process_group first")
        # Imported here, since torch's pipelines take a while to import.
        from offload.parallel.pipeline import EngineStage

        stages = self._stages
        return [
            EngineStage(stages[index], index, stages.num_stages, device, stages.group, calls, self)
            for index in stages.indices
        ]

    def begin_backward(self) -> None:
        raise UsageError(
            "this engine has stages of a pipeline, whose backwards a schedule runs: make one of "
            "torch.distributed.pipelining over engine.pipeline_stages(), call its step(...), and engine.step()"
        )

    def begin(self, stage: int) -> None:
        """Forgets a stage's micro-batches that an error has left. A schedule calls this before its first one."""
        self._done = {number: done - {stage} for number, done in self._done.items()}

    def end_backward(self, stage: int, micro_batch: int, divides: bool) -> bool:
        """Counts the backward of a micro-batch through a stage, and returns True if all stages have run theirs.

        If it `divides`, the schedule is expected to call `divided` at its end.
        """
        # torch asks for the division after the last backward, unless the schedule was made without it.
        if divides:
            self._undivided.add(stage)
        # Stages finish micro-batches in any order: a schedule may run two backwards of one stage before another's
        # first.
        done = self._done.setdefault(micro_batch, set())
        done.add(stage)
        complete = len(done) == len(self._stages.indices)
        if complete:
            del self._done[micro_batch]
        return complete

    def divided(self, stage: int) -> None:
        """Records that the schedule wants the mean over micro-batches: each loss was divided by their number."""
        self._undivided.discard(stage)

    def begin_step(self, count: int, micro_batches: int, access: ParamAccess) -> None:
        """Checks that a run of a schedule is complete, and adds up gradients of tied parameters over the stages.

        Raises `UsageError` if no run is complete, or the schedule wants a sum of gradients. Nothing has changed then.
        """
        if count != micro_batches:
            raise UsageError(
                f"step() follows a run of a schedule, and {count} of {micro_batches} micro-batches are complete on "
                "this process: make the schedule over engine.pipeline_stages(), with a loss_fn, and not over a "
                "PipelineStage of torch, and call its step(...) once for each step()"
            )
        if self._undivided:
            raise UsageError(
                "the schedule was made with scale_grads=False: an engine divides each loss by "
                "gradient_accumulation_steps, as engine.backward does. Leave scale_grads=True, and for a sum over "
                "micro-batches multiply the loss in loss_fn"
            )
        # Only now has every backward of this step given its gradient. Each stage has added up the gradients of its own
        # uses of a tied parameter. These gradients are added up over the stages, so that all stages update their copies
        # by the same bits. The first stage counts the parameter in the norm.
        for tie in self._stages.ties:
            parameter = self._stages.get_parameter(tie.name)
            handle = access.handle(parameter)
            assert handle is not None, "a parameter of the engine's model"
            gradient = access.read(handle, State.GRAD)
            # A stage whose uses gave no gradient in this step takes part with zeros, since the others wait for it.
            values = (
                torch.zeros(parameter.shape, dtype=torch.float32, device="cpu") if gradient is None else gradient.cpu()
            )
            # A sum of two gradients has the same bits in either order. For more stages gloo sums on one and sends the
            # sum.
            dist.all_reduce(values, group=tie.group)
            access.write(handle, State.GRAD, values)

    def forget(self) -> None:
        self._done, self._undivided = {}, set()
