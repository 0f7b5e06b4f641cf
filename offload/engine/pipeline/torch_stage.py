"""A stage of `torch.distributed.pipelining` over modules that an engine pages.

    schedule ─► forward_one_chunk ─► the module, whose hooks fetch weights
             ─► backward_one_chunk ─► autograd, whose gradients the engine takes; the loss is divided and scaled before
             ─► backward_weight_one_chunk ─► the second half, where a zero-bubble schedule asked for the first alone
             ─► scale_grads ─► nothing to divide: no parameter has a `.grad`

A graph that cannot be split (`split_backward`) runs as one where the first half is due, and its second half is empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from offload.engine.pipeline.split_backward import split
from offload.engine.pipeline.stage_run import StageRun
from offload.errors import OffloadError


@dataclass(frozen=True, kw_only=True)
class StageCalls:
    """The engine as its stages see it."""

    accumulation: Callable[[], int]
    """Returns the number of micro-batches of a step."""
    divided: Callable[[torch.Tensor], torch.Tensor]
    """Returns the loss of a micro-batch as its backward begins with it: divided, and scaled in fp16."""
    run_backward: Callable[[Callable[[], None]], None]
    """Runs the backward of a stage, which its argument begins."""


class EngineStage(PipelineStage):
    """A stage whose weights and gradients are an engine's. Belongs to the thread that runs the model."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        group: Any,
        calls: StageCalls,
        run: StageRun,
    ) -> None:
        """Creates the stage.

        Args:
            module: The module of the stage.
            index: Number of the stage.
            num_stages: Number of stages of the pipeline.
            device: The device on which the engine computes.
            group: The process group of the pipeline; None for all processes.
            calls: The engine.
            run: Counts micro-batches.
        """
        super().__init__(module, index, num_stages, device, group=group)
        self._calls, self._run = calls, run

    def clear_runtime_states(self) -> None:
        """Begins a run of the schedule."""
        super().clear_runtime_states()
        self._run.begin(self.stage_index)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """Returns the receipt of a micro-batch's inputs.

        Args:
            fwd_chunk_id: Number of the micro-batch.

        Raises:
            UsageError: If the schedule has another number of micro-batches than a step.
        """
        self._check()  # before this stage waits for the one before it, which finds the same error
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of a micro-batch.

        Args:
            *args: Those of torch.
            **kwargs: Those of torch.

        Returns:
            The output of the module.

        Raises:
            UsageError: If the schedule has another number of micro-batches than a step.
        """
        self._check()
        with _own_errors():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs the backward of a micro-batch, or its first half, and counts it when all of it has run.

        Args:
            bwd_chunk_id: Number of the micro-batch.
            loss: Its loss, on the last stage.
            full_backward: False for the first half.
            last_backward: True for the last one of the schedule.
        """
        if not self.has_backward:
            return
        # Torch would divide `.grad` at the end of the schedule, and there is none: gradients are in the engine.
        begins = loss if loss is None else self._calls.divided(loss)

        def run() -> None:
            super(EngineStage, self).backward_one_chunk(bwd_chunk_id, begins, full_backward, last_backward)

        # The schedule's own thread runs all nodes, so that the engine's collectives keep their order.
        with _own_errors():
            self._calls.run_backward(run)
        if full_backward:
            self._run.end_backward(self.stage_index, bwd_chunk_id, divides=self.chunks != 1)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the second half of the backward of a micro-batch, and counts it.

        Args:
            bwd_chunk_id: Number of the micro-batch.
            last_backward: True for the last one of the schedule.
        """
        if not self.has_backward:
            return

        def run() -> None:
            super(EngineStage, self).backward_weight_one_chunk(bwd_chunk_id, last_backward)

        with _own_errors():
            self._calls.run_backward(run)
        self._run.end_backward(self.stage_index, bwd_chunk_id, divides=self.chunks != 1)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], Any]:
        """Runs a backward, or one half of it.

        Args:
            backward_type: "full", "input" or "weight".
            bwd_kwargs: Inputs, outputs and gradients of the stage; for "weight" what "input" has returned.
            last_backward: True for the last one of the schedule.

        Returns:
            The gradients of the inputs, and for "input" the second half; None if nothing is left to do.
        """
        if backward_type == "weight":
            if bwd_kwargs["param_groups"] is not None:
                bwd_kwargs["param_groups"].weights()
            return (), None
        if backward_type == "input":
            outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            given = gradients or (None,) * len(outputs)
            pairs = [(output, each) for output, each in zip(outputs, given, strict=True) if output.requires_grad]
            needed = [output for output, _ in pairs]
            halves = split(needed, bwd_kwargs["input_values"], self.submod.parameters())
            if halves is not None:
                return halves.inputs(needed, [each for _, each in pairs], bwd_kwargs["input_values"]), halves
            # As one, of the loss itself: torch has put it into a tuple.
            bwd_kwargs = {**bwd_kwargs, "stage_output": outputs if gradients else outputs[0]}
        return super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward)

    def _check(self) -> None:
        self._run.check(self.chunks if self.has_backward else None, self._calls.accumulation())

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Notes that gradients are a mean over micro-batches, as they are: each loss was divided.

        Args:
            grad_scale_factor: Number of micro-batches.
        """
        self._run.divided(self.stage_index)


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raises an error of this package that torch has put behind one of its own, a `RuntimeError`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, OffloadError):
            raise error.__cause__ from error.__cause__.__cause__
        raise
