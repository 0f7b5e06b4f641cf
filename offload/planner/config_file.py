"""The config file of a plan: `offload plan --write`."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.planner.activations.formulas import need
from offload.planner.activations.kept import with_host_memory
from offload.planner.recommend import Planned
from offload.sizes import format_size, parse_size


def check_target(path: Path | None) -> None:
    """Raises `ConfigError` if `path` exists already or its folder does not exist."""
    if path is None:
        return
    if path.exists():
        raise ConfigError(f"{path} exists already; give another file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {path.absolute().parent}")


def ready(planned: Planned) -> dict[str, Any]:
    """Returns the plan's config with the planned budgets, so that a run of the config uses the planned memory.

    The device budget of a GPU is left out unless the config sets one: the first step measures the memory beside the
    activations. Where GPU and CPU share a memory both budgets are written, since a run sees that memory as free twice.
    """
    content = copy.deepcopy(dict(planned.content))
    block = content.setdefault("offload", {})
    if planned.memory.host and "host_memory" not in block:
        inputs = need(planned.shape, planned.load).host
        content = with_host_memory(content, planned.memory.host, inputs)
        block = content["offload"]
        block |= {name: format_exact(block[name]) for name in ("host_memory", "activation_memory") if name in block}
    if planned.hardware.on_cpu or planned.hardware.unified:
        block.setdefault("device_memory", format_exact(planned.memory.device))
    if planned.load.accumulation > 1:
        block["schedule"] = planned.choice.schedule
    if not planned.load.speculate:
        block["speculate"] = False
    content.setdefault("train_micro_batch_size_per_gpu", planned.load.batch)
    content.setdefault("gradient_accumulation_steps", planned.load.accumulation)
    return content


def format_exact(nbytes: int) -> int | str:
    """Returns a readable size if the text stands for exactly `nbytes`, else the number."""
    words = format_size(nbytes).replace(" ", "")
    return words if parse_size(words) == nbytes else nbytes


def write_config(planned: Planned, path: Path, extra: Mapping[str, Any]) -> None:
    """Writes the config of `ready`, updated by `extra`, to a new file. A failure leaves no file.

    Args:
        planned: the plan.
        path: the file; must not exist.
        extra: top-level keys on learning, such as "optimizer".

    Raises:
        OSError: the file exists or cannot be written; the message names it.
    """
    text = json.dumps({**ready(planned), **extra}, indent=2) + "\n"
    try:
        # Mode "x" never replaces a file that appeared since `check_target`.
        with open(path, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except OSError as error:
        raise OSError(f"cannot write the config {path}: {error.strerror}; give --write another file") from error
