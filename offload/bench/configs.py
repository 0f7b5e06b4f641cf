"""Configs of the engines that benchmarks train with: ours, and the same training for DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.1

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
"""Environment of a process that is the only rank, for libraries that expect a launcher."""


def placed(
    placement: str,
    folder: Path,
    device: torch.device,
    batch_size: int,
    dtype: str,
    accumulation: int = 1,
    clip: float = 0.0,
) -> dict[str, Any]:
    """Returns the config of a placement, the tiers of weights/states. A `clip` of 0 clips nothing."""
    weights, states = placement.split("/")
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": weights},
            "offload_optimizer": {"device": states},
        },
        "offload": {"nvme_path": str(folder), "device": device.type},
    }


def for_deepspeed(settings: dict[str, Any], pin_memory: bool = True) -> dict[str, Any]:
    """Returns a config without the keys that DeepSpeed does not know, and with its key for pinned memory."""
    # Copies, since the caller may train with the config itself too.
    zero = settings["zero_optimization"]
    pinned = {key: zero[key] | {"pin_memory": pin_memory} for key in ("offload_param", "offload_optimizer")}
    kept = {key: value for key, value in settings.items() if key != "offload"}
    return kept | {"zero_optimization": zero | pinned}
