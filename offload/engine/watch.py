"""What a time line shows of an engine, taken at the doors between its parts.

Without a time line none of this runs, and the parts know nothing of it but the waits and kernels that they name
themselves (`Table.timeline`, `Updater.timeline`). With one, `watch` puts itself in front of public methods of the
objects that one engine is made of, and beside the hooks of its modules. It only looks: every call goes on as it was.
`measure` does the same for a meter, which adds up what a time line would show.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.meter import EVALUATION, Meter
from offload.engine.parts import Parts
from offload.engine.rounds import Rounds
from offload.errors import IoError
from offload.swapper.scratch import Scratch
from offload.swapper.states import State
from offload.swapper.store import Store
from offload.swapper.timeline import OFF, Relay, Row, Timeline, now
from offload.swapper.trace import Kind
from offload.torch_internals import inside_backward


def watch(parts: Parts, timeline: Timeline, model: nn.Module, sites: dict[str, tuple[int, ...]]) -> Parts:
    """Record what these parts do from now on; the parts, which know of the time line."""
    if timeline is OFF:
        return parts
    names = [layout.name or "the root" for layout in parts.layouts]
    parts.pager.table.timeline = timeline
    _watch_memory(parts, timeline)
    _watch_compute(parts, timeline, model, sites, names)
    if parts.updater is not None:
        parts.updater.timeline = timeline
    if parts.store is not None:
        _watch_store(parts.store, timeline, names)
    if parts.gradients.downloads is not None:
        parts.gradients.downloads.timeline = timeline
    if parts.gradients.spill is not None:
        _watch_scratch(parts.gradients.spill.scratch, timeline, names)
    if parts.rounds is not None:
        _watch_rounds(parts.rounds, timeline, names)
    return parts._replace(timeline=timeline)


def measure(parts: Parts, meter: Meter, breakdown: bool) -> Parts:
    """Let the `meter` know what these parts do from now on, with a `breakdown` of steps; the parts, which have it."""
    if breakdown:
        relay = Relay(parts.timeline, meter.hear)
        parts.pager.table.timeline = relay
        if parts.updater is not None:
            parts.updater.timeline = relay
        _measure_phases(parts, meter)
        parts = parts._replace(timeline=relay)
    return parts._replace(meter=meter)


def _measure_phases(parts: Parts, meter: Meter) -> None:
    """Forwards of training, outermost backwards, and the gradients that these bring."""

    def began(begin: Callable[[Kind], None], kind: Kind) -> None:
        begin(kind)
        meter.begin_phase("forward" if kind is Kind.TRAIN else EVALUATION)

    def ended(end_forward: Callable[[], None]) -> None:
        end_forward()
        meter.end_phase("forward")
        meter.end_phase(EVALUATION)

    def added(add: Callable[..., None], unit: int, segment: int, gradient: torch.Tensor) -> None:
        meter.add_bytes("gradients", gradient.numel() * gradient.element_size())
        add(unit, segment, gradient)

    def ended_backward(end_backward: Callable[[], None]) -> None:
        end_backward()
        meter.end_phase("backward")

    _in_front(parts.pager, "begin", began)
    _in_front(parts.pager, "end_forward", ended)
    _in_front(parts.gradients, "add", added)
    _in_front(parts.gradients, "end_backward", ended_backward)


def _in_front(owner: object, method: str, watcher: Callable[..., Any]) -> None:
    """From now on calls of the `method` of this one object go to `watcher`, whose first argument is the method."""
    setattr(owner, method, functools.partial(watcher, getattr(owner, method)))


def _watch_memory(parts: Parts, timeline: Timeline) -> None:
    """Bytes in use, whenever the pager tells of a change. Its lock is held then."""
    pager, arena = parts.pager, parts.arena

    def notified(notify: Callable[[], None]) -> None:
        for name in ("tiles", "weights", "gradients", "homes", "staging"):
            space = getattr(arena, name).space
            if space.nbytes:
                timeline.count(f"leases of {name}", space.used_bytes)
        timeline.count("device memory", pager.arena.used_bytes)
        notify()

    _in_front(pager.table, "notify", notified)


def _watch_store(store: Store, timeline: Timeline, names: Sequence[str]) -> None:
    """Requests, from their submission to their end, and commits."""
    titles = [{state: f"{name} {state.value}" for state in State} for name in names]

    def requests(row: Row) -> Callable[..., Any]:
        def requested(
            submit: Callable[..., Any],
            unit: int,
            state: State,
            slot: int,
            start: int,
            buffer: memoryview,
            *rest: Any,
            **more: Any,
        ) -> Any:
            began = now()
            future = submit(unit, state, slot, start, buffer, *rest, **more)
            return _watched(future, timeline, row, titles[unit][state], began, len(buffer))

        return requested

    def committed(commit: Callable[..., None], epoch: int, contents: Any) -> None:
        with timeline.span(Row.COMMITS, f"commit of step {epoch}"):
            commit(epoch, contents)

    _in_front(store, "read", requests(Row.READS))
    _in_front(store, "write", requests(Row.WRITES))
    _in_front(store, "commit", committed)


def _watch_scratch(scratch: Scratch, timeline: Timeline, names: Sequence[str]) -> None:
    """Gradients that wait on DISK."""

    def requests(row: Row) -> Callable[..., Any]:
        def requested(submit: Callable[..., Any], unit: int, start: int, buffer: memoryview) -> Any:
            began = now()
            future = submit(unit, start, buffer)
            return _watched(future, timeline, row, f"{names[unit]} {State.GRAD.value}", began, len(buffer))

        return requested

    _in_front(scratch, "read", requests(Row.READS))
    _in_front(scratch, "write", requests(Row.WRITES))


def _watched(future: Any, timeline: Timeline, row: Row, title: str, began: int, nbytes: int) -> Any:
    """Record a request when it has ended."""

    def ended(future: Any) -> None:
        end, words = now(), title
        try:
            future.wait()
        except IoError as error:
            words = f"{title}: {error}"
        timeline.add(row, words, began, end, nbytes)

    future.add_done_callback(ended)
    return future


def _watch_rounds(rounds: Rounds, timeline: Timeline, names: Sequence[str]) -> None:
    """What is done with other ranks, the wait for them included."""

    def with_unit(words: str) -> Callable[..., Any]:
        def done(act: Callable[..., Any], unit: int, *arguments: Any) -> Any:
            with timeline.span(Row.RANKS, f"{words} {names[unit]}"):
                return act(unit, *arguments)

        return done

    def alone(words: str) -> Callable[..., Any]:
        def done(act: Callable[..., Any], *arguments: Any) -> Any:
            with timeline.span(Row.RANKS, words):
                return act(*arguments)

        return done

    _in_front(rounds, "agree", with_unit("agree to gather"))
    _in_front(rounds, "agree_ahead", alone("agree to gather ahead"))
    _in_front(rounds, "gather", alone("gather"))
    _in_front(rounds, "reduce", with_unit("reduce the gradients of"))
    _in_front(rounds, "step", alone("agree on a step"))


def _watch_compute(
    parts: Parts, timeline: Timeline, model: nn.Module, sites: dict[str, tuple[int, ...]], names: Sequence[str]
) -> None:
    """Forwards by hooks that lie within the engine's own, so that weights are bound; backwards by what they ask for."""
    compute = _Compute(timeline, names)
    removers: list[Callable[[], None]] = []
    modules = dict(model.named_modules())
    for name in {"": ()} | sites:
        removers += compute.hook(modules[name], f"forward {name}".rstrip())

    def viewed(view: Callable[..., torch.Tensor], unit: int, *arguments: Any) -> torch.Tensor:
        compute.leave_for(unit)
        weights = view(unit, *arguments)
        compute.turn_to(unit)
        return weights

    def added(add: Callable[..., None], unit: int, segment: int, gradient: torch.Tensor) -> None:
        compute.leave_for(unit)
        compute.turn_to(unit)
        if parts.gradients.downloads is not None:  # which tells of it when it has come
            add(unit, segment, gradient)
            return
        nbytes = gradient.numel() * gradient.element_size()  # as it is stored; a sparse one has no `nbytes`
        with timeline.span(Row.DOWNLOADS, f"gradient of {names[unit]}", nbytes):
            add(unit, segment, gradient)

    def ended(end_backward: Callable[[], None]) -> None:
        compute.end_stretch()
        end_backward()

    def removed(remove: Callable[[], None]) -> None:
        remove()
        while removers:
            removers.pop()()

    _in_front(parts.bindings, "view", viewed)
    _in_front(parts.gradients, "add", added)
    _in_front(parts.gradients, "end_backward", ended)
    _in_front(parts.hooks, "remove", removed)


