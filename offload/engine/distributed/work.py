"""Collectives under way, as events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from offload.interrupts import uninterrupted
from offload.swapper.memory.device import Event
from offload.torch_internals import without_saved_tensor_hooks


@uninterrupted  # a Ctrl-C between the hooks' going and coming would lose them
def begin(start: Callable[[], Any]) -> Any:
    """Returns the work of a collective that `start` begins.

    gloo keeps the state of the thread that begins it with the work, and so its saved-tensor hooks. A gather may begin
    within the checkpointing of one unit and be waited for at another one: its work would hold the graph until then.
    """
    with without_saved_tensor_hooks():
        return start()


class Waits(Protocol):
    """The ranks of a collective, which wait for it and look for lost ranks meanwhile."""

    on_gpu: bool

    def wait(self, work: Any, to: str) -> None:
        """Waits for `work`; raises `RankError` if a rank is lost."""
        ...


class Work:
    """A collective under way, as an `Event`."""

    def __init__(self, ranks: Waits, work: Any, to: str) -> None:
        self.work, self._ranks, self._to = work, ranks, to

    def done(self) -> bool:
        """Returns True if the collective has completed, with success or failure."""
        return self.work is None or bool(self.work.is_completed())

    def wait(self) -> None:
        """Waits for the collective, and raises `RankError` if a rank is lost."""
        if self.work is not None:
            self._ranks.wait(self.work, self._to)  # also after completion, which may be a failure

    def order_compute(self) -> None:
        """Makes compute that the calling thread starts from now on wait for the collective.

        On a CPU the thread itself waits, and `RankError` is raised if a rank is lost. On a GPU the thread continues: a
        lost rank is noticed by the next message between hosts, which aborts the collective.
        """
        if self._ranks.on_gpu and self.work is not None:
            self.work.wait()  # NCCL: the current stream waits, the host does not
        else:
            self.wait()


class AllDone:
    """Several events as one."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def done(self) -> bool:
        """Returns True if all events are done."""
        return all(event.done() for event in self._events)

    def wait(self) -> None:
        """Waits for each event."""
        for event in self._events:
            event.wait()
