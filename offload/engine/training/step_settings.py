"""Settings of an optimizer step, their change by `set_train_batch_size`, and how those of two starts differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from offload.config import Config
from offload.engine.optim.optimizer import Optimizer
from offload.engine.training.loss_scale import LossScaler
from offload.engine.training.snapshot import DECOUPLED
from offload.errors import UsageError
from offload.layout.placement import DeviceNeed
from offload.schedules.base import Schedule
from offload.sizes import count_of

_LABELS = {"lr": "learning rates", "weight_decay": "weight decay"}
_OF_SCHEDULE = "the schedule's "
"""Prefix of the names of settings that are parameters of the schedule."""
_OF_BATCH = ("micro-batch size", "accumulation")
_TOTAL = "samples of a step"
"""Name of the samples of a step over all ranks."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The config's settings of an optimizer step.

    `micro_batch_size` counts samples of one rank, `accumulation` the micro-batches of a step, and `total_batch_size`
    the samples of a step over all ranks.
    """

    micro_batch_size: int
    accumulation: int
    total_batch_size: int
    clip: float
    """Largest global norm of the gradient; 0 does not clip."""
    skip_nonfinite: bool
    """True if a norm that is inf or NaN skips the step; otherwise the step raises."""
    seed: int
    overlap: bool
    """True if updates run during the next forward (`Placement.overlaps_updates`)."""
    config: Config
    """The config, for all other settings."""
    scaler: LossScaler | None = None
    """Loss scaler in fp16, else None."""
    device_need: DeviceNeed


def resized(settings: StepSettings, total: int, ranks: int, gradients: torch.dtype | None) -> StepSettings:
    """Returns the settings for steps of `total` samples.

    Args:
        settings: the current settings.
        total: samples of a step over all ranks.
        ranks: number of ranks.
        gradients: dtype that the engine chose for the gradients; None if the config names one.

    Raises:
        UsageError: `total` is no multiple of a micro-batch of all ranks, or several micro-batches would accumulate in
            16 bits.
    """
    samples = settings.micro_batch_size * ranks
    if isinstance(total, bool) or not isinstance(total, int) or total < 1 or total % samples:
        raise UsageError(
            f"train_batch_size must be a multiple of train_micro_batch_size_per_gpu * ranks, which is "
            f"{settings.micro_batch_size} * {ranks}, got {total!r}"
        )
    accumulation = total // samples
    if accumulation > 1 and gradients is not None and gradients.itemsize < 4:
        raise UsageError(
            f"a step of {total} samples contains {accumulation} micro-batches, but gradients are kept in {gradients}, "
            "because the config has one micro-batch a step: to add up several, set data_types.grad_accum_dtype to fp32"
        )
    return replace(settings, accumulation=accumulation, total_batch_size=total)


def named_settings(
    settings: StepSettings, optimizer: Optimizer, configured: Sequence[Mapping[str, Any]], lr_scheduler: Any
) -> dict[str, Any]:
    """Returns the settings that may differ in a resumed run, each under its name in notices.

    Args:
        settings: the settings of a step.
        optimizer: the engine's optimizer.
        configured: the values of its groups as `initialize` found them; see `Optimizer.configured`.
        lr_scheduler: the schedule, or None.
    """
    parameters = lr_scheduler.parameters if isinstance(lr_scheduler, Schedule) else {}
    groups, config = optimizer.param_groups, settings.config
    return {
        "seed": settings.seed,
        "micro-batch size": settings.micro_batch_size,
        "accumulation": settings.accumulation,
        _TOTAL: settings.total_batch_size,
        "gradient clipping": settings.clip,
        "autocast": config.torch_autocast.dtype if config.torch_autocast.enabled else "off",
        "dtype of sums of gradients": config.data_types.grad_accum_dtype or "auto",
        **({} if settings.scaler is None else {"loss scale": settings.scaler.kind}),
        "optimizer": optimizer.rule.known_as or optimizer.rule.name,
        **{_LABELS.get(key, key): [group.get(key) for group in configured] for key in optimizer.rule.scheduled},
        **({DECOUPLED: [group["decoupled"] for group in groups]} if "decoupled" in groups[0] else {}),
        "schedule": None if lr_scheduler is None else type(lr_scheduler).__name__,
        **{_OF_SCHEDULE + name: value for name, value in parameters.items()},
    }


def job_of(model: nn.Module, settings: StepSettings, optimizer: Optimizer, lr_scheduler: Any) -> dict[str, Any]:
    """Returns what tells the job of a run from others that have the same layout: plain JSON.

    Args:
        model: the model.
        settings: the settings of a step, as `initialize` made them.
        optimizer: the engine's optimizer, before the first step.
        lr_scheduler: the schedule, or None.
    """
    # Of models of transformers that come from folders, the folder: others of the same shape have other weights.
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    named = named_settings(settings, optimizer, optimizer.configured(), lr_scheduler)
    job = {"model": f"{type(model).__name__} {source}".strip(), **named}
    return cast(dict[str, Any], json.loads(json.dumps(job, default=str)))


class Differences:
    """Settings in which a resumed run differs from the run that was committed, by name, each with both values."""

    def __init__(
        self,
        then: Mapping[str, Any],
        now: Mapping[str, Any],
        scheduled: bool = False,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Compares the settings that both have.

        Args:
            then: what `named_settings` returned in the run.
            now: what it returns here.
            scheduled: True if learning rates go on from those of a restored schedule, whatever the config has.
            groups: groups of the optimizer, which a schedule outside the engine may have marked as its own.
        """
        self.changed = {name: (then[name], now[name]) for name in now if name in then and then[name] != now[name]}
        self._scheduled = scheduled
        # torch's schedules store the first rate of a group there. Only the loop knows if it restores such a schedule.
        self._by_loop = not scheduled and now.get("schedule") is None and any("initial_lr" in each for each in groups)
        self._samples = [math.prod(each.get(name, 1) for name in _OF_BATCH) for each in ({**now, **then}, now)]
        # Checkpoints of earlier versions, and of other programs, do not say the total.
        self._has_total = _TOTAL in then and _TOTAL in now
        self._then, self._now = then, now

    def __bool__(self) -> bool:
        """Returns True if there is any."""
        return bool(self.changed)

    @property
    def of_schedule(self) -> bool:
        """True if a parameter of the schedule has changed."""
        return any(name.startswith(_OF_SCHEDULE) for name in self.changed)

    def __str__(self) -> str:
        """Returns all of them in words: from what to what."""
        return ", ".join(f"{name} {old} is now {new}{self._remark(name)}" for name, (old, new) in self.changed.items())

    @property
    def _divides_otherwise(self) -> bool:
        """True if a step has as many samples as it had, and nothing has changed but how micro-batches divide them."""
        counts = {name for name in self.changed if not self._remark(name)} <= set(_OF_BATCH)
        return counts and self._has_total and _TOTAL not in self.changed

    @property
    def _ranks(self) -> str:
        """How many ranks the former values need, in words, where they are not those of now."""
        if not self._has_total or not all(name in each for name in _OF_BATCH for each in (self._then, self._now)):
            return ""
        then, now = (each[_TOTAL] // math.prod(each[name] for name in _OF_BATCH) for each in (self._then, self._now))
        return "" if then == now else f", on {count_of(then, 'rank')}"

    def consequences(self) -> str:
        """Returns what follows for the steps of a resumed run, in words; at least one thing does."""
        found = []
        if not self._has_total and self._samples[0] != self._samples[1]:
            found.append(f"a step has {self._samples[1]} samples a rank in place of {self._samples[0]}")
        if "schedule" in self.changed and self.changed["schedule"][1] is not None:
            found.append(f"{self.changed['schedule'][1]} begins at its start")
        elif "schedule" in self.changed:
            found.append("without a schedule the optimizer's own learning rates count")
        if self._by_loop and all(self._remark(name) for name in self.changed):
            found.append(
                "the schedule of the loop makes the learning rates: those that the run would have had where the loop "
                "restores it, as the Trainer does, and the present ones where it begins anew"
            )
        elif all(self._remark(name) for name in self.changed):
            found.append(
                "the steps are those that the run would have made; the present rate would count without the schedule "
                "(offload train: --schedule constant), or in a new run of the weights that offload export writes"
            )
        elif self._divides_otherwise:
            found.append(
                f"a step has {self._now[_TOTAL]} samples as before, in other micro-batches: where each sample weighs "
                "as much as any other, and without dropout, losses and weights differ by rounding alone from those "
                "that the run would have had"
            )
        else:
            but = " but for the learning rates" if any(self._remark(name) for name in self.changed) else ""
            found.append(
                f"the steps from here on take the present values{but}, so losses and weights are not those that the "
                f"run would have had; the former values give those{self._ranks}"
            )
        return "; ".join(found)

    def _remark(self, name: str) -> str:
        """Returns what keeps a setting from having an effect, in brackets, or nothing."""
        if name != _LABELS["lr"] or not (self._scheduled or self._by_loop):
            return ""
        return " (set by the schedule of the loop)" if self._by_loop else " (a schedule continues from the former)"
