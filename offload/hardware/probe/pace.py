"""Control of a measurement's duration: sizes grow until one call takes long enough, and rounds end with the budget.

A size that suits one machine takes minutes on another, and Python handles no signal during a call of torch. No
measurement therefore starts with the largest size: the first size shows how slow the machine is.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

_T = TypeVar("_T")
_ROUNDS = 9
"""Rounds at most: more do not change a median."""
_BEYOND = 2.0
"""A larger size is tried if its expected time is at most this multiple of the sufficient time."""
_RATES = 30
"""Number of measurements among which the seconds of a probe are divided."""
_CALLS = 20
"""Calls of one measurement."""
_TRIES = 5
"""Calls of a size at most. Other work on the machine makes calls longer, so the shortest one counts."""


class Pace(NamedTuple):
    """Approximate durations in seconds."""

    rate: float
    """Duration of the measurement of one rate."""
    call: float
    """Target duration of one call; in shorter ones the overhead of the call dominates."""

    @classmethod
    def of(cls, seconds: float) -> Pace:
        """Returns the pace of a probe that takes `seconds` in all."""
        return cls(seconds / _RATES, seconds / _RATES / _CALLS)


def grown(
    sizes: Sequence[_T], work: Callable[[_T], float], call: Callable[[_T], Callable[[], object]], enough: float,
    device: torch.device | None = None,
) -> _T:  # fmt: skip
    """Returns the first of the growing `sizes` whose call takes `enough` seconds.

    Stops earlier if the next size is expected to take much longer than that. `work` is the amount of work of a size,
    from which the time of the next one is estimated.
    """
    # The last size is never tried: it is taken if the one before is short enough.
    for size, larger in itertools.pairwise(sizes):
        action = call(size)
        if not _is_short(action, enough, work(larger) / work(size), device):
            return size
    return sizes[-1]


def _is_short(action: Callable[[], object], enough: float, times: float, device: torch.device | None) -> bool:
    """Returns True if a call takes less than `enough`, and one with `times` the work would not take far more.

    The first call allocates memory and selects kernels, so it does not count if there is time for another.
    """
    limit, spent = min(enough, _BEYOND * enough / times), 0.0
    for tried in range(_TRIES):
        seconds = seconds_of(action, device)
        spent += seconds
        if tried and seconds < limit:
            return True
        # A machine far too slow for this size: further tries would only exceed the budget.
        if tried and spent > _TRIES * enough:
            break
    return False


def in_turns(
    actions: Sequence[Callable[[], object]], seconds: float, device: torch.device | None = None
) -> list[float]:
    """Returns the median seconds of each action. The actions take turns, so a slow moment of the machine affects all.

    A first round, which allocates memory and selects kernels, does not count. At least one more is run. `seconds` is
    the budget of all rounds.
    """
    end = time.perf_counter() + seconds
    rounds: list[list[float]] = []
    # The warm-up round counts against the budget, so a slow machine runs one further round and stops.
    while len(rounds) < 2 or (len(rounds) <= _ROUNDS and time.perf_counter() < end):
        rounds.append([seconds_of(action, device) for action in actions])
    return [statistics.median(taken) for taken in zip(*rounds[1:], strict=True)]


def seconds_of(action: Callable[[], object], device: torch.device | None = None) -> float:
    """Returns the seconds of one call, until the device has finished."""
    start = time.perf_counter()
    action()
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)  # the call only queues work; its execution is measured
    return time.perf_counter() - start
