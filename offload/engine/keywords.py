"""Keywords of DeepSpeed's calls that this library does not support. None, which scripts pass on, is accepted."""

from __future__ import annotations

import os
from typing import Any

from offload.errors import UsageError

_LAUNCHER = "the launcher connects the ranks (torchrun --master-port); leave this argument out"
_RANKS = "layers and sequences are not split over ranks; leave this argument out"
_CONFIG = 'the config places the weights ("offload_param"); leave this argument out'
_ADVICE = {
    "mpu": _RANKS,
    "mesh_param": _RANKS,
    "data_parallel_group": _RANKS,
    "distributed_port": _LAUNCHER,
    "dist_init_required": "expected None, True or False: initialize joins the ranks that torchrun has started",
    "remote_device": _CONFIG,
    "dtype": 'the config sets the dtype ("bf16", "fp16"); leave this argument out',
    "modifier_rank": "expected None or 0: the changes of rank 0 apply; make them there",
    "custom_load_fn": "weights are read by name; load others by offload.load_pretrained or load_state_dict",
    "allreduce_gradients": "gradients of all ranks are reduced at each boundary unless no_sync() delays the reduction",
    "release_loss": "the engine does not hold the loss; delete it yourself, or leave this argument out",
    "lr_kwargs": (
        "the schedule's step() is called without arguments; to pass arguments, step a schedule of your own, and pass "
        "no lr_scheduler"
    ),
}
_DEFAULTS = {"modifier_rank": 0, "allreduce_gradients": True, "release_loss": False}
"""DeepSpeed's defaults that describe what this library does anyway."""


def refuse(**given: Any) -> None:
    """Raises `UsageError` for the first keyword of DeepSpeed whose value asks for something that is not supported.

    Args:
        **given: keywords and the values that the caller received. None and DeepSpeed's own defaults are accepted.

    Raises:
        UsageError: with the keyword, its value and advice.
    """
    for name, value in given.items():
        if value is None or (name == "dist_init_required" and isinstance(value, bool)):
            continue
        if name in _DEFAULTS and value == _DEFAULTS[name]:
            continue
        if name == "distributed_port" and str(value) == os.environ.get("MASTER_PORT", "29500"):
            continue
        raise UsageError(f"{name}={value!r}: {_ADVICE[name]}")
