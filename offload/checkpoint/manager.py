"""Saving and loading of checkpoints between steps, for `Engine.save_checkpoint` and `Engine.load_checkpoint`."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.aio.protocols import Queue
from offload.checkpoint.directory import own_part
from offload.checkpoint.files import LATEST, check_folder, find
from offload.checkpoint.foreign import ForeignCheckpoint, is_foreign, look_foreign
from offload.checkpoint.load import (
    CLIENT_STATE,
    FoundCheckpoint,
    LoadOptions,
    buffers_among_weights,
    in_words,
    look,
)
from offload.checkpoint.resharding import all_places, difference, parameter_shapes
from offload.checkpoint.restore import CheckpointRestorer
from offload.checkpoint.save import SaveRequest, TrainingPosition, own_or_shared, save
from offload.distributed.agreement import Collective
from offload.engine.components import EngineComponents, together
from offload.engine.shards import LocalShards
from offload.engine.snapshot import as_bytes, persistent_buffers, scheduler_state, write_buffers
from offload.engine.state import TrainingState
from offload.errors import StoreError, UsageError
from offload.fileio.plain_json import from_plain, to_plain
from offload.layout.fingerprint import about, describe
from offload.layout.flat_layout import ParameterSegment, StateField, UnitLayout
from offload.layout.modes import MOMENT_BLOCK, Mode
from offload.layout.optimizer_states import states_of
from offload.model_io.saved_names import about_saved
from offload.sizes import count_of

# -- compatibility -------------------------------------------------------------------------------------
#
# Comparison of a checkpoint with the engine that is about to load it: names, shapes, forms, modes, groups.


_ITERATION = "last_batch_iteration"
"""Key in the states of DeepSpeed's schedules, and of the schedules here with the same names."""


def check_fits(
    checkpoint: FoundCheckpoint,
    shards: LocalShards,
    options: LoadOptions,
    names: set[str],
    buffers: Mapping[str, torch.Tensor],
) -> None:
    """Raises `StoreError` unless the checkpoint fits this model and, if optimizer states are loaded, this mode."""
    what = f"the checkpoint {checkpoint.folder}"
    shapes = parameter_shapes((s.name, s) for layout in shards.layouts for s in layout.segments)
    # Frozen weights that were left out of the save are not missing: they keep their values.
    absent: set[str] = set()
    if not checkpoint.manifest.frozen:
        absent = {s.parameter for layout in checkpoint.layouts for s in layout.segments if not s.trainable}
        absent |= {name for name, first in checkpoint.manifest.about["tied"].items() if first in absent}
    saved_shapes = parameter_shapes((name, segment) for name, (_, segment) in checkpoint.saved.items())
    wanted = {name: shape for name, shape in shapes.items() if name not in absent or name in saved_shapes}
    wanted |= {name: tuple(value.shape) for name, value in buffers.items()}
    saved_shapes |= {name: tuple(value.shape) for name, value in checkpoint.progress.buffers.items()}
    difference(wanted, names | buffers.keys(), saved_shapes).check(options.strict, what)
    # Masters and moments of another form are converted, so only another optimizer is an error.
    if options.states and checkpoint.mode.optimizer != shards.mode.optimizer:
        if not _all_states(checkpoint.mode, checkpoint.layouts):
            required = f"this engine's optimizer keeps {_names(_all_states(shards.mode, shards.layouts))}"
            raise StoreError(
                f"{what} contains no optimizer states, {required}: load the weights alone (load_module_only=True)"
            )
        raise StoreError(
            f"{what} was saved in mode {checkpoint.mode.name}, this engine is in mode {shards.mode.name}, so their "
            "optimizer states differ: load the weights alone (load_optimizer_states=False), or give the same optimizer"
        )
    checkpoint = checkpoint.for_rows(shards.layouts)
    _check_forms(checkpoint, shards, what)
    _check_precisions(checkpoint, shards, what)
    if options.states and shards.mode.in_blocks and checkpoint.mode.in_blocks:
        _check_blocks(checkpoint, shards, what)
    both = ((layout, segment) for layout in shards.layouts for segment in layout.segments if options.states)
    for layout, segment in both:
        # A parameter that the checkpoint does not contain keeps its states, so it cannot differ.
        if segment.name not in checkpoint.saved:
            continue
        unit, there = checkpoint.saved[segment.name]
        # If a weight is frozen on either side, its states begin at zero or are not read.
        if not (there.trainable and segment.trainable) and not there.kept and not segment.kept:
            continue
        saved_states = _fields(checkpoint.mode, checkpoint.layouts[unit], there)
        now = _fields(shards.mode, layout, segment)
        if saved_states != now:
            raise StoreError(
                f"{what} contains the states {_names(saved_states)} of {segment.name}, this optimizer keeps "
                f"{_names(now)}: load the weights alone (load_optimizer_states=False), or give the same "
                "optimizer"
            )


