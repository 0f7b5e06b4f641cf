"""The config of a DeepSpeed script, as this library reads it, and `deepspeed.runtime.config`.

accelerate and transformers read and change such a config before it reaches `deepspeed.initialize`. The checks at the
end of this module explain the keys that they lose or cannot read.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from offload.config import load_config, read_json, resolve_batch
from offload.config.blocks import TORCH_OPTIMIZERS
from offload.deepspeed.comm import get_world_size
from offload.engine.keywords import refuse
from offload.errors import ConfigError
from offload.notices import announce

DeepSpeedConfigError = ConfigError


class DeepSpeedConfig:
    """A checked config with its three batch sizes."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        """Reads and checks a config, a path or a dict; `mpu` and `mesh_device` are not supported."""
        refuse(mpu=mpu, mesh_param=mesh_device)
        self._param_dict = content_of(config)
        loaded = load_config(self._param_dict)
        batch = resolve_batch(loaded, get_world_size())
        self.train_batch_size = batch.total
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.gradient_clipping = loaded.gradient_clipping
        self.zero_config = loaded.zero_optimization
        self.zero_optimization_stage = loaded.zero_optimization.stage
        self.zero_enabled = loaded.zero_optimization.stage > 0


_engines = itertools.count()
"""Counts the engines of this process whose config names no run."""

_DOTTED = "zero_optimization."


def content_of(config: Any) -> dict[str, Any]:
    """Returns a copy of a config: a path, text in base64 or a mapping."""
    content = copy.deepcopy(dict(config)) if isinstance(config, Mapping) else read_json(config)
    # accelerate writes infinity to turn the lines off.
    if content.get("steps_per_print") == math.inf:
        del content["steps_per_print"]
    _check_paths(content)
    # trl adds keys with dots for the engine of a reference model; DeepSpeed ignores them.
    return {key: value for key, value in content.items() if not str(key).startswith(_DOTTED)}


def with_rate(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a config whose optimizer has a learning rate: DeepSpeed's default if the config sets none."""
    block = content.get("optimizer")
    if not isinstance(block, Mapping) or not isinstance(params := block.get("params", {}), Mapping):
        return content  # no optimizer, or an error that the config's reader explains
    kind = str(block.get("type", "AdamW"))
    rates = {"muon_lr": 0.02, "adam_lr": 3e-4} if kind.lower() == "muon" else {"lr": _rate_of(kind)}
    # "auto" is left for a Trainer to fill in, and is an error without one.
    missing = {} if "lr" in params else {key: rate for key, rate in rates.items() if key not in params and rate}
    if not missing:
        return content
    defaults = ", ".join(f"{key} {rate:g}" for key, rate in missing.items())
    announce(
        f"optimizer.params has no learning rate: {defaults}, DeepSpeed's default, where a group has none of its own"
    )
    return {**content, "optimizer": {**block, "params": {**params, **missing}}}


def _rate_of(kind: str) -> float | None:
    """Returns DeepSpeed's default learning rate for a type of optimizer; None for a type unknown to DeepSpeed."""
    kind = kind.removeprefix(TORCH_OPTIMIZERS)
    if kind.lower() in ("adam", "adamw", "lamb", "lion"):
        return 1e-3
    known = {name.lower(): value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    if kind.lower() not in known:
        return None
    rate = inspect.signature(known[kind.lower()]).parameters.get("lr")
    return None if rate is None else rate.default


def of_a_script(content: Mapping[str, Any], leaves: Iterable[str], trains: bool) -> dict[str, Any]:
    """Returns a config with defaults for the keys that a DeepSpeed script leaves out.

    Such a script saves checkpoints, and cannot resume from swap files: by default nothing is committed. Steps with
    non-finite gradients are skipped. The second engine of a process has its own swap files. `leaves` are the names of
    the modules that `set_z3_leaf_modules` has marked. A model that does not train has no optimizer.
    """
    result = copy.deepcopy(dict(content))
    # Without an optimizer, a schedule has no learning rate to set.
    if not trains:
        result.pop("scheduler", None)
    block = dict(result.get("offload") or {})
    # Commits would cost writes, and a killed run's swap files would block the next start.
    if "durability" not in block and "resume" not in block:
        block["durability"] = "none"
    # DeepSpeed skips such a step in each dtype, with a warning.
    block.setdefault("on_nonfinite", "skip")
    # Two engines cannot share swap files: a reference model of trl has its own.
    if "run" not in block and (number := next(_engines)):
        block["run"] = f"default{number + 1}"
    result["offload"] = block
    if marked := list(leaves):
        zero = dict(result.get("zero_optimization") or {})
        leaf = dict(zero.get("leaf_module") or {})
        leaf["names"] = [*leaf.get("names", []), *marked]
        result["zero_optimization"] = {**zero, "leaf_module": leaf}
    return result


_READER = "accelerate.utils.deepspeed"
"""The module that reads the config for accelerate, and for transformers' Trainer."""

_NO_PATH = "none"
"""Text that accelerate writes in place of an unknown path."""


def _check_paths(content: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if a block on NVMe has accelerate's text for an unknown path in place of a folder.

    `accelerate launch` passes its options and the keys of its YAML, but not these paths, to the ranks by the
    environment.
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
    """Raises `ConfigError` if accelerate could not read a config that `offload.initialize` reads."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        source = frame.f_locals.get("config_file_or_dict")
        if frame.f_globals.get("__name__") == _READER and isinstance(source, str):
            read_json(source)
            raise ConfigError(
                f"{source} has comments, or a comma after a last item: {error}. transformers and accelerate read the "
                "file themselves, as plain JSON; take these out"
            ) from error


def check_ranks() -> None:
    """Raises `ConfigError` if accelerate's number of processes, by which it divides the data, is not that of ranks."""
    state = sys.modules.get("accelerate.state")
    known = {} if state is None else state.PartialState._shared_state
    kind, count = known.get("distributed_type"), known.get("num_processes")
    # A script with its own loop may also have accelerate's state, but then the state divides no data.
    if kind != "DEEPSPEED" or not dist.is_initialized() or count == dist.get_world_size():
        return
    # Without an accelerator, accelerate requests no backend and treats each rank as the only process.
    raise ConfigError(
        f"accelerate counts {count} process, and there are {dist.get_world_size()} ranks: each would train on all "
        "rows. On a CPU set use_cpu=True in TrainingArguments, or build "
        'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])'
    )
