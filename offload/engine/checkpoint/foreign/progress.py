"""Counters, schedule, loss scale and the user's own state of another program, as an engine's snapshot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from offload.engine.checkpoint.foreign.contents import SavedContents
from offload.engine.training.snapshot import Snapshot
from offload.errors import UsageError
from offload.fileio.plain_json import to_plain


def snapshot(contents: SavedContents) -> Snapshot:
    """Returns the counters, the schedule, the groups' numbers, the loss scale and the buffers.

    Other programs save neither random generators nor the position in the data, nor which class the schedule has: the
    snapshot has no generators, and its settings say no schedule and no optimizer.
    """
    groups = [_numbers(group) for group in contents.groups]
    facts = {
        **dataclasses.asdict(contents.counters),
        "parameter_steps": [[parameter.steps] for parameter in contents.parameters.values()],
        "scheduler": _plain(contents.scheduler),
        "loss_scale": contents.loss_scale,
        "client_state": {},
        "registered": [],
        "data": None,
        "groups": groups,
        "configured": [
            {**values, "lr": float(group.get("initial_lr", values["lr"]))}
            for values, group in zip(groups, contents.groups, strict=True)
        ],
        "settings": {},
        **({"members": list(map(list, contents.members))} if len(contents.members) > 1 else {}),
    }
    buffers = {name: tensor.read() for name, tensor in contents.buffers.items()}
    return Snapshot(facts, {}, buffers)


def client_state(contents: SavedContents) -> tuple[dict[str, Any], list[str]]:
    """Returns what the user has added to a checkpoint, as JSON, and the names of what JSON cannot hold."""
    plain = {str(key): _plain(value) for key, value in contents.theirs.items()}
    lost = [str(key) for key, value in contents.theirs.items() if value is not None and plain[str(key)] is None]
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
