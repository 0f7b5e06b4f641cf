"""Spans of the model's compute: the forward of each module, and the backward, unit by unit.

forward     a module's span excludes the fetch of its own weights, since the hooks of the span run inside the engine's
backward    a unit's span begins with the first view of its weights, or its first gradient, and ends when the backward
            asks for another unit, when a forward is run again, or when the backward ends
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.timeline import OFF, Row, Timeline, now
from offload.torch_internals import inside_backward


class ComputeSpans:
    """The timeline's row of the model's compute. One thread at a time runs a model: the caller's, or autograd's."""

    def __init__(self, timeline: Timeline, names: Sequence[str]) -> None:
        """Prepares the row; `names` are those of the units, as they are shown."""
        self._timeline = timeline
        self._names = [f"backward {name}" for name in names]
        self._entered: list[tuple[nn.Module, int]] = []
        """Forwards that have begun, with their start; one that Ctrl-C has ended stays until an enclosing one ends."""
        self._unit: int | None = None
        """The unit of the backward's present span, or None."""
        self._since = 0
        self._removers: list[Callable[[], None]] = []

    def install(self, modules: Mapping[str, nn.Module], sites: Iterable[str]) -> None:
        """Records the forwards of the modules that `sites` names, until `remove`.

        The engine's own hooks enclose these: torch runs the engine's pre-hooks first, and these post-hooks first.
        """
        for name in sites:
            self._hook(modules[name], f"forward {name}".rstrip())

    def remove(self) -> None:
        """Removes every hook. Idempotent."""
        while self._removers:
            self._removers.pop()()

    def _hook(self, module: nn.Module, title: str) -> None:
        """Records the forwards of one module."""

        def before(called: nn.Module, args: Any) -> None:
            if called is module:  # a deep copy carries the hooks, but is another module
                self._enter(module)

        def after(called: nn.Module, args: Any, output: Any) -> None:
            if called is module:
                self._leave(module, title)

        # Appended pre-hook and prepended post-hook, the reverse of the engine's, so that the engine's are outside.
        self._removers += [
            module.register_forward_pre_hook(torch.compiler.disable(before)).remove,
            module.register_forward_hook(torch.compiler.disable(after), prepend=True, always_call=True).remove,
        ]

    def _enter(self, module: nn.Module) -> None:
        """Begins a forward's span."""
        # A forward inside of a backward is a recomputation, which ends the backward's present span.
        if not inside_backward():
            self._unit = None  # left over from an aborted backward
        self.end_span()
        self._entered.append((module, now()))

    def _leave(self, module: nn.Module, title: str) -> None:
        """Ends a forward's span, and drops those of inner forwards that never ended."""
        self.end_span()
        # A module may be entered twice: the innermost entry is the one that ends.
        for position in reversed(range(len(self._entered))):
            if self._entered[position][0] is module:
                self._timeline.add(Row.COMPUTE, title, self._entered[position][1], now())
                del self._entered[position:]
                return

    def leave_for(self, unit: int) -> None:
        """Ends the span of any other unit, since the backward asks for `unit`."""
        if self._unit != unit:
            self.end_span()

    def turn_to(self, unit: int) -> None:
        """Begins the span of `unit`, unless one is under way. Does nothing outside of a backward."""
        if self._unit is None and inside_backward():
            self._unit, self._since = unit, now()

    def end_span(self) -> None:
        """Ends the backward's present span, if there is one."""
        if self._unit is not None:
            self._timeline.add(Row.COMPUTE, self._names[self._unit], self._since, now())
            self._unit = None


class _NoSpans(ComputeSpans):
    """Recorder that records nothing and installs no hook. A view that a backward asks for costs two empty calls."""

    def __init__(self) -> None:
        super().__init__(OFF, ())

    def install(self, modules: Mapping[str, nn.Module], sites: Iterable[str]) -> None:
        pass

    def leave_for(self, unit: int) -> None:
        pass

    def turn_to(self, unit: int) -> None:
        pass

    def end_span(self) -> None:
        pass


NO_SPANS: ComputeSpans = _NoSpans()


def compute_spans(timeline: Timeline, names: Sequence[str]) -> ComputeSpans:
    """Returns a recorder of compute in `timeline`, or `NO_SPANS` if the timeline records nothing.

    A listener of the timeline does not receive these spans: for the meter, the row contains the ends of steps only.
    """
    # A `Relay` records nothing itself; the timeline behind it may.
    recorded = timeline.recorded
    return NO_SPANS if recorded is OFF else ComputeSpans(recorded, names)