def _all_states(mode: Mode, layouts: Sequence[UnitLayout]) -> Collection[str]:
    trained = ((layout, segment) for layout in layouts for segment in layout.segments if segment.trainable)
    return dict.fromkeys(name for layout, segment in trained for name in _fields(mode, layout, segment))


def _check_forms(checkpoint: FoundCheckpoint, shards: LocalShards, what: str) -> None:
    """Raises `StoreError` if a frozen weight of the checkpoint is stored in another form than in this engine."""
    for segment in (segment for layout in shards.layouts for segment in layout.segments):
        saved = [place for _, place in all_places(segment, checkpoint.saved)]
        # The facts that decide the meaning of a parameter's bytes, without the number of elements: blocks are counted
        # in elements of the weights' dtype, so the same blocks have other counts in another dtype.
        same = {(place.form, place.inner, place.kind) for place in saved} <= {
            (segment.form, segment.inner, segment.kind)
        }
        if saved and not (same and sum(place.numel for place in saved) == segment.numel):
            raise StoreError(
                f"{what} contains {segment.name} as {_form(saved[0], checkpoint.mode)}, this engine as "
                f'{_form(segment, shards.mode)}: train with the "frozen" and the dtype of the checkpoint, or save it '
                "with exclude_frozen_parameters=True and load that"
            )


def _check_precisions(checkpoint: FoundCheckpoint, shards: LocalShards, what: str) -> None:
    """Raises `StoreError` if the checkpoint has some parameters of a unit in fp32 and others in 16 bits."""
    for layout in shards.layouts:
        modes: dict[bool, str] = {}
        for segment in layout.segments:
            modes |= {
                checkpoint.layouts[unit].in_fp32: segment.name for unit, _ in all_places(segment, checkpoint.saved)
            }
        if len(modes) > 1:
            raise StoreError(
                f"{what} contains {modes[True]} in fp32 and {modes[False]} in {checkpoint.mode.precision}, which have "
                'one dtype here: load it with the "keep_in_fp32" with which it was saved'
            )


def _check_blocks(checkpoint: FoundCheckpoint, shards: LocalShards, what: str) -> None:
    """Raises `StoreError` if experts share a block of 8-bit moments in the checkpoint, but are separate units here."""
    for segment in (segment for layout in shards.layouts for segment in layout.segments if segment.trainable):
        rows = [place for _, place in all_places(segment, checkpoint.saved)]
        if any(place.start % MOMENT_BLOCK or (len(rows) > 1 and place.numel % MOMENT_BLOCK) for place in rows):
            raise StoreError(
                f"{what} has the 8-bit moments of {segment.parameter} in blocks of {MOMENT_BLOCK}, and an expert is no "
                'whole number of them: train with the "experts" of the checkpoint, or load the weights alone '
                "(load_optimizer_states=False)"
            )


def _form(segment: ParameterSegment, mode: Mode) -> str:
    if segment.inner:
        inner = (f"{field.name} {field.kind} {list(field.shape)}" for field in segment.inner)
        return f"{segment.kind} of {', '.join(inner)}"
    return f"{segment.form} of a model in {mode.precision}" if segment.form else mode.precision


def _fields(mode: Mode, layout: UnitLayout, segment: ParameterSegment) -> Mapping[str, StateField | None]:
    """Returns the states of a parameter by name, with the form of those that an optimizer of torch has chosen."""
    return dict.fromkeys(states_of(mode, layout, segment)) | {field.name: field for field in segment.kept}


def _names(states: Collection[str]) -> str:
    return ", ".join(states) or "none"


def check_progress(checkpoint: FoundCheckpoint, options: LoadOptions, groups: int, schedule: Any) -> None:
    """Raises `StoreError` unless the checkpoint has this optimizer's number of groups, and this schedule's keys."""
    facts, what = checkpoint.progress.facts, f"the checkpoint {checkpoint.folder}"
    if len(facts["groups"]) != groups:
        raise StoreError(
            f"{what} has {count_of(len(facts['groups']), 'group')} of parameters, this optimizer has {groups}: give "
            "the optimizer the same groups, or load the weights alone (load_module_only=True)"
        )
    saved = facts["scheduler"]
    # States of DeepSpeed's schedules hold the iteration alone.
    compared = options.schedule and isinstance(saved, dict) and isinstance(schedule, dict)
    alone = compared and saved.keys() == {_ITERATION} and _ITERATION in schedule
    if compared and saved.keys() != schedule.keys() and not alone:
        raise StoreError(
            f"{what} contains the state of another learning-rate schedule, with {', '.join(sorted(saved))}; this "
            f"schedule has {', '.join(sorted(schedule))}: give the same schedule, or pass "
            "load_lr_scheduler_states=False"
        )


