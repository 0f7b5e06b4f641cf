"""Spans on the timeline for the work of the drives: requests, from submission to completion, and commits.

submit ── began = now() ──► the queue ──► the request ends, on the queue's thread ──► show: one span
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from offload.errors import IoError
from offload.states import State
from offload.timeline import OFF, Row, Timeline, now

if TYPE_CHECKING:
    from offload.aio.protocols import Future


class DriveSpans:
    """Recorder of requests, by unit and state, and of commits. One object serves the store and the spill files."""

    def __init__(self, timeline: Timeline, names: Sequence[str]) -> None:
        """Creates the titles of all spans.

        Args:
            timeline: receives the spans.
            names: the displayed name of each unit.
        """
        self._timeline = timeline
        self._recorded = timeline.recorded
        self._titles = [{state: f"{name} {state.value}" for state in State} for name in names]

    def show(self, row: Row, unit: int, state: State, began: int, nbytes: int, future: Future) -> Future:
        """Records the request of `future` when the request has ended, and returns `future`.

        Args:
            row: `Row.READS` or `Row.WRITES`.
            unit: the unit whose bytes are moved.
            state: the state of the unit.
            began: the value of `now()` before the submission.
            nbytes: number of bytes moved.
            future: the request. A request that fails is recorded with its error.
        """
        if not self._recorded.started:  # spans that begin before the start are dropped, and `OFF` never starts
            return future
        title = self._titles[unit][state]

        # A thread of the queue runs this callback, while other threads may wait for the request: it must not block.
        def ended(request: Future) -> None:
            """Adds the span of a request that has ended."""
            end, words = now(), title
            try:
                request.wait()
            except IoError as error:
                words = f"{title}: {error}"
            self._recorded.add(row, words, began, end, nbytes)

        future.add_done_callback(ended)
        return future

    def commit(self, step: int) -> AbstractContextManager[None]:
        """Records a commit for as long as the context is open."""
        return self._timeline.span(Row.COMMITS, f"commit of step {step}")


NO_SPANS = DriveSpans(OFF, ())
"""Recorder that records nothing."""
