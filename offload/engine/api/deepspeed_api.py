"""The part of the engine's API that mirrors DeepSpeed: counters, learning rates, batch sizes, the config.

Nothing of it runs the model, waits for an update or communicates with other ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from offload.config.blocks.values import unpacked
from offload.engine.api.running_api import RunningApi
from offload.engine.core import EngineCore
from offload.engine.training.data_loader import Loader, check_data, load
from offload.engine.training.step_settings import StepSettings
from offload.errors import UsageError
from offload.launch.environment import rank_number
from offload.schedules.base import set_values
from offload.swapper.store import DriveWrites


class DeepSpeedApi(RunningApi):
    """Getters and setters of DeepSpeed's engine that read the core and run nothing."""

    def __init__(self, core: EngineCore) -> None:
        """Creates the API over a complete core.

        Args:
            core: components and training state.
        """
        super().__init__(core)
        self.optimizer = core.optimizer
        """The optimizer that `initialize` returns beside the engine."""

    # -- progress -----------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, including skipped ones; after a resume, the committed ones."""
        return self._core.state.global_steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that updated nothing because the gradient norm was inf or NaN."""
        return self._core.state.skipped_steps

    @property
    def loss_scale(self) -> float:
        """Factor by which the loss of the next backward is multiplied; 1 except in fp16."""
        return self._core.state.loss_scale

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far, counted by `step()`.

        A micro-batch whose `step()` the loop omitted is counted by the next call. After a resume, the count is that of
        the committed optimizer step.
        """
        return self._core.state.micro_steps

    @property
    def global_samples(self) -> int:
        """Samples of all optimizer steps so far, on all ranks."""
        return self._core.state.global_samples

    @property
    def client_state(self) -> dict[str, Any]:
        """Values of the user that each commit includes: numbers, strings, lists and dicts.

        The commit of step k includes them as they are at the first call of the engine after step k.
        """
        return self._core.state.client_state

    @client_state.setter
    def client_state(self, value: dict[str, Any]) -> None:
        self._core.state.set_client_state(value)

    @property
    def lr_scheduler(self) -> Any:
        """The schedule that `initialize` received, or None."""
        return self._core.state.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, value: Any) -> None:
        self._core.state.set_lr_scheduler(value)

    def was_step_applied(self) -> bool:
        """Returns True if the last `step()` updated the weights.

        False before the first step, after a `step()` that only ended a micro-batch, and if the norm was inf or NaN.
        """
        return self._core.optimizer_step.applied

    def get_global_grad_norm(self) -> float | None:
        """Returns the gradient norm of the last step before the clip; None before the first step and after a load."""
        return self._core.optimizer_step.grad_norm

    @property
    def micro_batches(self) -> int:
        """Backwards since the last optimizer step."""
        return self._core.accumulation.count

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns True if the `step()` of the current micro-batch updates the weights.

        The answer is known before the forward of the micro-batch and holds until its `step()` has ended. Always True
        without accumulation, always False in `no_sync`.
        """
        return self._core.accumulation.is_boundary(self._settings.accumulation)

    # -- the optimizer ------------------------------------------------------------------------------

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
        self._core.optimizer_step.clip_next(float(max_norm) if max_norm <= sys.float_info.max else 0.0)

    # -- the config ---------------------------------------------------------------------------------

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
        """Returns a loader like that of `training_data`: this rank's rows of each batch, shuffled by the config's seed.

        No commit includes the position of this loader; commits include that of `training_data` only.

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
        ranks = self._core.components
        rank, count = ranks.data_rank, ranks.data_ranks
        return load(dataset, size, rank, count, settings.seed, collate_fn, self.device, drop_last)

    # -- where it runs ------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """The rank of this process among those that train together."""
        everyone = self._core.components.everyone
        return 0 if everyone is None else everyone.rank

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
        everyone = self._core.components.everyone
        return 1 if everyone is None else everyone.size

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine, from the launcher's LOCAL_RANK."""
        # LOCAL_RANK may be set in the environment of a process that trains alone.
        return 0 if self._core.components.everyone is None else rank_number(os.environ, "LOCAL_RANK", 0)

    def drive_writes(self) -> tuple[DriveWrites, ...]:
        """Returns the bytes that this rank has written to each drive, in this process and in the life of the run."""
        return self._core.components.written.drives()

    @property
    def measured(self) -> Mapping[str, float]:
        """Numbers of the last step, by the names of reference/metrics.md; empty before it, or if none were requested.

        `wall_clock_breakdown` requests all of them, on the first rank.
        """
        meter = self._core.components.meter
        return {} if meter is None or meter.last is None else meter.last.values
