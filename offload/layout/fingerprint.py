"""Description of a model in a store or checkpoint, sufficient to find every parameter without the model."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.errors import StoreError
from offload.kernels.blocks import BLOCK_FORMATS
from offload.layout.flat_layout import ParameterSegment, StateField, UnitLayout, is_kind, with_kept
from offload.layout.modes import MODES, Mode
from offload.layout.tiers import GradientDtypes, partitions
from offload.states import State
from offload.swapper.store.format import StoreSpec


def describe(layouts: Sequence[UnitLayout], mode: Mode, world_size: int, replicas: int = 1) -> dict[str, Any]:
    """Returns, as JSON, all facts that must be equal when a run resumes: mode, ranks and the layout of every unit."""
    forms = {segment.form for layout in layouts for segment in layout.segments if segment.form}
    in_fp32 = sum(len(layout.segments) for layout in layouts if layout.in_fp32)
    return {
        "mode": mode.name,
        "world_size": world_size,
        # Written only for several replicas: descriptions of other stores have no such key.
        **({} if replicas == 1 else {"replicas": replicas}),
        # Written for a message, and only if there are blocks: descriptions of other stores have no such key.
        **({"frozen": "+".join(sorted(forms))} if forms else {}),
        # Likewise.
        **({"in_fp32": in_fp32} if in_fp32 else {}),
        "units": [
            {
                "name": layout.name,
                "numel": layout.numel,
                "trainable": layout.trainable_stop,
                # Written only for rules of matrices: descriptions of other stores have no such key.
                **({} if layout.matrices_start is None else {"matrices": layout.matrices_start}),
                # Likewise: written only for units whose weights stay in fp32.
                **({"in_fp32": True} if layout.in_fp32 else {}),
                # Likewise: written only for units whose experts ranks own.
                **({} if layout.ep_size == 1 else {"ep_size": layout.ep_size}),
                # Likewise: written only for units that stay in the model's own files.
                **({"in_files": True} if layout.in_files else {}),
                "parameters": [_described(segment) for segment in layout.segments],
            }
            for layout in layouts
        ],
    }


_ANY_GRADIENTS = GradientDtypes(torch.float32, torch.float32, torch.float32)
"""A store with two slots keeps every state, but no gradients, so any dtypes of gradients will do."""


def store_specs(
    layouts: Sequence[UnitLayout], mode: Mode, world_size: int, about: Mapping[str, Any] = {}, replicas: int = 1
) -> list[StoreSpec]:
    """Returns the contents of the durable store of each rank of a replica, whatever the tiers of its states are."""
    fingerprint = describe(layouts, mode, world_size, replicas)
    specs = []
    for rank in range(world_size):
        parts = partitions(layouts, mode, _ANY_GRADIENTS, rank, world_size, alone=world_size == 1)
        rows: list[Mapping[State, int]] = [
            {} if layout.in_files else {state: nbytes for state, nbytes in row.items() if state is not State.GRAD}
            for layout, row in zip(layouts, parts.nbytes, strict=True)
        ]
        specs.append(StoreSpec(tuple(rows), 2, fingerprint, about, parts.frozen))
    return specs


def _described(segment: ParameterSegment) -> dict[str, Any]:
    entry = {"name": segment.name, "shape": list(segment.shape), "start": segment.start, "trainable": segment.trainable}
    # Written only for optimizers of torch: descriptions of other stores have no such key.
    if segment.kept:
        entry["packed"] = _fields(segment.kept)
    # Likewise: written only for frozen weights that are stored as blocks.
    if segment.form:
        entry |= {"blocks": segment.form, "numel": segment.numel}
    # Likewise: written only for weights that are stored as the bytes of their inner tensors.
    if segment.inner:
        entry |= {"inner": _fields(segment.inner), "kind": segment.kind, "numel": segment.numel}
    # Likewise: written only for the rows of stacked experts, and for pieces of tables.
    if segment.rows is not None:
        entry |= {"stack": segment.stack, "rows": [segment.rows.start, segment.rows.stop]}
    elif segment.stack:
        entry |= {"stack": segment.stack, "row": segment.row}
    return entry


def _fields(fields: Sequence[StateField]) -> list[list[Any]]:
    return [[field.name, field.kind, list(field.shape)] for field in fields]


def described_layouts(description: Mapping[str, Any], part: bool = False) -> tuple[UnitLayout, ...]:
    """Returns the layouts from which `describe` made `description`.

    Raises `StoreError` if the layouts describe shards of tensor parallelism or stages of a pipeline; or if no engine
    makes such layouts, as in a manifest from somebody else.
    """
    mode = described_mode(description)
    grid = None if part else description.get("tensor_parallel")
    if grid is not None:
        raise StoreError(
            f"these files have part {grid['coordinate'] + 1} of {grid['size']} of each weight that tensor "
            f"parallelism divides, and nothing puts the parts together here: {_WHOLE}"
        )
    pipeline = None if part else description.get("pipeline")
    if pipeline is not None:
        raise StoreError(
            f"these files have the layers of place {pipeline['position'] + 1} of {pipeline['size']} in a "
            f"pipeline, and nothing puts the stages together here: {_WHOLE}"
        )
    ranks = description["world_size"]
    layouts = tuple(map(_described_layout, description["units"]))
    _check_geometry(layouts, mode, ranks)
    return tuple(
        with_kept(
            layout, {parameter["name"]: _read(parameter.get("packed", ())) for parameter in unit["parameters"]}, ranks
        )
        for layout, unit in zip(layouts, description["units"], strict=True)
    )


def described_mode(description: Mapping[str, Any]) -> Mode:
    """Returns the mode that a description names; raises `StoreError` if there is no such mode."""
    for name in ("mode", "world_size", "units"):
        if name not in description:
            raise StoreError(f"the description of the model has no {name!r}, so it is damaged, or made up")
    if (mode := MODES.get(description["mode"])) is None:
        raise StoreError(
            f"the states are in mode {description['mode']!r}, which this version does not know: read them with the "
            "version that wrote them"
        )
    return mode


def _check_geometry(layouts: Sequence[UnitLayout], mode: Mode, ranks: int) -> None:
    """Raises `StoreError` if parameters overlap, or do not lie in their unit as `arrange` lays them out.

    The caller has checked the kinds of all values. This function checks their sizes.
    """
    rows = Counter(segment.stack for layout in layouts for segment in layout.segments)
    table_stops: dict[str, int] = {}
    names = Counter(segment.name for layout in layouts for segment in layout.segments)
    for layout in layouts:
        if layout.trainable_stop > layout.numel or layout.trainable_stop % ranks or layout.numel % ranks:
            raise _no_layout(layout.name, f"{layout.trainable_stop} of {layout.numel} elements train, of {ranks} ranks")
        if not 0 <= layout.rest_stop <= layout.trainable_stop:
            raise _no_layout(layout.name, f"its matrices begin at {layout.rest_stop}")
        groups = {segment.rows for segment in layout.segments}
        if layout.ep_size != 1 and (len(groups) != layout.ep_size or None in groups or layout.numel % len(groups)):
            raise _no_layout(layout.name, f"{len(groups)} groups of experts for {layout.ep_size} owners")
        end = 0
        for segment in layout.segments:
            first, last = (0, layout.trainable_stop) if segment.trainable else (layout.trainable_stop, layout.numel)
            need = segment.value_numel
            if segment.form:
                form = BLOCK_FORMATS.get(segment.form)
                itemsize = layout.mode_in(mode).weight_dtype.itemsize
                need = -1 if form is None else -(-form.stored_nbytes(need) // itemsize)
            # Blocks may take more memory than they need. The bytes of another library take the recorded size.
            fits = 0 <= need <= segment.numel if segment.form else bool(segment.inner) or segment.numel == need
            apart = first <= segment.start >= end and segment.stop <= last
            if not (fits and apart and names[segment.name] == 1):
                where = f"{segment.name} of shape {list(segment.shape)} at {segment.start} to {segment.stop}"
                raise _no_layout(layout.name, where)
            if segment.rows is not None:
                start, stop = segment.rows.start, segment.rows.stop
                whole_rows = segment.stack and segment.shape and segment.shape[0] == len(segment.rows) > 0
                if not whole_rows or start != table_stops.get(segment.stack, 0):
                    raise _no_layout(layout.name, f"rows {start} to {stop} of {segment.stack}")
                table_stops[segment.stack] = stop
            elif segment.stack and segment.row >= rows[segment.stack]:
                raise _no_layout(layout.name, f"row {segment.row} of {rows[segment.stack]} of {segment.stack}")
            end = segment.stop


def _no_layout(unit: str, what: str) -> StoreError:
    return StoreError(f"the description of unit {unit or 'the root'} is damaged, or made up: {what}")


_WHOLE = (
    "give the folder of the whole checkpoint, which has a folder for each part; of swap files resume the run, and call "
    "engine.save_pretrained or save_checkpoint"
)
"""Advice for a description of one part of a grid."""


def _read(fields: Iterable[Any]) -> tuple[StateField, ...]:
    states = tuple(StateField(name, kind, tuple(shape)) for name, kind, shape in fields)
    for field in states:
        sizes = all(type(size) is int and 0 <= size < 1 << 48 for size in field.shape)
        known = isinstance(field.kind, str) and isinstance(field.name, str) and is_kind(field.kind)
        if not (known and sizes):
            raise _no_layout("", f"a state {field.name} of {field.kind} of shape {list(field.shape)}")
    return states


def _described_layout(unit: Mapping[str, Any]) -> UnitLayout:
    return UnitLayout(
        unit["name"],
        tuple(
            ParameterSegment(
                parameter["name"],
                tuple(parameter["shape"]),
                parameter["start"],
                parameter.get("numel", math.prod(parameter["shape"])),
                parameter["trainable"],
                form=parameter.get("blocks", ""),
                inner=_read(parameter.get("inner", ())),
                stack=parameter.get("stack", ""),
                row=parameter.get("row", 0),
                kind=parameter.get("kind", ""),
                rows=range(*parameter["rows"]) if "rows" in parameter else None,
            )
            for parameter in unit["parameters"]
        ),
        unit["numel"],
        unit["trainable"],
        unit.get("matrices"),
        unit.get("in_fp32", False),
        unit.get("ep_size", 1),
        unit.get("in_files", False),
    )


def about(model: nn.Module) -> dict[str, Any]:
    """Returns descriptive JSON for people and for `offload export`: version, model class, model config, tied names."""
    version = _own_version()
    return _of_model(model) if version is None else {"offload": version, **_of_model(model)}


@functools.cache  # each start of an engine asks, and the package's metadata take a millisecond to parse
def _own_version() -> str | None:
    """Returns the version of this package; None for a source checkout that was never installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("offload")
    return None


