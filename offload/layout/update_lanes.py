"""Two lanes of updates: those for which the drives read or write, and those of states in memory alone.

    MEMORY                                        kernel                   at the speed of memory
    STREAMED   reads of the tiles that follow ─► kernel ─► writes          at the speed of the drives

Both lanes share one kernel, and each updates its units in the order of their next use. The update worker and its
simulation choose the next tile by the same function.
"""

from __future__ import annotations

import enum
from collections.abc import Collection


class Lane(enum.Enum):
    """The lane of a unit's update. The first one takes tile buffers first: it needs at most one at a time."""

    MEMORY = "memory"
    """Nothing is read from the drives, and nothing is written to them."""
    STREAMED = "streamed"
    """The drives read or write states, or read the gradient. Updates that share the drives keep their order."""


def next_lane(begun: Collection[Lane], reads_ended: bool, awaited: Lane | None, last: Lane | None) -> Lane | None:
    """Returns the lane whose oldest tile is computed next, or None if no tile has begun.

    Args:
        begun: The lanes with tiles that have begun and are not computed.
        reads_ended: True if the oldest streamed tile has been read.
        awaited: The lane of the unit whose update a thread waits for, if any.
        last: The lane of the tile that was computed last.
    """
    if Lane.MEMORY not in begun:
        return Lane.STREAMED if begun else None
    if Lane.STREAMED not in begun or not reads_ended:
        return Lane.MEMORY
    # A streamed tile gives the drives a write and a read to do, for which they need far longer than the kernel. If they
    # are faster than the kernel, an awaited unit in memory still gets every second tile.
    return Lane.MEMORY if awaited is Lane.MEMORY and last is Lane.STREAMED else Lane.STREAMED
