"""The outermost forward and the outermost backward of an engine: what happens when each begins and ends.

    alone    a forward begins with its outermost module, a backward with its first sign; each ends by itself
    turns    the micro-batches of a step take turns (`layer_major`): all of their forwards and backwards together are
             one forward, which ends with the first backward, and one backward

Threads. A forward belongs to its caller's thread, a backward to autograd's. Micro-batches that take turns have a
thread each, of which one runs at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from offload.engine.callbacks import EngineCallbacks
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.errors import UsageError
from offload.interrupts import uninterrupted
from offload.swapper.pager import Pager
from offload.swapper.policy import PassKind
from offload.timeline import Phase, Timeline
from offload.torch_internals import call_after_backward, inside_backward


class Views(Protocol):
    """The views of weights, as a pass needs them."""

    @property
    def outdated(self) -> int:
        """Number of changes of weights that graphs hold themselves."""

    def end_kept(self) -> None:
        """Releases the units that were fetched on demand for the pass."""


class Passes:
    """The forward and the backward that are under way."""

    def __init__(
        self,
        pager: Pager,
        gradients: GradientAccumulator,
        views: Views,
        callbacks: EngineCallbacks,
        timeline: Timeline,
    ) -> None:
        """Begins nothing.

        Args:
            pager: is notified of the beginning and the end of each forward.
            gradients: is notified of the end of each backward.
            views: releases units at the end of a pass.
            callbacks: the engine, as its components see it.
            timeline: records the phases.
        """
        self._pager, self._gradients, self._views, self._callbacks = pager, gradients, views, callbacks
        self._timeline = timeline
        self.thread: threading.Thread | None = None
        """The thread whose forward is under way, or for whom micro-batches take turns."""
        self.in_backward = self.gradient_seen = self.through_old_graph = False
        """The last is True if the last backward began in a graph older than a change of weights that stay."""
        self.takes_turns = False
        """True while the micro-batches of a step take turns."""

    def check_thread(self) -> None:
        """Raises `UsageError` if the model runs on another thread: to release its weights would corrupt its results."""
        if self.thread is not None and self.thread is not threading.current_thread() and self.thread.is_alive():
            raise UsageError(
                f"the model runs on thread {self.thread.name}: until its forward ends, no other thread may use it or "
                f"read its weights"
            )

    # -- forward ------------------------------------------------------------------------------------

    def begin_forward(self, trains: bool) -> None:
        """Begins an outermost forward; `trains` if a backward may follow."""
        if self.takes_turns:
            return
        self._callbacks.enter_forward()
        self.thread = threading.current_thread()
        if not inside_backward():
            self._begin(trains)

    def _begin(self, trains: bool) -> None:
        self._pager.begin(PassKind.TRAIN if trains else PassKind.EVAL)
        self._timeline.begin_phase(Phase.FORWARD if trains else Phase.EVALUATION)

    def end_forward(self) -> None:
        """Ends the outermost forward."""
        if self.takes_turns:
            return
        self.thread = None
        if not inside_backward():
            self._end()

    def _end(self) -> None:
        self._views.end_kept()
        self._pager.end_forward()
        self._timeline.end_phase(Phase.FORWARD)
        self._timeline.end_phase(Phase.EVALUATION)

    # -- backward -----------------------------------------------------------------------------------

    @uninterrupted
    def begin_backward(self, made: int | None = None) -> None:
        """Begins the backward at its first sign: a gradient, a request for weights, or an output's node.

        Such a node passes what `Views.outdated` was when its graph was `made`.
        """
        if not self.in_backward:
            self.through_old_graph = made not in (None, self._views.outdated)
            self._timeline.begin_phase(Phase.BACKWARD)
            # If this call raises, the backward has not started, and its next sign calls again.
            self._callbacks.begin_backward()
            self.in_backward = True
            call_after_backward(self.end_backward)

    @uninterrupted
    def end_backward(self) -> None:
        """Ends the outermost backward. torch calls this once the graph task has ended."""
        self._views.end_kept()
        self._gradients.end_backward()
        if self.gradient_seen:
            self._callbacks.end_backward()
        self.in_backward = self.gradient_seen = False

    def abort_backward(self) -> bool:
        """Forgets a backward that did not end. Returns False if there is none."""
        aborted = self.in_backward
        self.in_backward = self.gradient_seen = False
        return aborted

    # -- micro-batches that take turns --------------------------------------------------------------

    @contextlib.contextmanager
    def turns(self, micro_batches: int, trains: bool = True) -> Iterator[None]:
        """Makes the forwards and backwards of the context one forward and one backward, of `micro_batches`.

        After an exception the backward is an aborted one, which the engine's next entry clears up. If `trains` is
        False, there are forwards alone.
        """
        self._callbacks.enter_forward()
        self.thread = threading.current_thread()
        self._begin(trains)
        self.takes_turns = True
        try:
            yield
        finally:
            self.takes_turns, self.thread = False, None
        if trains:
            self._end_turns(micro_batches)
        else:
            self._end()

    @uninterrupted
    def _end_turns(self, micro_batches: int) -> None:
        """Ends the one backward, in which each micro-batch has produced gradients."""
        self._pager.end_forward()
        self._views.end_kept()
        self._gradients.end_backward()
        for _ in range(micro_batches):
            self._callbacks.end_backward()
        self.in_backward = self.gradient_seen = False

    @uninterrupted
    def begin_backward_of_turn(self) -> None:
        """Begins the backward of one micro-batch. The first ends the forward of all, as far as phases go."""
        self._callbacks.begin_backward()
        if not self.in_backward:
            self._timeline.end_phase(Phase.FORWARD)
            self._timeline.begin_phase(Phase.BACKWARD)
            self.in_backward, self.through_old_graph = True, False
