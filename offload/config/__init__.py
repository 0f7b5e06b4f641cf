"""The config: a DeepSpeed JSON file, or its content as a dict, parsed into frozen models.

    config = load_config("ds_config.json")

Every key of DeepSpeed's offload is known. A key is honoured, accepted because it tunes something that this library
decides by itself (one notice names such keys), or refused with the reason. Keys that DeepSpeed does not have belong to
the block "offload", which DeepSpeed ignores.

    blocks ─► schema       the models
    load                   from a file to the models, or to an error message; values that the file leaves open
    script_values          values that a script determines, and two that differ
    edit                   some keys of a file, and no other character of it
"""

from __future__ import annotations

from offload.config.blocks import (
    OPTIMIZER_DEFAULTS,
    SCHEDULES,
    TORCH_SCHEDULES,
    Aio,
    Block,
    Fp16,
    OptimizerBlock,
    SchedulerBlock,
    ZeroOptimization,
)
from offload.config.load import (
    Batch,
    check_order,
    effective,
    examine,
    load_config,
    read_json,
    resolve_batch,
    schedule_params,
)
from offload.config.schema import Config

__all__ = [
    "OPTIMIZER_DEFAULTS",
    "SCHEDULES",
    "TORCH_SCHEDULES",
    "Aio",
    "Batch",
    "Block",
    "Config",
    "Fp16",
    "OptimizerBlock",
    "SchedulerBlock",
    "ZeroOptimization",
    "check_order",
    "effective",
    "examine",
    "load_config",
    "read_json",
    "resolve_batch",
    "schedule_params",
]
