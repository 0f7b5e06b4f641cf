"""Comparison of a checkpoint with the engine that is about to load it: names, shapes, forms, modes, groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from offload.engine.checkpoint.load import FoundCheckpoint, LoadOptions
from offload.engine.checkpoint.resharding import all_places, difference, parameter_shapes
from offload.engine.params.local_shards import LocalShards
from offload.errors import StoreError
from offload.layout.flat_layout import Segment, StateField, UnitLayout
from offload.layout.modes import MOMENT_BLOCK, Mode
from offload.layout.optimizer_states import states_of
from offload.sizes import count_of

_ITERATION = "last_batch_iteration"
"""Key of DeepSpeed's schedules, and of those here with the same names."""


def check_fits(
    found: FoundCheckpoint,
    held: LocalShards,
    options: LoadOptions,
    names: set[str],
    buffers: Mapping[str, torch.Tensor],
) -> None:
    """Checks that the checkpoint fits this model and, if optimizer states are loaded, this mode.

    Args:
        found: The checkpoint.
        held: This rank's partitions.
        options: Choice of what to load.
        names: Names of all parameters of the model, tied ones included.
        buffers: Persistent buffers of the model.

    Raises:
        StoreError: If names, shapes, mode or optimizer states differ.
    """
    what = f"the checkpoint {found.folder}"
    shapes = parameter_shapes((s.name, s) for layout in held.layouts for s in layout.segments)
    # Frozen weights that were left out of the save are not missing: they keep their values.
    absent: set[str] = set()
    if not found.manifest.frozen:
        absent = {s.parameter for layout in found.layouts for s in layout.segments if not s.trainable}
        absent |= {name for name, first in found.manifest.about["tied"].items() if first in absent}
    theirs = parameter_shapes((name, segment) for name, (_, segment) in found.saved.items())
    mine = {name: shape for name, shape in shapes.items() if name not in absent or name in theirs}
    mine |= {name: tuple(value.shape) for name, value in buffers.items()}
    theirs |= {name: tuple(value.shape) for name, value in found.progress.buffers.items()}
    difference(mine, names | buffers.keys(), theirs).check(options.strict, what)
    # Masters and moments of another form are converted.
    if options.states and found.mode.optimizer != held.mode.optimizer:
        raise _other_optimizer(found, held, what)
    found = found.for_rows(held.layouts)
    _check_forms(found, held, what)
    if options.states and held.mode.in_blocks and found.mode.in_blocks:
        _check_blocks(found, held, what)
    both = ((layout, segment) for layout in held.layouts for segment in layout.segments if options.states)
    for layout, segment in both:
        # A parameter that the checkpoint does not contain keeps its states, so it cannot differ.
        kept, now = _states_of(found, segment), _fields(held.mode, layout, segment)
        if kept is not None and kept != now:
            raise StoreError(
                f"{what} contains the states {_names(kept)} of {segment.name}, this optimizer keeps "
                f"{_names(now)}: load the weights alone (load_optimizer_states=False), or give the same "
                "optimizer"
            )


def _other_optimizer(found: FoundCheckpoint, held: LocalShards, what: str) -> StoreError:
    """Returns the error for a checkpoint of another optimizer, or of none, as a folder that has weights alone."""
    if not _all_states(found.mode, found.layouts):
        kept = f"this engine's optimizer keeps {_names(_all_states(held.mode, held.layouts))}"
        return StoreError(
            f"{what} contains no optimizer states, {kept}: load the weights alone (load_module_only=True)"
        )
    return StoreError(
        f"{what} was saved in mode {found.mode.name}, this engine is in mode {held.mode.name}, so their optimizer "
        "states differ: load the weights alone (load_optimizer_states=False), or give the same optimizer"
    )


def _all_states(mode: Mode, layouts: Sequence[UnitLayout]) -> Collection[str]:
    """Returns the names of the optimizer states of all parameters that train."""
    trained = ((layout, each) for layout in layouts for each in layout.segments if each.trainable)
    return dict.fromkeys(name for layout, segment in trained for name in _fields(mode, layout, segment))


