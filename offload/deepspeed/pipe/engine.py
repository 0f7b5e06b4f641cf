"""`PipelineEngine`: the engine over a `PipelineModule`, whose steps and evaluations are one call each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from offload.deepspeed.pipe.module import PipelineModule
from offload.deepspeed.runtime.dataloader import RepeatingLoader
from offload.deepspeed.runtime.engine import DeepSpeedEngine
from offload.engine.engine import Engine
from offload.engine.step import check_batches
from offload.errors import UsageError
from offload.sizes import count_of


class PipelineEngine(DeepSpeedEngine):
    """A `DeepSpeedEngine` over a `PipelineModule`, by torch's 1F1B schedule. Created by `deepspeed.initialize`."""

    def __init__(self, engine: Engine, model: PipelineModule, loader: Any) -> None:
        """Takes the place of an engine.

        Args:
            engine: result of `offload.initialize`.
            model: its model.
            loader: batches of `training_data`, or None.
        """
        super().__init__(engine)
        self._model = model
        self._batches = None if loader is None else RepeatingLoader(loader)
        self._schedules: dict[tuple[int, bool], Any] = {}
        """Schedules by their number of micro-batches, and True for those of evaluations."""

    def is_first_stage(self) -> bool:
        """Returns True if this process has the first stage, which reads inputs."""
        return self._model.stage_id == 0

    def is_last_stage(self) -> bool:
        """Returns True if this process has the last stage, which reads labels."""
        return self._model.stage_id == self._model.num_stages - 1

    def set_dataloader(self, loader: Any) -> None:
        """Sets the batches for calls of `train_batch` without any; it begins anew where it ends.

        Args:
            loader: an iterable of micro-batches.
        """
        self._batches = RepeatingLoader(loader)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Runs the micro-batches of a step through the pipeline, and the step. Every process calls it.

        Args:
            data_iter: an iterator of micro-batches, each of them (inputs, labels) of one size: a tensor or a tuple of
                tensors, and a tensor. Processes of the first and the last stage read the same; those between read
                none. None for the batches of `training_data` or of `set_dataloader`.

        Returns:
            The mean loss of all micro-batches on all processes, () fp32, on each of them.

        Raises:
            UsageError: if `data_iter` is no iterator, or a micro-batch has another form or size.
            NumericsError: as in `step`.
            StopIteration: if the data end before; so they must on the first and on the last stage.
        """
        if self._model.loss_fn is None:
            raise UsageError("train_batch needs a loss: give PipelineModule loss_fn=")
        count = self.gradient_accumulation_steps()
        inputs, labels = self._taken(data_iter, count, "train_batch")
        losses: list[torch.Tensor] = []
        self._schedule(count, evaluates=False).step(*inputs, target=labels, losses=losses, return_outputs=False)
        self.step()
        return self._mean_of_all(losses)

    def eval_batch(  # type: ignore[override]
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Returns the mean loss of some micro-batches, without gradients and in evaluation mode.

        Args:
            data_iter: as for `train_batch`.
            return_logits: True to return (loss, outputs of the last stage for all micro-batches, None on others).
            compute_loss: must be True.
            reduce_output: must be "avg".
            bcast_loss: without effect: each process receives the loss.
            num_micro_batches: number of micro-batches; by default as many as a step has.

        Raises:
            UsageError: as in `train_batch`, and if an argument asks for what is not supported.
        """
        if not compute_loss or reduce_output != "avg" or self._model.loss_fn is None:
            raise UsageError(
                'eval_batch of a pipeline computes the mean loss: give compute_loss=True, reduce_output="avg", and '
                "PipelineModule loss_fn="
            )
        count = self.gradient_accumulation_steps() if num_micro_batches is None else num_micro_batches
        inputs, labels = self._taken(data_iter, count, "eval_batch")
        # Behind an error the model trains on in the mode that it had.
        mode, losses = self.module.training, list[torch.Tensor]()
        self.eval()
        try:
            with torch.no_grad():
                outputs = self._schedule(count, evaluates=True).eval(*inputs, target=labels, losses=losses)
        finally:
            self.train(mode)
        loss = self._mean_of_all(losses)
        return (loss, outputs) if return_logits else loss

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `UsageError`: a step is one call of `train_batch`.

        Args:
            *args: ignored.
            **kwargs: ignored.
        """
        raise UsageError("a pipeline runs by engine.train_batch(data_iter) and engine.eval_batch(data_iter)")

    __call__ = forward

    def _schedule(self, micro_batches: int, evaluates: bool) -> Any:
        """Returns torch's schedule of so many micro-batches. Evaluations have their own, as torch prepares each."""
        # Here, since torch's pipelines take a while to import.
        from torch.distributed.pipelining import Schedule1F1B

        key = (micro_batches, evaluates)
        # Made at its first use, as the number of micro-batches may change between steps.
        if key not in self._schedules:
            (stage,) = self.pipeline_stages()
            loss = self._model.loss_fn
            # A loss may have buffers, such as weights of classes, and is no part of the model that the engine moves.
            loss = loss.to(self.device) if isinstance(loss, nn.Module) else loss
            self._schedules[key] = Schedule1F1B(stage, micro_batches, loss_fn=loss)
        return self._schedules[key]

    def _taken(self, data_iter: Iterator[Any] | None, count: int, call: str) -> tuple[tuple[Any, ...], Any]:
        """Returns the inputs of some micro-batches, one below the other, and their labels; what this stage needs."""
        batches = self._batches if data_iter is None else data_iter
        # A process between has no use for data, and may have none.
        if not (self.is_first_stage() or self.is_last_stage()):
            return (), None
        if batches is None:
            raise UsageError(f"{call} needs data: pass an iterator, or give initialize training_data")
        check_batches(batches)
        found = list(itertools.islice(batches, count))
        if len(found) < count:
            raise StopIteration
        if any(not isinstance(each, tuple | list) or len(each) != 2 for each in found):
            raise UsageError(
                f"{call} of a pipeline expects micro-batches (inputs, labels), got {type(found[0]).__name__}"
            )
        inputs = [each[0] if isinstance(each[0], tuple | list) else (each[0],) for each in found]
        below = tuple(self._below([each[position] for each in inputs], call) for position in range(len(inputs[0])))
        labels = self._below([each[1] for each in found], call)
        return below if self.is_first_stage() else (), labels if self.is_last_stage() else None

    def _below(self, parts: Sequence[Any], call: str) -> torch.Tensor:
        """Returns tensors of one shape, one below the other, on the device."""
        shapes = {tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in parts}
        if len(shapes) > 1 or not isinstance(parts[0], torch.Tensor):
            raise UsageError(
                f"{call} of a pipeline expects micro-batches of tensors of one shape, got {sorted(map(str, shapes))} "
                f"in {count_of(len(parts), 'micro-batch', 'micro-batches')}: pad them, and drop the last incomplete one"
            )
        return torch.cat([each.to(self.device) for each in parts])

    def _mean_of_all(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the mean of the losses on the last stages of all pipelines, on each process."""
        value = torch.zeros((), dtype=torch.float32, device=self.device)
        if self.is_last_stage():
            value.fill_(self.mean(float(torch.stack([loss.detach().float() for loss in losses]).mean())))
        # The processes of the other stages have no loss of their own to return.
        if self._model.num_stages > 1:
            dist.broadcast(value, self._model.processes[-1], self._model.group)
        return value
