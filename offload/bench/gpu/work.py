"""Sizes, placements and configs of the parts, and their functions for measuring times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.bench.configs import placed
from offload.finetune.model import make_ready
from offload.presets import build
from offload.sizes import MIB

Save = Callable[[dict[str, Any]], None]
"""Receives all figures so far, so that the figures of a part that is stopped are not lost."""

PLACEMENTS = (
    "none/none",
    "nvme/nvme",
    "cpu/cpu",
    "cpu/nvme",
    "none/nvme",
    "nvme/cpu",
    "none/cpu",
    "cpu/none",
    "nvme/none",
)
"""All nine placements, as weights/states, the most important first."""


class StepSize(NamedTuple):
    """The size of a step of one micro-batch."""

    batch_size: int
    seq_len: int
    recompute: bool = False


DEFAULT_STEP = StepSize(8, 512)


class Work(NamedTuple):
    """The work of a part."""

    device: torch.device
    folder: Path
    """An empty folder for swap files."""
    model: str = "llama-1b"
    layers: int | None = None
    """Layers of the model; None for all of them."""
    batch_size: int = 8
    seq_len: int = 512
    accumulation: int = 1
    recompute: bool = False
    """True if activations are computed again in the backward."""
    limit: int | None = None
    """Bytes of GPU memory that may be taken; None for all of it."""
    moments: str | None = None
    """Form of the optimizer's moments, and below of the masters, where the planner writes the config; None for fp32."""
    master: str | None = None
    steps: int = 8
    """Timed steps; fewer if they would take longer than `seconds`."""
    seconds: float = 60.0
    copy_nbytes: int = 256 * MIB
    rounds: int = 15

    @property
    def tokens(self) -> int:
        """Returns the tokens of a step."""
        return self.batch_size * self.seq_len * self.accumulation

    def keep_limit(self) -> None:
        """Limits this process to `limit` bytes of GPU memory from now on."""
        if self.limit is not None and self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(self.limit / total, 1.0), self.device)

    def build(self) -> nn.Module:
        """Returns the model. Inside of `offload.init` it takes no memory."""
        model = build(self.model, self.layers)
        make_ready(model, self.recompute)
        return model


def config_for(placement: str, work: Work, dtype: str, accumulation: int = 1, clip: float = 0.0) -> dict[str, Any]:
    """Returns the config of a placement, written as weights/states."""
    return placed(placement, work.folder, work.device, work.batch_size, dtype, accumulation, clip)