def _loader_ties(model: nn.Module) -> set[str]:
    """Returns the names of weights that transformers ties itself when it loads a model whose config has them tied."""
    names: set[str] = set()
    for path, module in model.named_modules():
        # Up to transformers 4 the attribute is a list of patterns of names. A wrapper such as peft's returns its
        # model's list.
        of_class = getattr(type(module), "_tied_weights_keys", None) or ()
        own = vars(module).get("all_tied_weights_keys") or ()
        for name, _ in module.named_parameters(remove_duplicate=False) if of_class or own else ():
            if name in own or any(re.search(pattern, name) for pattern in of_class):
                names.add(f"{path}.{name}" if path else name)
    return names


def _tied_buffers(model: nn.Module) -> dict[str, str]:
    """Returns the further names of persistent buffers, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                whole = f"{path}.{name}" if path else name
                if (first_name := first.setdefault(id(buffer), whole)) != whole:
                    aliases[whole] = first_name
    return aliases


def _of_model(model: nn.Module) -> dict[str, Any]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(parameter), name)
        # The store has a segment only for the first name of a tied parameter. Export writes the other names from this
        # table.
        if first_name != name:
            tied[name] = first_name
    config: Any = getattr(model, "config", None)
    as_json = json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else None
    # The result may contain the first name of a parameter: some heads come before the embedding to which they are tied.
    loader_ties = sorted(_loader_ties(model) & (tied.keys() | set(tied.values())))
    about_it = {
        "class": type(model).__name__,
        "config": as_json,
        "tied": tied,
        "loader_ties": loader_ties,
        "tied_buffers": _tied_buffers(model),
    }
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        about_it["generation_config"] = json.loads(generation.to_json_string())
    return about_it
