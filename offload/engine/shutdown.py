"""The end of an engine: complete steps are committed, everything is closed, and the store is kept or deleted.

    destroy      finishes and commits pending updates and edits; with several ranks waits for all of them, and serves
                 them until then; keeps or deletes the store as the user asks
    at exit      does the same in a process that ends without a call; after an exception, or `sys.exit` with a failure,
                 the run is kept and no later start replaces it
    abandon      finishes nothing; the last commit remains

In a forked child none of them does anything. With several ranks, an exception that is being handled when one of them
ends is reported to the others, whose errors name it.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from typing import Any, NoReturn

from torch import nn

from offload.engine.components import EngineComponents, close_all
from offload.engine.state import TrainingState
from offload.errors import OffloadError, UsageError
from offload.interrupts import restore_signals
from offload.notices import announce, exception_line, shell_command
from offload.swapper.store import Store

# -- exit status ---------------------------------------------------------------------------------------
#
# Remembers a non-zero `sys.exit`, which handlers of the exit cannot see.
#
# A script that catches its error, logs it and calls `sys.exit(1)` has failed as much as one that the error ends.


class _Exit:
    """The function `sys.exit`, which remembers here that the main thread has called it with a failure."""

    def __init__(self, exit: Callable[[Any], NoReturn]) -> None:
        functools.update_wrapper(self, exit)
        self._exit = exit
        self.failure = ""

    def __call__(self, status: Any = None, /) -> NoReturn:
        done = status is None or (isinstance(status, int) and status == 0)
        # On another thread it ends that thread alone.
        if not done and threading.current_thread() is threading.main_thread():
            self.failure = exception_line(sys.exc_info()[1] or SystemExit(status))
        self._exit(status)


@functools.cache
def _watched() -> _Exit:
    """Replaces `sys.exit`, once. It stays replaced, since others may wrap it later."""
    watched = _Exit(sys.exit)
    sys.exit = watched
    return watched


def watch() -> None:
    """Begins to remember failures of this process."""
    _watched()


def exit_failure() -> str:
    """Returns the exception that was handled when `sys.exit` was called with a failure, or that call; empty if none."""
    return _watched().failure


def forget() -> None:
    """Forgets a failure: the script has caught the `SystemExit`, and goes on."""
    _watched().failure = ""


# -- shutdown ------------------------------------------------------------------------------------------


logger = logging.getLogger("offload")


class Shutdown:
    """The shutdown of one engine: runs once, and can be repeated after an interruption.

    Belongs to the thread that runs the model.
    """

    def __init__(
        self, module: nn.Module, components: EngineComponents, state: TrainingState, enter: Callable[[], None]
    ) -> None:
        """Registers the shutdown with the interpreter's exit."""
        self._module, self._components, self._state, self._enter = module, components, state, enter
        self._pid = os.getpid()
        self._alive = True
        self._closed = False
        self._reported = False
        """True once this rank or the first one has reported the run that is left on the disk."""
        self._noted = False
        """True from when this rank notes that the run is removed."""
        self._after = ""
        """Words for the failure that ends this engine; empty without one."""
        self._ended_child: BaseException | None = None
        """The exception that ends this child of `multiprocessing`."""
        atexit.register(self.at_exit)
        watch()
        self._look_at_end: Finalize | None = None
        if multiprocessing.parent_process() is not None:
            # Its child prints an exception itself, or hands it to the parent, and ends as if there were none. It calls
            # this while the exception is still on its way.
            self._look_at_end = Finalize(None, self._see_exception, exitpriority=0)

    def check(self) -> None:
        """Raises `UsageError` in a forked child and after the end."""
        if os.getpid() != self._pid:
            raise UsageError(f"this engine belongs to process {self._pid}; a forked child cannot use an engine")
        if not self._alive:
            raise UsageError("this engine was destroyed")

    def go_on(self) -> None:
        """Learns that the script goes on: one that has called `sys.exit` has caught its `SystemExit`."""
        forget()

    @property
    def resumable(self) -> str | None:
        """The run folder that a later process can resume from, or None."""
        store = self._components.store
        return None if store is None or not self._state.commits else str(store.folders[0].parent)

    # -- ways to end --------------------------------------------------------------------------------

    def destroy(self, remove: bool | None) -> None:
        """Ends the engine. See `Engine.destroy`."""
        self._end_by_hand(remove, None)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Ends the engine, removes the run and leaves a note. See `Engine.finish`."""
        self._end_by_hand(True, facts)

    def _end_by_hand(self, remove: bool | None, facts: Mapping[str, Any] | None) -> None:
        """Ends the engine for a call of the user, who can still correct values that cannot be committed."""
        active = self._alive and os.getpid() == self._pid
        stopped = active and self._components.pager.failed
        if active:
            self._explain(_line(sys.exc_info()[1]))  # a call in `except` or `finally`
        if active and not stopped and not remove:
            if self._state.after_step_is_due:
                # Raises while the user can still fix the value, and the last step can be committed afterwards.
                self._state.of_the_user()
        # After an exception of this rank alone the others wait in a collective of the model, or of a shared sequence,
        # where they answer no rank that ends. They learn of its end instead.
        alone = self._after and not remove and self._components.world.shares_batches
        try:
            self._end(bool(remove), meet=not alone, keep=remove is False, facts=facts)
        except KeyboardInterrupt:
            # This engine has ended, so `at_exit` will not report where its run is.
            if active and not self._reported and not self._noted and self._components.world.ranks.rank == 0:
                self._report_run(keep=True)
            raise
        if stopped and remove and self._components.world.ranks.rank == 0 and self.resumable:
            logger.warning(
                "an error has stopped the engine, so the run in %s is kept: `%s` deletes it",
                self.resumable,
                shell_command("rm", self.resumable),
            )

    def abandon(self, remove: bool) -> None:
        """Closes without finishing anything. Called by `initialize` if its last steps fail."""
        self._alive = False
        self._close(remove)

    def at_exit(self) -> None:
        """Ends the engine as `destroy()` does if the process ends without a failure.

        Otherwise the committed run is kept, and a notice names its folder.
        """
        if not self._alive or os.getpid() != self._pid:
            return
        # `sys.last_value` is set by now if an exception ends this process. The other ranks are not served then: they
        # learn from the lost connection, rather than waiting for a rank that fails.
        failure = _line(getattr(sys, "last_value", self._ended_child)) or exit_failure()
        try:
            self._explain(failure)
            self._end(remove=False, meet=not failure, keep=bool(failure))
        # An exception in an exit handler would only print a traceback; the run is kept, so a line is enough.
        except (OffloadError, OSError, RuntimeError, KeyboardInterrupt) as error:  # RuntimeError from CUDA
            logger.error("at exit: %s", str(error) or "stopped by Ctrl-C")
        if not self._reported:
            self._report_run(keep=True)

    def _see_exception(self) -> None:
        """Keeps the exception that ends a child of `multiprocessing`, also one after which `exit` was called."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = (error.__context__ or error) if error.code else None
        self._ended_child = error

    def _explain(self, failure: str) -> None:
        """Tells the other ranks which failure, if any, ends this one, before they learn that it ends."""
        if failure:
            self._after = f", after {failure}"
            self._components.world.everyone.explain(failure)

    def _end(self, remove: bool, meet: bool, keep: bool = True, facts: Mapping[str, Any] | None = None) -> None:
        """Finishes, commits and closes, once.

        Args:
            remove: True to delete the run.
            meet: True to wait for the other ranks.
            keep: True if a later start that does not resume the run is refused, and does not replace the run.
            facts: contents of a note that a removed run leaves, or None for no note.
        """
        if self._closed or os.getpid() != self._pid:
            return
        finished = False
        try:
            if self._alive and not self._components.pager.failed:
                self._finish()
                self._end_together(remove, meet, facts)
                finished = True
                if not remove:
                    self._report_end(keep)
        finally:
            self._alive = False
            self._close(remove and finished, notes=facts is None)

    def _end_together(self, remove: bool, meet: bool, facts: Mapping[str, Any] | None) -> None:
        """Ends together with the processes that can be reached, and leaves the note of a removed run.

        The arguments are those of `_end`.
        """
        ranks, agreement = self._components.world.ranks, self._components.agreement
        if not meet:  # an exception ends this rank, whose run stays: nothing is agreed
            return
        if remove or not (ranks.lost or agreement.interrupted):
            agreement.end(remove)
            self._meet_all(remove)
            if remove:  # the note marks stores as leftovers, so it exists before any is deleted
                self._note_end(facts or {})
                ranks.share(None, "delete its store")
        else:
            ranks.look()  # names a lost rank in the log now: a launcher's signal may end this process next

    def _meet_all(self, remove: bool) -> None:
        """Waits until every process of a grid is about to close its engine, and commits edits then; see `_end`."""
        world = self._components.world
        if world.divides_model and not world.everyone.lost:
            world.end(remove)
            if not remove:
                self._commit(edits=True)

    # -- finishing ----------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Completes and commits pending updates and edits."""
        self._enter()
        if self._components.update_worker is not None:
            self._components.update_worker.come_to_rest()
        # Processes of a grid meet in each step, but not at an edit. So one may have ended before its last commit, and
        # another one, which commits edits now, would be two commits ahead: no resume could go back to the first's.
        self._commit(edits=not self._components.world.divides_model)

    def _commit(self, edits: bool) -> None:
        """Commits steps that the durability setting left uncommitted and, with `edits`, edits since the last step."""
        store, state = self._components.store, self._state
        if store is None or store.durable is None:
            return
        if store.durable.step != state.global_steps or (edits and state.edited):
            store.commit(state.global_steps, state.for_commit().pack())
            state.mark_edited(False)

    def _report_end(self, keep: bool) -> None:
        """Reports, on the first rank, the run that is left on the disk.

        Args:
            keep: False to note on the disk that a later start may replace the run.
        """
        store = self._components.store
        if self._components.world.ranks.rank != 0:
            self._reported = True
        if store is None or store.durable is None or self._components.world.ranks.rank != 0 or not self.resumable:
            return
        if not keep:
            try:
                state = self._state
                store.note_closed({"steps": store.durable.step, "job": state.job, "saved": state.saved})
            except OSError:  # such as a full disk: without the note, the run is kept
                keep = True
        self._report_run(keep)

    def _note_end(self, facts: Mapping[str, Any]) -> None:
        """Writes a note that the run has ended. The first rank writes for all."""
        self._noted = True
        if self._components.store is not None and self._components.world.ranks.rank == 0:
            self._components.store.note_end({"steps": self._state.global_steps, **facts})

    def _report_run(self, keep: bool) -> None:
        """Reports the run folder and what the next start does with it; nothing if the run cannot be resumed.

        Args:
            keep: True if a start that does not resume the run is refused.
        """
        self._reported = True
        store, folder, steps = self._components.store, self.resumable, self._state.global_steps
        if store is None or folder is None:
            return
        if store.durable is None:
            announce(f"no step was committed in {folder}; `{shell_command('rm', folder)}` deletes it")
            return
        made = f", the last committed one of {steps}" if store.durable.step != steps else ""
        anew = "is refused while the run is there" if keep else "begins anew in its place"
        if not keep and not self._state.saved:
            anew = f"{anew} if the job is the same"
        announce(
            f'the run is kept in {folder}, at step {store.durable.step}{made}: "resume": "auto" goes on from there, '
            f"a start without it {anew}; `{shell_command('rm', folder)}` deletes the run"
        )

    # -- closing ------------------------------------------------------------------------------------

    def _close(self, remove: bool, notes: bool = False) -> None:
        """Releases everything. The store is kept if it can be resumed from, unless `remove` is True.

        Args:
            remove: True to delete the store.
            notes: True to delete the notes of the run's end with the store.
        """
        try:
            self._close_components(remove, notes)
        finally:
            self._components.timeline.close()
            if self._components.meter is not None:
                self._components.meter.close()

    def _close_components(self, remove: bool, notes: bool) -> None:
        """Closes the components, then the process group, then the store. See `_close` for the arguments."""
        components = self._components
        # The registration would keep the memory of the engine alive until the process exits.
        atexit.unregister(self.at_exit)
        if self._look_at_end is not None:
            self._look_at_end.cancel()
        self._module.__dict__.pop("zero_grad", None)
        restore_signals(self._state)
        closing = components.closing()
        # The process group closes after the arena, so that no collective is in flight.
        steps = self._state.global_steps
        closing.append(lambda: components.world.everyone.close(f"its engine was closed at step {steps}{self._after}"))
        if components.store is not None:
            store = components.store
            closing.append(lambda: self._close_store(store, remove, notes))
        try:
            close_all(*closing)
        except Exception:
            self._closed = True
            raise
        self._closed = True

    def _close_store(self, store: Store, remove: bool, notes: bool) -> None:
        """Closes the store, or deletes it if `remove` is True or the run makes no commits; for `notes` see `_close`."""
        if remove or not self._state.commits:  # without commits the store holds nothing to resume from
            store.remove(notes and remove)
        else:
            store.close()


def _line(error: BaseException | None) -> str:
    """Returns an exception on one line; empty without one."""
    return "" if error is None else exception_line(error)
