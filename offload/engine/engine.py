"""The engine: what a training loop calls.

    engine(batch) ─► backward(loss) ─► step()      (per micro-batch; a boundary every `accumulation` of them)

`step()` at a boundary finishes what the step before left in flight, decides, and schedules the updates; they
run on the update worker while the next forward, unit by unit, waits for what it needs. One step is in flight
at most. The first call of the engine after a boundary takes the state blob that the commit of that step waits
for, so that random generators, schedule and counters are those of one moment.

Threads. All methods belong to the thread that runs the model. In a forked child every call raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.engine import batch
from offload.engine.boundary import Boundary
from offload.engine.checkpoint import Checkpoints
from offload.engine.checkpoint_load import Wish
from offload.engine.checkpoint_save import Order
from offload.engine.decision import UnitUpdate, cut
from offload.engine.device_room import advised, grow
from offload.engine.ending import Ending
from offload.engine.facts import Facts
from offload.engine.keywords import refuse
from offload.engine.loader import Loader, other_dtype, to_device
from offload.engine.looking import Looking
from offload.engine.memory_report import base_bytes
from offload.engine.micro_batches import MicroBatches
from offload.engine.model_save import Saving, Wanted
from offload.engine.optimizer import Optimizer
from offload.engine.optimizer_states import OptimizerStates
from offload.engine.parts import Choices, Parts, resized
from offload.engine.progress import Progress
from offload.engine.step_values import Edit
from offload.engine.training_state import TrainingState
from offload.errors import UsageError
from offload.notices import tell
from offload.sizes import count_of, format_size
from offload.swapper.modes import dtype_name
from offload.swapper.timeline import Row
from offload.torch_internals import inside_backward

logger = logging.getLogger("offload")


class _ZeroGrad:
    """`model.zero_grad()`: gradients are in the engine. A deep copy of the model has its class' method again."""

    def __init__(self, module: nn.Module, forget: Callable[[], None]) -> None:
        self._module, self._forget = module, forget

    def __call__(self, set_to_none: bool = True) -> None:
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(type(self._module).zero_grad, memo[id(self._module)])


