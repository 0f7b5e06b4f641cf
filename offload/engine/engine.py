"""The engine: the object that a training loop calls.

    engine(batch) ─► backward(loss) ─► step()      (per micro-batch; every `accumulation`-th step() is an optimizer
    step)

An optimizer step waits for the updates of the step before, decides on norm, clip and overflow, and schedules its own
updates. The update worker executes the updates while the next forward runs. That forward waits, unit by unit, for the
weights that it uses. At most one optimizer step is in flight. The commit of a step waits for a state blob. The first
call of the engine after the step takes that blob, so that random generators, schedule and counters belong to one
moment.

Threads. All methods belong to the thread that runs the model. In a forked child every call raises.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from offload.checkpoint.load import LoadOptions
from offload.checkpoint.manager import Checkpoints
from offload.checkpoint.save import SaveRequest
from offload.config.blocks import unpacked
from offload.distributed.agreement import Collective, all_or_nothing
from offload.distributed.process_group import Communication
from offload.engine import step
from offload.engine.access import OptimizerStates, ParamAccess
from offload.engine.callbacks import Edit, EngineCallbacks
from offload.engine.compiled_blocks import compile_blocks
from offload.engine.components import EngineComponents, close_all
from offload.engine.data import InputCast, Loader, check_data, load
from offload.engine.device_budget import (
    DeviceBudget,
    FreedBytes,
    MemoryReport,
    Sleep,
    base_bytes,
    check_unused,
    memory_report,
)
from offload.engine.dtype_mismatch import fp32_needed
from offload.engine.gradients import ZeroGrad
from offload.engine.keywords import refuse
from offload.engine.memory_guard import HostWatch
from offload.engine.micro_batches import MicroBatchGenerators, StageCalls
from offload.engine.shutdown import Shutdown
from offload.engine.snapshot import persistent_buffers
from offload.engine.state import StepSettings, TrainingState, resized
from offload.engine.step import GradientAccumulation, OptimizerStep
from offload.engine.update_strategy import UnitUpdate, cut
from offload.errors import OffloadError, UsageError
from offload.interrupts import defer_signals, interruptible, uninterrupted
from offload.launch.environment import rank_number
from offload.layout.pass_order import Schedule
from offload.model_io.save import PretrainedWriter, SaveOptions
from offload.notices import Headline, announce
from offload.schedules import set_values
from offload.sizes import count_of, format_size, parse_device_size, parse_size
from offload.swapper.memory.device import DeviceRoom
from offload.swapper.prefetch import PrefetchStats
from offload.swapper.store import DriveWrites
from offload.timeline import Row
from offload.torch_internals import inside_backward

logger = logging.getLogger("offload")

_T = TypeVar("_T")

# -- core ----------------------------------------------------------------------------------------------
#
#     Engine (what users call) ─► EngineCore ─► components ─► EngineCallbacks, implemented by the core
#
# The core exists before its components: each of them receives it as `EngineCallbacks` through its constructor.
#
# Threads. Every method belongs to the thread that runs the model, except where `EngineCallbacks` names another thread.


class EngineCore(EngineCallbacks):
    """The components of one engine, their shared training state, and the order in which a call enters them."""

    def __init__(
        self, module: nn.Module, state: TrainingState, assemble: Callable[[EngineCallbacks], EngineComponents]
    ) -> None:
        """Builds the components by `assemble`, and takes over the model and the optimizer.

        If a later step of this constructor fails, the components are closed.
        """
        self.module, self.state = module, state
        self.device, self.optimizer, settings = state.device, state.optimizer, state.settings
        self.accumulation = GradientAccumulation()
        self._missed_gradient_reported = False
        components = self.components = assemble(self)  # calls no callback: attributes set below do not exist yet
        self.state.pass_schedule = components.schedule
        try:
            self.checkpoints = Checkpoints(module, components, self.state)
            self.optimizer_step = OptimizerStep(components, state, self.accumulation, module, self.optimizer)
            shards, need = components.shards, settings.device_need
            self.device_budget = DeviceBudget(module, components.pager, components.gradients, shards.device, need)
            self.sleeping = Sleep(components, self.device_budget)
            self.host_watch = HostWatch(components, settings.config.offload.memory_watch)
            self.inputs = InputCast(self.device, components.shards.mode.weight_dtype, settings.config.casts_inputs)
            self.param_access = ParamAccess(components, self)
            self.pretrained_writer = PretrainedWriter(module, components)
            self.base_bytes = base_bytes(components)
            """Resident bytes of the process when the engine was built, without the memory of engines."""
            states = OptimizerStates(self.param_access, self.state)
            self.optimizer.attach(self.end_step, self.forget_gradients, self.state.regrouped, states)
            module.__dict__["zero_grad"] = ZeroGrad(module, self.forget_gradients)
            self.shutdown = Shutdown(module, components, self.state, self._enter_end)
        except BaseException:
            module.__dict__.pop("zero_grad", None)
            # The first error is reported; no thread, lock or memory remains.
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

        Refuses a CUDA graph capture anywhere. Inside of a backward does nothing else.
        """
        self._refuse_capture()
        if self._in_turn:
            self.check()
        elif not inside_backward():
            self._begin()
            self.components.weights.flush()

    def _refuse_capture(self) -> None:
        """Raises `UsageError` while the current stream records a graph, in a forked child and after the end."""
        # A CUDA call in a forked child would fail with an error that does not name the cause.
        self.shutdown.check()
        # This check precedes any event: recording one would end the user's capture with an error that names no cause.
        if self.components.shards.device.capturing():
            raise UsageError(
                "a CUDA graph cannot be captured of a model whose weights are paged, since they have other addresses "
                "in each pass: run the model without torch.cuda.graph and make_graphed_callables"
            )

    @property
    def _in_turn(self) -> bool:
        """True on the thread of a micro-batch that takes turns with others; all of them together are one call."""
        return self.components.schedule.on_this_thread

    def enter_between_steps(self, call: str) -> None:
        """Enters the engine for the public method `call`, and waits for the updates and the commit of the last step.

        Raises:
            UsageError: if a forward or a backward is running.
        """
        if inside_backward() or self.components.hooks.running or self._in_turn:
            raise UsageError(f"{call} must be called between steps, not inside of a forward or a backward")
        self.enter()
        self.components.update_worker.come_to_rest()

    def _enter_end(self) -> None:
        """Enters the engine for its end, or only checks it if it sleeps, since it has nothing to write then."""
        self.check() if self.sleeping.asleep else self.enter()

    def sleep(self, host: bool) -> FreedBytes:
        """Gives the memory of the arenas back; see `ModelEngine.sleep`."""
        self.check() if self.sleeping.asleep else self.enter_between_steps("sleep")
        return self.sleeping.sleep(host, self.accumulation.count)

    def resize(self, host: int | str | None, device: int | str | None) -> Budgets:
        """Changes the budgets; see `ModelEngine.resize`."""
        host_nbytes = None if host is None else parse_size(host)
        device = None if device is None else parse_device_size(device)
        self.enter_between_steps("resize")
        components, sizes = self.components, dict[str, int]()

        def check() -> None:
            if host_nbytes is not None:
                self.host_watch.check(host_nbytes, self.state.settings.config.offload.host_memory)
                sizes["host"] = host_nbytes
            if device is not None:
                check_unused(components, "resize", self.accumulation.count)
                sizes["device"] = self.device_budget.bytes_of(device)

        def carry_out() -> None:
            if "host" in sizes:
                self.host_watch.resize(sizes["host"])
            if "device" in sizes:
                self.device_budget.resize(sizes["device"], components.unit_views)

        # A collective: ranks rely on the units that are on each other's devices.
        with all_or_nothing(components.agreement, Collective.RESIZE, "resize") as ranks:
            ranks.settle(check)
            ranks.settle(carry_out)
        return Budgets(components.arena.nbytes, components.pager.arena.nbytes)

    @uninterrupted
    def _begin(self) -> None:
        """Checks the engine, clears the remains of an aborted call, and delivers the blob that a commit waits for."""
        defer_signals(self.state)
        for extension in self.components.extensions:
            extension.abandon()
        self.components.hooks.leave_all()
        self.check()
        self.sleeping.wake()  # first: all that follows may use weights
        self.components.hooks.reset_aborted()
        self.components.activations.recover()
        self.device_budget.relieve()
        self.state.enter()
        # The commit of step k waits for random generators, counters and buffers of one moment: the first entry after
        # the step. This thread must collect them, and the update worker's thread writes them as a blob.
        progress = self.state.after_step
        if self.components.update_worker.wants_blob and progress is not None:
            self.components.update_worker.deliver_blob(progress.pack())
        self.host_watch.relieve()

    def run_model(self, args: Any, kwargs: Any) -> Any:
        """Runs the model and returns its output. If device memory runs out, the device budget may run it once more.

        Raises:
            UsageError: a module computes in fp32 with a 16-bit weight, which torch refuses.
        """
        alone = self.components.world.everyone.alone
        try:
            if self._in_turn:  # the other micro-batches keep memory and views, so a repetition would not help
                return self.module(*args, **kwargs)
            return self.device_budget.run(lambda: self.module(*args, **kwargs), (args, kwargs), alone)
        except RuntimeError as error:
            explained = fp32_needed(error, self.module, self.components.shards.mode.weight_dtype)
            if explained is None:
                raise
            raise explained from error

    @uninterrupted
    def run_backward(self, begin: Callable[[], None]) -> None:
        """Calls `begin`, which runs a whole backward on this thread. A Ctrl-C leaves no setting of torch changed.

        torch would run the nodes of a GPU on a thread of its own while the caller waits in C++, where no handler of a
        signal runs: a Ctrl-C would be obeyed when the backward ends. One GPU's nodes run one after the other on either
        thread, and the nodes of a CPU run on the caller's anyway.
        """

        @interruptible
        def run() -> None:
            begin()

        if self._in_turn:
            self.components.hooks.passes.begin_backward_of_turn()
        # Activations are largest in the backward: `advised` adds advice to torch's out-of-memory error.
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
        """Runs micro-batches in the order of the schedule, and returns their results.

        Each of at most `most` works draws from random generators of its own, so that the order changes no bits. With
        `trains` False no work runs a backward.
        """

        @contextlib.contextmanager
        def turns(micro_batches: int) -> Iterator[None]:
            if trains and not self.components.schedule.trial:
                self.device_budget.make_room(micro_batches)
            try:
                with self.components.hooks.passes.turns(micro_batches, trains):
                    yield
            except BaseException:
                # Some units have gradients of all micro-batches now, others of none: no loop could continue with that.
                self.components.gradients.fail_in_turns()
                if not self.components.pager.failed and self.components.world.everyone.alone:
                    with contextlib.suppress(OffloadError):
                        self.forget_gradients()
                raise

        return self.components.schedule.run(works, MicroBatchGenerators(self.device, most), turns)

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
        self.components.activations.end_step(self.state.global_steps)
        self.components.schedule.end_step()
        self.state.ended()
        self.components.meter.end_step(
            self.optimizer_step.stepped()._replace(host_given_back=self.host_watch.given_back)
        )

    @uninterrupted
    def forget_gradients(self) -> None:
        """Drops the gradients since the last optimizer step, and the count of their micro-batches, on all ranks."""
        self.enter()
        self.components.hooks.forget_gradients()
        self.optimizer_step.early.drop()
        self.components.gradients.forget()
        self.accumulation.reset()
        self.components.schedule.forget()

    # -- EngineCallbacks ----------------------------------------------------------------------------

    def enter_forward(self) -> None:
        self.shutdown.go_on()
        self.enter()  # a user may run the model without the engine; that is an entry too

    def enter_weights(self) -> None:
        # Does not call `enter`, which flushes pending edits: the edits of one unit must stay together until its last
        # one.
        if self.components.hooks.running or self._in_turn:
            self.check()
        else:
            self._refuse_capture()
            self._begin()

    def begin_backward(self) -> None:
        # Before a plain `loss.backward()` no call of the engine has checked for a capture.
        self._refuse_capture()
        self.sleeping.wake()  # the graph may be older than the sleep
        # Only the last stage of a pipeline computes a loss to scale.
        if self.components.schedule.counts_backwards:
            self.state.scaler.begin_backward()

    def end_backward(self) -> None:
        if self.components.schedule.counts_backwards:
            self.accumulation.count_backward()

    def steps_so_far(self) -> int:
        return self.state.global_steps

    def is_last_micro_batch(self) -> bool:
        # Micro-batches that take turns are all counted at their end.
        return self.accumulation.is_last(self.state.settings.accumulation, ahead=self.components.schedule.micro_batch)

    def keeps_gradients(self) -> bool:
        step = self.state.global_steps - self.state.skipped_steps + 1
        return self.optimizer.rule.keeps_gradients(self.optimizer.param_groups, step)

    def gradients_complete(self, unit: int) -> None:
        self.optimizer_step.early.complete(unit, self.state.parameter_steps[unit], self.state.loss_scale)

    def gradients_changed(self, unit: int) -> None:
        self.optimizer_step.early.changed(unit)

    def await_gradient(self, unit: int) -> None:
        self.components.update_worker.await_gradient(unit)

    def device_room(self) -> DeviceRoom:
        return self.device_budget.room()

    @uninterrupted
    def apply_edits(self, unit: int, edits: Sequence[Edit]) -> None:
        components = self.components
        # Order matters: a live view of old weights is refused before anything changes. Then the update in flight ends
        # with its commit, after which the other slot of the unit may be written.
        components.unit_views.settle()
        components.update_worker.come_to_rest()
        edits = components.agreement.edit(unit, edits)
        if not edits:
            return
        part = components.trainable[unit]
        components.unit_views.outdate([unit])
        try:
            # Other ranks of a grid do not take part, and may still have to resume from the step whose slot is
            # overwritten now.
            if components.world.divides_model:
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
        size = format_size(components.arena.classes.cache)
        logger.info("%s of host memory go from this engine to another engine of this process", size)
        components.update_worker.come_to_rest(commit=False)
        # thread of the other engine: this engine's own thread may have begun a step since the wait. Its updates use the
        # promoted states, so they must end first.
        while not components.pager.give_cache(components.update_worker.drop_spare):
            components.update_worker.come_to_rest(commit=False)

    def read_stored(self, parameter: torch.Tensor) -> torch.Tensor:
        handle = self.param_access.handle(parameter)
        assert handle is not None, "the caller owns the parameter"
        return self.param_access.read_weight(handle)

    def give_host_memory(self, nbytes: int) -> None:
        self.host_watch.give(nbytes)

    def leave_weights(self) -> None:
        self.components.unit_views.end_recent()

    def read_back(self) -> bool:
        components = self.components
        if components.world.everyone.size > 1:
            return False  # ranks agree on what is cached, and the others go on
        components.update_worker.come_to_rest(commit=False)
        components.unit_views.outdate(range(len(components.layouts)))
        components.pager.begin_load()
        if not components.shards.stale:  # memory alone has the newest states of these
            components.shards.read_back()
        components.pager.end_load()
        return True

    def pending_unit(self) -> int:
        return self.components.gradients.pending_unit

    def serve_gather(self, unit: int) -> None:
        self.sleeping.wake()
        self.components.pager.serve_gather(unit)

    def reduction_position(self, unit: int) -> int:
        # Backwards mostly go through the units from the last to the first.
        units, schedule = len(self.components.layouts), self.components.schedule
        before, micro_batch = units - 1 - unit, self.accumulation.count + schedule.micro_batch
        if schedule.interleaves:
            return before * self.state.settings.accumulation + micro_batch
        return micro_batch * units + before

    def serve_reduce(self, unit: int, holders: Sequence[int], complete: bool) -> None:
        self.components.gradients.serve_reduce(unit, holders, complete)


