"""bf16 or fp32, where the config leaves it open; and a word where it says what this processor is slow at.

A run that goes on keeps the dtype that it was begun in, whatever this machine would choose: its bytes are of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload import precision
from offload.config import Config, load_config, read_json
from offload.engine.checkpoint.files import find, read_manifest
from offload.engine.distributed.rendezvous import as_the_first
from offload.precision import Choice
from offload.swapper.memory.device import compute_device
from offload.swapper.store import rank_folders, run_status
from offload.swapper.store.inspection import look

logger = logging.getLogger("offload")

_WARNED_FROM = 1.5
"""Times slower than fp32 from which on it is worth a warning: below it, the memory that is saved may be the reason."""
warned: set[str] = set()
"""Dtypes that this process has been warned of."""


def auto_dtype(
    config: Mapping[str, Any] | str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """A copy of `config`, a dict or a file's path, with bf16 switched on or off, where it does not say that itself.

    It is on where this machine multiplies bf16 at least as fast as fp32: on GPUs with arithmetic for it, and on a
    processor that was measured, once, in some 20 ms. A run that the config goes on with, or `checkpoint`, a folder as
    `save_checkpoint` makes it, keeps the dtype that it has. Of several ranks all call it, and get what the first one
    chooses. What says bf16, fp16 or torch_autocast stays as it is.
    """
    content = dict(config) if isinstance(config, Mapping) else read_json(config)
    content, line = settle(content, checkpoint)
    if line is not None:
        logger.info(line)
    return content


def settle(
    content: Mapping[str, Any], checkpoint: str | os.PathLike[str] | None = None
) -> tuple[dict[str, Any], str | None]:
    """What `auto_dtype` returns, and a line for people where that is not bf16."""
    config = load_config(content)
    if not _is_open(content, config):
        return dict(content), None
    chosen = Choice(*as_the_first(lambda: _choose(config, checkpoint), "choose the dtype"))
    return _with_dtype(content, chosen.dtype), chosen.line


def _choose(config: Config, checkpoint: str | os.PathLike[str] | None) -> Choice:
    begun = _of_checkpoint(checkpoint) if checkpoint is not None else _of_run(config)
    return precision.choose(compute_device(config.offload.device)) if begun is None else Choice(begun)


def _is_open(content: Mapping[str, Any], config: Config) -> bool:
    """Whether a config says nothing about its dtype, or "auto"."""
    said = content.get("bfloat16") or content.get("bf16") or {}
    return said.get("enabled") in (None, "auto") and config.dtype == "fp32" and not config.torch_autocast.enabled


def _with_dtype(content: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A copy of a config that leaves the dtype open, in bf16 or fp32, or in fp16 where a run was begun so."""
    name = "bfloat16" if "bfloat16" in content else "bf16"
    said = {name: dict(content.get(name) or {}) | {"enabled": dtype == "bf16"}}
    if dtype == "fp16":
        said["fp16"] = dict(content.get("fp16") or {}) | {"enabled": True}
    return {**content, **said}


def _of_run(config: Config) -> str | None:
    """The dtype of the run that `config` goes on with; None where it begins."""
    if (
        config.offload.resume in ("never", "restart")
        or not config.drives
        or not run_status(config.drives, config.offload.run).exists
    ):
        return None
    found = (look(folder).manifest for folder in rank_folders(Path(config.drives[0]) / config.offload.run))
    return next((_precision(each.spec.fingerprint) for each in found if each is not None), None)


def _of_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The same of a checkpoint, or of the latest in a folder of them; None where there is none."""
    found = find(folder, None)
    return None if found is None else _precision(read_manifest(Path(found)).layout)


def _precision(layout: Mapping[str, Any]) -> str:
    return str(layout["mode"]).partition(" ")[0]


# -- what was chosen by hand --------------------------------------------------------------------------


def warn_if_slow(config: Config, device: torch.device, goes_on: bool) -> None:
    """Say it once in a process where the dtype of `config` is one that this processor multiplies much slower."""
    dtype = config.torch_autocast.dtype if config.torch_autocast.enabled else config.dtype
    if dtype == "fp32" or device.type != "cpu" or dtype in warned:
        return
    warned.add(dtype)
    found = precision.rates(dtype)
    if found.slower >= _WARNED_FROM:
        block = "torch_autocast" if config.torch_autocast.enabled else dtype
        logger.warning("offload: %s", _slow(dtype, found.slower, block, goes_on and config.dtype != "fp32"))


def _slow(dtype: str, slower: float, block: str, kept: bool) -> str:
    """How much slower, and what to do; `kept` where a run that goes on must stay so."""
    cure = f'give --dtype fp32, or leave the block "{block}" out of the config'
    if kept:
        cure = "a run that goes on keeps its dtype; begin another in fp32, or go on with it on another machine"
    return f"{dtype} products are {slower:.1f} times slower than fp32 on this processor: {cure}"
