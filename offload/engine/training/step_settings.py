"""Settings of an optimizer step, and the change of them that `set_train_batch_size` makes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from offload.config import Config
from offload.engine.training.loss_scale import LossScaler
from offload.errors import UsageError
from offload.layout.budgets.device_need import DeviceNeed


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
