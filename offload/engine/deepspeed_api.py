"""What a loop asks an engine, and what it may set between steps: counters, learning rates, batch sizes, the config.

Nothing here runs the model, waits for an update or talks to other ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from offload.engine.core import EngineCore
from offload.engine.memory_report import MemoryReport, memory_report
from offload.engine.training.data_loader import Loader, check_data, load
from offload.engine.training.step_settings import Choices
from offload.errors import UsageError
from offload.swapper.pager import Counts
from offload.swapper.store import DriveWrites


class IoBytes(NamedTuple):
    """Bytes that the engine's own reads and writes have moved."""

    read: int
    written: int


class Facts:
    """Getters and setters of DeepSpeed's engine that read the core and run nothing."""

    def __init__(self, core: EngineCore) -> None:
        """Makes the API over the core of an engine, which is complete."""
        self._core = core
        self.module = core.module
        """The model that was given to `initialize`."""
        self.device = core.device
        """The device on which the model computes."""
        self.optimizer = core.optimizer
        """The optimizer that `initialize` returns beside the engine."""

    # -- progress -----------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Boundaries passed, skipped ones among them; after a resume, those that were committed."""
        return self._core.state.global_steps

    @property
    def skipped_steps(self) -> int:
        """Boundaries at which the norm was not finite and nothing was updated."""
        return self._core.state.skipped_steps

    @property
    def loss_scale(self) -> float:
        """By which the loss of the next backward is multiplied: 1 but in fp16."""
        return self._core.state.loss_scale

    @property
    def micro_steps(self) -> int:
        """Calls of `step()`, the next of which counts micro-batches for which it was left out too.

        After a resume, those up to the boundary that was committed.
        """
        return self._core.state.micro_steps

    @property
    def global_samples(self) -> int:
        """Samples of all boundaries passed, on all ranks."""
        return self._core.state.global_samples

    @property
    def client_state(self) -> dict[str, Any]:
        """The user's own: numbers, strings, lists and dicts. Each commit holds it, as it is when that of step k is
        taken: at the first engine call after step k."""
        return self._core.state.client_state

    @client_state.setter
    def client_state(self, value: dict[str, Any]) -> None:
        self._core.state.set_client_state(value)

    @property
    def lr_scheduler(self) -> Any:
        """The schedule that was given to `initialize`, or None."""
        return self._core.state.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, value: Any) -> None:
        self._core.state.set_lr_scheduler(value)

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the weights.

        False before the first, between boundaries, and where the norm was not finite.
        """
        return self._core.boundary.applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last boundary's gradient before the clip; None before the first."""
        return self._core.boundary.grad_norm

    @property
    def micro_batches(self) -> int:
        """Backwards since the last boundary."""
        return self._core.micro.count

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the `step()` of the micro-batch that is under way updates the weights, until that `step()` has ended.

        The answer is known before its forward. It is True always without accumulation, and never in `no_sync`.
        """
        return self._core.micro.is_boundary(self._choices.accumulation)

    # -- the optimizer ------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """The learning rate of each group, as the next step will use it."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate of all groups, or that of each; a schedule sets its own again when it steps."""
        groups = self.optimizer.param_groups
        rates: list[Any] = list(lr) if isinstance(lr, list | tuple) else [lr] * len(groups)
        if len(rates) != len(groups):
            raise UsageError(f"set_lr expects one number, or {len(groups)}, one for each group, got {len(rates)}")
        for rate in rates:
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
                raise UsageError(f"set_lr expects a finite number of at least 0, got {rate!r}")
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = float(rate)

    def get_mom(self) -> list[Any]:
        """The betas of each group, or its momentum where the optimizer has no betas (SGD; 0.0 for Adagrad)."""
        return [
            group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in self.optimizer.param_groups
        ]

    def get_type(self) -> list[str]:
        """The name of each group's optimizer, as the config would say it."""
        return [self.optimizer.rule.title(group) for group in self.optimizer.param_groups]

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clip the gradient of the next step to `max_norm`, 0 for not at all, in place of gradient_clipping.

        The norm is known when the step is made: `get_global_grad_norm()` after it.
        """
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm >= 0:
            raise UsageError(f"clip_grad_norm_ expects a number of at least 0, got {max_norm!r}")
        self._core.boundary.clip_next(float(max_norm) if math.isfinite(max_norm) else 0.0)

    # -- the config ---------------------------------------------------------------------------------

    @property
    def _choices(self) -> Choices:
        return self._core.state.choices

    @property
    def config(self) -> dict[str, Any]:
        """The config with its defaults and all three batch sizes, as JSON would have it: a copy, not to be set.

        The model's own, where it has one, is `engine.module.config`.
        """
        choices = self._choices
        return choices.config.model_dump(mode="json") | {
            "train_batch_size": choices.total_batch_size,
            "train_micro_batch_size_per_gpu": choices.micro_batch_size,
            "gradient_accumulation_steps": choices.accumulation,
        }

    def zero_optimization_stage(self) -> int:
        """The stage of ZeRO that the config names."""
        return self._choices.config.zero_optimization.stage

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether weights may be saved in stage 3; here they may unless the config says false."""
        return self._choices.config.zero_optimization.stage3_gather_16bit_weights_on_model_save is not False

    def fp16_enabled(self) -> bool:
        """Whether weights are fp16."""
        return self._choices.config.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bf16."""
        return self._choices.config.dtype == "bf16"

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._choices.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch on this rank."""
        return self._choices.micro_batch_size

    def train_batch_size(self) -> int:
        """Samples of a step on all ranks."""
        return self._choices.total_batch_size

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> Loader:
        """A loader as that of `training_data`: this rank's rows of each batch, shuffled by the config's seed.

        `batch_size` is that of one rank, the micro-batch's by default. Its position is in no commit; that of
        `training_data` is. Raises `UsageError`, and `ConfigError` where the data have no length, or not one batch.
        """
        check_data(dataset, collate_fn)
        choices = self._choices
        size = choices.micro_batch_size if batch_size is None else batch_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"deepspeed_io expects a batch_size of at least 1, got {size!r}")
        drop_last = choices.config.dataloader_drop_last
        return load(dataset, size, self.global_rank, self.world_size, choices.seed, collate_fn, self.device, drop_last)

    # -- where it runs ------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """The number of this process among those that train together."""
        return self._core.parts.rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._core.parts.world_size

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its machine, as its launcher says."""
        return 0 if self._core.parts.ranks is None else int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters; a tied one counts once."""
        return sum(segment.numel for layout in self._core.parts.layouts for segment in layout.segments)

    @property
    def host_memory(self) -> int:
        """Bytes of the host arena: this engine's part of the host budget."""
        return self._core.parts.arena.nbytes

    @property
    def device_memory(self) -> int:
        """Bytes of the device arena: the device budget."""
        return self._core.parts.pager.arena.nbytes

    def io_bytes(self) -> IoBytes:
        """Bytes read and written so far by the engine."""
        queue = self._core.parts.queue
        return IoBytes(0, 0) if queue is None else IoBytes(queue.read_bytes, queue.written_bytes)

    def memory_report(self) -> MemoryReport:
        """Bytes of RAM and of the device by who holds them, in sums that add up; `print` it for the words.

        Of `["host"]`, rss = base + arena + device_arena + other_engines + other, where base is what was resident before
        the engine, and other what came since: activations, libraries. Of `["device"]`, allocated = arena + other. Each
        of `["classes"]` has its part of the host budget, what is used of it now, and the most that ever was.
        """
        return memory_report(self._core.parts, self._core.base_bytes)

    def drive_writes(self) -> tuple[DriveWrites, ...]:
        """What this rank has written to each drive: in this process, and in all of the run's that it goes on with."""
        return self._core.parts.written.drives()

    @property
    def measured(self) -> Mapping[str, float]:
        """Numbers of the last step, by the names of guides/monitor.md; empty where none were asked for.

        `wall_clock_breakdown` asks for all of them, on the first rank.
        """
        meter = self._core.parts.meter
        return {} if meter is None or meter.last is None else meter.last.values

    def use_counts(self) -> Counts:
        """How often units were used so far, found on the device, and used otherwise than foreseen."""
        return self._core.parts.pager.counts()