# -- any engine ----------------------------------------------------------------------------------------


class Budgets(NamedTuple):
    """The budgets of an engine, in bytes."""

    host_memory: int
    device_memory: int


class IoBytes(NamedTuple):
    """Bytes that the engine's own reads and writes have moved."""

    read: int
    written: int


class ModelEngine:
    """An engine that may train or not: call and attributes of the model, and the engine's memory and traffic."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.module = core.module
        """The model that `initialize` received."""
        self.device = core.device
        """The device that the model computes on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on inputs that are moved to the engine's device and cast as `auto_cast` of the config says.

        Args:
            *args: positional inputs of the model. Tensors are found in lists, tuples, mappings and dataclasses too.
            **kwargs: keyword inputs of the model, treated alike.

        Returns:
            The output of the model.

        Raises:
            UsageError: if `auto_cast` is false and the model cannot compute with the dtype of an input.
            EngineFailed: if an error has stopped the engine.
        """
        self._core.enter()
        # Moving the batch may exhaust the device, so the move runs in `advised`, which explains an out-of-memory error.
        with self.autocast(), self._core.device_budget.advised():
            args, kwargs = self._core.inputs((args, kwargs))
            try:
                return self._core.run_model(args, kwargs)
            except RuntimeError as error:
                # torch reports a dtype mismatch deep inside the model; the replacement names the input and the config
                # key.
                if (clearer := self._core.inputs.explain(error, (args, kwargs))) is None:
                    raise
                raise clearer from error

    forward = __call__

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a forward that `torch_autocast` of the config asks for.

        `engine(...)` enters it by itself. torch's autocast cache is off: its copies of weights would outlive the device
        buffers of their units.
        """
        if not self._core.state.settings.config.torch_autocast.enabled:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    _names_page = ""
    """The end of the error for a missing attribute: where the existing names are listed."""

    # A type checker that saw `__getattr__` would accept any attribute name.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns the model's attribute if the engine does not define the name: `generate`, `named_modules`.

            Args:
                name: the attribute. Names that begin with an underscore are not looked up on the model.

            Raises:
                AttributeError: if the model does not define it either.
            """
            # `self.module` would call this method again while the constructor has not set it yet.
            module = self.__dict__.get("module")
            if module is None or name.startswith("_") or not hasattr(module, name):
                model = (
                    "" if module is None else (f", and neither does its model (engine.module), {type(module).__name__}")
                )
                raise AttributeError(
                    f"an engine has no attribute {name!r}{model}{self._names_page}", name=name, obj=self
                )
            return getattr(module, name)

    # -- memory and traffic --------------------------------------------------------------------------

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters; a tied parameter counts once."""
        return sum(segment.value_numel for layout in self._core.components.layouts for segment in layout.segments)

    @property
    def host_memory(self) -> int:
        """Bytes of the host arena: this engine's host budget."""
        return self._core.components.arena.nbytes

    @property
    def device_memory(self) -> int:
        """Bytes of the device arena: the device budget."""
        return self._core.components.pager.arena.nbytes

    @property
    def asleep(self) -> bool:
        """True after `sleep`, until the engine has its memory again."""
        return self._core.sleeping.asleep

    def resize(self, host_memory: int | str | None = None, device_memory: int | str | None = None) -> Budgets:
        """Makes the budgets smaller or larger between steps. Bits do not change. Every rank calls it.

        A smaller host budget gives memory back to the system at once: the end of the cache, whose weights and promoted
        states are on the drives too. States whose tier is HOST stay. A larger one takes memory again, up to the budget
        of the start, and reads promoted states back. A smaller or larger device budget lets fewer or more units stay
        on the device, whose copies of weights are dropped by this call. On a GPU such a budget never grows by itself
        again; on a CPU it can be at most that of the start.

        Args:
            host_memory: the host budget of this engine: bytes, or text such as "8GiB". None keeps it.
            device_memory: the device budget: bytes, text such as "8GiB", or "50%", the share of the weights that stays
                on the device. None keeps it.

        Returns:
            The budgets from now on, in bytes. They are at most those that were asked for.

        Raises:
            ConfigError: if an argument is no size.
            UsageError: if a forward or a backward is running; for `device_memory` also if gradients wait for a step, or
                if a view of weights or the graph of a forward is held. Nothing has changed then.
            BudgetError: if a budget is below the least that works, which the error names, or larger than the engine can
                have. Nothing has changed then, except if the system or the device refuses memory that was free before.
            IoError: if a promoted state cannot be read back.
        """
        return self._core.resize(host_memory, device_memory)

    def sleep(self, host: bool = False) -> FreedBytes:
        """Gives the engine's device memory back between steps, for others to use, such as an engine that generates.

        The next call that uses the engine takes the memory again, as `wake()` does. Bits do not change. States that the
        swap files contain are read from the files then. All other states are copied from the device to host memory when
        the engine falls asleep. Every rank calls it. A graph that was made before cannot be run backward afterwards.

        Args:
            host: True to give back the host memory too, unpinned, except for states that are nowhere else.

        Returns:
            The bytes given back by this call and by earlier calls since the engine was last awake.

        Raises:
            UsageError: if a forward or a backward is running, if gradients wait for a step, if a view of weights is
                held, or if the graph of a forward holds weights, which it does not where they come for each use.
                Nothing has changed then.
            BudgetError: if host memory has no room for states of the device that are in no file.
        """
        return self._core.sleep(host)

    def wake(self) -> None:
        """Takes the memory that `sleep` gave back. Does nothing if the engine has it.

        Raises:
            BudgetError: if others have not freed it; the engine sleeps on, and the call may be repeated.
            IoError: if the swap files cannot be read; the engine is stopped then.
        """
        self._core.enter()

    def io_bytes(self) -> IoBytes:
        """Returns the bytes that the engine has read and written so far in this process."""
        queue = self._core.components.queue
        return IoBytes(0, 0) if queue is None else IoBytes(queue.read_bytes, queue.written_bytes)

    def communication(self) -> Communication:
        """Returns the collectives and bytes that this rank has sent to other ranks so far, by kind.

        Collectives of your own are not counted, nor the heartbeat.
        """
        return self._core.components.world.sent

    def memory_report(self) -> MemoryReport:
        """Returns bytes of RAM and of the device by owner, in sums that add up. `print` it for a readable form.

        `["host"]`: rss = base + arena + device_arena + other_engines + other. `base` was resident before the engine;
        `other` came later, such as activations and libraries. `["device"]`: allocated = arena + other. Each class in
        `["classes"]` lists its budget in the host arena, the bytes in use now, and the peak. `["activations"]` lists
        inputs of blocks that are computed again, by tier, if "activations" of the config moves any. `["planned"]` lists
        the parts of the peak of RAM, above the base, that the start has compared with the limits of the process.
        """
        return memory_report(self._core.components, self._core.base_bytes)

    def use_counts(self) -> PrefetchStats:
        """Returns how often units were used so far, were found on the device, and were used in an unpredicted order."""
        return self._core.components.pager.counts()


