"""Saving and loading of checkpoints between steps, for `Engine.save_checkpoint` and `Engine.load_checkpoint`."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from offload.aio.protocols import Queue
from offload.distributed.agreement import Collective
from offload.engine.checkpoint.compatibility import check_fits, check_progress
from offload.engine.checkpoint.conversion import in_words
from offload.engine.checkpoint.files import LATEST, check_folder, find
from offload.engine.checkpoint.foreign.checkpoint import ForeignCheckpoint, is_foreign, look_foreign
from offload.engine.checkpoint.load import (
    CLIENT_STATE,
    FoundCheckpoint,
    LoadOptions,
    buffers_among_weights,
    fitting,
    look,
)
from offload.engine.checkpoint.parts import CheckpointPlace
from offload.engine.checkpoint.restore import CheckpointRestorer
from offload.engine.checkpoint.save import own_or_shared, save
from offload.engine.checkpoint.save_request import Moment, SaveRequest
from offload.engine.model_io.saved_names import about_saved
from offload.engine.training.components import EngineComponents, together
from offload.engine.training.snapshot import as_bytes, persistent_buffers, scheduler_state, write_buffers
from offload.engine.training.training_state import TrainingState
from offload.errors import UsageError
from offload.fileio.plain_json import from_plain, to_plain
from offload.layout.fingerprint import about, describe
from offload.sizes import count_of

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
            client_state: The user's own state; None or a dict of plain values and of small tensors.
        """
        components = self._components
        with together(components, Collective.SAVE, "save a checkpoint") as ranks:
            orders: list[SaveRequest] = []
            ranks.settle(lambda: orders.append(ordered()))
            with own_or_shared(components.queue) as queue:
                moment = functools.partial(self._moment, pending, client_state)
                save(components.shards, orders[0], moment, queue, ranks, self._place)

    def load(self, load_dir: str | os.PathLike[str], tag: Any, options: LoadOptions) -> Loaded | None:
        """Loads a checkpoint; see `Engine.load_checkpoint`. Collective.

        A failure before the first change leaves the engine as it was; a failure after that stops the pager.

        Args:
            load_dir: Folder of checkpoints.
            tag: Tag of the checkpoint, or None for the latest.
            options: The parts that are loaded.

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
                found: list[FoundCheckpoint] = []
                notices: list[str] = []
                ranks.settle(lambda: found.append(self._inspect(Path(folder), options)))
                ranks.settle(
                    lambda: found[0].check_bytes(options, queue, self._components.rank, self._components.world_size)
                )
                try:
                    # The engine changes only now, after the ranks have found all data of the load intact.
                    ranks.settle(lambda: notices.extend(self._take_over(found[0], options, queue)))
                except BaseException as error:
                    # Also if only another rank has failed: the weights of the ranks no longer belong together.
                    components.pager.fail(error)
                    raise
        return Loaded(folder, from_plain(found[0].client_state), tuple(notices))

    @property
    def _place(self) -> CheckpointPlace:
        """This process's files in a checkpoint."""
        components = self._components
        return CheckpointPlace(rank=components.rank, mesh=components.mesh, grid=components.tensor_parallel)

    def _moment(self, pending: int, client_state: Any) -> Moment:
        """Returns the state of this rank that is saved beside its partitions."""
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
        mesh = self._components.mesh
        contents = {**self._state.take().pack(), CLIENT_STATE: as_bytes(json.dumps(plain, allow_nan=False).encode())}
        layout = describe(self._components.layouts, self._components.shards.mode, mesh.shards, mesh.replicas)
        said = about_saved(self._module, self._components.divides_parameters)
        return Moment(self._state.global_steps, contents, layout, said)

    def _inspect(self, folder: Path, options: LoadOptions) -> FoundCheckpoint:
        """Reads all but the states and checks that the checkpoint fits. Changes nothing."""
        self._components.unit_views.settle()
        tied = about(self._module)["tied"]
        if is_foreign(folder):
            self._components.refuse_shards("load_checkpoint of another program's checkpoint")
            found: FoundCheckpoint = look_foreign(folder, options.states, tied)
        else:
            found = look(self._place.own(folder), self._components.rank, self._components.world_size, tied)
        names = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        check_fits(found, self._components.shards, options, names, persistent_buffers(self._module))
        self._state.entries.check_fits(found.progress.entries, f"the checkpoint {folder}")
        if not options.module_only:
            check_progress(
                found, options, len(self._state.optimizer.param_groups), scheduler_state(self._state.lr_scheduler)
            )
            self._state.registered.check_fits(found.progress.facts["registered"], f"the checkpoint {folder}")
        # The commit after the load contains the user's states. One that cannot be committed raises here, before
        # anything changes.
        self._state.of_the_user()
        return found.for_rows(self._components.layouts)

    def _changed_form(self, found: FoundCheckpoint, options: LoadOptions) -> list[str]:
        """Returns a notice if what trains here has another form than in a checkpoint of this program."""
        trains = any(layout.trainable_stop for layout in self._components.layouts)
        if not trains or options.module_only or isinstance(found, ForeignCheckpoint):
            return []
        words = in_words(found.mode, self._components.shards.mode, options.states)
        return [] if words is None else [f"{found.folder} is {words}"]

    def _take_over(self, found: FoundCheckpoint, options: LoadOptions, queue: Queue) -> list[str]:
        """Makes the checkpoint the engine's state and, with commits on, commits it. Returns notices for the user."""
        components = self._components
        # Gradients of the earlier weights must not update the loaded weights.
        components.hooks.forget_gradients()
        components.gradients.clear()
        components.unit_views.outdate(range(len(components.layouts)))
        components.pager.begin_load()
        CheckpointRestorer(found, components.shards, options, queue, components.shard).run()
        components.pager.end_load()
        steps = (
            found.steps(components.layouts, self._state.parameter_steps)
            if options.states
            else self._state.parameter_steps
        )
        buffers = persistent_buffers(self._module)
        progress = fitting(found.progress, buffers, steps, options.schedule)
        # Of the names that the checkpoint calls weights, this model knows which are buffers.
        among = buffers_among_weights(found, buffers.keys() - progress.buffers.keys(), queue)
        progress = progress._replace(buffers={**progress.buffers, **among})
        if not progress.generators:
            # Another program's checkpoint has none: those of this process go on.
            progress = progress._replace(generators=self._state.take().generators)
        notices = [*found.notices, *self._changed_form(found, options)]
        if options.module_only:
            write_buffers(buffers, {name: value for name, value in progress.buffers.items() if name in buffers})
            notices += self._state.entries.restore(progress.entries, self._state.device)
        else:
            notices += self._state.restore(progress, options.schedule, options.states)
            if not found.own and found.progress.generators:
                notices.append(
                    f"{found.folder} was saved by {count_of(found.manifest.ranks, 'rank')}, this run has "
                    f"{components.world_size}: each rank continues with the random generators of rank 0, so dropout "
                    "draws other numbers"
                )
            for notice in notices if self._components.rank == 0 else ():
                logger.warning("offload: %s", notice)
        if components.store is not None and self._state.commits:
            held = self._state.take()
            # `restore` sets the saved generators only at the next call of the engine, so the snapshot contains this
            # process's present ones. The commit must contain those of the checkpoint.
            components.store.commit(
                self._state.global_steps,
                (held if options.module_only else held._replace(generators=progress.generators)).pack(),
            )
            components.pager.mark_rewritten(False)
        self._state.mark_edited(False)
        if options.strict:  # else some weights may still be the engine's own
            self._state.mark_saved()
        return notices