def _check_forms(found: FoundCheckpoint, held: LocalShards, what: str) -> None:
    """Raises `StoreError` if a frozen weight of the checkpoint is stored in another form than in this engine."""
    for segment in (segment for layout in held.layouts for segment in layout.segments):
        saved = [place for _, place in all_places(segment, found.saved)]
        # Blocks are counted in elements of the weights' dtype, so the same blocks have other counts in another dtype.
        same = {_stored(place) for place in saved} <= {_stored(segment)}
        if saved and not (same and sum(place.numel for place in saved) == segment.numel):
            raise StoreError(
                f"{what} contains {segment.name} as {_form(saved[0], found.mode)}, this engine as "
                f'{_form(segment, held.mode)}: train with the "frozen" and the dtype of the checkpoint, or save it '
                "with exclude_frozen_parameters=True and load that"
            )


def _check_blocks(found: FoundCheckpoint, held: LocalShards, what: str) -> None:
    """Raises `StoreError` if a block of moments in 8 bits contains values of two experts, one of which has it here."""
    for segment in (segment for layout in held.layouts for segment in layout.segments if segment.trainable):
        rows = [place for _, place in all_places(segment, found.saved)]
        if any(place.start % MOMENT_BLOCK or (len(rows) > 1 and place.numel % MOMENT_BLOCK) for place in rows):
            raise StoreError(
                f"{what} has the 8-bit moments of {segment.parameter} in blocks of {MOMENT_BLOCK}, and an expert is no "
                'whole number of them: train with the "experts" of the checkpoint, or load the weights alone '
                "(load_optimizer_states=False)"
            )


def _stored(segment: Segment) -> tuple[object, ...]:
    """Returns all on which the meaning of a parameter's bytes depends, but their number."""
    return segment.form, segment.inner, segment.kind


def _form(segment: Segment, mode: Mode) -> str:
    """Returns the form in which a parameter is stored, for a message."""
    if segment.inner:
        return f"{segment.kind} of {', '.join(f'{each.name} {each.kind} {list(each.shape)}' for each in segment.inner)}"
    return f"{segment.form} of a model in {mode.precision}" if segment.form else mode.precision


def _states_of(found: FoundCheckpoint, segment: Segment) -> Mapping[str, StateField | None] | None:
    """Returns what `_fields` does, of a parameter in the checkpoint; None if it is not there or does not train there.

    The states of weights that were frozen begin at zero.
    """
    if segment.name not in found.saved:
        return None
    unit, there = found.saved[segment.name]
    if not (there.trainable and segment.trainable) and not there.kept and not segment.kept:
        return None
    return _fields(found.mode, found.layouts[unit], there)


def _fields(mode: Mode, layout: UnitLayout, segment: Segment) -> Mapping[str, StateField | None]:
    """Returns the states of a parameter by name, with their form where an optimizer of torch chooses it."""
    return dict.fromkeys(states_of(mode, layout, segment)) | {each.name: each for each in segment.kept}


def _names(kept: Collection[str]) -> str:
    """Returns the names of optimizer states for a message."""
    return ", ".join(kept) or "none"


def check_progress(found: FoundCheckpoint, options: LoadOptions, groups: int, schedule: Any) -> None:
    """Checks that the checkpoint has as many parameter groups as this optimizer, and the same keys of the schedule.

    Args:
        found: The checkpoint.
        options: Choice of what to load.
        groups: Number of parameter groups of this optimizer.
        schedule: State of this engine's learning-rate schedule.

    Raises:
        StoreError: If the number of groups or the keys of the schedule differ.
    """
    facts, what = found.progress.facts, f"the checkpoint {found.folder}"
    if len(facts["groups"]) != groups:
        raise StoreError(
            f"{what} has {count_of(len(facts['groups']), 'group')} of parameters, this optimizer has {groups}: give "
            "the optimizer the same groups, or load the weights alone (load_module_only=True)"
        )
    saved = facts["scheduler"]
    if options.schedule and isinstance(saved, dict) and isinstance(schedule, dict) and not _same(saved, schedule):
        raise StoreError(
            f"{what} contains the state of another learning-rate schedule, with {', '.join(sorted(saved))}; this "
            f"schedule has {', '.join(sorted(schedule))}: give the same schedule, or pass "
            "load_lr_scheduler_states=False"
        )


def _same(saved: Mapping[str, Any], schedule: Mapping[str, Any]) -> bool:
    """Returns whether two states of schedules have the same keys. Those of DeepSpeed hold the iteration alone."""
    return saved.keys() == schedule.keys() or (saved.keys() == {_ITERATION} and _ITERATION in schedule)
