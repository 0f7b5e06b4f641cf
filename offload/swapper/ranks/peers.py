"""The other ranks, as the pager of one rank sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from offload.swapper.device_cache import Gathers


def checksum(*facts: object) -> int:
    """Returns a checksum of plain values that fits into 57 bits and is never 0."""
    return 1 + int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=7).digest(), "little")


class Series(NamedTuple):
    """Gathers that a rank could begin in a fixed order, each before the first use of its unit, without a round each.

    Once all ranks have agreed, no use of a unit in `missing`, or of one that was on the device, needs a round.
    """

    missing: tuple[int, ...]
    """Units that are not on this rank's device, in the order of their uses. Their room is reserved."""
    ahead: int
    """Number of gathers that begin before those that a use needs."""
    checksum: int
    """Checksum of all of this, and of the units that are on the device. Never 0."""
    begin: Callable[[], None]
    """Begins the series on this rank; called when all ranks have agreed, before any gather."""


class Having(NamedTuple):
    """State of the device of a rank that uses a unit."""

    unit: bool
    """True if the unit is on this rank's device."""
    all: bool
    """True if every unit is on this rank's device, and stays until weights change."""
    ahead: int
    """The unit that this rank could gather next; -1 if none is to be gathered, or none has room."""
    series: Series | None = None
    """The gathers that this rank could begin without a round each; None if it needs rounds."""


class Agreed(NamedTuple):
    """Joint decision of all ranks about a unit that one of them uses."""

    gather: bool
    """True if a rank that uses the unit lacks it: all ranks gather it."""
    together: bool
    """True if all ranks announced the same use."""
    all: bool = False
    """True if every rank has every unit: no rank needs the others until weights change."""
    ahead: int = -1
    """The unit that all ranks gather as well, before its use; -1 for none."""
    series: bool = False
    """True if a series has begun, in which `go_on` gathers the unit."""


class Peers(Gathers, Protocol):
    """The other ranks, which hold the rest of each unit. Called by the thread that runs the model or its backward."""

    def agree(self, unit: int, having: Callable[[], Having]) -> Agreed:
        """Announces that this rank uses `unit`, and returns the decision of all ranks.

        Serves the gathers of other ranks while it waits. The caller must not hold the table's lock.

        Args:
            unit: the unit in use.
            having: returns the state of this rank; called without the table's lock, once for each round.
        """

    def agree_ahead(self, ahead: Callable[[], int]) -> int:
        """Returns the unit that every rank could gather next, or -1. Called after a gather that all ranks announced.

        Args:
            ahead: returns the unit that this rank could gather next, or -1.
        """

    @property
    def behind(self) -> bool:
        """True if gathers of the series have not begun. Every round begins them first."""
        ...

    def go_on(self, unit: int) -> None:
        """Begins the gathers of the series that come before a use of `unit`; without the table's lock."""
