"""Spans of what the model computes: the forward of each module, and the stretches of a backward, unit by unit.

forward     hooks within the engine's own, so that the weights are bound: the time to bring them is not in a span
backward    a unit's stretch begins with the first view of its weights, or its first gradient, and ends where the
            backward asks for another unit, where a forward is run again, or where the backward ends
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.timeline import OFF, Row, Timeline, now
from offload.torch_internals import inside_backward


class ComputeSpans:
    """The row of what the model computes. One thread at a time runs a model: the caller's, or autograd's for it."""

    def __init__(self, timeline: Timeline, names: Sequence[str]) -> None:
        """`names` has the name of each unit, as it is shown."""
        self._timeline = timeline
        self._names = [f"backward {name}" for name in names]
        self._entered: list[tuple[nn.Module, int]] = []
        """Forwards that have begun; one that Ctrl-C has ended stays."""
        self._unit: int | None = None
        self._since = 0
        self._removers: list[Callable[[], None]] = []

    def install(self, modules: Mapping[str, nn.Module], sites: Iterable[str]) -> None:
        """Records the forwards of the modules that `sites` names, until `remove`.

        The engine's own hooks surround these: torch runs those pre-hooks first, and these post-hooks first.
        """
        for name in sites:
            self._hook(modules[name], f"forward {name}".rstrip())

    def remove(self) -> None:
        """Takes every hook away. Idempotent."""
        while self._removers:
            self._removers.pop()()

    def _hook(self, module: nn.Module, title: str) -> None:
        def before(called: nn.Module, args: Any) -> None:
            if called is module:  # and not a deep copy of it
                self._enter(module)

        def after(called: nn.Module, args: Any, output: Any) -> None:
            if called is module:
                self._leave(module, title)

        self._removers += [
            module.register_forward_pre_hook(torch.compiler.disable(before)).remove,
            module.register_forward_hook(torch.compiler.disable(after), prepend=True, always_call=True).remove,
        ]

    def _enter(self, module: nn.Module) -> None:
        if not inside_backward():
            self._unit = None  # of a backward that was aborted
        self.end_stretch()
        self._entered.append((module, now()))

    def _leave(self, module: nn.Module, title: str) -> None:
        self.end_stretch()
        for position in reversed(range(len(self._entered))):
            if self._entered[position][0] is module:
                self._timeline.add(Row.COMPUTE, title, self._entered[position][1], now())
                del self._entered[position:]
                return

    def leave_for(self, unit: int) -> None:
        """Ends the stretch of another unit than `unit`, for which the backward asks."""
        if self._unit != unit:
            self.end_stretch()

    def turn_to(self, unit: int) -> None:
        """Begins the stretch of `unit`, unless one is under way. Does nothing outside of a backward."""
        if self._unit is None and inside_backward():
            self._unit, self._since = unit, now()

    def end_stretch(self) -> None:
        """Ends the stretch that is under way, if there is one."""
        if self._unit is not None:
            self._timeline.add(Row.COMPUTE, self._names[self._unit], self._since, now())
            self._unit = None


class _NoSpans(ComputeSpans):
    """Records nothing, and hooks nothing: for each view that a backward asks for it costs two empty calls."""

    def __init__(self) -> None:
        super().__init__(OFF, ())

    def install(self, modules: Mapping[str, nn.Module], sites: Iterable[str]) -> None:
        pass

    def leave_for(self, unit: int) -> None:
        pass

    def turn_to(self, unit: int) -> None:
        pass

    def end_stretch(self) -> None:
        pass


NO_SPANS: ComputeSpans = _NoSpans()


def compute_spans(timeline: Timeline, names: Sequence[str]) -> ComputeSpans:
    """Returns what records compute in `timeline`; `NO_SPANS` where that records nothing.

    A listener of the time line does not hear these spans: for the meter the row has the ends of steps alone.
    """
    recorded = timeline.recorded
    return NO_SPANS if recorded is OFF else ComputeSpans(recorded, names)
