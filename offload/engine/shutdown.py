"""The end of an engine: what is complete is committed, everything is closed, and the store stays or goes.

    destroy      what was begun is finished and committed; with several ranks all come here, and serve each other until
                 then; the store goes where the user says so
    at exit      the same, for a process that ends without it; one that ends by an error leaves what no start replaces
    abandon      nothing is finished: the last commit is what there is

In a forked child none of it does anything.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from offload.engine.training.components import Parts, close_all
from offload.engine.training.training_state import TrainingState
from offload.errors import OffloadError, UsageError
from offload.notices import tell
from offload.swapper.store import Store

logger = logging.getLogger("offload")


class Ending:
    """Ends one engine, once, also where it was interrupted. Belongs to the thread that runs the model."""

    def __init__(self, module: nn.Module, parts: Parts, state: TrainingState, enter: Callable[[], None]) -> None:
        """`enter` is what every call of the engine begins with."""
        self._module, self._parts, self._state, self._enter = module, parts, state, enter
        self._pid = os.getpid()
        self._alive = True
        self._closed = False
        self._told = False
        """Whether it was said what stays on the disk, here or by the first rank."""
        atexit.register(self.at_exit)

    def check(self) -> None:
        """Raise `UsageError` in a forked child, and after the end."""
        if os.getpid() != self._pid:
            raise UsageError(f"this engine belongs to process {self._pid}; a forked child cannot use it")
        if not self._alive:
            raise UsageError("this engine was destroyed")

    @property
    def resumable(self) -> str | None:
        """The run folder that a later process can resume from, or None."""
        store = self._parts.store
        return None if store is None or not self._state.commits else str(store.folders[0].parent)

    # -- ways to end --------------------------------------------------------------------------------

    def destroy(self, remove: bool | None) -> None:
        """See `Engine.destroy`."""
        self._end_by_hand(remove, None)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """See `Engine.finish`."""
        self._end_by_hand(True, facts)

    def _end_by_hand(self, remove: bool | None, facts: Mapping[str, Any] | None) -> None:
        if self._alive and os.getpid() == self._pid and not self._parts.pager.failed and not remove:
            if self._state.after_step_is_due:
                self._state.of_the_user()  # while it can still be mended, and the last step be committed
        self._end(bool(remove), meet=True, keep=remove is False, facts=facts)

    def abandon(self, remove: bool) -> None:
        """Close without finishing anything: what `initialize` does when its last steps fail."""
        self._alive = False
        self._close(remove)

    def at_exit(self) -> None:
        """End the process as `destroy()` does, where it ends by no error; else what is committed is kept, and said."""
        if not self._alive or os.getpid() != self._pid:
            return
        # An exception that ends this process, which is known by now, ends the run: nobody is served any more.
        broken = hasattr(sys, "last_value")
        try:
            self._end(remove=False, meet=not broken, keep=broken)
        except (OffloadError, OSError, RuntimeError) as error:  # the last from CUDA
            logger.error("at exit: %s", error)
        if not self._told:
            self._say_what_is_left(keep=True)

    def _end(self, remove: bool, meet: bool, keep: bool = True, facts: Mapping[str, Any] | None = None) -> None:
        """`meet` says whether to wait for the other ranks, `keep` whether a later start must not replace the run.

        With `facts` a removed run leaves a note that has them.
        """
        if self._closed or os.getpid() != self._pid:
            return
        finished = False
        if self._alive:
            self._parts.pager.check_whole()
        try:
            if self._alive and not self._parts.pager.failed:
                self._finish()
                ranks, rounds = self._parts.ranks, self._parts.rounds
                if rounds is not None and ranks is not None and meet:
                    if remove or not (ranks.lost or rounds.interrupted):
                        rounds.end(remove)
                        if remove:  # nobody deletes anything before the note is there that says that all may go
                            self._note_end(facts or {})
                            ranks.share(None, "delete its store")
                    else:
                        ranks.look()  # a launcher stops this rank when another dies, and may be faster
                elif remove:
                    self._note_end(facts or {})
                finished = True
                if not remove:
                    self._leave(keep)
        finally:
            self._alive = False
            self._close(remove and finished, notes=facts is None)

    # -- finishing ----------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Complete and commit what was begun."""
        store, updater, state = self._parts.store, self._parts.updater, self._state
        self._enter()
        if updater is not None:
            updater.finish()
        if store is None or store.durable is None:
            return
        if state.edited or store.durable.epoch != state.global_steps:
            store.commit(state.global_steps, state.for_commit().pack())
            state.mark_edited(False)

    def _leave(self, keep: bool) -> None:
        """Say, on the first rank for all, what stays on the disk; note that it may go, unless it is to be kept."""
        store = self._parts.store
        if self._parts.rank != 0:
            self._told = True
        if store is None or store.durable is None or self._parts.rank != 0 or not self.resumable:
            return
        if not keep:
            try:
                store.note_closed({"steps": store.durable.epoch})
            except OSError:  # a full disk: what cannot be noted is kept
                keep = True
        self._say_what_is_left(keep)

    def _note_end(self, facts: Mapping[str, Any]) -> None:
        """Leave a note that the run has ended, which its first rank does for all."""
        if self._parts.store is not None and self._parts.rank == 0:
            self._parts.store.note_end({"steps": self._state.global_steps, **facts})

    def _say_what_is_left(self, keep: bool) -> None:
        """Say where the run is, and what the next start does with it; nothing where none can go on with it."""
        self._told = True
        store, folder, steps = self._parts.store, self.resumable, self._state.global_steps
        if store is None or folder is None:
            return
        if store.durable is None:
            tell(f"nothing is committed in {folder}; `offload rm {folder}` deletes it")
            return
        made = f", the last that was committed of {steps}" if store.durable.epoch != steps else ""
        goes = "the next start that does not resume it is refused" if keep else "the next start replaces it"
        tell(
            f'the run is left in {folder}, at step {store.durable.epoch}{made}: "resume": "auto" goes on with it, '
            f"{goes}; `offload rm {folder}` deletes it"
        )

    # -- closing ------------------------------------------------------------------------------------

    def _close(self, remove: bool, notes: bool = False) -> None:
        """Give everything back. The store stays where it can be resumed from, unless it is to be removed.

        With `notes` those of the run's end go with it.
        """
        try:
            self._close_parts(remove, notes)
        finally:
            self._parts.timeline.close()
            if self._parts.meter is not None:
                self._parts.meter.close()

    def _close_parts(self, remove: bool, notes: bool) -> None:
        parts = self._parts
        atexit.unregister(self.at_exit)
        self._module.__dict__.pop("zero_grad", None)
        closing = parts.closing()
        if parts.ranks is not None:  # after the arena, so that no collective is under way
            ranks, reason = parts.ranks, f"its engine was closed at step {self._state.global_steps}"
            closing.append(lambda: ranks.close(reason))
        if parts.store is not None:
            store = parts.store
            closing.append(lambda: self._close_store(store, remove, notes))
        try:
            close_all(*closing)
        except Exception:
            self._closed = True
            raise
        self._closed = True

    def _close_store(self, store: Store, remove: bool, notes: bool) -> None:
        if remove or not self._state.commits:  # nothing in it was ever committed
            store.remove(notes and remove)
        else:
            store.close()
