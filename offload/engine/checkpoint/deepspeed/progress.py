"""Counters, schedule, loss scale and the user's own state of a DeepSpeed checkpoint, as an engine's snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from offload.engine.checkpoint.deepspeed.contents import DeepSpeedContents, attributes
from offload.engine.training.snapshot import Snapshot
from offload.errors import UsageError
from offload.fileio.plain_json import to_plain

_OF_DEEPSPEED = """module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments
lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config
ds_version checkpoint_parallel_dimensions universal_checkpoint_info num_experts ds_autoep_layers
sparse_tensor_module_names""".split()
"""Keys of a file of model states that are not the user's."""


def snapshot(contents: DeepSpeedContents) -> Snapshot:
    """Returns the counters, the schedule, the groups' numbers, the loss scale and the buffers.

    DeepSpeed saves neither random generators nor the position in the data, nor which class the schedule has: the
    snapshot has no generators, and its settings say no schedule and no optimizer.
    """
    model = contents.model
    steps = int(model.get("global_steps") or 0)
    accumulation = (model.get("ds_config") or {}).get("gradient_accumulation_steps")
    # DeepSpeed does not save its count of micro-batches. A checkpoint is saved between steps, so it follows.
    groups = [_numbers(group) for group in contents.groups]
    facts = {
        "global_steps": steps,
        "skipped_steps": int(model.get("skipped_steps") or 0),
        "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
        "global_samples": int(model.get("global_samples") or 0),
        "parameter_steps": [[parameter.steps] for parameter in contents.parameters.values()],
        "scheduler": _plain(model.get("lr_scheduler")),
        "loss_scale": _loss_scale(contents.loss_scaler),
        "client_state": {},
        "registered": [],
        "data": None,
        "groups": groups,
        "configured": [
            {**values, "lr": float(group.get("initial_lr", values["lr"]))}
            for values, group in zip(groups, contents.groups, strict=True)
        ],
        "settings": {},
    }
    buffers = {name: tensor.read() for name, tensor in contents.buffers.items()}
    return Snapshot(facts, {}, buffers)


def client_state(model: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns what the user has added to a file of model states, as JSON, and the names of what JSON cannot hold."""
    # DeepSpeed saves the user's values among its own keys.
    theirs = {str(key): value for key, value in model.items() if key not in _OF_DEEPSPEED}
    plain = {key: _plain(value) for key, value in theirs.items()}
    lost = [key for key, value in plain.items() if value is None and theirs[key] is not None]
    return {key: value for key, value in plain.items() if key not in lost}, lost


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of an optimizer's group, with lists for tuples."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, list | tuple) and key != "params" and all(_is_number(each) for each in value):
            found[key] = [float(each) for each in value]
        elif _is_number(value):
            found[key] = float(value)
    return found


def _is_number(value: Any) -> bool:
    """Returns whether a value is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """Returns a value as JSON; None if it contains objects that JSON cannot represent."""
    try:
        return to_plain(value, "a value", "")
    except UsageError:
        return None


def _loss_scale(scaler: Any) -> dict[str, Any] | None:
    """Returns the state of a dynamic loss scale as `LossScaler.state` does; None for a fixed one, or none."""
    found = attributes(scaler)
    # A fixed scale is the config's in both programs.
    if not found.get("dynamic") or "cur_iter" not in found:
        return None
    return {
        "scale": float(found["cur_scale"]),
        "steps": int(found["cur_iter"]),
        "overflowed_at": int(found["last_overflow_iter"]),
        "patience": int(found["cur_hysteresis"]),
    }
