"""The config of a script of DeepSpeed, as this library reads it."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.config import read_json
from offload.config.blocks import TORCH_OPTIMIZERS
from offload.deepspeed.accelerate_checks import check_paths
from offload.notices import announce

_engines = itertools.count()
"""Engines so far of this process whose config names no run."""

_DOTTED = "zero_optimization."


def content_of(config: Any) -> dict[str, Any]:
    """Returns a copy of a config that is given as a path, as text in base64 or as a mapping.

    Args:
        config: the config.

    Raises:
        ConfigError: if the config cannot be read, or lacks a path that accelerate has lost.
    """
    content = copy.deepcopy(dict(config)) if isinstance(config, Mapping) else read_json(config)
    # accelerate's word for no lines.
    if content.get("steps_per_print") == math.inf:
        del content["steps_per_print"]
    check_paths(content)
    # trl adds such keys for the engine of a reference; DeepSpeed knows none with a dot, and ignores them.
    return {key: value for key, value in content.items() if not str(key).startswith(_DOTTED)}


def with_rate(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a config whose optimizer has a learning rate: DeepSpeed's default where the config names none.

    Args:
        content: the config.
    """
    block = content.get("optimizer")
    if not isinstance(block, Mapping) or not isinstance(params := block.get("params", {}), Mapping):
        return content  # none, or an error that the config's reader explains
    kind = str(block.get("type", "AdamW"))
    rates = {"muon_lr": 0.02, "adam_lr": 3e-4} if kind.lower() == "muon" else {"lr": _rate_of(kind)}
    # "auto" is left to a Trainer, and stays an error where none fills it in.
    missing = {} if "lr" in params else {key: rate for key, rate in rates.items() if key not in params and rate}
    if not missing:
        return content
    told = ", ".join(f"{key} {rate:g}" for key, rate in missing.items())
    announce(f"optimizer.params has no learning rate: {told}, DeepSpeed's default, where a group has none of its own")
    return {**content, "optimizer": {**block, "params": {**params, **missing}}}


def _rate_of(kind: str) -> float | None:
    """Returns the default learning rate of DeepSpeed for a type of optimizer; None for one that DeepSpeed has not."""
    kind = kind.removeprefix(TORCH_OPTIMIZERS)
    if kind.lower() in ("adam", "adamw", "lamb", "lion"):
        return 1e-3
    known = {name.lower(): each for name, each in vars(torch.optim).items() if isinstance(each, type)}
    if kind.lower() not in known:
        return None
    rate = inspect.signature(known[kind.lower()]).parameters.get("lr")
    return None if rate is None else rate.default


def of_a_script(content: Mapping[str, Any], leaves: Iterable[str], trains: bool) -> dict[str, Any]:
    """Returns a config with what a script of DeepSpeed leaves open.

    Such a script saves checkpoints, and cannot resume from swap files: nothing is committed unless the config says so.
    A step whose gradients are not finite is skipped.
    The second engine of a process has swap files beside those of the first.

    Args:
        content: the config.
        leaves: names of the modules that `set_z3_leaf_modules` has marked.
        trains: False for a model without an optimizer.
    """
    result = copy.deepcopy(dict(content))
    # A schedule without an optimizer has nothing to set.
    if not trains:
        result.pop("scheduler", None)
    block = dict(result.get("offload") or {})
    # Commits would cost writes, and a killed run would be in the way of the next start.
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
