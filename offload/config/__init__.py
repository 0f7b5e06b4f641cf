"""The config: a DeepSpeed JSON file, or its content as a dict, read into frozen models.

    config = load_config("ds_config.json")

Every key of DeepSpeed's offload is known here: honoured, accepted because it tunes what this library decides by itself
(one notice names those), or refused with the reason. All keys that DeepSpeed does not have lie in the block "offload",
which DeepSpeed ignores.

    values ─► block ─► zero, optimizer, scheduler, precision, monitors, ours ─► whole    what there is
    reading ─► messages    from a file to the models, or to an error
    batch                  what the file leaves open
    documentation          docs/configuration.md, from the descriptions and tables of the blocks
"""

from __future__ import annotations

from offload.config.batch import Batch, effective, resolve_batch
from offload.config.blocks.block import Block
from offload.config.blocks.optimizer import OPTIMIZER_DEFAULTS, OptimizerBlock
from offload.config.blocks.precision import Fp16
from offload.config.blocks.scheduler import SCHEDULES, TORCH_SCHEDULES, SchedulerBlock
from offload.config.blocks.zero import Aio, ZeroOptimization
from offload.config.documentation import document
from offload.config.load import check_order, load_config, read_json, schedule_params
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
    "document",
    "effective",
    "load_config",
    "read_json",
    "resolve_batch",
    "schedule_params",
]
