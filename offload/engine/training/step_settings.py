"""Settings of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from offload.config import Config
from offload.engine.training.loss_scale import LossScaler
from offload.errors import UsageError
from offload.layout.device_need import DeviceNeed


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What the config says about a step."""

    micro_batch_size: int
    accumulation: int
    total_batch_size: int
    clip: float
    """The largest global norm of the gradient; 0 leaves it as it is."""
    skip_nonfinite: bool
    """Whether a norm that is inf or NaN skips the step, or raises."""
    seed: int
    overlap: bool
    """Whether updates run while the next forward does; off only to find faults."""
    config: Config
    """All else that it says."""
    scaler: LossScaler | None = None
    """In fp16."""
    device_need: DeviceNeed


def resized(choices: StepSettings, total: int, ranks: int, gradients: torch.dtype | None) -> StepSettings:
    """The same for steps of `total` samples. Raises `UsageError` where these are no whole micro-batches.

    `gradients` is the dtype in which gradients are kept, unless the config names it.
    """
    samples = choices.micro_batch_size * ranks
    if isinstance(total, bool) or not isinstance(total, int) or total < 1 or total % samples:
        raise UsageError(
            f"train_batch_size must be a multiple of train_micro_batch_size_per_gpu * ranks, which is "
            f"{choices.micro_batch_size} * {ranks}, got {total!r}"
        )
    accumulation = total // samples
    if accumulation > 1 and gradients is not None and gradients.itemsize < 4:
        raise UsageError(
            f"a step of {total} samples has {accumulation} micro-batches, and gradients are kept in {gradients}, since "
            f"the config has one micro-batch a step: to add several up, set data_types.grad_accum_dtype to fp32"
        )
    return replace(choices, accumulation=accumulation, total_batch_size=total)
