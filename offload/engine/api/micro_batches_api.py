"""The engine's API for steps of several micro-batches, and the backward of one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from offload.engine.api.persistence_api import PersistenceApi
from offload.engine.training.step_settings import resized
from offload.errors import UsageError
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR, Schedule
from offload.parallel.stages import PipelineStages
from offload.sizes import count_of


class MicroBatchesApi(PersistenceApi):
    """Methods on which `accumulate` and `train_batch` are built, and those that say where a step ends."""

    def _run_backward(self, loss: torch.Tensor, retain_graph: bool, scale_wrt_gas: bool) -> torch.Tensor:
        """Runs the backward of `loss`, and returns the loss after the division; for the rest see `backward`."""
        self._core.enter()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"backward expects the loss, a tensor of one element, got {what}")
        if not loss.requires_grad:
            trains = any(parameter.requires_grad for parameter in self.module.parameters())
            why = (
                " (no_grad? detach?)"
                if trains
                else (
                    ": none of this model trains. Give an optimizer, by the config or as optimizer=, without which "
                    "deepspeed.initialize freezes the model; or set requires_grad before initialize"
                )
            )
            raise UsageError(f"backward got a loss that does not depend on any trainable parameter{why}")
        if self._core.stage_run is not None:
            raise UsageError(
                "this engine has stages of a pipeline, whose backwards a schedule runs: make one of "
                "torch.distributed.pipelining over engine.pipeline_stages(), call its step(...), and engine.step()"
            )
        divided = loss / self._settings.accumulation if scale_wrt_gas else loss
        scaled = self.scale(divided)
        self._core.run_backward(lambda: scaled.backward(retain_graph=retain_graph))
        return divided

    def pipeline_stages(self) -> list[Any]:
        """Returns this process's stages of a pipeline, to make a schedule of `torch.distributed.pipelining` over.

        The model must be `offload.PipelineStages`. `schedule.step(...)` runs the forwards and backwards of a step, and
        `engine.step()` follows. Each loss is divided by gradient_accumulation_steps, the schedule's `n_microbatches`,
        and multiplied by the loss scale in fp16.

        Returns:
            A `torch.distributed.pipelining.PipelineStage` for each stage, in their order: one for a schedule of one
            stage a process, which takes it by itself, or all for one of several.

        Raises:
            UsageError: if the model is not stages of a pipeline, or torch.distributed has no process group.
        """
        self._core.check()
        stages, run = self.module, self._core.stage_run
        if run is None or not isinstance(stages, PipelineStages):
            raise UsageError(
                "pipeline_stages() needs an engine over stages of a pipeline: give initialize "
                "model=offload.PipelineStages({index: module}, num_stages, group)"
            )
        if not dist.is_initialized():
            raise UsageError("pipeline_stages() needs a process group: call torch.distributed.init_process_group first")
        # Here, since torch's pipelines take a while to import.
        from offload.parallel.pipeline import EngineStage, StageCalls

        calls = StageCalls(
            accumulation=lambda: self._settings.accumulation,
            divided=self._divided,
            run_backward=self._core.run_backward,
        )
        return [
            EngineStage(stages[index], index, stages.num_stages, self.device, stages.group, calls, run)
            for index in stages.indices
        ]

    def _divided(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a pipeline's micro-batch as its backward begins with it, and reports it to the meter."""
        divided = loss / self._settings.accumulation
        self._add_losses([divided], first=not self.micro_batches)
        return self.scale(divided)

    def _add_losses(self, losses: Sequence[torch.Tensor], first: bool) -> None:
        """Reports divided losses to the meter of steps; `first` if no micro-batch of the step came before."""
        if self._core.components.meter is not None:
            for number, loss in enumerate(losses):
                self._core.components.meter.add_loss(loss, first=first and not number)

    @property
    def schedule(self) -> Schedule:
        """Order in which `accumulate` and `train_batch` run micro-batches: "layer_major" or "micro_batch_major".

        It changes after the first step if the model turns out to keep values on its modules between blocks.
        """
        layer_major = self._core.components.layer_major
        return MICRO_BATCH_MAJOR if layer_major is None or not layer_major.takes_turns else LAYER_MAJOR

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns `loss` times the loss scale in fp16, and `loss` itself otherwise.

        For loops that call `.backward()` themselves.

        Args:
            loss: the loss of a micro-batch, divided by gradient_accumulation_steps if gradients accumulate.
        """
        return loss if self._core.state.scaler is None else self._core.state.scaler.multiply(loss)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of samples of a step on all ranks, and with it the number of micro-batches.

        Between steps only.

        Args:
            train_batch_size: samples of a step on all ranks; a multiple of train_micro_batch_size_per_gpu * ranks.

        Raises:
            UsageError: if a micro-batch of the current step has run, if the number is no such multiple, or if several
                micro-batches would have to be added up in a 16-bit dtype.
        """
        self._core.enter_between_steps("set_train_batch_size")
        if self.micro_batches:
            ran = count_of(self.micro_batches, "micro-batch", "micro-batches")
            raise UsageError(
                f"set_train_batch_size must be called between steps, but {ran} of this step ran: call it after step()"
            )
        # A dtype that the engine chose because a step had one micro-batch may be too narrow to add several up.
        kept = None if self._settings.config.data_types.grad_accum_dtype else self._core.components.gradients.dtype
        ranks = self._core.components.data_ranks
        self._core.state.change_settings(resized(self._settings, train_batch_size, ranks, kept))

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Sets whether the next `step()` updates the weights, regardless of the count of micro-batches.

        The setting holds until the next call. A loop that sets it may omit the `step()` of other micro-batches, as
        `accelerate` does. `backward` still divides by gradient_accumulation_steps.

        Args:
            is_boundary: True or False; None returns to the count.

        Raises:
            UsageError: if `is_boundary` is anything else.
        """
        self._core.check()
        self._core.accumulation.declare(is_boundary)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for micro-batches that do not end a step.

        Each backward in the context counts as a micro-batch. `step()` never updates weights in the context. Results do
        not change, since the config decides when ranks reduce, inside of the context and outside. In ZeRO stages 0 and
        1 with several micro-batches gradients add up on each rank until the last one. In stages 2 and 3 they are
        reduced as they come, or with the last of several that take turns. Gradients for which the GPU has room
        accumulate on the GPU in all cases, and are copied to the host with the last micro-batch.
        """
        self._core.check()
        return self._core.accumulation.no_sync()
