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
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from offload.engine.checkpoint.load import Wish
from offload.engine.checkpoint.save import Order
from offload.engine.core import EngineCore
from offload.engine.deepspeed_api import Facts
from offload.engine.keywords import refuse
from offload.engine.model_io.save_pretrained import Wanted
from offload.engine.training import train_batch as batch
from offload.engine.training.step_settings import resized
from offload.errors import UsageError
from offload.sizes import count_of
from offload.timeline import Row

logger = logging.getLogger("offload")


class Engine(Facts):
    """A model whose weights and optimizer states are paged; made by `offload.initialize`.

    All methods belong to the thread that runs the model; in a forked child every call raises. An error on a thread of
    the engine is raised, with its cause, by the next call: from then on the engine is stopped (`EngineFailed`), and the
    last commit is whole. What an engine has not is the model's: `engine.generate`, `engine.parameters`.
    """

    def __init__(self, core: EngineCore, notices: Sequence[str]) -> None:
        """Makes the API over a core, which is complete.

        Args:
            core: components and training state.
            notices: lines that were reported at the start.
        """
        super().__init__(core)
        self.notices = tuple(notices)
        """Lines that were reported at the start: homes, budgets, keys without an effect, what a resume found."""

    # -- training -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on `args`, whose tensors are moved to the engine's device first, and cast by `auto_cast`.

        Raises `UsageError` where `auto_cast` is false and the model cannot compute with the dtype of an input.
        """
        args, kwargs = self._core.enter_model((args, kwargs))
        with self.autocast(), self._core.advised():
            try:
                return self.module(*args, **kwargs)
            except RuntimeError as error:
                if (clearer := self._core.inputs.explain(error, (args, kwargs))) is None:
                    raise
                raise clearer from error

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
        self._core.enter()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"backward expects the loss, a tensor of one element, got {what}")
        if not loss.requires_grad:
            raise UsageError("backward got a loss that does not depend on any trainable parameter (no_grad? detach?)")
        divided = loss / self._choices.accumulation if scale_wrt_gas else loss
        with self._core.advised():
            self.scale(divided).backward(retain_graph=retain_graph)
        if self._core.parts.meter is not None:
            self._core.parts.meter.add_loss(divided, first=self.micro_batches <= 1)
        return divided

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, for a `backward()` of one's own; it is as it was outside of fp16."""
        return loss if self._core.state.scaler is None else self._core.state.scaler.multiply(loss)

    def step(self, lr_kwargs: None = None) -> None:
        """End a micro-batch; at a boundary, clip, schedule the updates and advance the learning rates.

        Raises `UsageError` where several backwards ran since the last call and micro-batches accumulate, since it
        cannot know what they are, and `NumericsError` where the norm is not finite: then the gradients are dropped and
        nothing was updated. `lr_kwargs` is DeepSpeed's: another value than None is a `UsageError`.
        """
        refuse(lr_kwargs=lr_kwargs)
        self._core.enter()
        self._core.micro.end(self._choices.accumulation)
        if not self._core.micro.ends_step(self._choices.accumulation):
            self._core.boundary.pass_micro_batch()
            return
        self._step_and_schedule()

    def _step_and_schedule(self) -> None:
        before = self.global_steps
        try:
            self.optimizer.step()
            if self.lr_scheduler is not None and not self.optimizer.overflow:
                self.lr_scheduler.step()
                self._core.state.ended()
        except BaseException as error:
            # A step whose schedule did not move, or moved by half, must not be committed; the last commit is whole.
            if self.lr_scheduler is not None and self.global_steps != before:
                self._core.parts.pager.fail(error)
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
        self._core.enter_between_steps("set_train_batch_size")
        if self.micro_batches:
            ran = count_of(self.micro_batches, "micro-batch", "micro-batches")
            raise UsageError(f"set_train_batch_size is for between steps, {ran} of this one ran: call it after step()")
        kept = None if self._choices.config.data_types.grad_accum_dtype else self._core.parts.gradients.dtype
        self._core.state.change_settings(resized(self._choices, train_batch_size, self.world_size, kept))

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next `step()` updates the weights, whatever the count, until this is called again.

        With None the count says it again. A loop that says it may leave out the `step()` of other micro-batches, as
        `accelerate` does. `backward` divides by gradient_accumulation_steps all the same.
        """
        self._core.check()
        self._core.micro.tell(is_boundary)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context for micro-batches that do not end a step: each backward in it is one, `step()` never updates.

        It changes no result. Ranks add each gradient up as it comes, in it as outside of it; what a GPU has room for is
        added up there, in it as outside of it, and leaves for the host with the last micro-batch.
        """
        self._core.check()
        return self._core.micro.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last boundary, and their micro-batches.

        With several ranks all of them do, where there is anything to forget: it was added up already.
        """
        self._core.forget_gradients()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Hold the states of `objects` in each commit, as `accelerate` does: such as a schedule that the user steps.

        They have `state_dict()`, of plain values, and `load_state_dict(state)`, which is called at once on a resumed
        run. There, as many objects as the run had must come in the same order before the first step; then the groups'
        values (learning rates and such) become those of the commit again. Raises `UsageError`.
        """
        self._core.check()
        self._core.state.registered.add(objects)
        self._core.state.put_values()

    def restore_generators(self) -> None:
        """Put the random generators back as they were at the end of the last step, in a loop with its own DataLoader.

        Call it in a resumed run, or after a load, when the batches that were trained on are skipped, right before the
        next one is fetched: what is drawn between there and the first call of the engine comes out as in the run. In a
        new run, and from the first step on, it does nothing.
        """
        self._core.check()
        self._core.state.restore_generators()

    def mean(self, value: float) -> float:
        """The mean of a number over all ranks, such as a loss to log; every rank must ask for it at the same place."""
        self._core.enter()
        return value if self._core.parts.rounds is None else self._core.parts.rounds.mean(value)

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
        with self._core.parts.timeline.span(Row.COMPUTE, "synchronize"):  # a part of the step, as the meter counts
            self._core.enter_between_steps("synchronize")

    # -- weights ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The model's weights and persistent buffers by the model's names: ordinary tensors on the CPU.

        Weights are copies, in the dtype that the model computes in, read one parameter after the other; tied ones stay
        tied. A rank may ask for it alone. Raises `BudgetError` where they would not fit into the RAM.
        """
        return self.module_state_dict()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The same as `state_dict`, also without frozen parameters."""
        self._core.check()
        return self._core.looking.state_dict(self.module, exclude_frozen_parameters)

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
        self._core.enter_between_steps("save_checkpoint")
        name = f"global_step{self.global_steps}" if tag is None else tag
        self._core.checkpoints.save(
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
        self._core.enter_between_steps("load_checkpoint")
        trains = self._core.parts.updater is not None and not load_module_only
        wish = Wish(load_module_strict, trains and load_optimizer_states, load_lr_scheduler_states, not trains)
        loaded = self._core.checkpoints.load(load_dir, tag, wish)
        if loaded is None:
            return None, {}
        self._core.micro.reset()
        if not wish.module_only:
            self._core.boundary.forget_norm()
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
        self._core.enter_between_steps("save_pretrained")
        self._core.saving.save(Wanted(save_directory, max_shard_size, dtype, tokenizer), self.global_steps)

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
        self._core.enter_between_steps("save_16bit_model")
        if not self.zero_gather_16bit_weights_on_model_save() and self.zero_optimization_stage() == 3:
            logger.warning(
                "save_16bit_model has written nothing, as stage3_gather_16bit_weights_on_model_save: false asks for; "
                "take it out of the config, or call save_pretrained"
            )
            return False
        frozen = not exclude_frozen_parameters
        self._core.saving.save(Wanted(save_dir, frozen=frozen, file_name=save_filename), self.global_steps)
        return True

    def destroy(self, remove: bool | None = None) -> None:
        """Finish and commit what is complete, join every thread, close the store.

        What the store holds can be gone on with by `"resume": "auto"`. With `remove` nothing of it is left; with False,
        a later start under the same name that does not resume it is refused; by default such a start replaces it, with
        a line.

        With several ranks it waits for the others to come here too, and serves them until then. Idempotent, and may be
        called again where it was interrupted. The model's parameters stay placeholders. Raises what finishing raised,
        after closing; only what cannot be committed, in `client_state` or registered objects, it raises before.
        """
        self._core.ending.destroy(remove)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Do what `destroy(remove=True)` does, but leave a note that the run has ended.

        Under `"resume": "auto"` or `"must"` a later start of that name is refused then. All ranks call it.

        Args:
            facts: what `finished.json` says of the end, beside its steps and date; JSON.
        """
        self._core.ending.finish(facts)

    @property
    def resumable(self) -> str | None:
        """The run folder that a later process can resume from, or None."""
        return self._core.ending.resumable
