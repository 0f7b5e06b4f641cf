"""What `save_checkpoint` and `load_checkpoint` do between steps: this moment into a folder, and back."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.aio.protocols import Queue
from offload.engine.checkpoint.files import LATEST, check_folder, find
from offload.engine.checkpoint.load import (
    CLIENT_STATE,
    Found,
    Wish,
    check_bytes,
    check_fits,
    check_progress,
    fitting,
    look,
)
from offload.engine.checkpoint.restore import Filling
from offload.engine.checkpoint.save import Moment, Order, own_or_shared, save
from offload.engine.distributed.agreement import Kind
from offload.engine.distributed.all_or_nothing import together
from offload.engine.training.components import Parts
from offload.engine.training.snapshot import as_bytes, persistent_buffers, scheduler_state
from offload.engine.training.training_state import TrainingState
from offload.errors import UsageError
from offload.fileio.plain_json import from_plain, to_plain
from offload.layout.fingerprint import about, describe
from offload.sizes import count_of

logger = logging.getLogger("offload")


class Loaded(NamedTuple):
    """A load that succeeded."""

    folder: str
    client_state: dict[str, Any]
    """What `save_checkpoint` was given."""
    notices: tuple[str, ...]


class Checkpoints:
    """Saves and loads an engine's parts and state. Between steps, when no update is under way."""

    def __init__(self, module: nn.Module, parts: Parts, state: TrainingState) -> None:
        self._module, self._parts, self._state = module, parts, state

    def save(self, ordered: Callable[[], Order], pending: int, client_state: Any) -> None:
        """See `Engine.save_checkpoint`; `pending` micro-batches are not of a step yet.

        `ordered` may raise: what is wrong on one rank is told to all of them.
        """
        parts = self._parts
        with together(parts.rounds, Kind.SAVE, "save a checkpoint") as ranks:
            orders: list[Order] = []
            ranks.settle(lambda: orders.append(ordered()))
            with own_or_shared(parts.queue) as queue:
                save(parts.held, orders[0], lambda: self._moment(pending, client_state), queue, ranks)

    def load(self, load_dir: str | os.PathLike[str], tag: Any, wish: Wish) -> Loaded | None:
        """See `Engine.load_checkpoint`; None where there is none. A failure half-way stops the pager."""
        parts = self._parts
        with together(parts.rounds, Kind.LOAD, "load a checkpoint") as ranks:
            ranks.settle(lambda: str(check_folder(load_dir, "load_dir")))
            ranks.same({"folder": str(load_dir), "tag": str(tag), "wish": list(wish)})
            folder = ranks.by_first(lambda: find(load_dir, tag))
            if folder is None:
                logger.warning("no checkpoint was loaded: there is no %s in %s", LATEST, load_dir)
                return None
            with own_or_shared(parts.queue) as queue:
                found: list[Found] = []
                notices: list[str] = []
                ranks.settle(lambda: found.append(self._inspect(Path(folder), wish)))
                ranks.settle(lambda: check_bytes(found[0], wish, queue, self._parts.rank, self._parts.world_size))
                try:
                    ranks.settle(lambda: notices.extend(self._take_over(found[0], wish, queue)))
                except BaseException as error:  # also where it failed on another rank: half of a load is none
                    parts.pager.fail(error)
                    raise
        return Loaded(folder, from_plain(found[0].client_state), tuple(notices))

    def _moment(self, pending: int, client_state: Any) -> Moment:
        self._parts.bindings.check_not_gathered("saved")
        if client_state is not None and not isinstance(client_state, Mapping):
            raise UsageError(f"client_state must be a dict or None, got {type(client_state).__name__}")
        if pending:
            logger.warning(
                "the gradients of %d micro-batches since the last boundary are not in the checkpoint",
                pending,
            )
        advice = "a checkpoint holds None, booleans, numbers, strings, and lists, tuples and dicts of them"
        plain = to_plain(dict(client_state or {}), "client_state", advice)
        contents = {**self._state.take().pack(), CLIENT_STATE: as_bytes(json.dumps(plain, allow_nan=False).encode())}
        layout = describe(self._parts.layouts, self._parts.held.mode, self._parts.world_size)
        return Moment(self._state.global_steps, contents, layout, about(self._module))

    def _inspect(self, folder: Path, wish: Wish) -> Found:
        """Read all but the states, and see whether it fits. Nothing is changed."""
        self._parts.bindings.settle()
        found = look(folder, self._parts.rank, self._parts.world_size, about(self._module)["tied"])
        names = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        check_fits(found, self._parts.held, wish, names, persistent_buffers(self._module))
        if not wish.module_only:
            check_progress(
                found, wish, len(self._state.optimizer.param_groups), scheduler_state(self._state.lr_scheduler)
            )
            self._state.registered.check_fits(found.progress.facts["registered"], f"the checkpoint {folder}")
        self._state.of_the_user()  # what cannot be committed with the load is known before it
        return found

    def _take_over(self, found: Found, wish: Wish, queue: Queue) -> list[str]:
        """Make what was found the state of the engine, and commit it; what of it a user should know."""
        parts = self._parts
        parts.hooks.forget_gradients()
        parts.gradients.clear()
        parts.pager.begin_load()
        Filling(found, parts.held, wish, queue).run()
        parts.pager.end_load()
        steps = found.steps(parts.layouts, self._state.parameter_steps) if wish.states else self._state.parameter_steps
        progress = fitting(found.progress, persistent_buffers(self._module), steps, wish.schedule)
        notices: list[str] = []
        if wish.module_only:
            with torch.no_grad():
                for name, buffer in persistent_buffers(self._module).items():
                    buffer.copy_(progress.buffers.get(name, buffer))
        else:
            notices += self._state.restore(progress, wish.schedule)
            if not found.own:
                notices.append(
                    f"{found.folder} was saved by {count_of(found.manifest.world_size, 'rank')}, these are "
                    f"{parts.world_size}: each goes on with the random generators of rank 0, so "
                    f"dropout draws other numbers"
                )
            for notice in notices if self._parts.rank == 0 else ():
                logger.warning(notice)
        if parts.store is not None and self._state.commits:
            held = self._state.take()
            # The generators follow at the next entry.
            parts.store.commit(
                self._state.global_steps,
                (held if wish.module_only else held._replace(generators=progress.generators)).pack(),
            )
            parts.pager.mark_rewritten(False)
        self._state.mark_edited(False)
        return notices
