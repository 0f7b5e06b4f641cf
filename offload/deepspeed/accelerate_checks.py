"""Errors for what accelerate loses, or cannot read, on the way to `deepspeed.initialize`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from offload.config.load import read_json
from offload.errors import ConfigError

_READER = "accelerate.utils.deepspeed"
"""The module that reads the config for accelerate, and for transformers' Trainer."""

_NO_PATH = "none"
"""What accelerate writes in place of a path that it does not know."""


def check_paths(content: Mapping[str, Any]) -> None:
    """Checks that accelerate knows the folder of each block that is on NVMe.

    `accelerate launch` hands its options and the keys of its YAML to the ranks in the environment, all but these paths.

    Args:
        content: the config.

    Raises:
        ConfigError: if a path is accelerate's word for none.
    """
    zero = content.get("zero_optimization")
    for name in ("offload_param", "offload_optimizer"):
        place = zero.get(name) if isinstance(zero, Mapping) else None
        if isinstance(place, Mapping) and place.get("device") == "nvme" and place.get("nvme_path") == _NO_PATH:
            raise ConfigError(
                f'zero_optimization.{name}.nvme_path is "{_NO_PATH}": accelerate launch does not pass {name}_nvme_path '
                "on to the ranks; name a JSON with the path by deepspeed_config_file, or set "
                f"ACCELERATE_DEEPSPEED_{name.upper()}_NVME_PATH=/mnt/nvme in the environment"
            )


def check_comments(error: json.JSONDecodeError) -> None:
    """Checks that an error of Python's JSON is not that of accelerate at a config that `offload.initialize` reads.

    Args:
        error: the error that ended a script.

    Raises:
        ConfigError: if it is, or if the config is no JSON at all.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        source = frame.f_locals.get("config_file_or_dict")
        if frame.f_globals.get("__name__") == _READER and isinstance(source, str):
            read_json(source)
            raise ConfigError(
                f"{source} has comments, or a comma after a last item: {error}. transformers and accelerate read the "
                "file themselves, as plain JSON; take these out"
            ) from error


def check_ranks() -> None:
    """Checks that accelerate divides the data among all ranks, if accelerate is in use.

    Raises:
        ConfigError: if accelerate counts other processes than there are ranks.
    """
    state = sys.modules.get("accelerate.state")
    known = {} if state is None else state.PartialState._shared_state
    kind, count = known.get("distributed_type"), known.get("num_processes")
    # Of a script with a loop of its own the state may be there too, and divides nothing.
    if kind != "DEEPSPEED" or not dist.is_initialized() or count == dist.get_world_size():
        return
    # Without an accelerator accelerate has no backend to ask for, and takes each rank for the only one.
    raise ConfigError(
        f"accelerate counts {count} process, and there are {dist.get_world_size()} ranks: each would train on all "
        "rows. On a CPU set use_cpu=True in TrainingArguments, or build "
        'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])'
    )
