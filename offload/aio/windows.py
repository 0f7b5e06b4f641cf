"""The choice between reads and writes at once, and windows of one direction after the other. Pure functions.

Let a drive read r and write w bytes a second alone, and move m in all when half of the bytes are read and half
written at once. Equal numbers of bytes S in each direction take

    at once      2 S / m
    in windows   S / r + S / w + 2 T

where T is the time of a turn: the blocks of one direction end before those of the other one start, so the drive falls
idle for about as long as it takes to move four blocks. A window is twice as much as a queue has in flight by default.
With less, the queue is never full for long: on the drive that was measured, windows as large as what is in flight cost
a twentieth of the speed, and half as large ones a third (docs/benchmarks/2026-11-io.md). Two turns cost at most an
eighth of their windows, whatever the drive's speed. A request waits for a window of the other direction about twice as
long as it waits for a full queue; urgent requests do not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from offload.sizes import MIB

WINDOW_BYTES = 128 * MIB
"""Bytes of a window on one drive: twice the default of what is in flight, 32 blocks of 2 MiB."""
_TURN_BYTES = 8 * MIB
"""Bytes that the drive could have moved in the idle time of a turn, in its slower direction: four blocks."""
_GAIN = 0.2
"""Least fraction of the time that windows must save. Probes of one drive differ, and an update does not always have a
window of requests: where windows gained nothing, it took 3 to 20 % longer in them (docs/benchmarks/2026-11-io.md)."""


class DirectionRates(Protocol):
    """Bytes a second of a drive by itself."""

    @property
    def read(self) -> float:
        """Only reads."""

    @property
    def write(self) -> float:
        """Only writes."""

    @property
    def mixed(self) -> float:
        """Half of the bytes read and half written at once, in all."""


def seconds_at_once(rates: DirectionRates) -> float:
    """Returns the seconds in which a drive reads a window of bytes and writes as many, both at once."""
    return 2 * WINDOW_BYTES / rates.mixed


def seconds_in_windows(rates: DirectionRates) -> float:
    """Returns the seconds in which a drive reads a window of bytes and then writes as many, with a turn after each."""
    turn = _TURN_BYTES / min(rates.read, rates.write)
    return WINDOW_BYTES / rates.read + WINDOW_BYTES / rates.write + 2 * turn


def rate_of_both(rates: DirectionRates) -> float:
    """Returns the bytes a second that a drive moves in all, reading and writing equal parts in the better order."""
    seconds = seconds_in_windows(rates) if window_bytes([rates]) else seconds_at_once(rates)
    return 2 * WINDOW_BYTES / seconds


def window_bytes(drives: Sequence[DirectionRates]) -> int:
    """Returns the bytes of a window for a queue over `drives`; 0 if it should read and write at once.

    Files are striped, so a request keeps all drives busy and the queue has one direction for all of them. It goes in
    windows if that saves a fifth of the time on each drive, or more.

    Args:
        drives: rates of the queue's drives; none of them means that they are unknown.
    """
    if not drives or any(seconds_in_windows(each) > (1 - _GAIN) * seconds_at_once(each) for each in drives):
        return 0
    return WINDOW_BYTES * len(drives)
