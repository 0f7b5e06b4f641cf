"""A piece of work that all ranks do at the same place of the program, and that succeeds on all of them or on none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from offload.engine.distributed.agreement import Kind, Rounds
from offload.errors import RankError, StoreError


class Together:
    """One rank's side of it. Alone, the others are nobody."""

    def __init__(self, rank: int, size: int, share: Callable[[Any], list[Any]], what: str) -> None:
        self.rank, self.size = rank, size
        self._share, self._what = share, what

    def settle(self, action: Callable[[], Any]) -> list[Any]:
        """Do `action` on every rank; what each returned, as JSON tells it.

        Where it failed on one it fails on all: there with its own error, on the others with a `StoreError` that names
        the rank.
        """
        if self.size == 1:
            return [action()]
        value, failure = None, None
        try:
            value = action()
        except Exception as error:
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        rows = self._share([told, value])
        if failure is not None:
            raise failure
        for rank, (told, _) in enumerate(rows):
            if told is not None:
                raise StoreError(f"rank {rank} could not {self._what}, so no rank did: {told}")
        return [value for _, value in rows]

    def by_first(self, action: Callable[[], Any]) -> Any:
        """Let rank 0 do `action`; what it returned, on every rank."""
        return self.settle(lambda: action() if self.rank == 0 else None)[0]

    def same(self, facts: dict[str, Any]) -> None:
        """Raise `RankError` on all ranks where their `facts` differ."""
        everyone = self.settle(lambda: facts)
        for rank, others in enumerate(everyone):
            for name, value in everyone[0].items():
                if others[name] != value:
                    raise RankError(
                        f"the ranks were asked to {self._what} with other {name}: rank 0 with {value!r}, rank {rank} "
                        f"with {others[name]!r}; give every rank the same"
                    )


@contextlib.contextmanager
def together(rounds: Rounds | None, kind: Kind, what: str) -> Iterator[Together]:
    """Wait until every rank is about to do this; what is raised inside must come from what they settled."""
    if rounds is None:
        yield Together(0, 1, lambda value: [value], what)
        return
    with rounds.meeting(kind) as share:
        yield Together(rounds.rank, rounds.size, lambda value: share(value, what), what)
