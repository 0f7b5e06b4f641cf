"""What a part works on: sizes, placements and configs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
    batch_size: int = 8
    seq_len: int = 512
    steps: int = 8
    """Timed steps, fewer where `seconds` are over."""
    seconds: float = 60.0
    copy_nbytes: int = 256 * MIB
    rounds: int = 15


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
