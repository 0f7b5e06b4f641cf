"""What a part works on: sizes, placements and configs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.finetune.model import make_ready
from offload.presets import build
from offload.sizes import MIB

Save = Callable[[dict[str, Any]], None]
"""Called with all figures so far, so that a part that is stopped leaves those it had."""

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
"""weights/states: all nine, most important first."""


class Work(NamedTuple):
    """What a part works on."""

    device: torch.device
    folder: Path
    """An empty folder for swap files."""
    model: str = "llama-1b"
    layers: int | None = None
    """Of the model, None for all of them."""
    batch_size: int = 8
    seq_len: int = 512
    accumulation: int = 1
    recompute: bool = False
    """Whether activations are computed again in the backward."""
    limit: int | None = None
    """Bytes of the GPU that may be taken, None for all of it."""
    steps: int = 8
    """Timed steps, fewer where `seconds` are over."""
    seconds: float = 60.0
    copy_nbytes: int = 256 * MIB
    rounds: int = 15

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch_size * self.seq_len * self.accumulation

    def keep_limit(self) -> None:
        """From now on this process takes no more of the GPU than `limit`."""
        if self.limit is not None and self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(self.limit / total, 1.0), self.device)

    def build(self) -> nn.Module:
        """The model. Inside `offload.init` it takes no memory."""
        model = build(self.model, self.layers)
        make_ready(model, self.recompute)
        return model


def config_for(placement: str, work: Work, dtype: str, accumulation: int = 1, clip: float = 0.0) -> dict[str, Any]:
    weights, states = placement.split("/")
    return {
        "train_micro_batch_size_per_gpu": work.batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": weights},
            "offload_optimizer": {"device": states},
        },
        "offload": {"nvme_path": str(work.folder), "device": work.device.type},
    }