# -- an engine that trains -----------------------------------------------------------------------------


@dataclass
class Evaluation:
    """The result of an evaluation; see `Engine.evaluation`."""

    loss: float | None = None
    """The mean loss; None for an evaluation without one."""


_STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names of the states that `offload_states` may move."""


class Engine(ModelEngine):
    """A model whose weights and optimizer states are paged. Created by `offload.initialize`.

    All methods belong to the thread that runs the model; in a forked child every call raises. An error on a background
    thread of the engine is raised, as the cause of an `EngineFailed`, by the next call. From then on the engine is
    stopped, and the last commit remains valid. Attributes that the engine does not define are looked up on the model:
    `engine.generate`, `engine.parameters`.
    """

    def __init__(self, core: EngineCore, notices: Sequence[str]) -> None:
        super().__init__(core)
        self.optimizer = core.optimizer
        """The optimizer that `initialize` returns with the engine."""
        self.notices = tuple(notices)
        """Lines reported at the start: placements, budgets, keys without an effect, the result of a resume."""

    # -- training ----------------------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        allreduce_gradients: bool | None = None,
        release_loss: bool | None = None,
    ) -> torch.Tensor:
        """Runs the backward of `loss`, and adds its gradients to the current step's.

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
        self._core.components.schedule.begin_backward()
        divided = loss / self._settings.accumulation if scale_wrt_gas else loss
        scaled = self.scale(divided)
        self._core.run_backward(lambda: scaled.backward(retain_graph=retain_graph))
        return divided

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns `loss` times the loss scale in fp16, and `loss` itself otherwise.

        For loops that call `.backward()` themselves.

        Args:
            loss: the loss of a micro-batch, divided by gradient_accumulation_steps if gradients accumulate.
        """
        return self._core.state.scaler.multiply(loss)

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
        self._core.components.schedule.begin_step(
            self._core.accumulation.count, self._settings.accumulation, self._core.param_access
        )
        self._core.accumulation.end(self._settings.accumulation)
        if not self._core.accumulation.ends_step(self._settings.accumulation):
            self._core.optimizer_step.pass_micro_batch()
            if self._core.accumulation.by_count:
                self._core.components.schedule.ran_by_itself()
            return
        # The count shows below whether the optimizer step itself went through: only then are weights ahead of the
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
        block is fetched. Weights are then read and copied as often as for one micro-batch. Each micro-batch draws
        dropout from a random generator of its own, so that the schedule changes no bits. If anything is raised in
        between, the gradients of the step are dropped; with the schedule micro_batch_major, those of complete
        micro-batches stay.

        Args:
            micro_batches: the micro-batches; all are taken first. As many as complete the step, or fewer.
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
        return self._accumulate(
            taken, len(taken), loss or (lambda micro_batch: step.run(self, micro_batch)), scale_wrt_gas
        )

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
            works = (work(number, micro_batch) for number, micro_batch in enumerate(micro_batches))
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
        step.check_batches(data_iter)
        # Otherwise the loop below would take all the data without a step.
        self._core.accumulation.check_no_sync()
        # `step()` decides where the step ends, by the count or the user's setting, so the loop watches its counter.
        steps, losses = self.global_steps, list[torch.Tensor]()
        while self.global_steps == steps:
            wanted = self._core.accumulation.remaining(self._settings.accumulation) or 1
            micro_batches = itertools.islice(data_iter, wanted)
            losses_now = self._accumulate(
                micro_batches, wanted, lambda micro_batch: step.run(self, micro_batch), scale_wrt_gas=True
            )
            losses += losses_now
            if losses_now:
                self.step()
            if len(losses_now) < wanted:
                raise StopIteration
        return torch.stack([loss.float() for loss in losses]).mean()

    def _add_losses(self, losses: Sequence[torch.Tensor], first: bool) -> None:
        """Reports divided losses to the meter of steps; `first` if no micro-batch of the step came before."""
        for number, loss in enumerate(losses):
            self._core.components.meter.add_loss(loss, first=first and not number)

    def pipeline_stages(self) -> list[Any]:
        """Returns this process's stages of a pipeline, to make a schedule of `torch.distributed.pipelining` over.

        The model must be `offload.PipelineStages`. `schedule.step(...)` runs the forwards and backwards of a step, and
        `engine.step()` follows. Each loss is divided by gradient_accumulation_steps, the schedule's `n_microbatches`,
        and multiplied by the loss scale in fp16.

        Returns:
            A `torch.distributed.pipelining.PipelineStage` for each stage of this process, in order. A schedule class
            for one stage per process takes the only item; a class for several stages takes the list.

        Raises:
            UsageError: if the model is not stages of a pipeline, or torch.distributed has no process group.
        """
        self._core.check()

        def begin_backward(loss: torch.Tensor) -> torch.Tensor:
            divided = loss / self._settings.accumulation
            self._add_losses([divided], first=not self.micro_batches)
            return self.scale(divided)

        calls = StageCalls(
            accumulation=lambda: self._settings.accumulation,
            divided=begin_backward,
            run_backward=self._core.run_backward,
            count_micro_batch=self._core.accumulation.count_micro_batch,
        )
        return self._core.components.schedule.pipeline_stages(self.device, calls)

    @property
    def schedule(self) -> Schedule:
        """Order of the micro-batches in `accumulate` and `train_batch`: "layer_major" or "micro_batch_major".

        It changes after the first step if the model turns out to keep values on its modules between blocks.
        """
        return self._core.components.schedule.name

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
        1 with several micro-batches gradients add up on each rank until the last one. In stages 2 and 3 gradients are
        reduced as they are computed, or with the last micro-batch if several take turns. Gradients for which the GPU
        has room accumulate on the GPU in all cases, and are copied to the host with the last micro-batch.
        """
        self._core.check()
        return self._core.accumulation.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last optimizer step, and their micro-batches.

        With several ranks every rank must call it if there is a gradient to drop, because gradients are reduced
        already.

        Args:
            set_to_none: accepted for compatibility with torch; has no effect.
        """
        self._core.refuse_in_turn("zero_grad")
        self._core.forget_gradients()

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Has torch compile each block of the model by itself, as the config's "compile" block does at the start.

        The hooks that fetch weights stay outside of the graphs. A run that resumes must call it at the same step: a
        compiled block differs from its original by rounding.

        Args:
            backend: Of `torch.compile`; None for the config's, which is "inductor" by default.
            compile_kwargs: Further keywords of `torch.compile`, beside those of the config.
            schedule: Must be None. DeepSpeed's passes over graphs move weights, which this engine does outside.
            compiled_autograd_enabled: Must be False.

        Raises:
            UsageError: If an argument has an unsupported value, or micro-batches take turns just now.
            ConfigError: If blocks of this model were not tried, or torch would record CUDA graphs.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise UsageError("engine.compile compiles blocks: leave schedule and compiled_autograd_enabled out")
        self._core.refuse_in_turn("compile")
        config = self._settings.config
        options = {"backend": backend or config.compile.backend, **config.compile.kwargs, **(compile_kwargs or {})}
        compile_blocks(self.module, config, options)

    # -- between steps -----------------------------------------------------------------------------------

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
        """Yields an object for the loss of an evaluation, and writes that loss to where the numbers of steps go.

            with engine.evaluation() as found:
                found.loss = mean_loss(engine, held_out)

        The config names the destinations: "log", and from there the page of `offload report`, TensorBoard, CSV files,
        Weights & Biases. Seconds and bytes of the context count for no step. Every rank calls it, between steps; the
        first one's loss is written.

        Yields:
            An object whose `loss` the caller sets; None writes nothing.

        Raises:
            UsageError: if a forward or a backward is running.
        """
        # An update that still runs belongs to the last step, not to the evaluation.
        self.synchronize()
        result, meter = Evaluation(), self._core.components.meter
        began = time.perf_counter()
        with meter.pause():
            yield result
        if result.loss is not None:
            meter.evaluated(self.global_steps, self.global_samples, result.loss, time.perf_counter() - began)

    def mean(self, value: float) -> float:
        """Returns the mean of a number over all ranks, such as a loss to log.

        A collective: every rank calls it at the same place.

        Args:
            value: the number of this rank.

        Raises:
            RankError: if another rank is gone or does something else.
        """
        self._core.enter()
        return self._core.components.agreement.mean(value)

    def empty_partition_cache(self) -> int:
        """Gives device memory back before an evaluation or a generation that needs much of it, between steps.

        Drops the copies of weights that are on the device only because memory was free, and all that torch caches.
        Nothing is lost: weights are copied again when they are used. After some steps the engine takes free memory
        again.

        Returns:
            The bytes that the device budget lost; 0 if it has the config's size or the smallest possible one.

        Raises:
            UsageError: if a forward or a backward is running.
        """
        self._core.enter_between_steps("empty_partition_cache")
        return self._core.device_budget.release()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Includes the states of `objects` in each commit, as `accelerate` does.

        Example: a schedule that the user steps. In a resumed run, register the same number of objects in the same order
        before the first step. Each receives its state at once. Then the values of the optimizer's groups, such as
        learning rates, become those of the commit again, because the constructor of a schedule may have overwritten
        them.

        Args:
            *objects: objects with `load_state_dict(state)` and `state_dict()`, which returns plain values and tensors
                of the CPU of at most 64 KiB. An iterable object is a loader: its state is taken at the end of the step.

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
        sums = self._core.components.gradients.dtypes.sums
        dtype = None if self._settings.config.data_types.grad_accum_dtype else sums
        ranks = self._core.components.world.data_ranks
        self._core.state.settings = resized(self._settings, train_batch_size, ranks, dtype)

    # -- progress ----------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, including skipped ones; after a resume, the committed ones."""
        return self._core.state.global_steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that updated nothing because the gradient norm was inf or NaN."""
        return self._core.state.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far, counted by `step()`.

        A micro-batch whose `step()` the loop omitted is counted by the next call. After a resume, the count starts from
        the committed optimizer step.
        """
        return self._core.state.micro_steps

    @property
    def micro_batches(self) -> int:
        """Backwards since the last optimizer step."""
        return self._core.accumulation.count

    @property
    def global_samples(self) -> int:
        """Samples of all optimizer steps so far, on all ranks."""
        return self._core.state.global_samples

    @property
    def loss_scale(self) -> float:
        """Factor that multiplies the loss of the next backward; 1 except in fp16."""
        return self._core.state.loss_scale

    @property
    def client_state(self) -> dict[str, Any]:
        """Values of the user that each commit includes: numbers, strings, lists and dicts.

        The commit of step k includes them as they are at the first call of the engine after step k.
        """
        return self._core.state.client_state

    @client_state.setter
    def client_state(self, value: dict[str, Any]) -> None:
        self._core.state.client_state = value

    @property
    def lr_scheduler(self) -> Any:
        """The schedule that `initialize` received, or None."""
        return self._core.state.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, value: Any) -> None:
        self._core.state.lr_scheduler = value

    @property
    def measured(self) -> Mapping[str, float]:
        """Numbers of the last step, by the names of reference/metrics.md; empty before it, or if none were requested.

        `wall_clock_breakdown` requests all of them, on the first rank.
        """
        return self._core.components.meter.measured

    def drive_writes(self) -> tuple[DriveWrites, ...]:
        """Returns the bytes that this rank has written to each drive, in this process and in the life of the run."""
        return self._core.components.written.drives()

    # -- weights, checkpoints, and files that others load ------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the weights and persistent buffers by the model's names, as ordinary tensors on the CPU.

        Weights are copies in the compute dtype, read one parameter after the other; tied weights stay tied. One rank
        may call this alone.

        Raises:
            BudgetError: if the copies would not fit into the RAM.
        """
        return self.module_state_dict()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Returns the result of `state_dict`, optionally without frozen parameters.

        Args:
            exclude_frozen_parameters: True to leave out parameters that do not require a gradient.

        Raises:
            BudgetError: if the copies would not fit into the RAM.
        """
        self._core.check()
        return self._core.param_access.state_dict(self.module, exclude_frozen_parameters)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and a copy of each weight and persistent buffer, one after the other.

        A copy is in the compute dtype, on the engine's device. No more than the copy and its unit is in memory, so this
        hands a model of any size to an engine that generates. A tied weight comes once, under its first name. One rank
        may call this alone, between steps.

        Raises:
            EngineFailed: if an error has stopped the engine.
        """
        self._core.check()
        for name, parameter in self.module.named_parameters():
            # A placeholder's `detach` is a placeholder, and its `clone` reads the weights.
            yield name, parameter.detach().clone()
        for name, buffer in persistent_buffers(self.module).items():
            yield name, buffer.clone()

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        keep_last: int | None = None,
    ) -> bool:
        """Writes weights, optimizer states and training state to `save_dir`/`tag` atomically.

        Every rank calls it, between steps. Gradients of micro-batches since the last step are not saved.

        Args:
            save_dir: folder of the checkpoints, created if it does not exist; not the folder of a run.
            tag: name of the checkpoint; "global_step<N>" by default. A checkpoint of that name is replaced.
            client_state: values that `load_checkpoint` returns: numbers, strings, tensors on the CPU of at most 64 KiB,
                such as the state of a generator, and lists and dicts of them.
            save_latest: True to make this checkpoint the one that a load without a tag takes.
            exclude_frozen_parameters: True to leave out the weights of frozen parameters.
            keep_last: number of checkpoints to keep in `save_dir`; the oldest others are deleted. None keeps all.

        Returns:
            True.

        Raises:
            StoreError: before anything is written, if the disk has no room, if a folder that is no checkpoint has the
                name, or if another save into `save_dir` is under way; on the other ranks also if one rank fails.
            IoError: if a write fails.
            UsageError: if an argument is invalid, or if a forward or a backward is running.
        """
        self._core.enter_between_steps("save_checkpoint")
        name = f"global_step{self.global_steps}" if tag is None else tag
        self._core.checkpoints.save(
            # Checked inside of the collective: an argument that is invalid on one rank fails the call on all ranks.
            lambda: SaveRequest.checked(save_dir, name, save_latest, not exclude_frozen_parameters, keep_last),
            self.micro_batches,
            client_state,
        )
        self._core.state.mark_saved()
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Resumes from a checkpoint that was saved with any placement and number of ranks.

        Every rank calls it, between steps. Everything is read and checked before the engine changes. Gradients are
        dropped, and the loaded state is committed at once. `engine.client_state`, the values of the optimizer's groups
        and the position of `training_data` are restored, and registered objects receive their states. Objects that are
        registered later receive theirs then, as in a resumed run; objects that the checkpoint does not hold stay as
        they are.

        Args:
            load_dir: the folder that `save_checkpoint` received as `save_dir`.
            tag: name of the checkpoint; the latest by default.
            load_module_strict: True to refuse a checkpoint whose parameters differ from the model's.
            load_optimizer_states: False to load weights without optimizer states. The groups of the optimizer keep
                their values too, unless a schedule is loaded.
            load_lr_scheduler_states: False to leave the schedule that `initialize` received and the groups' values as
                they are. Registered objects are loaded in any case.
            load_module_only: True to load weights and buffers only.
            custom_load_fn: DeepSpeed's keyword; must be None.

        Returns:
            The folder of the checkpoint and the `client_state` that was saved; (None, {}) if no tag is given and
            `load_dir` names no latest checkpoint.

        Raises:
            StoreError: if the named checkpoint does not exist, is damaged, or belongs to another model or to other
                registered objects.
            UsageError: if an argument is invalid, or if a forward or a backward is running.
        """
        refuse(custom_load_fn=custom_load_fn)
        self._core.enter_between_steps("load_checkpoint")
        # A frozen engine keeps neither states nor a schedule: it loads the weights only, whatever was asked for.
        trains = self._core.components.update_worker.trains and not load_module_only
        options = LoadOptions(
            load_module_strict, trains and load_optimizer_states, load_lr_scheduler_states, not trains
        )
        loaded = self._core.checkpoints.load(load_dir, tag, options)
        if loaded is None:
            return None, {}
        # Micro-batches that ran before the load belong to gradients that are gone.
        self._core.optimizer_step.early.drop()
        self._core.accumulation.reset()
        if not options.module_only:
            self._core.optimizer_step.grad_norm = None  # of another moment
        self.notices += loaded.notices
        if self.global_rank == 0:
            outcome = f"training goes on after step {self.global_steps}{self._core.state.where_data_goes_on()}"
            outcome = "weights alone, as asked" if options.module_only else outcome
            announce(Headline(f"loaded {loaded.folder}: {outcome}"))
        return loaded.folder, loaded.client_state

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "50GB",
        dtype: str | torch.dtype | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Writes the model as `from_pretrained` of transformers loads it: safetensors, their index and the configs.

        Weights are streamed from their tier: the RAM holds no more than a few chunks. A model of peft writes its
        adapters, as peft does. In an existing folder, files of the same names are replaced atomically and other files
        stay. Every rank calls it, between steps; rank 0 writes.

        Args:
            save_directory: the folder to write.
            max_shard_size: upper bound of one safetensors file, in bytes or as text such as "50GB".
            dtype: "bf16", "fp16", "fp32" or a torch dtype; by default the dtype of the weights. fp32 gives the exact
                masters.
            tokenizer: a tokenizer of transformers to save with the model, or None.

        Raises:
            StoreError: if the disk has no room, before anything is written.
            IoError: if a write fails.
            UsageError: if an argument is invalid, or if a forward or a backward is running.
            ConfigError: if an argument has a value that is not supported.
        """
        self._core.enter_between_steps("save_pretrained")
        self._core.pretrained_writer.save(
            SaveOptions(save_directory, max_shard_size, dtype, tokenizer), self.global_steps
        )
        self._core.state.mark_saved()

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights in the compute dtype into one safetensors file, and no other file. Every rank calls it.

        Tied weights are stored under each of their names if the model has no transformers config, so that a strict
        `load_state_dict` takes the file. Weights that transformers ties itself are stored under their first name, as in
        its own files.

        Args:
            save_dir: the folder of the file.
            save_filename: name of the file; must end with ".safetensors". DeepSpeed's default, the name of a pickle, is
                an error.
            exclude_frozen_parameters: True to leave out the weights of frozen parameters.

        Returns:
            True; False, after a warning, if nothing was written because stage 3 is configured with
            `"stage3_gather_16bit_weights_on_model_save": false`.

        Raises:
            StoreError: if the disk has no room, before anything is written.
            IoError: if a write fails.
            UsageError: if an argument is invalid, or if a forward or a backward is running.
        """
        self._core.enter_between_steps("save_16bit_model")
        if not self.zero_gather_16bit_weights_on_model_save() and self.zero_optimization_stage() == 3:
            logger.warning(
                "save_16bit_model wrote nothing, because the config sets stage3_gather_16bit_weights_on_model_save to "
                "false; take that key out of the config, or call save_pretrained"
            )
            return False
        frozen = not exclude_frozen_parameters
        self._core.pretrained_writer.save(
            SaveOptions(save_dir, frozen=frozen, file_name=save_filename), self.global_steps
        )
        self._core.state.mark_saved()
        return True

    # -- the end -----------------------------------------------------------------------------------------

    def destroy(self, remove: bool | None = None) -> None:
        """Finishes and commits complete steps, joins every thread and closes the store.

        With several ranks the call waits until all ranks make it, and serves them until then. Idempotent; may be
        called again after an interruption. The model's parameters stay placeholders. If an error has stopped the
        engine, nothing is finished and the run is kept, with a warning if `remove` is True. An error of finishing is
        raised after everything is closed. Only an error about values of `client_state` or registered objects that
        cannot be committed is raised before, so that the caller can correct the values.

        Args:
            remove: True deletes the run from the disk. False keeps the run, and a later start under the same name that
                does not resume it is refused. None keeps the run too, but such a start replaces it, with a notice, if
                the job is the same or the last step was saved.
                `"resume": "auto"` resumes a run that was kept.

        Raises:
            UsageError: before anything is closed, if `client_state` or a registered object cannot be committed.
        """
        self._core.shutdown.end(remove)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Ends the engine as `destroy(remove=True)` does, but leaves a note that the run has ended. All ranks call it.

        A later start of the same name with `"resume"` set to `"auto"` or `"must"` is then refused.

        Args:
            facts: contents of `finished.json` in addition to its steps and date; plain JSON values.
        """
        self._core.shutdown.end(True, facts)

    @property
    def resumable(self) -> str | None:
        """The run folder that a later process can resume from, or None."""
        return self._core.shutdown.resumable

    # -- names of DeepSpeed ------------------------------------------------------------------------------

    # These methods read the core and run nothing. `deepspeed.runtime.engine` adds the methods that only DeepSpeed
    # defines.

    def was_step_applied(self) -> bool:
        """Returns True if the last `step()` updated the weights.

        False before the first step, after a `step()` that only ended a micro-batch, and if the norm was inf or NaN.
        """
        return self._core.optimizer_step.applied

    def get_global_grad_norm(self) -> float | None:
        """Returns the gradient norm of the last step before the clip; None before the first step and after a load."""
        return self._core.optimizer_step.grad_norm

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns True if the `step()` of the current micro-batch updates the weights.

        The answer is known before the forward of the micro-batch and holds until its `step()` has ended. Always True
        without accumulation, always False in `no_sync`.
        """
        return self._core.accumulation.is_boundary(self._settings.accumulation)

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each group for the next step."""
        # torch allows a tensor as learning rate.
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Sets the learning rate of all groups. A schedule overwrites the values when it steps.

        Args:
            lr: one number for all groups, or a list of one number for each group; tensors of no dimension count.

        Raises:
            UsageError: if a number is negative or not finite, or if a list has another length than the groups.
        """
        groups = self.optimizer.param_groups
        rates = list(map(unpacked, lr)) if isinstance(lr, list | tuple) else [unpacked(lr)] * len(groups)
        if len(rates) != len(groups):
            raise UsageError(
                f"set_lr expects one number, or {len(groups)} numbers, one for each group, got {len(rates)}"
            )
        # All values are checked before the first is set, so that a refused call changes nothing.
        for rate in rates:
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= sys.float_info.max:
                raise UsageError(f"set_lr expects a finite number of at least 0, got {rate!r}")
        for group, rate in zip(groups, rates, strict=True):
            set_values(group, {"lr": float(rate)})

    def get_mom(self) -> list[Any]:
        """Returns the betas of each group, or its momentum if the optimizer has no betas (SGD; 0.0 for Adagrad)."""
        return [
            group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in self.optimizer.param_groups
        ]

    def get_type(self) -> list[str]:
        """Returns the name of each group's optimizer as the config spells it."""
        return [self.optimizer.rule.title(group) for group in self.optimizer.param_groups]

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clips the gradient of the next step to `max_norm` instead of to the config's `gradient_clipping`.

        The norm is computed by the step: call `get_global_grad_norm()` after it.

        Args:
            max_norm: largest 2-norm over all parameters; 0 or inf for no clip.

        Raises:
            UsageError: if `max_norm` is no number of at least 0.
        """
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm >= 0:
            raise UsageError(f"clip_grad_norm_ expects a number of at least 0, got {max_norm!r}")
        # 0 is the core's value for "no clip"; a norm of inf clips nothing either.
        self._core.optimizer_step.clip_once = float(max_norm) if max_norm <= sys.float_info.max else 0.0

    @property
    def _settings(self) -> StepSettings:
        # Read through the state each time: `set_train_batch_size` replaces the object.
        return self._core.state.settings

    @property
    def config(self) -> dict[str, Any]:
        """A copy of the config with its defaults and all three batch sizes, as JSON values.

        Changes of the copy have no effect. The config of the model, if the model has one, is `engine.module.config`.
        """
        settings = self._settings
        # The settings, not the config, hold the sizes: `set_train_batch_size` may have changed them since.
        return settings.config.model_dump(mode="json") | {
            "train_batch_size": settings.total_batch_size,
            "train_micro_batch_size_per_gpu": settings.micro_batch_size,
            "gradient_accumulation_steps": settings.accumulation,
        }

    def zero_optimization_stage(self) -> int:
        """Returns the stage of ZeRO that the config names."""
        return self._settings.config.zero_optimization.stage

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Returns False if the config sets the key to false, so that `save_16bit_model` writes nothing in stage 3."""
        return self._settings.config.zero_optimization.stage3_gather_16bit_weights_on_model_save is not False

    def fp16_enabled(self) -> bool:
        """Returns True if weights are fp16."""
        return self._settings.config.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Returns True if weights are bf16."""
        return self._settings.config.dtype == "bf16"

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro-batches of a step."""
        return self._settings.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the number of samples of a micro-batch on this rank."""
        return self._settings.micro_batch_size

    def train_batch_size(self) -> int:
        """Returns the number of samples of a step on all ranks."""
        return self._settings.total_batch_size

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> Loader:
        """Returns a loader as for `training_data`: this rank's rows of each batch, shuffled by the config's seed.

        No commit includes the position of this loader: a commit includes only the position in `training_data`.

        Args:
            dataset: a dataset with a length.
            batch_size: samples of a batch on this rank; the micro-batch size by default.
            collate_fn: makes a batch of a list of samples; torch's default if None.

        Raises:
            UsageError: if an argument is invalid.
            ConfigError: if the dataset has no length, or less than one batch.
        """
        if dataset is None:
            raise UsageError("deepspeed_io expects a data set, got None")
        check_data(dataset, collate_fn)
        settings = self._settings
        size = settings.micro_batch_size if batch_size is None else batch_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"deepspeed_io expects a batch_size of at least 1, got {size!r}")
        drop_last = settings.config.dataloader_drop_last
        rank, count = self._core.components.world.data_rank, self._core.components.world.data_ranks
        return load(dataset, size, rank, count, settings.seed, collate_fn, self.device, drop_last)

    @property
    def global_rank(self) -> int:
        """The rank of this process among those that train together."""
        return self._core.components.world.everyone.rank

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
        return self._core.components.world.everyone.size

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine, from the launcher's LOCAL_RANK."""
        # LOCAL_RANK may be set in the environment of a process that trains alone.
        return rank_number(os.environ, "LOCAL_RANK", 0) if self.world_size > 1 else 0

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Gives the engine's device memory back, as `sleep()` does: DeepSpeed's name for it.

        Args:
            include: DeepSpeed's names of states, or None for all. The arena is one allocation and goes as a whole,
                whichever are named.
            device: "cpu". States on disk stay there.
            pin_memory: True or False; the memory of states is not pinned meanwhile.
            non_blocking: True or False; the call waits for the copies.

        Raises:
            UsageError: if an argument has another value; otherwise as in `sleep`.
            BudgetError: as in `sleep`.
        """
        names = [str(getattr(item, "value", item)) for item in (() if include is None else include)]
        if unknown := [name for name in names if name not in _STATES]:
            raise UsageError(f"offload_states expects include of {', '.join(_STATES)}, got {unknown[0]!r}")
        where = str(getattr(device, "value", device))
        if where != "cpu":
            raise UsageError(f'offload_states expects device="cpu", got {where!r}: the config places states on nvme')
        for name, value in (("pin_memory", pin_memory), ("non_blocking", non_blocking)):
            if not isinstance(value, bool):
                raise UsageError(f"offload_states expects True or False as {name}, got {value!r}")
        self.sleep()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Takes the device memory again, as `wake()` does: DeepSpeed's name for it.

        Args:
            non_blocking: True or False; the call waits for the copies.

        Raises:
            BudgetError: as in `wake`.
        """
        self.wake()
