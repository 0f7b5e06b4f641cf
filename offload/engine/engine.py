"""The engine: the object that a training loop calls.

    engine(batch) ─► backward(loss) ─► step()      (per micro-batch; every `accumulation`-th step() is an optimizer
    step)

An optimizer step waits for the updates of the step before, decides on norm, clip and overflow, and schedules its own
updates. The update worker executes them while the next forward runs and waits, unit by unit, for the weights that it
uses. At most one optimizer step is in flight. The first call of the engine after an optimizer step takes the state blob
for which the commit of that step waits, so that random generators, schedule and counters belong to one moment.

Threads. All methods belong to the thread that runs the model. In a forked child every call raises.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from offload.engine.api.micro_batches_api import MicroBatchesApi
from offload.engine.keywords import refuse
from offload.engine.training import train_batch as batch
from offload.errors import UsageError
from offload.timeline import Row

logger = logging.getLogger("offload")


@dataclass
class Evaluation:
    """The result of an evaluation; see `Engine.evaluation`."""

    loss: float | None = None
    """The mean loss; None for an evaluation without one."""


class Engine(MicroBatchesApi):
    """A model whose weights and optimizer states are paged. Created by `offload.initialize`.

    All methods belong to the thread that runs the model; in a forked child every call raises. An error on a background
    thread of the engine is raised, as the cause of an `EngineFailed`, by the next call. From then on the engine is
    stopped, and the last commit remains valid. Attributes that the engine does not define are looked up on the model:
    `engine.generate`, `engine.parameters`.
    """

    # -- training -----------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raises `UsageError`: an engine is not compiled as a whole.

        Blocks are compiled before `initialize`, so that the hooks that fetch weights stay outside of the graphs.
        Defined because DeepSpeed has the call. Without it the call would reach `compile` of the model, which would
        trace through the hooks.

        Args:
            *args: ignored.
            **kwargs: ignored.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "an engine cannot be compiled as one graph, because weights are paged between its blocks: call "
            "block.compile() for each block of the model before offload.initialize, as `for block in model.layers: "
            "block.compile()`, with the backend and other keywords there"
        )

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        allreduce_gradients: bool | None = None,
        release_loss: bool | None = None,
    ) -> torch.Tensor:
        """Runs the backward of `loss`, which adds its gradients to those of the current step.

        In fp16 the loss is multiplied by the loss scale first; the returned loss is without the scale. The whole
        backward runs on the calling thread, also on a GPU, so that a Ctrl-C ends it within one unit.

        Args:
            loss: a tensor of one element that depends on a trainable parameter.
            retain_graph: as in `Tensor.backward`.
            scale_wrt_gas: True to divide the loss by gradient_accumulation_steps.
            allreduce_gradients: DeepSpeed's keyword; None or its default there, True.
            release_loss: DeepSpeed's keyword; None or its default there, False.

        Returns:
            The loss after the division, with its graph.

        Raises:
            UsageError: if `loss` is no tensor of one element or does not require a gradient, or if a keyword of
                DeepSpeed has another value.
            EngineFailed: if an error has stopped the engine.
        """
        refuse(allreduce_gradients=allreduce_gradients, release_loss=release_loss)
        self._core.refuse_in_turn("backward")
        divided = self._run_backward(loss, retain_graph, scale_wrt_gas)
        self._add_losses([divided], first=self.micro_batches <= 1)
        return divided

    def step(self, lr_kwargs: None = None) -> None:
        """Ends a micro-batch. If it completes a step, clips, schedules the updates and advances the learning rates.

        Args:
            lr_kwargs: DeepSpeed's keyword; must be None.

        Raises:
            UsageError: if several backwards ran since the last call while micro-batches accumulate, so that their
                number is ambiguous; if this rank cannot step now; or if `lr_kwargs` is not None.
            NumericsError: if the gradient norm is inf or NaN and the config does not skip such a step. Gradients are
                dropped and nothing is updated.
            EngineFailed: if an error has stopped the engine.
        """
        refuse(lr_kwargs=lr_kwargs)
        self._core.refuse_in_turn("step")
        self._core.enter()
        if self._core.stage_run is not None:
            self._core.stage_run.begin_step(self._settings.accumulation)
        self._core.accumulation.end(self._settings.accumulation)
        if not self._core.accumulation.ends_step(self._settings.accumulation):
            self._core.optimizer_step.pass_micro_batch()
            return
        self._step_and_schedule()

    def _step_and_schedule(self) -> None:
        # The count tells below whether the optimizer step itself went through: only then are weights ahead of the
        # schedule.
        before = self.global_steps
        try:
            self.optimizer.step()
            if self.lr_scheduler is not None and not self.optimizer.overflow:
                self.lr_scheduler.step()
                self._core.state.ended()
        except BaseException as error:
            # A step whose schedule did not advance, or advanced partly, must not be committed: a resumed run would
            # train with the wrong learning rate. The last commit stays valid.
            if self.lr_scheduler is not None and self.global_steps != before:
                self._core.components.pager.fail(error)
            raise

    def accumulate(
        self,
        micro_batches: Iterable[Any],
        loss: Callable[[Any], torch.Tensor] | None = None,
        *,
        scale_wrt_gas: bool = True,
    ) -> list[torch.Tensor]:
        """Runs forward and backward of micro-batches, in the order that "schedule" of the config says.

        Call `step()` afterwards. With the schedule layer_major all micro-batches pass through one block before the next
        is fetched: their weights are copied and read as for one micro-batch. Each micro-batch draws dropout from a
        random generator of its own, so that the schedule changes no bits. If anything is raised in between, the
        gradients of the step are dropped; with the schedule micro_batch_major, those of complete micro-batches stay.

        Args:
            micro_batches: the micro-batches, all of which are taken first. As many as complete the step, or fewer.
            loss: returns the loss of a micro-batch, a tensor of one element, by a call of the engine or the model; it
                may run on another thread. By default the micro-batch is the model's input, as in `train_batch`.
            scale_wrt_gas: False if the losses are divided by gradient_accumulation_steps already, as in `backward`.

        Returns:
            The losses, detached, before their division by gradient_accumulation_steps, in the order of the
            micro-batches.

        Raises:
            UsageError: if there are more micro-batches than the step needs, or the loss is no tensor of one element.
        """
        self._core.enter()
        if not isinstance(micro_batches, Iterable):
            raise UsageError(
                f"accumulate expects the micro-batches of a step, as a list, got {type(micro_batches).__name__}"
            )
        taken = list(micro_batches)
        if not taken:
            return []
        self._core.accumulation.check_room(len(taken), self._settings.accumulation)
        return self._accumulate(taken, len(taken), loss or (lambda each: batch.run(self, each)), scale_wrt_gas)

    def _accumulate(
        self, micro_batches: Iterable[Any], most: int, loss_of: Callable[[Any], torch.Tensor], scale_wrt_gas: bool
    ) -> list[torch.Tensor]:
        """Runs forward and backward of `most` micro-batches, or fewer if there are no more; see `accumulate`."""
        losses: dict[int, torch.Tensor] = {}

        def work(number: int, micro_batch: Any) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                loss = loss_of(micro_batch)
                divided = self._run_backward(loss, retain_graph=False, scale_wrt_gas=scale_wrt_gas)
                losses[number] = loss.detach()
                return divided.detach()

            return run

        first = not self.micro_batches
        with self._core.accumulation.several(most):
            works = (work(number, each) for number, each in enumerate(micro_batches))
            self._add_losses(self._core.run_micro_batches(works, most), first)
        return [losses[number] for number in range(len(losses))]

    def train_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """Runs micro-batches of `data_iter` until a step is complete, including the step.

        If the data end before the step is complete, `StopIteration` is raised as `next` raises it. The gradients stay,
        and the next call resumes with them.

        Args:
            data_iter: an iterator of micro-batches. A mapping is passed as keywords, a tuple or list as positional
                arguments, anything else as the only argument. The model must return the loss, or an output that holds
                it as `.loss`, as `["loss"]` or as its first item.

        Returns:
            The mean loss of the micro-batches on this rank, () fp32, on the device of the losses.

        Raises:
            UsageError: if `data_iter` is no iterator, if the model returns no loss of one element, or inside of
                `no_sync`.
            NumericsError: as in `step`.
        """
        batch.check_batches(data_iter)
        # Otherwise the loop below would take all the data without a step.
        self._core.accumulation.check_no_sync()
        # `step()` decides where the step ends, by the count or as the user says, so the loop watches its counter.
        steps, losses = self.global_steps, list[torch.Tensor]()
        while self.global_steps == steps:
            wanted = self._core.accumulation.remaining(self._settings.accumulation) or 1
            some = itertools.islice(data_iter, wanted)
            found = self._accumulate(some, wanted, lambda each: batch.run(self, each), scale_wrt_gas=True)
            losses += found
            if found:
                self.step()
            if len(found) < wanted:
                raise StopIteration
        return torch.stack([loss.float() for loss in losses]).mean()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last optimizer step, and their micro-batches.

        With several ranks every rank must call it if there is a gradient to drop, because gradients are reduced
        already.

        Args:
            set_to_none: accepted for compatibility with torch; has no effect.
        """
        self._core.refuse_in_turn("zero_grad")
        self._core.forget_gradients()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Includes the states of `objects` in each commit, as `accelerate` does.

        Example: a schedule that the user steps. In a resumed run as many objects as the run had must be registered in
        the same order before the first step. Each receives its state at once. Then the values of the optimizer's
        groups, such as learning rates, become those of the commit again, because the constructor of a schedule may have
        overwritten them.

        Args:
            *objects: objects with `load_state_dict(state)` and `state_dict()`, which returns plain values and tensors
                of the CPU of at most 64 KiB. What can be iterated is a loader: its state is that of the step's end.

        Raises:
            UsageError: if an object lacks one of the methods, its state is not plain, or it is not the object that the
                resumed run holds at this position.
        """
        self._core.check()
        self._core.state.registered.add(objects)
        # The constructor of a schedule writes its first learning rates into the groups, over the committed ones.
        self._core.state.put_values()

    def restore_generators(self) -> None:
        """Restores the random generators of the end of the last step, for loops with their own DataLoader.

        Call it in a resumed run, or after `load_checkpoint`, when the loop has skipped the batches that were trained on
        and is about to fetch the next one. Random numbers drawn between this call and the first call of the engine then
        equal those of the uninterrupted run. In a new run, and from the first step on, the call does nothing.
        """
        self._core.check()
        self._core.state.restore_generators()

    def mean(self, value: float) -> float:
        """Returns the mean of a number over all ranks, such as a loss to log.

        A collective: every rank calls it at the same place.

        Args:
            value: the number of this rank.

        Raises:
            RankError: if another rank is gone or does something else.
        """
        self._core.enter()
        return value if self._core.components.agreement is None else self._core.components.agreement.mean(value)

    def train(self, mode: bool = True) -> Engine:
        """Sets the model's training mode, as `nn.Module.train` does.

        Args:
            mode: True for training, False for evaluation.

        Returns:
            The engine.
        """
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Sets the model to evaluation, as `nn.Module.eval` does.

        Returns:
            The engine.
        """
        return self.train(False)

    def synchronize(self) -> None:
        """Waits until the updates of the last step are done and committed as far as the config's durability asks.

        Only measurements need it: a read of a weight waits for the newest value by itself.

        Raises:
            UsageError: if a forward or a backward is running.
        """
        with self._core.components.timeline.span(Row.COMPUTE, "synchronize"):  # the meter counts it as part of the step
            self._core.enter_between_steps("synchronize")

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[Evaluation]:
        """Yields an object for the loss of an evaluation, which then goes where the numbers of steps go.

            with engine.evaluation() as found:
                found.loss = mean_loss(engine, held_out)

        The destinations are those of the config: "log", and from there the page of `offload report`, TensorBoard, CSV
        files, Weights & Biases. Seconds and bytes of the context count for no step. Every rank calls it, between steps;
        the first one's loss is written.

        Yields:
            An object whose `loss` the caller sets; None writes nothing.

        Raises:
            UsageError: if a forward or a backward is running.
        """
        # An update that still runs belongs to the last step, not to the evaluation.
        self.synchronize()
        found, meter = Evaluation(), self._core.components.meter
        began = time.perf_counter()
        with contextlib.nullcontext() if meter is None else meter.pause():
            yield found
        if meter is not None and found.loss is not None:
            meter.evaluated(self.global_steps, self.global_samples, float(found.loss), time.perf_counter() - began)

    def empty_partition_cache(self) -> int:
        """Gives device memory back before an evaluation or a generation that needs much of it, between steps.

        Drops the copies of weights that are on the device only because memory was free, and all that torch caches.
        Nothing is lost: weights are copied again when they are used. After some steps the engine takes free memory
        again.

        Returns:
            The bytes by which the device budget is smaller; 0 if it is what the config says or as small as it can be.

        Raises:
            UsageError: if a forward or a backward is running.
        """
        self._core.enter_between_steps("empty_partition_cache")
        return self._core.device_budget.release()
