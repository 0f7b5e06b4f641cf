"""Work that all ranks do at the same place of the program, and that succeeds on all of them or on none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from offload.engine.distributed.agreement import Agreement
from offload.engine.distributed.process_group import Ranks
from offload.engine.distributed.rounds.intents import Collective
from offload.errors import RankError, StoreError


class AllOrNothing:
    """One rank's side of the common work. A process that trains alone is the only rank."""

    def __init__(self, rank: int, size: int, share: Callable[[Any], list[Any]], what: str) -> None:
        """Describes the work.

        Args:
            rank: this rank.
            size: number of ranks.
            share: sends a JSON value to all ranks, and returns every rank's.
            what: the work in words, for messages.
        """
        self.rank, self.size = rank, size
        self._share, self._what = share, what

    def settle(self, action: Callable[[], Any]) -> list[Any]:
        """Runs `action` on every rank, and returns the results of all ranks; several ranks exchange them as JSON.

        If `action` raises an `Exception` on one rank, this method raises on all ranks.

        Raises:
            Exception: the error of `action`, on a rank where it failed.
            StoreError: on ranks where it succeeded; names the first rank that failed.
        """
        if self.size == 1:
            return [action()]
        value, failure = None, None
        try:
            value = action()
        except Exception as error:
            failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        rows = self._share([message, value])
        if failure is not None:
            raise failure
        for rank, (message, _) in enumerate(rows):
            if message is not None:
                raise StoreError(f"rank {rank} could not {self._what}, so no rank did: {message}")
        return [value for _, value in rows]

    def by_first(self, action: Callable[[], Any]) -> Any:
        """Runs `action` on rank 0 only, and returns its result on every rank."""
        return self.settle(lambda: action() if self.rank == 0 else None)[0]

    def same(self, facts: dict[str, Any]) -> None:
        """Raises `RankError` on all ranks if the `facts` of any rank differ from those of rank 0."""
        everyone = self.settle(lambda: facts)
        for rank, others in enumerate(everyone):
            for name, value in everyone[0].items():
                if others[name] != value:
                    raise RankError(
                        f"the ranks were asked to {self._what} with different values of {name}: rank 0 with "
                        f"{value!r}, rank {rank} with {others[name]!r}; give every rank the same value"
                    )


@contextlib.contextmanager
def all_or_nothing(rounds: Agreement | None, kind: Collective, what: str) -> Iterator[AllOrNothing]:
    """Waits until every rank is about to do this work, and yields this rank's side of the work.

    Args:
        rounds: this rank's agreement with the others; None for a process that trains alone.
        kind: the collective to announce.
        what: the work in words, for messages.

    Yields:
        The object through which the ranks settle each action. Any exception that leaves the body must come from this
        object, so that all ranks raise.
    """
    if rounds is None:
        yield AllOrNothing(0, 1, lambda value: [value], what)
        return
    with rounds.meeting(kind) as share:
        yield AllOrNothing(rounds.rank, rounds.size, lambda value: share(value, what), what)


def among_all(everyone: Ranks, what: str) -> AllOrNothing:
    """Returns this process's side of work of a whole grid of processes, of which each column has met.

    Args:
        everyone: all processes.
        what: the work in words, for messages.
    """
    return AllOrNothing(everyone.rank, everyone.size, lambda value: everyone.share(value, what), what)