class _Compute:
    """The row of what the model computes. One thread at a time runs a model: the caller's, or autograd's for it."""

    def __init__(self, timeline: Timeline, names: Sequence[str]) -> None:
        self._timeline = timeline
        self._names = [f"backward {name}" for name in names]
        self._entered: list[tuple[nn.Module, int]] = []
        """Forwards that have begun; one that Ctrl-C has ended stays."""
        self._unit: int | None = None
        self._since = 0

    def hook(self, module: nn.Module, title: str) -> list[Callable[[], None]]:
        """Record the forwards of a module under `title`; what ends that."""

        def before(called: nn.Module, args: Any) -> None:
            if called is module:  # and not a deep copy of it
                self._enter(module)

        def after(called: nn.Module, args: Any, output: Any) -> None:
            if called is module:
                self._leave(module, title)

        return [
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
        """The backward asks for `unit`; what it computed before was another unit's."""
        if self._unit != unit:
            self.end_stretch()

    def turn_to(self, unit: int) -> None:
        """From now on the backward computes with `unit`."""
        if self._unit is None and inside_backward():
            self._unit, self._since = unit, now()

    def end_stretch(self) -> None:
        """The backward does something else now."""
        if self._unit is not None:
            self._timeline.add(Row.COMPUTE, self._names[self._unit], self._since, now())
            self._unit = None
