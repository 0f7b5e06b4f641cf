"""The announcements of ranks, and the pure decision on the next collective from all of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Collective(enum.IntEnum):
    """An operation that a rank may announce."""

    USE = 0
    """Use of a unit's weights: in a forward, in a backward, or by a read."""
    REDUCE = 1
    STEP = 2
    """Decision on a step."""
    EDIT = 3
    END = 4
    MEAN = 5
    """Exchange of a number, whose mean every rank receives."""
    FORGET = 6
    """Drop of gradients that were reduced."""
    SAVE = 7
    """Save of a checkpoint."""
    LOAD = 8
    """Load of a checkpoint."""
    LOOK = 9
    """Read of a parameter's state, or replacement of its gradient."""
    SLEEP = 10
    """Return of the memory to others, between steps."""


class RankIntent(NamedTuple):
    """The announcement of one rank."""

    kind: Collective
    unit: int = -1
    ready: bool = False
    """True if the rank has the weights (USE), has new values (EDIT), or deletes its store (END)."""
    holds: int = -1
    """The unit of which the rank has gradients that are not reduced, or -1."""
    ahead: int = -1
    """For USE: the unit that the rank could gather next, or -1."""
    has_all: bool = False
    """For USE: True if the rank has the weights of all units."""
    series: int = 0
    """Checksum of what the rank could do from here on without a round each; 0 for nothing."""

    def same(self, other: RankIntent) -> bool:
        """Returns True if both ranks announce the same operation on the same unit."""
        return (self.kind, self.unit) == (other.kind, other.unit)


class NextCollective(NamedTuple):
    """The next collective of all ranks. If `next` is None, ranks whose use is ready continue; others announce again."""

    next: RankIntent | None


def next_collective(intents: Sequence[RankIntent]) -> NextCollective | None:
    """Returns the next collective for the announcements of all ranks, in rank order; None if there can be none.

    A rank whose announcement was not chosen announces again, unless it announced a USE and all uses are ready. Which
    gradients are reduced together, and so the order of their sum, depends on the reductions alone, not on gathers.
    """
    if all(intent.same(intents[0]) for intent in intents):
        return NextCollective(intents[0])
    uses = [intent for intent in intents if intent.kind is Collective.USE]
    # Gathers come first, so that a rank that still gathers can reach its reduction and join the others'.
    if uses:
        return NextCollective(next((intent for intent in uses if not intent.ready), None))
    reduces = [intent for intent in intents if intent.kind is Collective.REDUCE]
    return NextCollective(reduces[0]) if reduces else None


_DOES = {
    Collective.USE: "uses the weights of {}",
    Collective.REDUCE: "reduces the gradients of {}",
    Collective.STEP: "is at step()",
    Collective.EDIT: "changes the weights of {}",
    Collective.END: "closes its engine",
    Collective.MEAN: "takes the mean of a number (engine.mean)",
    Collective.FORGET: "drops its gradients (zero_grad)",
    Collective.SAVE: "saves a checkpoint or a model",
    Collective.LOAD: "loads a checkpoint",
    Collective.LOOK: "accesses a state of a parameter",
    Collective.SLEEP: "gives its memory back (engine.sleep)",
}


def describe(intent: RankIntent, names: Sequence[str]) -> str:
    """Returns an announcement as text for messages."""
    return _DOES[intent.kind].format(names[intent.unit] if intent.unit >= 0 else "")
