"""Count of the micro-batches of a step; each stage of a process runs a backward of each.

    stage 0    forward 0  forward 1  ...  backward 0  backward 1          a micro-batch counts when all stages of the
    stage 2               forward 0  ...  backward 0        backward 1    process have run its backward

An engine counts backwards otherwise, one or more for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from offload.engine.access import ParamAccess
from offload.engine.step import GradientAccumulation
from offload.errors import UsageError
from offload.parallel.stages import PipelineStages, Tie
from offload.states import State

# -- ties ----------------------------------------------------------------------------------------------
#
# Sums of the gradients of parameters that several stages of a pipeline have.
#
# Each stage adds up the gradients of its own uses. Before a step the whole gradients are added up over the stages, so
# that all of them update their copy by the same bits. The first stage counts the parameter in the norm.


class TiedGradients:
    """The parameters of one process that other stages have too. Belongs to the thread that runs the model."""

    def __init__(self, model: nn.Module, ties: Sequence[Tie], access: ParamAccess) -> None:
        self._access = access
        self._tied = [(model.get_parameter(tie.name), tie.group) for tie in ties]

    def add_up(self) -> None:
        """Replaces each gradient by its sum over the stages. Collective, also of the ranks of ZeRO."""
        for parameter, group in self._tied:
            handle = self._access.handle(parameter)
            assert handle is not None, "a parameter of the engine's model"
            gradient = self._access.read(handle, State.GRAD)
            # A stage whose uses gave no gradient in this step takes part with zeros, since the others wait for it.
            values = (
                torch.zeros(parameter.shape, dtype=torch.float32, device="cpu") if gradient is None else gradient.cpu()
            )
            # Of two stages the sum has the same bits in either order; gloo adds up those of more on one, and sends it.
            dist.all_reduce(values, group=group)
            self._access.write(handle, State.GRAD, values)


# -- stage run -----------------------------------------------------------------------------------------


class StageRun:
    """The micro-batches that a schedule runs through the stages of one process. Belongs to the model's thread."""

    def __init__(self, stages: int, accumulation: GradientAccumulation, ties: TiedGradients) -> None:
        self._stages, self._accumulation, self._ties = stages, accumulation, ties
        self._done: dict[int, set[int]] = {}
        """For each micro-batch that is not complete the stages that have run its backward."""
        self._undivided: set[int] = set()
        """Stages whose schedule has not yet asked for gradients that are divided by the number of micro-batches."""

    def begin(self, stage: int) -> None:
        """Forgets micro-batches of a schedule that an error has ended; a schedule calls this before the first."""
        self._done = {number: done - {stage} for number, done in self._done.items()}

    @staticmethod
    def check(micro_batches: int | None, accumulation: int) -> None:
        """Raises `UsageError` if a schedule has another number of micro-batches than a step.

        Args:
            micro_batches: Those of the schedule; None if it runs no backward.
            accumulation: Those of a step.
        """
        if micro_batches not in (None, accumulation):
            raise UsageError(
                f"the schedule has n_microbatches={micro_batches}, and gradient_accumulation_steps is {accumulation} "
                "in the config: a step is one run of the schedule, so give both the same number"
            )

    def end_backward(self, stage: int, micro_batch: int, divides: bool) -> None:
        """Counts the backward of a micro-batch through a stage.

        Args:
            stage: Number of the stage.
            micro_batch: Number of the micro-batch in the schedule.
            divides: True if the schedule is expected to call `divided` at its end.
        """
        # torch asks for the division after the last backward, unless the schedule was made without it.
        if divides:
            self._undivided.add(stage)
        # Stages finish in any order of micro-batches: a schedule may run two of one before the first of another.
        done = self._done.setdefault(micro_batch, set())
        done.add(stage)
        if len(done) == self._stages:
            del self._done[micro_batch]
            self._accumulation.count_micro_batch()

    def divided(self, stage: int) -> None:
        """Notes that the schedule wants the mean over micro-batches: it has divided each loss by their number."""
        self._undivided.discard(stage)

    def begin_step(self, accumulation: int) -> None:
        """Checks that a run of a schedule is complete, and adds up gradients of tied parameters over the stages.

        Raises:
            UsageError: If no run is complete, or the schedule means its gradients otherwise. Nothing has changed then.
        """
        if self._accumulation.count != accumulation:
            raise UsageError(
                f"step() follows a run of a schedule, and {self._accumulation.count} of {accumulation} micro-batches "
                "are complete on this process: make the schedule over engine.pipeline_stages(), with a loss_fn, and "
                "not over a PipelineStage of torch, and call its step(...) once for each step()"
            )
        if self._undivided:
            raise UsageError(
                "the schedule was made with scale_grads=False: an engine divides each loss by "
                "gradient_accumulation_steps, as engine.backward does. Leave scale_grads=True, and for a sum over "
                "micro-batches multiply the loss in loss_fn"
            )
        # Only now: every backward of this step has given its gradient.
        self._ties.add_up()

    def forget(self) -> None:
        """Forgets all micro-batches, whose gradients were dropped or used."""
        self._done, self._undivided = {}, set()


def stage_run_of(model: nn.Module, accumulation: GradientAccumulation, access: ParamAccess) -> StageRun | None:
    """Returns the count of an engine's micro-batches; None if its model is not stages of a pipeline."""
    if not isinstance(model, PipelineStages):
        return None
    return StageRun(len(model.indices), accumulation, TiedGradients(model, model.ties, access))
