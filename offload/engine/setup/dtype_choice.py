"""Choice between bf16 and fp32 if the config sets no dtype, and a warning if its dtype is slow on this machine.

A resumed run keeps the dtype that it was begun in, whatever this machine would choose: its files are in this dtype.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload import precision
from offload.checkpoint.files import find, read_manifest
from offload.config import Config, load_config, read_json
from offload.distributed.process_group import as_the_first
from offload.precision import Choice
from offload.swapper.memory.device import compute_device
from offload.swapper.store import rank_folders, run_status
from offload.swapper.store.inspection import look

logger = logging.getLogger("offload")

_WARNED_FROM = 1.5
"""Warning threshold, as a multiple of the time of fp32; below it, the memory saved may be the reason for the choice."""
warned: set[str] = set()
"""Dtypes that this process has already been warned of."""


def auto_dtype(
    config: Mapping[str, Any] | str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Returns a copy of `config` with bf16 switched on or off, unless the config chooses a dtype itself.

    bf16 is switched on if this machine multiplies bf16 at least as fast as fp32: on GPUs with arithmetic for it, and on
    a processor according to one measurement of about 20 ms, which is cached. A resumed run keeps its dtype. With
    several ranks all must call this, and all receive the choice of rank 0. A config that chooses bf16, fp16 or
    torch_autocast is unchanged, and one whose "master" is bf24 gets bf16.

    Args:
        config: The config as a dict, or the path of a JSON file.
        checkpoint: Folder of a checkpoint, or of several, as `save_checkpoint` makes it; its dtype is kept.
    """
    content = dict(config) if isinstance(config, Mapping) else read_json(config)
    content, line = settle(content, checkpoint)
    if line is not None:
        logger.info(line)
    return content


def settle(
    content: Mapping[str, Any], checkpoint: str | os.PathLike[str] | None = None
) -> tuple[dict[str, Any], str | None]:
    """Returns the result of `auto_dtype`, and a line for the user if fp32 was chosen for this machine, else None."""
    config = load_config(content)
    if not _is_open(content, config):
        return dict(content), None
    # Ranks on different machines would choose differently, so rank 0 chooses for all.
    chosen = Choice(*as_the_first(lambda: _choose(config, checkpoint), "choose the dtype"))
    return _with_dtype(content, chosen.dtype), chosen.line


def _choose(config: Config, checkpoint: str | os.PathLike[str] | None) -> Choice:
    """Returns the dtype of the checkpoint or of the run, or else the choice for this machine."""
    # The measurement takes time and is needed only for a new run.
    begun = _of_checkpoint(checkpoint) if checkpoint is not None else _of_run(config)
    if begun is None and config.offload.master != "fp32":
        return Choice("bf16")  # no other weights have such a master
    return precision.choose(compute_device(config.offload.device)) if begun is None else Choice(begun)


def _is_open(content: Mapping[str, Any], config: Config) -> bool:
    """Returns whether a config sets no dtype, or "auto"."""
    block = _keys_of(content, "bfloat16") or _keys_of(content, "bf16")
    # A config without a dtype means fp32, so any other dtype was chosen.
    return block.get("enabled") in (None, "auto") and config.dtype == "fp32" and not config.torch_autocast.enabled


def _keys_of(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a copy of the block `name`; empty if the block is missing, null or "auto"."""
    block = content.get(name)
    return dict(block) if isinstance(block, Mapping) else {}


def _with_dtype(content: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns a copy of a config with an open dtype set to bf16 or fp32, or to fp16 if the run was begun so."""
    # "bfloat16" is DeepSpeed's older name of the block; a config keeps the name that it has.
    name = "bfloat16" if "bfloat16" in content else "bf16"
    block = {name: _keys_of(content, name) | {"enabled": dtype == "bf16"}}
    if dtype == "fp16":
        block["fp16"] = _keys_of(content, "fp16") | {"enabled": True}
    return {**content, **block}


def _of_run(config: Config) -> str | None:
    """Returns the dtype of the run that `config` resumes; None for a new run."""
    if (
        config.offload.resume in ("never", "restart")
        or not config.drives
        or not run_status(config.drives, config.offload.run).exists
    ):
        return None
    found = (look(folder).manifest for folder in rank_folders(Path(config.drives[0]) / config.offload.run))
    return next((_precision(each.spec.fingerprint) for each in found if each is not None), None)


def _of_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the dtype of a checkpoint, or of the latest in a folder of checkpoints; None if there is none."""
    found = find(folder, None)
    return None if found is None else _precision(read_manifest(Path(found)).layout)


def _precision(layout: Mapping[str, Any]) -> str:
    """Returns the dtype in the name of a mode."""
    return str(layout["mode"]).partition(" ")[0]


# -- explicitly chosen dtypes -------------------------------------------------------------------------


def warn_if_slow(config: Config, device: torch.device, goes_on: bool) -> None:
    """Warns once in a process if this machine is slow in the config's dtype.

    A processor is measured, and slow if it multiplies the dtype much slower than fp32. A GPU is asked whether it has
    arithmetic in bf16.

    Args:
        config: The whole config.
        device: The compute device.
        goes_on: True if a run is resumed, whose dtype cannot change.
    """
    dtype = config.torch_autocast.dtype if config.torch_autocast.enabled else config.dtype
    # Each dtype is worth one warning.
    if dtype == "fp32" or dtype in warned:
        return
    warned.add(dtype)
    if device.type == "cuda":
        if dtype == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            logger.warning("offload: %s", _emulated(torch.cuda.get_device_name(device), config, goes_on))
        return
    found = precision.rates(dtype)
    if found.slower >= _WARNED_FROM:
        block = "torch_autocast" if config.torch_autocast.enabled else dtype
        logger.warning("offload: %s", _slow(dtype, found.slower, block, goes_on and config.dtype != "fp32"))


def _emulated(gpu: str, config: Config, goes_on: bool) -> str:
    """Returns the warning for a GPU without arithmetic in bf16, with its advice."""
    # Whoever reads this knows which of the ways is theirs; the config that arrives here does not tell.
    cure = (
        'choose fp16 where bf16 was chosen: "fp16": {"enabled": true} in the config, fp16=True in TrainingArguments, '
        'mixed_precision="fp16" in Accelerator, dtype="fp16" in initialize; offload train: --dtype fp16'
    )
    if config.torch_autocast.enabled:
        cure = 'leave the block "torch_autocast" out of the config, and set "fp16": {"enabled": true}'
    elif goes_on:
        cure = "a resumed run keeps its dtype; start another run in fp16, or resume this run on a newer GPU"
    return f"{gpu} has no arithmetic in bf16, which torch emulates slowly: {cure}"


def _slow(dtype: str, slower: float, block: str, kept: bool) -> str:
    """Returns the warning with its advice.

    Args:
        dtype: The slow dtype.
        slower: Time as a multiple of that of fp32.
        block: Block of the config that chooses the dtype.
        kept: True if a resumed run must keep the dtype.
    """
    cure = f'leave the block "{block}" out of the config'
    if block == dtype:
        cure = (
            f'leave out what chose it: the block "{dtype}" of the config, {dtype}=True of TrainingArguments, '
            f'mixed_precision="{dtype}" of Accelerator, dtype="{dtype}" of initialize; offload train: --dtype fp32'
        )
    if kept:
        cure = "a resumed run keeps its dtype; start another run in fp32, or resume this run on another machine"
    return f"{dtype} products are {slower:.1f} times slower than fp32 on this processor: {cure}"