class Engine(Facts):
    """A model whose weights and optimizer states are paged; made by `offload.initialize`.

    All methods belong to the thread that runs the model; in a forked child every call raises. An error on a thread of
    the engine is raised, with its cause, by the next call: from then on the engine is stopped (`EngineFailed`), and the
    last commit is whole. What an engine has not is the model's: `engine.generate`, `engine.parameters`.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        parts: Parts,
        optimizer: Optimizer,
        lr_scheduler: Any,
        loader: Loader | None,
        choices: Choices,
        commits: bool,
        notices: Sequence[str],
    ) -> None:
        self.module = module
        """The model that was given to `initialize`."""
        self.device = device
        """Where the model computes."""
        self.optimizer = optimizer
        """What `initialize` returned beside the engine; see `Optimizer`."""
        self.notices = tuple(notices)
        """What was said at the start, line by line: homes, budgets, keys without an effect, what a resume found."""
        self._parts = parts
        self._state = TrainingState(module, device, optimizer, lr_scheduler, loader, choices, parts.layouts, commits)
        self.notices += tuple(self._state.notices())
        self._checkpoints = Checkpoints(module, parts, self._state)
        self._micro = MicroBatches(lambda: parts.hooks.backward_count)
        self._boundary = Boundary(parts, self._state, self._micro, module, optimizer)
        self._is_first_step = True
        """Of this process: before it nobody knows what activations take."""
        optimizer.attach(self._end_step, self.zero_grad, self._state.regrouped)
        module.__dict__["zero_grad"] = _ZeroGrad(module, self.zero_grad)
        # A user may run the model without the engine; the first moment of that is an entry too.
        parts.hooks.entered, parts.weights.entered = self._enter, self._look
        measure, parts.hooks.began_backward = parts.hooks.began_backward, self._begin_backward
        self._measure_backward = measure
        if parts.updater is not None:
            parts.weights.apply, parts.weights.settle = self._edit, parts.bindings.settle
            parts.gradients.settle = self._await_updates
            parts.gradients.is_last = lambda: self._micro.is_last(self._choices.accumulation)
        parts.weights.several_ranks = parts.rounds is not None
        parts.arena.give_cache = self._give_cache
        self._looking = Looking(parts)
        optimizer.states = OptimizerStates(self._looking, parts.layouts, parts.held.mode, self._state)
        self._saving = Saving(module, parts)
        self._base_bytes = base_bytes(parts)
        self._told_of_cast = self._told_of_gradients = False
        parts.weights.missed_gradient = self._say_where_gradients_are
        self._ending = Ending(module, parts, self._state, self._enter)

    # -- training -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on `args`, whose tensors are moved to the engine's device first, and cast by `auto_cast`.

        Raises `UsageError` where `auto_cast` is false and the model cannot compute with the dtype of an input.
        """
        self._enter()
        dtype, casts = self._parts.held.mode.weight_dtype, self._choices.config.casts_inputs
        if casts is None and not self._told_of_cast and (other := other_dtype((args, kwargs), dtype)) is not None:
            self._told_of_cast = True
            tell(
                f"inputs of {dtype_name(other)} are cast to {dtype_name(dtype)}, the dtype of the weights; "
                f'"auto_cast": true in the block "{dtype_name(dtype)}" says so without this line, false leaves them'
            )
        args, kwargs = to_device((args, kwargs), self.device, None if casts is False else dtype)
        with self.autocast(), self._advised():
            try:
                return self.module(*args, **kwargs)
            except RuntimeError as error:
                other = other_dtype((args, kwargs), dtype) if self._choices.config.dtype != "fp32" else None
                if other is None or "dtype" not in str(error):
                    raise
                raise UsageError(
                    f"the model cannot compute with inputs of {dtype_name(other)} ({error}): its weights are "
                    f'{dtype_name(dtype)}; set "auto_cast": true in the block "{dtype_name(dtype)}", or leave it out, '
                    f"or cast them"
                ) from error

    forward = __call__

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """A context for a forward, as `torch_autocast` asks for; `engine(...)` has it by itself.

        Without torch's cache: its copies of weights would outlive their slices.
        """
        if not self._choices.config.torch_autocast.enabled:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    if not TYPE_CHECKING:  # else any name would be right for a checker of types

        def __getattr__(self, name: str) -> Any:
            """What an engine has not is the model's: `generate`, `parameters`, `named_modules`."""
            module = self.__dict__.get("module")
            if module is None or name.startswith("_") or not hasattr(module, name):
                model = "" if module is None else f", nor has its model (engine.module), {type(module).__name__}"
                raise AttributeError(f"an engine has no attribute {name!r}{model}", name=name, obj=self)
            return getattr(module, name)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raise `UsageError`: blocks are compiled before `initialize`, and the hooks that bring weights stay outside.

        DeepSpeed's call, which would otherwise reach that of the model, which hooks go through.
        """
        raise UsageError(
            "an engine is not compiled as a whole, since weights come and go between its blocks: call block.compile() "
            "for each block of the model before offload.initialize, as `for block in model.layers: block.compile()`, "
            "with the backend and other keywords there"
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
        """Add the gradients of `loss`, a scalar, divided by the accumulation unless `scale_wrt_gas` is false.

        In fp16 of the loss times the loss scale; what is returned is without it. The last two are DeepSpeed's: their
        defaults there, True and False, are taken; another value is a `UsageError`.
        """
        refuse(allreduce_gradients=allreduce_gradients, release_loss=release_loss)
        self._enter()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"backward expects the loss, a tensor of one element, got {what}")
        if not loss.requires_grad:
            raise UsageError("backward got a loss that does not depend on any trainable parameter (no_grad? detach?)")
        divided = loss / self._choices.accumulation if scale_wrt_gas else loss
        with self._advised():
            self.scale(divided).backward(retain_graph=retain_graph)
        if self._parts.meter is not None:
            self._parts.meter.add_loss(divided, first=self.micro_batches <= 1)
        return divided

    def _advised(self) -> contextlib.AbstractContextManager[None]:
        return advised(self._parts.pager.arena, self._choices.device_need)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, for a `backward()` of one's own; it is as it was outside of fp16."""
        return loss if self._state.scaler is None else self._state.scaler.multiply(loss)

    def step(self, lr_kwargs: None = None) -> None:
        """End a micro-batch; at a boundary, clip, schedule the updates and advance the learning rates.

        Raises `UsageError` where several backwards ran since the last call and micro-batches accumulate, since it
        cannot know what they are, and `NumericsError` where the norm is not finite: then the gradients are dropped and
        nothing was updated. `lr_kwargs` is DeepSpeed's: another value than None is a `UsageError`.
        """
        refuse(lr_kwargs=lr_kwargs)
        self._enter()
        self._micro.end(self._choices.accumulation)
        if not self._micro.ends_step(self._choices.accumulation):
            self._state.micro_steps += self._micro.passed(self._choices.accumulation)
            self._boundary.applied = False
            return
        self._step_and_schedule()

    def _step_and_schedule(self) -> None:
        before = self.global_steps
        try:
            self.optimizer.step()
            if self.lr_scheduler is not None and not self.optimizer.overflow:
                self.lr_scheduler.step()
                self._state.ended()
        except BaseException as error:
            # A step whose schedule did not move, or moved by half, must not be committed; the last commit is whole.
            if self.lr_scheduler is not None and self.global_steps != before:
                self._parts.pager.fail(error)
            raise

    def train_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """Run micro-batches of `data_iter` up to the next boundary and step there; their mean loss, on this rank.

        A batch that is a mapping has the model's keywords, a tuple or list its arguments; anything else is the only
        one. The model returns its loss, or something whose `loss`, `["loss"]` or first item that is; else `UsageError`.
        Where the data end before the boundary `StopIteration` comes out, as `next` raises it; the gradients stay, and
        the next call goes on with them.
        """
        batch.check_batches(data_iter)
        steps, losses = self.global_steps, list[torch.Tensor]()
        while self.global_steps == steps:
            loss = batch.run(self, next(data_iter))
            self.backward(loss)
            losses.append(loss.detach().float())
            self.step()
        return torch.stack(losses).mean()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Train on so many samples of all ranks a step from the next on: it changes how many micro-batches it has.

        Between steps alone. Raises `UsageError` where that cannot be.
        """
        self._between("set_train_batch_size")
        if self.micro_batches:
            ran = count_of(self.micro_batches, "micro-batch", "micro-batches")
            raise UsageError(f"set_train_batch_size is for between steps, {ran} of this one ran: call it after step()")
        kept = None if self._choices.config.data_types.grad_accum_dtype else self._parts.gradients.dtype
        self._state.choices = resized(self._choices, train_batch_size, self.world_size, kept)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next `step()` updates the weights, whatever the count, until this is called again.

        With None the count says it again. A loop that says it may leave out the `step()` of other micro-batches, as
        `accelerate` does. `backward` divides by gradient_accumulation_steps all the same.
        """
        self._check()
        self._micro.tell(is_boundary)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context for micro-batches that do not end a step: each backward in it is one, `step()` never updates.

        It changes no result. Ranks add each gradient up as it comes, in it as outside of it; what a GPU has room for is
        added up there, in it as outside of it, and leaves for the host with the last micro-batch.
        """
        self._check()
        return self._micro.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last boundary, and their micro-batches.

        With several ranks all of them do, where there is anything to forget: it was added up already.
        """
        self._enter()
        self._parts.hooks.forget_gradients()
        self._parts.gradients.forget()
        self._micro.reset()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Hold the states of `objects` in each commit, as `accelerate` does: such as a schedule that the user steps.

        They have `state_dict()`, of plain values, and `load_state_dict(state)`, which is called at once on a resumed
        run. There, as many objects as the run had must come in the same order before the first step; then the groups'
        values (learning rates and such) become those of the commit again. Raises `UsageError`.
        """
        self._check()
        self._state.registered.add(objects)
        self._state.put_values()

    def restore_generators(self) -> None:
        """Put the random generators back as they were at the end of the last step, in a loop with its own DataLoader.

        Call it in a resumed run, or after a load, when the batches that were trained on are skipped, right before the
        next one is fetched: what is drawn between there and the first call of the engine comes out as in the run. In a
        new run, and from the first step on, it does nothing.
        """
        self._check()
        self._state.restore_generators()

    def mean(self, value: float) -> float:
        """The mean of a number over all ranks, such as a loss to log; every rank must ask for it at the same place."""
        self._enter()
        return value if self._parts.rounds is None else self._parts.rounds.mean(value)

    def train(self, mode: bool = True) -> Engine:
        """Set the model's training mode, as `nn.Module.train` does."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the model to evaluation, as `nn.Module.eval` does."""
        return self.train(False)

    def synchronize(self) -> None:
        """Wait until the updates of the last step are done, and what is to be durable of it is committed.

        Nothing needs it but measurements: whoever reads a weight gets the new one.
        """
        with self._parts.timeline.span(Row.COMPUTE, "synchronize"):  # a part of the step, as the meter counts
            self._between("synchronize")

    # -- weights ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The model's weights and persistent buffers by the model's names: ordinary tensors on the CPU.

        Weights are copies, in the dtype that the model computes in, read one parameter after the other; tied ones stay
        tied. A rank may ask for it alone. Raises `BudgetError` where they would not fit into the RAM.
        """
        return self.module_state_dict()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The same as `state_dict`, also without frozen parameters."""
        self._check()
        return self._looking.state_dict(self.module, exclude_frozen_parameters)

    # -- checkpoints --------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        keep_last: int | None = None,
    ) -> bool:
        """Write weights, optimizer states and all else of this moment to `save_dir`/`tag`, whole or not at all.

        `tag` is "global_step<N>" by default; a checkpoint of that name is replaced. `client_state` is given back by
        `load_checkpoint`: numbers, strings, lists and dicts. With `save_latest` it is what a load without a tag takes;
        `keep_last` then removes the oldest others, so that so many are left. Every rank calls it. True.

        Raises `StoreError` where there is no room, something that is no checkpoint has its name, or another save into
        `save_dir` is under way, before anything is written, and `IoError` where the disk refuses.
        """
        self._between("save_checkpoint")
        name = f"global_step{self.global_steps}" if tag is None else tag
        self._checkpoints.save(
            lambda: Order.checked(save_dir, name, save_latest, not exclude_frozen_parameters, keep_last),
            self.micro_batches,
            client_state,
        )
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
        """Go on from a checkpoint, saved with any placement and number of ranks: its folder, and its `client_state`.

        Without a `tag` it is the latest; where there is none, (None, {}). Everything is checked before anything of the
        engine changes. Gradients are dropped; what the store commits is the loaded state, at once. With
        `load_module_only` weights and buffers alone are loaded. Every rank calls it.

        `engine.client_state`, the groups' values and the position of `training_data` come back too, and registered
        objects get their states. Objects that are registered later get them then, as on a resumed run; those that the
        checkpoint has not stay as they are. Without `load_lr_scheduler_states` the schedule that was given to
        `initialize` goes on as it is, and with it the groups' values; registered objects are the user's, and loaded.

        Raises `StoreError` where it is named and not there, damaged, of another model or of other registered objects.
        """
        refuse(custom_load_fn=custom_load_fn)
        self._between("load_checkpoint")
        trains = self._parts.updater is not None and not load_module_only
        wish = Wish(load_module_strict, trains and load_optimizer_states, load_lr_scheduler_states, not trains)
        loaded = self._checkpoints.load(load_dir, tag, wish)
        if loaded is None:
            return None, {}
        self._micro.reset()
        if not wish.module_only:
            self._boundary.grad_norm = None
        self.notices += loaded.notices
        return loaded.folder, loaded.client_state

    # -- files that others load ---------------------------------------------------------------------

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "50GB",
        dtype: str | torch.dtype | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Write the model as `from_pretrained` of transformers loads it: safetensors, their index, the configs.

        It is streamed, wherever things lie: no more than a few chunks are in RAM. `dtype` ("bf16", "fp16", "fp32") is
        that of the weights by default; fp32 gives the exact masters. A model of peft gives its adapters, as peft writes
        them. In a folder that is there, files of these names are replaced, whole or not at all, and others stay. Every
        rank calls it, rank 0 writes. Raises `StoreError` where there is no room, before anything is written, and
        `IoError` where the disk refuses.
        """
        self._between("save_pretrained")
        self._saving.save(Wanted(save_directory, max_shard_size, dtype, tokenizer), self.global_steps)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights that the model computes with into one safetensors file, and nothing else; True.

        Tied weights of a model without a transformers config are there under each of their names, so that a strict
        `load_state_dict` takes the file; those that transformers ties itself under the first, as in its own files.
        DeepSpeed's default name is that of a pickle, which is an error here. Where the config says
        `"stage3_gather_16bit_weights_on_model_save": false`, stage 3 writes nothing, says so and gives False.
        """
        self._between("save_16bit_model")
        if not self.zero_gather_16bit_weights_on_model_save() and self.zero_optimization_stage() == 3:
            logger.warning(
                "save_16bit_model has written nothing, as stage3_gather_16bit_weights_on_model_save: false asks for; "
                "take it out of the config, or call save_pretrained"
            )
            return False
        frozen = not exclude_frozen_parameters
        self._saving.save(Wanted(save_dir, frozen=frozen, file_name=save_filename), self.global_steps)
        return True

    def _between(self, call: str) -> None:
        """Finish what is under way; raises where the weights of a moment cannot be told."""
        if inside_backward() or self._parts.hooks.running:
            raise UsageError(f"{call} is for between steps, not for inside of a forward or a backward")
        self._enter()
        if self._parts.updater is not None:
            self._parts.updater.finish()

    # -- what the parts call ------------------------------------------------------------------------

    def _end_step(self) -> None:
        """A call of `optimizer.step()`, by `step()` or by the user, comes in here."""
        with self._parts.timeline.span(Row.COMPUTE, f"step {self.global_steps + 1}"):
            self._enter()
            self._boundary.end_step()
        if self._is_first_step:
            self._is_first_step = False
            memory = grow(self._parts.pager, self._choices.device_need, self._parts.held.device)
            self._parts.gradients.add_up_in(memory)
        self._state.ended()
        if self._parts.meter is not None:
            self._parts.meter.end_step(self._boundary.stepped())

    def _edit(self, unit: int, edits: Sequence[Edit]) -> None:
        """Write what a user has set, before anybody reads these weights."""
        parts = self._parts
        assert parts.updater is not None
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
        self._state.edited = True
        parts.updater.finish(commit=False)

    def _give_cache(self) -> None:
        """Another engine of the process starts, and the host budget has no room but in this one's cache."""
        parts = self._parts
        parts.pager.check_whole()
        if parts.pager.failed:
            return
        logger.info(
            "%s of host memory go from one engine of this process to another", format_size(parts.arena.classes.cache)
        )
        if parts.updater is not None:
            parts.updater.finish(commit=False)
        parts.pager.give_cache(parts.updater.drop_spare if parts.updater is not None else lambda: None)

    def _say_where_gradients_are(self, name: str) -> None:
        """Once, where there are any: between a backward and the step."""
        if self.micro_batches and not self._told_of_gradients:
            self._told_of_gradients = True
            tell(
                f"`.grad` of {name} is None, as of every parameter: gradients are in the engine. "
                f"offload.safe_get_full_grad(parameter) reads one before step(), engine.get_global_grad_norm() gives "
                f"their norm after it (docs/guides/looking.md)"
            )

    def _await_updates(self) -> None:
        """Called by autograd's threads too."""
        if self._parts.updater is not None:
            self._parts.updater.finish(commit=False)

    # -- entry, resume, end -------------------------------------------------------------------------

    def _enter(self) -> None:
        """Every call outside of a backward: what `_begin` does, and edits that wait are carried out."""
        if not inside_backward():
            self._begin()
            self._parts.weights.flush()

    def _begin(self) -> None:
        """Check, clear what an aborted call left, take a blob that is due."""
        self._parts.hooks.leave_all()
        self._check()
        self._parts.hooks.reset_aborted()
        self._state.enter()
        updater, progress = self._parts.updater, self._state.after_step
        if updater is not None and updater.wants_blob and progress is not None:
            updater.deliver_blob(progress.pack())

    def _look(self) -> None:
        """Weights are read or edited: an entry, unless a forward or a backward is under way.

        Edits of a unit that is being edited are not carried out one by one.
        """
        if self._parts.hooks.running:
            self._check()
        else:
            self._begin()

    def _begin_backward(self) -> None:
        """Called where a backward begins, by its thread."""
        self._measure_backward()
        if self._state.scaler is not None:
            self._state.scaler.begin_backward()

    def _check(self) -> None:
        """Raise where this engine cannot be used any more."""
        self._ending.check()
        self._parts.pager.check_whole()
        self._parts.pager.check()

    def progress(self) -> Progress:
        """All of this moment that is not weights and moments."""
        return self._state.take()

    def restore(self, progress: Progress) -> None:
        """Go on from `progress`; see `TrainingState.restore`."""
        self.notices += tuple(self._state.restore(progress))

    def destroy(self, remove: bool | None = None) -> None:
        """Finish and commit what is complete, join every thread, close the store.

        What the store holds can be gone on with by `"resume": "auto"`. With `remove` nothing of it is left; with False,
        a later start under the same name that does not resume it is refused; by default such a start replaces it, with
        a line.

        With several ranks it waits for the others to come here too, and serves them until then. Idempotent, and may be
        called again where it was interrupted. The model's parameters stay placeholders. Raises what finishing raised,
        after closing; only what cannot be committed, in `client_state` or registered objects, it raises before.
        """
        self._ending.destroy(remove)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Do what `destroy(remove=True)` does, but leave a note that the run has ended.

        Under `"resume": "auto"` or `"must"` a later start of that name is refused then. All ranks call it.

        Args:
            facts: what `finished.json` says of the end, beside its steps and date; JSON.
        """
        self._ending.finish(facts)

    def abandon(self, remove: bool) -> None:
        """Close without finishing anything, as `initialize` does when its last steps fail."""
        self._ending.abandon(remove)

    def at_exit(self) -> None:
        """What happens at the end of a process that has not called `destroy`."""
        self._ending.at_exit()

    @property
    def resumable(self) -> str | None:
        """The run folder that a later process can resume from, or None."""
        return self._ending.resumable
