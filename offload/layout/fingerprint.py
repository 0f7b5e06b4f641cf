"""What a store or a checkpoint says of its model: enough to find every parameter in it without the model."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from offload.layout.flat_layout import Segment, UnitLayout, with_kept
from offload.layout.opaque_state import Kept
from offload.swapper.modes import Mode


def describe(layouts: Sequence[UnitLayout], mode: Mode, world_size: int) -> dict[str, Any]:
    """JSON of all that must be equal where a run goes on: mode, ranks, and where each parameter lies in its unit."""
    return {
        "mode": mode.name,
        "world_size": world_size,
        "units": [
            {
                "name": layout.name,
                "numel": layout.numel,
                "trainable": layout.trainable_stop,
                "parameters": [_described(segment) for segment in layout.segments],
            }
            for layout in layouts
        ],
    }


def _described(segment: Segment) -> dict[str, Any]:
    found = {
        "name": segment.name,
        "shape": list(segment.shape),
        "start": segment.start,
        "trainable": segment.trainable,
    }
    if segment.kept:
        found["packed"] = [[each.name, each.kind, list(each.shape)] for each in segment.kept]
    return found


def described_layouts(description: Mapping[str, Any]) -> tuple[UnitLayout, ...]:
    """The layouts that `describe` was given."""
    return tuple(
        with_kept(_described_layout(unit), {each["name"]: _kept(each) for each in unit["parameters"]})
        for unit in description["units"]
    )


def _kept(parameter: Mapping[str, Any]) -> tuple[Kept, ...]:
    return tuple(Kept(name, kind, tuple(shape)) for name, kind, shape in parameter.get("packed", ()))


def _described_layout(unit: Mapping[str, Any]) -> UnitLayout:
    return UnitLayout(
        unit["name"],
        tuple(
            Segment(each["name"], tuple(each["shape"]), each["start"], math.prod(each["shape"]), each["trainable"])
            for each in unit["parameters"]
        ),
        unit["numel"],
        unit["trainable"],
    )


def about(model: nn.Module) -> dict[str, Any]:
    """JSON for people and for `offload export`: what made the store, the model's class, its config, tied names."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("offload")
        return {"offload": version, **_of_model(model)}
    return _of_model(model)


def _of_model(model: nn.Module) -> dict[str, Any]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            tied[name] = other
    config: Any = getattr(model, "config", None)
    as_json = json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else None
    about_it = {"class": type(model).__name__, "config": as_json, "tied": tied}
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        about_it["generation_config"] = json.loads(generation.to_json_string())
    return about_it
