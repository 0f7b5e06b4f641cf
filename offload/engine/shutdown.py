"""Ends an engine: commits complete steps, closes everything, and keeps or deletes the store.

    destroy      finishes and commits pending updates and edits; with several ranks waits for all of them, and serves
                 them until then; keeps or deletes the store as the user asks
    at exit      does the same in a process that ends without a call; after an exception, or `sys.exit` with a failure,
                 the run is kept and no later start replaces it
    abandon      finishes nothing; the last commit remains

In a forked child all of these do nothing. With several ranks, a rank that ends while it handles an exception reports
the exception to the other ranks, and their errors contain the exception.
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
from offload.notices import ENDS, announce, exception_line, shell_command

# -- exit status ---------------------------------------------------------------------------------------
#
# This part remembers a call of `sys.exit` with a failure, which handlers of the exit cannot see.
#
# A script that catches its error, logs it and calls `sys.exit(1)` has failed as much as one that the error ends.


class _Exit:
    """The function `sys.exit`, which remembers here that the main thread has called it with a failure."""

    def __init__(self, exit: Callable[[Any], NoReturn]) -> None:
        functools.update_wrapper(self, exit)
        self._exit = exit
        self.failure = ""
        """The exception during which the script called `sys.exit` with a failure, or that call; empty without one."""

    def __call__(self, status: Any = None, /) -> NoReturn:
        done = status is None or (isinstance(status, int) and status == 0)
        # On another thread, `sys.exit` ends only that thread.
        if not done and threading.current_thread() is threading.main_thread():
            self.failure = exception_line(sys.exc_info()[1] or SystemExit(status))
        self._exit(status)


@functools.cache
def watched_exit() -> _Exit:
    """Replaces `sys.exit`, once. It stays replaced, since others may wrap it later."""
    watched = _Exit(sys.exit)
    sys.exit = watched
    return watched


# -- shutdown ------------------------------------------------------------------------------------------


logger = logging.getLogger("offload")


class Shutdown:
    """The shutdown of one engine. It runs once, and can be repeated after an interruption.

    Only the thread that runs the model may call it.
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
        """True once this rank has begun to note that the run is removed."""
        self._after = ""
        """Words for the failure that ends this engine; empty if there is no failure."""
        self._ended_child: BaseException | None = None
        """The exception that ends this child of `multiprocessing`."""
        atexit.register(self.at_exit)
        self._exit = watched_exit()
        self._look_at_end: Finalize | None = None
        if multiprocessing.parent_process() is not None:
            # A child of `multiprocessing` prints an exception or passes it to the parent, and ends as if there were
            # none. It calls this finalizer while it still handles the exception.
            self._look_at_end = Finalize(None, self._see_exception, exitpriority=0)

    def check(self) -> None:
        """Raises `UsageError` in a forked child and after the end."""
        if os.getpid() != self._pid:
            raise UsageError(f"this engine belongs to process {self._pid}; a forked child cannot use an engine")
        if not self._alive:
            raise UsageError("this engine was destroyed")

    def go_on(self) -> None:
        """Records that the script goes on. If it has called `sys.exit`, it has caught the `SystemExit`."""
        self._exit.failure = ""

    @property
    def resumable(self) -> str | None:
        """The run folder that a later process can resume from, or None."""
        return str(self._components.store.folders[0].parent) if self._state.commits else None

    # -- ways to end --------------------------------------------------------------------------------

    def end(self, remove: bool | None, facts: Mapping[str, Any] | None = None) -> None:
        """Ends the engine for a call of the user, who can still correct values that cannot be committed.

        See `Engine.destroy`, and with `facts` `Engine.finish`.
        """
        active = self._alive and os.getpid() == self._pid
        stopped = active and self._components.pager.failed
        if active:
            # A call in `except` or `finally`, or after an error that has stopped this rank and was handled.
            self._explain(_line(sys.exc_info()[1] or self._components.pager.table.failure))
        if active and not stopped and not remove:
            if self._state.after_step_is_due:
                # Raises while the user can still fix the value, and the last step can be committed afterwards.
                self._state.of_the_user()
        # After an exception on this rank alone, the other ranks wait in a collective of the model, or of a shared
        # sequence, and cannot answer a rank that ends. So this rank does not wait for them.
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
        """Ends the engine when the process ends. Without a failure, does the same as `destroy()`.

        After a failure, keeps the committed run, and a notice names its folder.
        """
        if not self._alive or os.getpid() != self._pid:
            return
        # `sys.last_value` is set by now if an exception ends this process. The other ranks are not served then: they
        # learn from the lost connection, rather than waiting for a rank that fails.
        failure = _line(getattr(sys, "last_value", self._ended_child)) or self._exit.failure
        try:
            self._explain(failure)
            self._end(remove=False, meet=not failure, keep=bool(failure))
        # An exception in an exit handler would only print a traceback; the run is kept, so a line is enough.
        except (OffloadError, OSError, RuntimeError, KeyboardInterrupt) as error:  # RuntimeError from CUDA
            logger.error("at exit: %s", str(error) or "stopped by Ctrl-C")
        if not self._reported:
            self._report_run(keep=True)

    def _see_exception(self) -> None:
        """Stores the exception that ends a child of `multiprocessing`, even if the child has then called `exit`."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = (error.__context__ or error) if error.code else None
        self._ended_child = error

    def _explain(self, failure: str) -> None:
        """Sends the failure, if any, that ends this rank to the other ranks, before they learn of the end."""
        if failure:
            self._after = f", after {failure}"
            self._components.world.everyone.explain(failure)

    def _end(self, remove: bool, meet: bool, keep: bool = True, facts: Mapping[str, Any] | None = None) -> None:
        """Finishes, commits and closes, once. If `meet`, waits for the other ranks.

        With `keep` a later start that does not resume the run is refused, and does not replace the run. A removed run
        leaves a note with `facts`, if these are given.
        """
        if self._closed or os.getpid() != self._pid:
            return
        components, world = self._components, self._components.world
        finished = False
        try:
            if self._alive and not components.pager.failed:
                self._enter()
                # update thread: its updates and a commit that is due come first. A commit of edits would otherwise name
                # slots that are being written.
                components.update_worker.come_to_rest()
                # Processes of a grid meet in each step, but not at an edit. So one may have ended before its last
                # commit, and another one, which commits edits now, would be two commits ahead: no resume could go back
                # to the first's.
                self._commit(edits=not world.divides_model)
                if meet:  # otherwise an exception ends this rank, whose run stays: nothing is agreed
                    if remove or not (world.ranks.lost or components.agreement.interrupted):
                        # other ranks: each serves gathers and reductions until all have come here, so the wait ends
                        # when the last one does, or is lost.
                        components.agreement.end(remove)
                        if world.divides_model and not world.everyone.lost:
                            world.end(remove)
                            if not remove:
                                self._commit(edits=True)
                        if remove:
                            # The note marks stores as leftovers, so it exists before any is deleted.
                            self._noted = True
                            if world.ranks.rank == 0:
                                components.store.note_end({"steps": self._state.global_steps, **(facts or {})})
                            world.ranks.share(None, "delete its store")
                    else:
                        world.ranks.look()  # names a lost rank now: a launcher's signal may end this process next
                finished = True
                if not remove:
                    self._report_end(keep)
        finally:
            self._alive = False
            self._close(remove and finished, notes=facts is None)

    # -- finishing ----------------------------------------------------------------------------------

    def _commit(self, edits: bool) -> None:
        """Commits steps that the durability setting left uncommitted and, with `edits`, edits since the last step."""
        store, state = self._components.store, self._state
        if store.durable is None:
            return
        if store.durable.step != state.global_steps or (edits and state.edited):
            self._components.shards.commit(state.global_steps, state.for_commit().pack())
            state.mark_edited(False)

    def _report_end(self, keep: bool) -> None:
        """Reports, on the first rank, the run that is left on the disk.

        Without `keep` a note in the run's folder allows a later start to replace the run.
        """
        store = self._components.store
        if self._components.world.ranks.rank != 0:
            self._reported = True
        if store.durable is None or self._components.world.ranks.rank != 0 or not self.resumable:
            return
        if not keep:
            try:
                state = self._state
                store.note_closed({"steps": store.durable.step, "job": state.job, "saved": state.saved})
            except OSError:  # such as a full disk: without the note, the run is kept
                keep = True
        self._report_run(keep)

    def _report_run(self, keep: bool) -> None:
        """Reports the run folder and how the next start treats it. Reports nothing if the run cannot be resumed."""
        self._reported = True
        store, folder, steps = self._components.store, self.resumable, self._state.global_steps
        if folder is None:
            return
        if store.durable is None:
            announce(f"no step was committed in {folder}; `{shell_command('rm', folder)}` deletes it", ENDS)
            return
        made = f", the last committed one of {steps}" if store.durable.step != steps else ""
        anew = "is refused while the run is there" if keep else "begins anew in its place"
        if not keep and not self._state.saved:
            anew = f"{anew} if the job is the same"
        announce(
            f'the run is kept in {folder}, at step {store.durable.step}{made}: "resume": "auto" goes on from there, '
            f"a start without it {anew}; `{shell_command('rm', folder)}` deletes the run",
            ENDS,
        )

    # -- closing ------------------------------------------------------------------------------------

    def _close(self, remove: bool, notes: bool = False) -> None:
        """Releases everything. The store is kept if it can be resumed from, unless `remove` is True.

        With `notes` the notes of the run's end are deleted with the store.
        """
        components, steps = self._components, self._state.global_steps
        try:
            # The registration would keep the memory of the engine alive until the process exits.
            atexit.unregister(self.at_exit)
            if self._look_at_end is not None:
                self._look_at_end.cancel()
            self._module.__dict__.pop("zero_grad", None)
            restore_signals(self._state)
            closing = components.closing()
            # The process group closes after the arena, so that no collective is in flight.
            words = f"its engine was closed at step {steps}{self._after}"
            closing.append(lambda: components.world.everyone.close(words))
            store = components.store
            # Without commits the store contains nothing to resume from.
            removes = remove or not self._state.commits
            closing.append(lambda: store.remove(notes and remove) if removes else store.close())
            try:
                close_all(*closing)
            except Exception:
                self._closed = True
                raise
            self._closed = True
        finally:
            components.timeline.close()
            components.meter.close()


def _line(error: BaseException | None) -> str:
    return "" if error is None else exception_line(error)
