"""A timeline with a listener: the meter of steps receives each span and mark as it is recorded."""

from __future__ import annotations

from typing import Protocol

from offload.timeline import Phase, Row, Timeline


class Listener(Protocol):
    """Receiver of spans and marks, on the thread that makes them."""

    def on_span(self, row: Row, name: str, nanoseconds: int, nbytes: int) -> None:
        """Notes a span that has ended."""

    def on_phase_begin(self, phase: Phase) -> None:
        """Notes the start of a phase. An earlier start without an end counts as abandoned."""

    def on_phase_end(self, phase: Phase) -> None:
        """Notes the end of a phase, if the phase has begun."""

    def on_gradient(self, nbytes: int) -> None:
        """Notes a gradient of `nbytes`."""


class Relay(Timeline):
    """A timeline that reports spans and marks to a listener, and passes spans and counters on to another timeline."""

    def __init__(self, onto: Timeline, listener: Listener) -> None:
        super().__init__(onto.path)
        self.notices = onto.notices
        self._onto, self._listener = onto, listener

    @property
    def recorded(self) -> Timeline:
        return self._onto

    @property
    def started(self) -> bool:
        return self._onto.started

    def start(self) -> None:
        self._onto.start()

    def begin(self, row: Row, name: str) -> None:
        self._onto.begin(row, name)

    def end(self, row: Row, name: str) -> None:
        self._onto.end(row, name)

    def add(self, row: Row, name: str, start: int, end: int, nbytes: int = 0) -> None:
        self._listener.on_span(row, name, end - start, nbytes)
        self._onto.add(row, name, start, end, nbytes)

    def count(self, name: str, value: int) -> None:
        self._onto.count(name, value)

    def begin_phase(self, phase: Phase) -> None:
        self._listener.on_phase_begin(phase)

    def end_phase(self, phase: Phase) -> None:
        self._listener.on_phase_end(phase)

    def add_gradient(self, nbytes: int) -> None:
        self._listener.on_gradient(nbytes)

    def close(self) -> None:
        self._onto.close()
