"""What a user has registered: objects whose state each commit holds, in the order in which they came.

a new run        objects may come at any time; from then on each commit holds them
a resumed run    as many objects as the commit holds must come before the first step, of the same types and in the
                 same order; each gets its state as it comes. After that step more may come
a load           each object that is there gets its state at once. Those that the checkpoint has beyond them must come
                 as in a resumed run; those that it has not stay as they are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import StoreError, UsageError
from offload.fileio.plain_json import from_plain, to_plain
from offload.sizes import count_of

_ADVICE = (
    "a commit holds None, booleans, numbers, strings, and lists, tuples and dicts of them. Let state_dict() return "
    "such values; tensors can be buffers of the model, which each commit holds"
)


class Registered:
    """The objects of `engine.register_for_checkpointing`."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._waiting: list[Mapping[str, Any]] = []
        """The states of objects of the run or checkpoint gone on from, that have not come yet."""
        self._may_grow = True

    def check_fits(self, states: Sequence[Mapping[str, Any]], what: str) -> None:
        """Raise `StoreError` where the objects that are there are not the first of `states`, those of `what`."""
        for position, (thing, held) in enumerate(zip(self._objects, states, strict=False), 1):
            if held["type"] != type(thing).__name__:
                raise StoreError(
                    f"{what} has the registered objects {_names(states)}; number {position} of this engine is a "
                    f"{type(thing).__name__}: register the same objects in the same order, or load the weights alone "
                    f"(load_module_only=True)"
                )

    def restore(self, states: Sequence[Mapping[str, Any]], may_grow: bool) -> int:
        """Give each object its state; how many there are without one, which stay as they are.

        Where there are more states, objects must come for them, and others before the next step only if it `may_grow`.
        """
        for thing, held in zip(self._objects, states, strict=False):
            thing.load_state_dict(from_plain(held["state"]))
        more = max(0, len(self._objects) - len(states))
        self._waiting, self._may_grow = list(states[len(self._objects) :]), may_grow or more > 0
        return more

    @property
    def complete(self) -> bool:
        """Whether no object of the resumed run is missing."""
        return not self._waiting

    @property
    def schedules(self) -> bool:
        """Whether any of them can be stepped, as a schedule of learning rates is."""
        return any(hasattr(thing, "step") for thing in self._objects)

    def add(self, objects: Sequence[Any]) -> None:
        """Register `objects`, and load their states on a resumed run. Raises `UsageError` before it registers any."""
        for position, thing in enumerate(objects, len(self._objects) + 1):
            missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(thing, name, None))]
            if missing:
                raise UsageError(
                    f"register_for_checkpointing expects objects with state_dict() and load_state_dict(), got a "
                    f"{type(thing).__name__} without {' and '.join(missing)}; put single values into "
                    f"engine.client_state"
                )
            _state(thing, position)
        if not self._may_grow and len(objects) > len(self._waiting):
            raise UsageError(
                f"the commit or checkpoint that this run goes on from holds "
                f"{count_of(len(self._objects) + len(self._waiting), 'registered object')}, and this would be number "
                f"{len(self._objects) + len(self._waiting) + 1}: register the same objects as then. "
                f"An object that is new can be registered after the first step()"
            )
        for thing, held in zip(objects, self._waiting, strict=False):
            if held["type"] != type(thing).__name__:
                raise UsageError(
                    f"the commit or checkpoint that this run goes on from holds {_names(self._waiting)} next, got a "
                    f"{type(thing).__name__}: register the same objects in the same order"
                )
        for thing in objects:
            if self._waiting:
                thing.load_state_dict(from_plain(self._waiting[0]["state"]))
                del self._waiting[0]
            self._objects.append(thing)

    def check_complete(self) -> None:
        """Raise `UsageError` where a step would be made without an object of the resumed run."""
        if self._waiting:
            raise UsageError(
                f"the commit or checkpoint that this run goes on from holds "
                f"{count_of(len(self._objects) + len(self._waiting), 'registered object')}, of which "
                f"{count_of(len(self._objects), 'is', 'are')} registered: {_names(self._waiting)} would be lost with "
                f"this step. Call engine.register_for_checkpointing with all of them before it"
            )

    def stepped(self) -> None:
        """A step was made: from here on objects may come that the run did not have."""
        self._may_grow = True

    def states(self) -> list[Mapping[str, Any]]:
        """What the next commit holds, as JSON; the states of objects that have not come yet are kept."""
        return [_state(thing, number) for number, thing in enumerate(self._objects, 1)] + self._waiting


def _state(thing: Any, number: int) -> Mapping[str, Any]:
    what = f"registered object {number}, {type(thing).__name__}: its state_dict()"
    return {"type": type(thing).__name__, "state": to_plain(thing.state_dict(), what, _ADVICE)}


def _names(states: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"a {state['type']}" for state in states)
