"""The core of an engine: its components, its training state, and the order in which a call enters them.

    Engine (what users call) ─► EngineCore ─► components ─► EngineCallbacks, which the core implements

The core exists before its components do: each of them receives it as `EngineCallbacks` through its constructor, so no
component is wired up after it was built.

Threads. Every method belongs to the thread that runs the model, except where `EngineCallbacks` says otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.callbacks import Edit, EngineCallbacks
from offload.engine.checkpoint.manager import Checkpoints
from offload.engine.device_growth import advised, grow
from offload.engine.memory_report import base_bytes
from offload.engine.model_io.save_pretrained import Saving
from offload.engine.optim.optimizer import Optimizer
from offload.engine.optim.unit_updates import UnitUpdate, cut
from offload.engine.optimizer_state_dict import OptimizerStates
from offload.engine.param_access import Looking
from offload.engine.shutdown import Ending
from offload.engine.step import Boundary
from offload.engine.training.components import Parts, close_all
from offload.engine.training.data_loader import Loader
from offload.engine.training.gradient_accumulation import MicroBatches
from offload.engine.training.model_inputs import InputCast
from offload.engine.training.step_settings import Choices
from offload.engine.training.training_state import TrainingState
from offload.errors import UsageError
from offload.layout.flat_layout import UnitLayout
from offload.notices import tell
from offload.sizes import format_size
from offload.timeline import Row
from offload.torch_internals import inside_backward

logger = logging.getLogger("offload")


class _ZeroGrad:
    """`model.zero_grad()` under an engine, which holds the gradients.

    A deep copy of the model gets the method of its class again.
    """

    def __init__(self, module: nn.Module, forget: Callable[[], None]) -> None:
        self._module, self._forget = module, forget

    def __call__(self, set_to_none: bool = True) -> None:
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(type(self._module).zero_grad, memo[id(self._module)])


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
        choices: Choices,
        layouts: Sequence[UnitLayout],
        commits: bool,
        assemble: Callable[[EngineCallbacks], Parts],
    ) -> None:
        """Builds the components and takes the model and the optimizer over.

        Args:
            module: the model that is trained.
            device: where it computes.
            optimizer: groups of the model's parameters.
            lr_scheduler: a schedule with `step()`, or None.
            loader: batches of `training_data`, or None.
            choices: settings of a step.
            layouts: the segments of each unit.
            commits: whether steps are committed.
            assemble: builds the components, which keep the callbacks that it is given. If a later step of this
                constructor fails, they are closed here.
        """
        self.module, self.device, self.optimizer = module, device, optimizer
        self.state = TrainingState(module, device, optimizer, lr_scheduler, loader, choices, layouts, commits)
        self.micro = MicroBatches()
        self._is_first_step = True
        """Until the first step of this process ends nobody knows the memory of its activations."""
        self._missed_gradient_reported = False
        parts = self.parts = assemble(self)
        try:
            self.checkpoints = Checkpoints(module, parts, self.state)
            self.boundary = Boundary(parts, self.state, self.micro, module, optimizer)
            self.inputs = InputCast(device, parts.held.mode.weight_dtype, choices.config.casts_inputs)
            self.looking = Looking(parts, self)
            self.saving = Saving(module, parts)
            self.base_bytes = base_bytes(parts)
            """Resident bytes when the engine began, without the memory of engines."""
            states = OptimizerStates(self.looking, parts.layouts, parts.held.mode, self.state)
            optimizer.attach(self.end_step, self.forget_gradients, self.state.regrouped, states)
            module.__dict__["zero_grad"] = _ZeroGrad(module, self.forget_gradients)
            self.ending = Ending(module, parts, self.state, self.enter)
        except BaseException:
            module.__dict__.pop("zero_grad", None)
            with contextlib.suppress(Exception):  # the first error is the one that is reported
                close_all(*parts.closing())
            raise

    # -- entry --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises if this engine can no longer be used: `UsageError` after its end, `EngineFailed` after an error."""
        self.ending.check()
        self.parts.pager.check_whole()
        self.parts.pager.check()

    def enter(self) -> None:
        """Starts a call of the engine: checks it, clears what an aborted call left, and carries out pending edits.

        Does nothing inside of a backward.
        """
        if not inside_backward():
            self._begin()
            self.parts.weights.flush()

    def enter_between_steps(self, call: str) -> None:
        """Enters the engine and waits for the updates and the commit of the last step.

        Args:
            call: the name of the public method, for the error.

        Raises:
            UsageError: if a forward or a backward is running.
        """
        if inside_backward() or self.parts.hooks.running:
            raise UsageError(f"{call} is for between steps, not for inside of a forward or a backward")
        self.enter()
        if self.parts.updater is not None:
            self.parts.updater.finish()

    def _begin(self) -> None:
        """Checks the engine, clears what an aborted call left, and delivers the state blob that a commit waits for."""
        self.parts.hooks.leave_all()
        self.check()
        self.parts.hooks.reset_aborted()
        self.state.enter()
        updater, progress = self.parts.updater, self.state.after_step
        if updater is not None and updater.wants_blob and progress is not None:
            updater.deliver_blob(progress.pack())

    def enter_model(self, inputs: Any) -> Any:
        """Starts a forward: enters the engine and returns the inputs on its device."""
        self.enter()
        return self.inputs(inputs)

    def advised(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which torch's out-of-memory error of the device says what to change."""
        return advised(self.parts.pager.arena, self.state.choices.device_need)

    # -- steps --------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Ends a step at a boundary. `Engine.step` and the user's `optimizer.step()` both come here."""
        with self.parts.timeline.span(Row.COMPUTE, f"step {self.state.global_steps + 1}"):
            self.enter()
            self.boundary.end_step()
        if self._is_first_step:
            self._is_first_step = False
            memory = grow(self.parts.pager, self.state.choices.device_need, self.parts.held.device)
            self.parts.gradients.add_up_in(memory)
        self.state.ended()
        if self.parts.meter is not None:
            self.parts.meter.end_step(self.boundary.stepped())

    def forget_gradients(self) -> None:
        """Drops the gradients since the last boundary, and their micro-batches, on all ranks."""
        self.enter()
        self.parts.hooks.forget_gradients()
        self.parts.gradients.forget()
        self.micro.reset()

    # -- EngineCallbacks ----------------------------------------------------------------------------

    def enter_forward(self) -> None:
        self.enter()  # a user may run the model without the engine; that is an entry too

    def enter_weights(self) -> None:
        # Edits of a unit that is being edited are not carried out one by one, so `enter`, which flushes them, is not
        # for here.
        if self.parts.hooks.running:
            self.check()
        else:
            self._begin()

    def begin_backward(self) -> None:
        if self.state.scaler is not None:
            self.state.scaler.begin_backward()

    def end_backward(self) -> None:
        self.micro.count_backward()

    def is_last_micro_batch(self) -> bool:
        return self.micro.is_last(self.state.choices.accumulation)

    def await_updates(self) -> None:
        if self.parts.updater is not None:
            self.parts.updater.finish(commit=False)

    def apply_edits(self, unit: int, edits: Sequence[Edit]) -> None:
        parts = self.parts
        assert parts.updater is not None, "an engine that trains nothing refuses edits before it comes here"
        parts.bindings.settle()
        parts.updater.finish()
        if parts.rounds is not None:
            edits = parts.rounds.edit(unit, edits)
        if not edits:
            return
        part = parts.trainable[unit]
        try:
            parts.updater.schedule([UnitUpdate(unit=unit, numel=len(part), edits=cut(edits, part))], None)
        except BaseException as error:
            parts.pager.fail(error)
            raise
        self.state.mark_edited()
        parts.updater.finish(commit=False)

    def report_missed_gradient(self, name: str) -> None:
        # Only between a backward and the step is there a gradient to miss; once is enough.
        if self.micro.count and not self._missed_gradient_reported:
            self._missed_gradient_reported = True
            tell(
                f"`.grad` of {name} is None, as of every parameter: gradients are in the engine. "
                f"offload.safe_get_full_grad(parameter) reads one before step(), engine.get_global_grad_norm() gives "
                f"their norm after it (docs/guides/looking.md)"
            )

    def give_cache(self) -> None:
        parts = self.parts
        parts.pager.check_whole()
        if parts.pager.failed:
            return
        logger.info(
            "%s of host memory go from one engine of this process to another", format_size(parts.arena.classes.cache)
        )
        if parts.updater is not None:
            parts.updater.finish(commit=False)
        parts.pager.give_cache(parts.updater.drop_spare if parts.updater is not None else lambda: None)

    def pending_unit(self) -> int:
        return self.parts.gradients.pending_unit

    def serve_gather(self, unit: int) -> None:
        self.parts.pager.take_part(unit)

    def serve_reduce(self, unit: int, holders: Sequence[int]) -> None:
        self.parts.gradients.serve_reduce(unit, holders)
