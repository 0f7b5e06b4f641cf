"""`deepspeed.runtime`: its submodules that scripts use."""

from __future__ import annotations

from offload.deepspeed.submodules import submodules

__getattr__ = submodules(
    __name__,
    "activation_checkpointing",
    "config",
    "dataloader",
    "engine",
    "lr_schedules",
    "sequence_parallel",
    "utils",
    "zero",
)
