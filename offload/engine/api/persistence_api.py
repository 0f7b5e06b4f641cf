"""The engine's API for data that outlives a step: weights, checkpoints, model files, the end of the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.checkpoint.load import LoadOptions
from offload.checkpoint.save import SaveRequest
from offload.engine.api.deepspeed_api import DeepSpeedApi
from offload.engine.core import EngineCore
from offload.engine.keywords import refuse
from offload.engine.training.snapshot import persistent_buffers
from offload.errors import UsageError
from offload.model_io.save import SaveOptions
from offload.notices import Headline, announce

logger = logging.getLogger("offload")


_STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names of the states that `offload_states` may move."""


class PersistenceApi(DeepSpeedApi):
    """Methods that read weights out, save and load, and end an engine."""

    def __init__(self, core: EngineCore, notices: Sequence[str]) -> None:
        """Creates the API over a complete core.

        Args:
            core: components and training state.
            notices: lines that were reported at the start.
        """
        super().__init__(core)
        self.notices = tuple(notices)
        """Lines reported at the start: placements, budgets, keys without an effect, the result of a resume."""

    # -- weights ------------------------------------------------------------------------------------

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
        names = [str(getattr(each, "value", each)) for each in (() if include is None else include)]
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
            load_module_strict: True to refuse a checkpoint whose parameters are not those of the model.
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
        trains = self._core.components.update_worker is not None and not load_module_only
        options = LoadOptions(
            load_module_strict, trains and load_optimizer_states, load_lr_scheduler_states, not trains
        )
        loaded = self._core.checkpoints.load(load_dir, tag, options)
        if loaded is None:
            return None, {}
        # Micro-batches that ran before the load belong to gradients that are gone.
        self._core.accumulation.reset()
        if not options.module_only:
            self._core.optimizer_step.forget_norm()
        self.notices += loaded.notices
        if self.global_rank == 0:
            told = f"training goes on after step {self.global_steps}{self._core.state.where_data_goes_on()}"
            told = "weights alone, as asked" if options.module_only else told
            announce(Headline(f"loaded {loaded.folder}: {told}"))
        return loaded.folder, loaded.client_state

    # -- files that others load ---------------------------------------------------------------------

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
            dtype: "bf16", "fp16", "fp32" or a torch dtype; by default that of the weights. fp32 gives the exact
                masters.
            tokenizer: a tokenizer of transformers to save beside the model, or None.

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
        self._core.shutdown.destroy(remove)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Ends the engine as `destroy(remove=True)` does, but leaves a note that the run has ended. All ranks call it.

        A later start of the same name with `"resume"` set to `"auto"` or `"must"` is then refused.

        Args:
            facts: contents of `finished.json` beside its steps and date; plain JSON values.
        """
        self._core.shutdown.finish(facts)

    @property
    def resumable(self) -> str | None:
        """The run folder that a later process can resume from, or None."""
        return self._core.shutdown.resumable