# -- manager -------------------------------------------------------------------------------------------


logger = logging.getLogger("offload")


class Loaded(NamedTuple):
    """Result of a load that succeeded."""

    folder: str
    client_state: dict[str, Any]
    """The state that `save_checkpoint` received."""
    notices: tuple[str, ...]


class Checkpoints:
    """Saves and loads an engine's components and state. Only between steps, when no update is in progress."""

    def __init__(self, module: nn.Module, components: EngineComponents, state: TrainingState) -> None:
        self._module, self._components, self._state = module, components, state

    def save(self, ordered: Callable[[], SaveRequest], pending: int, client_state: Any) -> None:
        """Saves a checkpoint; see `Engine.save_checkpoint`. Collective.

        Args:
            ordered: Returns the request, or raises; an error on one rank is raised on all of them.
            pending: Number of micro-batches since the last optimizer step, whose gradients are not saved.
        """
        components = self._components
        with together(components, Collective.SAVE, "save a checkpoint") as ranks:
            orders: list[SaveRequest] = []
            ranks.settle(lambda: orders.append(ordered()))
            with own_or_shared(components.queue) as queue:
                moment = functools.partial(self._moment, pending, client_state)
                save(components.shards, orders[0], moment, queue, ranks, components.world)

    def load(self, load_dir: str | os.PathLike[str], tag: Any, options: LoadOptions) -> Loaded | None:
        """Loads a checkpoint; see `Engine.load_checkpoint`. Collective.

        A failure before the first change leaves the engine as it was; a failure after that stops the pager.

        Returns:
            The result, or None if no tag is given and `load_dir` contains no `latest` and is no checkpoint itself.
        """
        components = self._components
        with together(components, Collective.LOAD, "load a checkpoint") as ranks:
            ranks.settle(lambda: str(check_folder(load_dir, "load_dir")))
            ranks.same({"folder": str(load_dir), "tag": str(tag), "options": list(options)})
            folder = ranks.by_first(lambda: find(load_dir, tag, is_foreign))
            if folder is None:
                there = (
                    f"{LATEST} is not in {load_dir}" if os.path.isdir(load_dir) else f"there is no folder {load_dir}"
                )
                logger.warning(
                    "offload: no checkpoint was loaded: %s; training goes on after step %d",
                    there,
                    self._state.global_steps,
                )
                return None
            with own_or_shared(components.queue) as queue:
                inspected: list[FoundCheckpoint] = []
                notices: list[str] = []
                ranks.settle(lambda: inspected.append(self._inspect(Path(folder), options)))
                own = components.world.ranks
                ranks.settle(lambda: inspected[0].check_bytes(options, queue, own.rank, own.size))
                if any(layout.in_files for layout in components.layouts):
                    restorer = CheckpointRestorer(inspected[0], components.shards, options, queue, own.shard)
                    ranks.settle(restorer.check_model_files)
                try:
                    # The engine changes only now, after the ranks have found all data of the load intact.
                    ranks.settle(lambda: notices.extend(self._take_over(inspected[0], options, queue)))
                except BaseException as error:
                    # Also if only another rank has failed: the weights of the ranks no longer belong together.
                    components.pager.fail(error)
                    raise
        return Loaded(folder, from_plain(inspected[0].client_state), tuple(notices))

    def _moment(self, pending: int, client_state: Any) -> TrainingPosition:
        """Returns this rank's state that is saved in addition to its partitions."""
        self._components.unit_views.check_not_gathered("saved")
        if client_state is not None and not isinstance(client_state, Mapping):
            raise UsageError(f"client_state must be a dict or None, got {type(client_state).__name__}")
        if pending:
            logger.warning(
                "the gradients of %d micro-batches since the last boundary are not in the checkpoint",
                pending,
            )
        advice = (
            "a checkpoint holds None, booleans, numbers, strings, tensors on the CPU of at most 64 KiB, and lists, "
            "tuples and dicts of them: convert the value, as by vars(args), array.tolist(), tensor.cpu(), float(number)"
        )
        plain = to_plain(dict(client_state or {}), "client_state", advice, tensors=True)
        mesh = self._components.world.ranks.mesh
        contents = {**self._state.take().pack(), CLIENT_STATE: as_bytes(json.dumps(plain, allow_nan=False).encode())}
        # A checkpoint has all weights itself.
        layouts = [layout._replace(in_files=False) for layout in self._components.layouts]
        layout = describe(layouts, self._components.shards.mode, mesh.shards, mesh.replicas)
        components = self._components
        facts = about_saved(self._module, components.divides_parameters, components.base_files)
        return TrainingPosition(self._state.global_steps, contents, layout, facts)

    def _inspect(self, folder: Path, options: LoadOptions) -> FoundCheckpoint:
        """Reads all but the states and checks that the checkpoint fits. Changes nothing."""
        self._components.unit_views.settle()
        tied = about(self._module)["tied"]
        if is_foreign(folder):
            self._components.refuse_shards("load_checkpoint of another program's checkpoint")
            checkpoint: FoundCheckpoint = look_foreign(folder, options.states, tied)
        else:
            world = self._components.world
            checkpoint = look(own_part(world, folder), world.ranks.rank, world.ranks.size, tied)
        names = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        check_fits(checkpoint, self._components.shards, options, names, persistent_buffers(self._module))
        self._state.entries.check_fits(checkpoint.progress.entries, f"the checkpoint {folder}")
        if not options.module_only:
            check_progress(
                checkpoint, options, len(self._state.optimizer.param_groups), scheduler_state(self._state.lr_scheduler)
            )
            self._state.registered.check_fits(checkpoint.progress.facts["registered"], f"the checkpoint {folder}")
        # The commit after the load contains the user's states. A state that cannot be committed raises here, before any
        # change.
        self._state.of_the_user()
        return checkpoint.for_rows(self._components.layouts)

    def _changed_form(self, checkpoint: FoundCheckpoint, options: LoadOptions) -> list[str]:
        """Returns a notice if trained states have another form here than in a checkpoint of this program."""
        trains = any(layout.trainable_stop for layout in self._components.layouts)
        if not trains or options.module_only or isinstance(checkpoint, ForeignCheckpoint):
            return []
        there, here = (
            sum(len(layout.segments) for layout in layouts if layout.in_fp32)
            for layouts in (checkpoint.layouts, self._components.layouts)
        )
        words = in_words(checkpoint.mode, self._components.shards.mode, options.states, (there, here))
        return [] if words is None else [f"{checkpoint.folder} is {words}"]

    def _take_over(self, checkpoint: FoundCheckpoint, options: LoadOptions, queue: Queue) -> list[str]:
        """Makes the checkpoint the engine's state and, with commits on, commits it. Returns notices for the user."""
        components = self._components
        # Gradients of the earlier weights must not update the loaded weights.
        components.hooks.forget_gradients()
        components.gradients.clear()
        components.unit_views.outdate(range(len(components.layouts)))
        components.pager.begin_load()
        CheckpointRestorer(checkpoint, components.shards, options, queue, components.world.ranks.shard).run()
        components.pager.end_load()
        steps = (
            checkpoint.steps(components.layouts, self._state.parameter_steps)
            if options.states
            else self._state.parameter_steps
        )
        buffers = persistent_buffers(self._module)
        facts = {**checkpoint.progress.facts, "parameter_steps": [list(row) for row in steps]}
        if not options.schedule:
            facts["scheduler"] = None
        saved_buffers = {name: value for name, value in checkpoint.progress.buffers.items() if name in buffers}
        # The checkpoint may store this model's buffers as weights.
        saved_buffers |= buffers_among_weights(checkpoint, buffers.keys() - saved_buffers.keys(), queue)
        progress = checkpoint.progress._replace(facts=facts, buffers=saved_buffers)
        if not progress.generators:
            # Another program's checkpoint has no generators: the generators of this process go on.
            progress = progress._replace(generators=self._state.take().generators)
        notices = [*checkpoint.notices, *self._changed_form(checkpoint, options)]
        if options.states and (own := components.shards.mode.rule.of_one_rank):
            names = " and ".join(state.title for state in own)
            notices.append(f"{names} begin at zero: a checkpoint contains those of one rank alone")
        if options.module_only:
            write_buffers(buffers, saved_buffers)
            notices += self._state.entries.restore(progress.entries, self._state.device)
        else:
            notices += self._state.restore(progress, options.schedule, options.states)
            if not checkpoint.own and checkpoint.progress.generators:
                notices.append(
                    f"{checkpoint.folder} was saved by {count_of(checkpoint.manifest.ranks, 'rank')}, this run has "
                    f"{components.world.ranks.size}: each rank continues with the random generators of rank 0, so "
                    "dropout draws other numbers"
                )
            for notice in notices if self._components.world.ranks.rank == 0 else ():
                logger.warning("offload: %s", notice)
        if self._state.commits:
            snapshot = self._state.take()
            # `restore` sets the saved generators only at the next call of the engine, so the
            # snapshot contains this process's present generators. The commit must contain the checkpoint's.
            components.shards.commit(
                self._state.global_steps,
                (snapshot if options.module_only else snapshot._replace(generators=progress.generators)).pack(),
            )
            components.pager.mark_rewritten(False)
        self._state.mark_edited(False)
        if options.strict:  # else some weights may still be the engine's own
            self._state.mark_saved()
        return notices
