"""The choice between bf16 and fp32 for a config that sets no dtype.

A resumed run keeps its first dtype, whatever this machine would choose: its files are in this dtype.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload import precision
from offload.checkpoint.files import find, read_manifest
from offload.config import Config, load_config, read_json
from offload.distributed.process_group import as_the_first
from offload.swapper.memory.device import compute_device
from offload.swapper.store import rank_folders, run_status
from offload.swapper.store.inspection import look

logger = logging.getLogger("offload")


def auto_dtype(
    config: Mapping[str, Any] | str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Returns a copy of `config` with bf16 switched on or off, unless the config chooses a dtype itself.

    bf16 is switched on if this machine multiplies bf16 at least as fast as fp32: on GPUs with arithmetic for it, and on
    a processor according to one measurement of about 20 ms, which is cached. A resumed run keeps its dtype. With
    several ranks all must call this, and all receive the choice of rank 0. A config that chooses bf16, fp16 or
    torch_autocast is unchanged, and a config with "master": "bf24" gets bf16.

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
    # "bfloat16" is DeepSpeed's older name of the block; a config keeps the name that it has.
    name = "bfloat16" if "bfloat16" in content else "bf16"
    is_open = _keys_of(content, name).get("enabled") in (None, "auto")
    # A config without a dtype means fp32, so any other dtype was chosen.
    if not is_open or config.dtype != "fp32" or config.torch_autocast.enabled:
        return dict(content), None

    def choose() -> precision.Choice:
        begun = _of_run(config) if checkpoint is None else _of_checkpoint(checkpoint)
        if begun is not None:
            return precision.Choice(begun)
        if config.offload.master != "fp32":
            return precision.Choice("bf16")  # no other weights have such a master
        # The measurement takes time and is needed only for a new run.
        return precision.choose(compute_device(config.offload.device))

    # Ranks on different machines would choose differently, so rank 0 chooses for all.
    chosen = precision.Choice(*as_the_first(choose, "choose the dtype"))
    changed = {**content, name: _keys_of(content, name) | {"enabled": chosen.dtype == "bf16"}}
    if chosen.dtype == "fp16":  # the run or the checkpoint began in fp16
        changed["fp16"] = _keys_of(content, "fp16") | {"enabled": True}
    return changed, chosen.line


def _keys_of(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a copy of the block `name`; empty if the block is missing, null or "auto"."""
    block = content.get(name)
    return dict(block) if isinstance(block, Mapping) else {}


def _of_run(config: Config) -> str | None:
    """Returns the dtype of the run that `config` resumes; None for a new run."""
    if (
        config.offload.resume in ("never", "restart")
        or not config.drives
        or not run_status(config.drives, config.offload.run).exists
    ):
        return None
    manifests = (look(folder).manifest for folder in rank_folders(Path(config.drives[0]) / config.offload.run))
    return next((_in_mode(manifest.spec.fingerprint) for manifest in manifests if manifest is not None), None)


def _of_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the dtype of a checkpoint, or of the latest in a folder of checkpoints; None if there is none."""
    checkpoint = find(folder, None)
    return None if checkpoint is None else _in_mode(read_manifest(Path(checkpoint)).layout)


def _in_mode(layout: Mapping[str, Any]) -> str:
    return str(layout["mode"]).partition(" ")[0]
