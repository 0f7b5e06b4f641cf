"""Registered objects of the user, whose states each commit contains, in the order of their registration.

a new run        objects may be registered at any time; each commit after that contains them
a resumed run    as many objects as the commit contains must be registered before the first step, of the same types and
                 in the same order; each receives its state at once. After that step more may be registered
a load           each registered object receives its state at once. Further objects of the checkpoint must be registered
                 as in a resumed run; objects that the checkpoint lacks stay as they are

A commit contains a loader's state as of the step's end, since the loop draws the next batch before it calls the engine
again; of all other objects as of the first call after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import StoreError, UsageError
from offload.fileio.plain_json import from_plain, to_plain
from offload.sizes import count_of

_ADVICE = (
    "a commit holds None, booleans, numbers, strings, and lists, tuples and dicts of them. Let state_dict() return "
    "such values, and tensors of the CPU of at most 64 KiB; larger ones can be buffers of the model, which each commit "
    "holds"
)


class RegisteredObjects:
    """Objects of `engine.register_for_checkpointing`."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._waiting: list[Mapping[str, Any]] = []
        """States from the resumed commit or checkpoint whose objects are not registered yet."""
        self._positions: dict[int, Mapping[str, Any]] = {}
        """States of the loaders among the objects, by their number, as of the step's end."""
        # True if objects may be registered for which the commit contains no state.
        self._may_grow = True

    def check_fits(self, states: Sequence[Mapping[str, Any]], what: str) -> None:
        """Raises `StoreError` if the registered objects are not of the types of the first `states`.

        Args:
            states: states of registered objects in a checkpoint.
            what: name of the checkpoint for the message.
        """
        for position, (thing, held) in enumerate(zip(self._objects, states, strict=False), 1):
            if held["type"] != type(thing).__name__:
                raise StoreError(
                    f"{what} contains the registered objects {_names(states)}; number {position} of this engine is a "
                    f"{type(thing).__name__}: register the same objects in the same order, or load the weights alone "
                    "(load_module_only=True)"
                )

    def restore(self, states: Sequence[Mapping[str, Any]], may_grow: bool) -> int:
        """Gives each object its state; returns the number of objects without one, which stay as they are.

        Args:
            states: states of the commit or checkpoint; those without an object are stored until one is registered.
            may_grow: True if objects without a state may be registered before the next step.
        """
        for thing, held in zip(self._objects, states, strict=False):
            thing.load_state_dict(from_plain(held["state"]))
        # Objects without a state show that the user knows of more objects than the checkpoint, so others may follow.
        self._keep_positions()
        more = max(0, len(self._objects) - len(states))
        self._waiting, self._may_grow = list(states[len(self._objects) :]), may_grow or more > 0
        return more

    @property
    def complete(self) -> bool:
        """True if all objects of the resumed run or loaded checkpoint are registered."""
        return not self._waiting

    @property
    def schedules(self) -> bool:
        """True if any object can be stepped, as a learning-rate schedule can."""
        # Any object with `step` counts: schedules have no base class in common.
        return any(hasattr(thing, "step") for thing in self._objects)

    def add(self, objects: Sequence[Any]) -> None:
        """Registers `objects`, and on a resumed run loads their states.

        Raises:
            UsageError: one of `objects` cannot be registered. After this and any error of an object's own
                `load_state_dict` none of them is registered, so that the same call may be repeated.
        """
        for position, thing in enumerate(objects, len(self._objects) + 1):
            missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(thing, name, None))]
            if missing:
                raise UsageError(
                    f"register_for_checkpointing expects objects with state_dict() and load_state_dict(), got a "
                    f"{type(thing).__name__} without {' and '.join(missing)}; put single values into "
                    f"engine.client_state"
                )
            # Fails now, at the call that the user can change, and not at the first commit.
            _state(thing, position)
        # Before the first step of a resumed run an extra object is more likely a changed order than a new object.
        if not self._may_grow and len(objects) > len(self._waiting):
            raise UsageError(
                "the loaded commit or checkpoint contains "
                f"{count_of(len(self._objects) + len(self._waiting), 'registered object')}, and this would be number "
                f"{len(self._objects) + len(self._waiting) + 1}: register the same objects as in that run. A new "
                "object can be registered after the first step()"
            )
        for thing, held in zip(objects, self._waiting, strict=False):
            if held["type"] != type(thing).__name__:
                raise UsageError(
                    f"the loaded commit or checkpoint contains {_names(self._waiting)} next, got a "
                    f"{type(thing).__name__}: register the same objects in the same order"
                )
        # All checks have passed; only `load_state_dict` of an object can fail, and nothing is registered before that.
        for thing, held in zip(objects, self._waiting, strict=False):
            thing.load_state_dict(from_plain(held["state"]))
        self._waiting = self._waiting[len(objects) :]
        self._objects.extend(objects)
        self._keep_positions()

    def check_complete(self) -> None:
        """Raises `UsageError` if the next step would lose the state of an object that is not registered."""
        if self._waiting:
            raise UsageError(
                "the loaded commit or checkpoint contains "
                f"{count_of(len(self._objects) + len(self._waiting), 'registered object')}, of which "
                f"{count_of(len(self._objects), 'is', 'are')} registered: {_names(self._waiting)} would be lost with "
                "this step. Call engine.register_for_checkpointing with all of them before the step"
            )

    def stepped(self) -> None:
        """Takes the positions of loaders at a step's end, and allows new objects, also in a resumed run."""
        self._may_grow = True
        self._keep_positions()

    def states(self) -> list[Mapping[str, Any]]:
        """Returns the states for the next commit as JSON, including those whose objects are not registered yet."""
        numbered = enumerate(self._objects, 1)
        return [self._positions.get(number) or _state(thing, number) for number, thing in numbered] + self._waiting

    def _keep_positions(self) -> None:
        """Takes the states of all loaders: of objects that are iterated."""
        numbered = enumerate(self._objects, 1)
        self._positions = {number: _state(thing, number) for number, thing in numbered if hasattr(thing, "__iter__")}


def _state(thing: Any, number: int) -> Mapping[str, Any]:
    """Returns type and state of an object as JSON."""
    what = f"registered object {number}, {type(thing).__name__}: its state_dict()"
    return {"type": type(thing).__name__, "state": to_plain(thing.state_dict(), what, _ADVICE, tensors=True)}


def _names(states: Sequence[Mapping[str, Any]]) -> str:
    """Returns the types of states in words."""
    return ", ".join(f"a {state['type']}" for state in states)
