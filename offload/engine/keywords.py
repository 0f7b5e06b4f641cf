"""Converts keywords of `initialize` into a config, and refuses unsupported keywords of DeepSpeed's calls."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import nn

from offload.config.blocks import short_dtype
from offload.config.load import read_json
from offload.errors import ConfigError, UsageError

# -- refused keywords ----------------------------------------------------------------------------------
#
# None is always accepted, because scripts pass it on.


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
"""Defaults of DeepSpeed that are accepted, because this library always does the same."""


def refuse(**keywords: Any) -> None:
    """Raises `UsageError` for the first keyword of DeepSpeed whose value asks for something that is not supported.

    None and DeepSpeed's own defaults are accepted.
    """
    for name, value in keywords.items():
        if value is None or (name == "dist_init_required" and isinstance(value, bool)):
            continue
        if name in _DEFAULTS and value == _DEFAULTS[name]:
            continue
        if name == "distributed_port" and str(value) == os.environ.get("MASTER_PORT", "29500"):
            continue
        raise UsageError(f"{name}={value!r}: {_ADVICE[name]}")


# -- plain config --------------------------------------------------------------------------------------
#
# A loop of plain PyTorch may give `initialize` keywords instead of a config. They are converted into a config.


class PlainKeywords(TypedDict, total=False):
    """Keywords that replace a config. If a config is given too, it must agree with them."""

    weights: str
    """Tier of the weights: "none" (the device), "cpu" or "nvme"."""
    states: str
    """Tier of the optimizer states and fp32 masters: "none", "cpu" or "nvme"."""
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    """Folder of the swap files, or one for each drive."""
    host_memory: int | str
    """Bytes of host memory, as a number or text such as "32GiB"."""
    device_memory: int | str
    """Bytes of device memory, or a text such as "50%": that share of the weights stays on the device."""
    dtype: str | torch.dtype
    """"bf16", "fp16" or "fp32"; by default the dtype of the model's parameters."""
    gradient_accumulation_steps: int
    """Micro-batches of a step."""


_KEYS = {
    "weights": ("zero_optimization", "offload_param", "device"),
    "states": ("zero_optimization", "offload_optimizer", "device"),
    "path": ("offload", "nvme_path"),
    "host_memory": ("offload", "host_memory"),
    "device_memory": ("offload", "device_memory"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
}
"""For each keyword except `dtype`, the path of the config key that it sets."""
_TIERS = ("none", "cpu", "nvme")
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def plain_config(model: Any, config: Any, keywords: Mapping[str, Any]) -> Any:
    """Returns the given config, which may be None, with the settings of the keywords of `PlainKeywords` added.

    Raises:
        ConfigError: if a keyword and the config differ (the message names both), if a keyword has an invalid value, or
            if a tier on drives has no path.
        UsageError: if there is no such keyword.
    """
    if unknown := sorted(keywords.keys() - PlainKeywords.__annotations__.keys()):
        raise UsageError(
            f"initialize got the keyword {unknown[0]!r}, expected some of {', '.join(PlainKeywords.__annotations__)}"
        )
    # A caller that received no value for a keyword passes None on.
    keywords_given = {name: value for name, value in keywords.items() if value is not None}
    if not keywords_given:
        return config
    _check_tiers(keywords_given, config)
    # A copy down to the blocks: the caller's dict must not change.
    content: dict[str, Any] = {}
    if config is not None:
        content = _blocks_of(config if isinstance(config, Mapping) else read_json(config))
    dtype = keywords_given.pop("dtype", None)
    # A given config sets the dtype and the clip in its own blocks; a loop of plain PyTorch clips nothing by itself.
    if config is None:
        content["gradient_clipping"] = 0.0
        dtype = dtype or _of_model(model)
    for name, value in keywords_given.items():
        if name == "path":
            paths = [value] if isinstance(value, str | os.PathLike) else list(value)
            value = [os.fspath(path) for path in paths]
        _put(content, _KEYS[name], name, value)
    if dtype is not None:
        wanted = _DTYPES.get(dtype, dtype) if isinstance(dtype, torch.dtype) else short_dtype(dtype)
        if wanted not in _DTYPES.values():
            raise ConfigError(f'dtype must be "bf16", "fp16" or "fp32", got {dtype!r}')
        for precision in ("bf16", "fp16"):
            _put(content, (precision, "enabled"), "dtype", precision == wanted, said=str(wanted))
    return content


def _check_tiers(keywords: Mapping[str, Any], config: Any) -> None:
    """Raises `ConfigError`, with the name of the keyword, if a value is no tier, or if "nvme" lacks its folder."""
    for name in ("weights", "states"):
        tier = keywords.get(name, "none")
        if tier not in _TIERS:
            raise ConfigError(f'{name} must be "none", "cpu" or "nvme", got {tier!r}')
        if tier == "nvme" and "path" not in keywords and config is None:
            raise ConfigError(f'{name}="nvme" needs path=, the folder of the swap files on the drive')


def _blocks_of(block: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _blocks_of(value) if isinstance(value, Mapping) else value for name, value in block.items()}


def _put(content: dict[str, Any], key: Sequence[str], name: str, value: Any, said: str | None = None) -> None:
    """Sets a key of the config to `value`. Raises `ConfigError` if the config gives the key another value."""
    block, dotted = content, ".".join(key)
    for part in key[:-1]:
        block = block.setdefault(part, {})
        if not isinstance(block, dict):
            raise ConfigError(f"the config has no block for {dotted}, but {block!r}: make it a dict")
    # As in transformers, "auto" in a config leaves the value to the keyword.
    before = block.setdefault(key[-1], value)
    same = before == value or [before] == value or before == "auto"
    if not same:
        raise ConfigError(
            f"initialize got {name}={value if said is None else said!r} and a config in which {dotted} is {before!r}: "
            "leave one of them out"
        )
    block[key[-1]] = value


def _of_model(model: Any) -> str:
    """Returns the dtype of the model's floating-point parameters: the widest, if there are several."""
    # If the model has several dtypes, the widest holds all values.
    dtypes = {parameter.dtype for parameter in model.parameters()} if isinstance(model, nn.Module) else set()
    # No mode trains float64: such a model trains in fp32, and a notice reports it.
    names = {_DTYPES.get(dtype, "fp32") for dtype in dtypes if dtype in _DTYPES or dtype is torch.float64} or {"fp32"}
    return "fp32" if len(names) > 1 else names.pop()
