"""The core of an engine: its components, its training state, and the order in which a call enters them.

    Engine (what users call) ─► EngineCore ─► components ─► EngineCallbacks, implemented by the core

The core exists before its components: each of them receives it as `EngineCallbacks` through its constructor.

Threads. Every method belongs to the thread that runs the model, except where `EngineCallbacks` says otherwise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from offload.checkpoint.manager import Checkpoints
from offload.engine.callbacks import Edit, EngineCallbacks, Turn
from offload.engine.dtype_mismatch import fp32_needed
from offload.engine.gradients.zero_grad import ZeroGrad
from offload.engine.memory.report import base_bytes
from offload.engine.memory.sleep import FreedBytes, Sleep
from offload.engine.optim.optimizer import Optimizer
from offload.engine.optim.unit_updates import UnitUpdate, cut
from offload.engine.optimizer_state_dict import OptimizerStates
from offload.engine.shutdown import Shutdown
from offload.engine.stack_access import StackAccess
from offload.engine.step import OptimizerStep
from offload.engine.training.components import EngineComponents, close_all
from offload.engine.training.data_loader import Loader
from offload.engine.training.device_growth import DeviceBudget
from offload.engine.training.gradient_accumulation import GradientAccumulation
from offload.engine.training.model_inputs import InputCast
from offload.engine.training.step_settings import StepSettings
from offload.engine.training.training_state import TrainingState
from offload.errors import OffloadError, UsageError
from offload.interrupts import defer_signals, interruptible, uninterrupted
from offload.layout.flat_layout import UnitLayout
from offload.model_io.save import PretrainedWriter
from offload.notices import announce
from offload.parallel.stage_run import stage_run_of
from offload.passes.generators import MicroBatchGenerators
from offload.sizes import format_size
from offload.timeline import Row
from offload.torch_internals import inside_backward

logger = logging.getLogger("offload")

_T = TypeVar("_T")


class EngineCore(EngineCallbacks):
    """The components of one engine and the training state that they share."""

    def __init__(
        self,
        *,
        module: nn.Module,
        device: torch.device,
        optimizer: Optimizer,
        lr_scheduler: Any,
        loader: Loader | None,
        settings: StepSettings,
        layouts: Sequence[UnitLayout],
        commits: bool,
        assemble: Callable[[EngineCallbacks], EngineComponents],
    ) -> None:
        """Builds the components and takes over the model and the optimizer.

        Args:
            module: the model that is trained.
            device: the device on which the model computes.
            optimizer: the optimizer that `initialize` returns, with the groups of the model's parameters.
            lr_scheduler: a schedule with `step()`, or None.
            loader: batches of `training_data`, or None.
            settings: settings of a step.
            layouts: the segments of each unit.
            commits: True if steps are committed.
            assemble: builds the components, which store the callbacks that they receive. If a later step of this
                constructor fails, the components are closed.
        """
        self.module, self.device, self.optimizer = module, device, optimizer
        self.state = TrainingState(module, device, optimizer, lr_scheduler, loader, settings, layouts, commits)
        self.accumulation = GradientAccumulation()
        self._missed_gradient_reported = False
        components = self.components = assemble(self)  # they call nothing: attributes set below do not exist yet
        try:
            self.checkpoints = Checkpoints(module, components, self.state)
            self.optimizer_step = OptimizerStep(components, self.state, self.accumulation, module, optimizer)
            shards, need = components.shards, settings.device_need
            self.device_budget = DeviceBudget(module, components.pager, components.gradients, shards.device, need)
            self.sleeping = Sleep(components, self.device_budget)
            self.inputs = InputCast(device, components.shards.mode.weight_dtype, settings.config.casts_inputs)
            self.param_access = StackAccess(components, self)
            self.stage_run = stage_run_of(module, self.accumulation, self.param_access)
            self.pretrained_writer = PretrainedWriter(module, components)
            self.base_bytes = base_bytes(components)
            """Resident bytes of the process when the engine was built, without the memory of engines."""
            states = OptimizerStates(self.param_access, components.layouts, components.shards.mode, self.state)
            optimizer.attach(self.end_step, self.forget_gradients, self.state.regrouped, states)
            module.__dict__["zero_grad"] = ZeroGrad(module, self.forget_gradients)
            self.shutdown = Shutdown(module, components, self.state, self._enter_end)
        except BaseException:
            module.__dict__.pop("zero_grad", None)
            # The first error is reported; no thread, lock or memory is left behind.
            with contextlib.suppress(Exception):
                close_all(*components.closing())
            raise

    # -- entry --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises if this engine can no longer be used.

        Raises:
            UsageError: if the engine was destroyed, or if the process is a forked child.
            EngineFailed: if an error has stopped the engine.
        """
        self.shutdown.check()
        self.components.pager.check()

    def enter(self) -> None:
        """Starts a call of the engine: checks it, clears the remains of an aborted call, and writes pending edits.

        Inside of a backward does nothing of this. Refuses a capture anywhere.
        """
        self._refuse_capture()
        if self._in_turn:
            self.check()
        elif not inside_backward():
            self._begin()
            self.components.weights.flush()

    def _refuse_capture(self) -> None:
        """Raises `UsageError` while the current stream records a graph, in a forked child and after the end."""
        # CUDA answers no question in a forked child, and would fail with an error that does not name the cause.
        self.shutdown.check()
        # Asked before any event is recorded: an event would end the user's capture by an error that names no cause.
        if self.components.shards.device.capturing():
            raise UsageError(
                "a CUDA graph cannot be captured of a model whose weights are paged, since they have other addresses "
                "in each pass: run the model without torch.cuda.graph and make_graphed_callables"
            )

    @property
    def _in_turn(self) -> bool:
        """True on the thread of a micro-batch that takes turns with others, all of which are one call of the engine."""
        layer_major = self.components.layer_major
        return layer_major is not None and layer_major.on_this_thread

    def enter_between_steps(self, call: str) -> None:
        """Enters the engine and waits for the updates and the commit of the last step.

        Args:
            call: the name of the public method, for the error.

        Raises:
            UsageError: if a forward or a backward is running.
        """
        if inside_backward() or self.components.hooks.running or self._in_turn:
            raise UsageError(f"{call} must be called between steps, not inside of a forward or a backward")
        self.enter()
        if self.components.update_worker is not None:
            self.components.update_worker.come_to_rest()

    def _enter_end(self) -> None:
        """Enters the engine for its end. One that sleeps has nothing to write, and needs no memory for that."""
        self.check() if self.sleeping.asleep else self.enter()

    def sleep(self, host: bool) -> FreedBytes:
        """Gives the memory of the arenas back; see `RunningApi.sleep`."""
        self.check() if self.sleeping.asleep else self.enter_between_steps("sleep")
        return self.sleeping.sleep(host, self.accumulation.count)

    @uninterrupted
    def _begin(self) -> None:
        """Checks the engine, clears the remains of an aborted call, and delivers the blob for which a commit waits."""
        defer_signals(self.state)
        if self.components.layer_major is not None:
            self.components.layer_major.abandon_on_entry()
        self.components.hooks.leave_all()
        if self.components.sharded_views is not None:
            self.components.sharded_views.abandon()
        self.check()
        self.sleeping.wake()  # first: all that follows may use weights
        self.components.hooks.reset_aborted()
        self.components.activations.recover()
        self.device_budget.relieve()
        self.state.enter()
        # The commit of step k waits for random generators, counters and buffers of one moment: the first entry after
        # the step. This thread must collect them, and the update worker's thread writes them as a blob.
        updater, progress = self.components.update_worker, self.state.after_step
        if updater is not None and updater.wants_blob and progress is not None:
            updater.deliver_blob(progress.pack())

    def run_model(self, args: Any, kwargs: Any) -> Any:
        """Runs the model and returns its output. If device memory runs out, the device budget may run it once more.

        Raises:
            UsageError: a module computes in fp32 with a 16-bit weight, which torch refuses.
        """
        try:
            return self._run_model(args, kwargs)
        except RuntimeError as error:
            explained = fp32_needed(error, self.module, self.components.shards.mode.weight_dtype)
            if explained is None:
                raise
            raise explained from error

    def _run_model(self, args: Any, kwargs: Any) -> Any:
        if self._in_turn:  # the other micro-batches keep memory and views, so a repetition would not help
            return self.module(*args, **kwargs)
        return self.device_budget.run(
            lambda: self.module(*args, **kwargs), (args, kwargs), self.components.everyone is None
        )

    @uninterrupted
    def run_backward(self, begin: Callable[[], None]) -> None:
        """Runs a backward by `begin`, all nodes on the calling thread. A Ctrl-C leaves no setting of torch changed.

        torch would run the nodes of a GPU on a thread of its own while the caller waits in C++, where no handler of a
        signal runs: a Ctrl-C would be obeyed when the backward ends. One GPU's nodes run one after the other on either
        thread, and the nodes of a CPU run on the caller's anyway.
        """

        @interruptible
        def run() -> None:
            begin()

        if self._in_turn:
            self.components.hooks.passes.begin_backward_of_turn()
        # Activations are largest in the backward: torch's out-of-memory error says in here what to change.
        with self.device_budget.advised(backward=True), torch.autograd.set_multithreading_enabled(False):
            try:
                run()
            except RuntimeError as error:
                # Weights that stay on the device are in the graph, and torch notices that they have changed.
                if self.components.hooks.passes.through_old_graph and "modified by an inplace operation" in str(error):
                    raise UsageError(
                        "backward through a graph made before step(): the weights, which are in the graph itself, have "
                        "changed since"
                    ) from error
                raise

    def run_micro_batches(self, works: Iterable[Callable[[], _T]], most: int, trains: bool = True) -> list[_T]:
        """Runs micro-batches in the order of the schedule, and returns what each returns.

        Each draws from random generators of its own, so that the order changes no bits.

        Args:
            works: run the forward and the backward of a micro-batch each.
            most: number of micro-batches, at most.
            trains: False if no work runs a backward.
        """
        generators = MicroBatchGenerators(self.device, most)
        layer_major = self.components.layer_major
        if layer_major is None or most < 2 or not layer_major.possible:
            return [generators.run(number, work) for number, work in enumerate(works)]
        try:
            return layer_major.run(list(works), generators, trains)
        except BaseException:
            # Some units have gradients of all micro-batches now, others of none, and no loop could go on with that.
            if not self.components.pager.failed and self.components.everyone is None:
                with contextlib.suppress(OffloadError):
                    self.forget_gradients()
            raise

    # -- steps --------------------------------------------------------------------------------------

    def refuse_in_turn(self, call: str) -> None:
        """Raises `UsageError` within the loss function of `accumulate`."""
        if self._in_turn:
            raise UsageError(
                f"{call} must not be called in the loss function of accumulate, which runs the backward itself"
            )

    @uninterrupted
    def end_step(self) -> None:
        """Performs an optimizer step. `Engine.step` and the user's `optimizer.step()` both call this method."""
        with self.components.timeline.span(Row.COMPUTE, f"step {self.state.global_steps + 1}"):
            self.enter()
            self.optimizer_step.end_step()
        # The device arena was planned without knowledge of activations. After one forward and backward torch's
        # allocator shows their peak, and the arena may grow into the memory that they leave free.
        self.device_budget.end_step()
        self.components.activations.checkpoints.end_step(self.state.global_steps)
        self.state.ended()
        if self.components.meter is not None:
            self.components.meter.end_step(self.optimizer_step.stepped())

    @uninterrupted
    def forget_gradients(self) -> None:
        """Drops the gradients since the last optimizer step, and their micro-batches, on all ranks."""
        self.enter()
        self.components.hooks.forget_gradients()
        self.optimizer_step.forget_gradients()
        self.components.gradients.forget()
        self.accumulation.reset()
        if self.stage_run is not None:
            self.stage_run.forget()

    # -- EngineCallbacks ----------------------------------------------------------------------------

    def enter_forward(self) -> None:
        self.shutdown.go_on()
        self.enter()  # a user may run the model without the engine; that is an entry too

    def enter_weights(self) -> None:
        # Not `enter`: it flushes pending edits, and those of the unit being edited must stay together until the end.
        if self.components.hooks.running or self._in_turn:
            self.check()
        else:
            self._refuse_capture()
            self._begin()

    def begin_backward(self) -> None:
        # For a plain `loss.backward()`: no call of the engine has asked before.
        self._refuse_capture()
        self.sleeping.wake()  # a graph of before
        # Of the stages of a pipeline the last one alone has a loss to scale.
        if self.state.scaler is not None and self.stage_run is None:
            self.state.scaler.begin_backward()

    def end_backward(self) -> None:
        if self.stage_run is None:
            self.accumulation.count_backward()

    def is_last_micro_batch(self) -> bool:
        layer_major = self.components.layer_major
        ahead = 0 if layer_major is None else layer_major.turn
        return self.accumulation.is_last(self.state.settings.accumulation, ahead)

    def turn(self) -> Turn | None:
        layer_major = self.components.layer_major
        if layer_major is None or not self.components.hooks.passes.takes_turns:
            return None
        return Turn(layer_major.turn, layer_major.turn == layer_major.count - 1)

    def gradients_complete(self, unit: int) -> None:
        self.optimizer_step.gradients_complete(unit)

    def gradients_changed(self, unit: int) -> None:
        self.optimizer_step.gradients_changed(unit)

    def await_updates(self) -> None:
        if self.components.update_worker is not None:
            self.components.update_worker.finish(commit=False)

    @uninterrupted
    def apply_edits(self, unit: int, edits: Sequence[Edit]) -> None:
        components = self.components
        assert components.update_worker is not None, "an engine that trains nothing refuses edits earlier"
        # Order matters: a live view of old weights is refused before anything changes. Then the update in flight ends
        # with its commit, after which the other slot of the unit may be written.
        components.unit_views.settle()
        components.update_worker.come_to_rest()
        if components.agreement is not None:
            edits = components.agreement.edit(unit, edits)
        if not edits:
            return
        part = components.trainable[unit]
        components.unit_views.outdate([unit])
        try:
            # The others of a grid take no part, and may yet have to resume from the step whose slot is written now.
            if components.tensor_parallel is not None and components.store is not None:
                components.store.set_aside(unit)
            # If this is interrupted, a part of the edit may be scheduled already: nothing may be committed after it.
            components.update_worker.schedule([UnitUpdate(unit=unit, numel=len(part), edits=cut(edits, part))], None)
        except BaseException as error:
            components.pager.fail(error)
            raise
        self.state.mark_edited()
        components.update_worker.finish(commit=False)

    def report_missed_gradient(self, name: str) -> None:
        # Users can miss a gradient only between a backward and the step. One notice is enough.
        if self.accumulation.count and not self._missed_gradient_reported:
            self._missed_gradient_reported = True
            announce(
                f"`.grad` of {name} is None for every parameter, because gradients are in the engine. "
                "offload.safe_get_full_grad(parameter) reads one before step(), engine.get_global_grad_norm() gives "
                "their norm after it (docs/guides/inspect-and-edit-parameters.md)"
            )

    def give_cache(self) -> None:
        components = self.components
        # The waits below would raise this engine's failure in the thread of another, sound engine.
        if components.pager.failed:
            return
        given = format_size(components.arena.classes.cache)
        logger.info("%s of host memory go from this engine to another engine of this process", given)
        worker = components.update_worker
        if worker is not None:
            worker.come_to_rest(commit=False)
        # No update may use a host buffer while the pager takes all of them away: the wait above has ended them.
        components.pager.give_cache(worker.drop_spare if worker is not None else lambda: None)

    def read_stored(self, parameter: torch.Tensor) -> torch.Tensor:
        handle = self.param_access.handle(parameter)
        assert handle is not None, "the caller owns the parameter"
        return self.param_access.read_weight(handle)

    def pending_unit(self) -> int:
        return self.components.gradients.pending_unit

    def serve_gather(self, unit: int) -> None:
        self.sleeping.wake()
        self.components.pager.serve_gather(unit)

    def serve_reduce(self, unit: int, holders: Sequence[int]) -> None:
        self.components.gradients.serve_reduce(unit, holders)
