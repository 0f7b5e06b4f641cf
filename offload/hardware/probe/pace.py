"""How long a measurement may take: sizes grow until one call takes long enough, and rounds end with the budget.

A size that is right for one machine takes another minutes, and no signal is obeyed within a call of torch. So nothing
begins with the largest size: the first one tells how slow the machine is.
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
"""At most: more do not change a median."""
_BEYOND = 2.0
"""A larger size is tried where it is expected to take at most so many times what is long enough."""
_RATES = 30
"""Into so many measurements the seconds of all are divided."""
_CALLS = 20
"""Of one measurement."""
_TRIES = 5
"""Of a size, at most: other work on the machine makes a call longer, and the shortest tells the most of the size."""


class Pace(NamedTuple):
    """Seconds, about."""

    rate: float
    """That measuring one rate may take."""
    call: float
    """That one call should take: shorter ones tell more of the call than of the machine."""

    @classmethod
    def of(cls, seconds: float) -> Pace:
        """Where all rates together may take so long."""
        return cls(seconds / _RATES, seconds / _RATES / _CALLS)


def grown(
    sizes: Sequence[_T], work: Callable[[_T], float], call: Callable[[_T], Callable[[], object]], enough: float,
    device: torch.device | None = None,
) -> _T:  # fmt: skip
    """The first of the growing `sizes` whose call takes `enough` seconds, or the last that does not take far more.

    `call(size)` makes a call, `work(size)` is how much that does: what a larger one will take follows from it.
    """
    for size, larger in itertools.pairwise(sizes):
        action = call(size)
        if not _is_short(action, enough, work(larger) / work(size), device):
            return size
    return sizes[-1]


def _is_short(action: Callable[[], object], enough: float, times: float, device: torch.device | None) -> bool:
    """Whether a call takes less than `enough`, and one of `times` the work not far more. The first one does not count
    where there is time for another: it finds memory and kernels."""
    limit, spent = min(enough, _BEYOND * enough / times), 0.0
    for tried in range(_TRIES):
        seconds = seconds_of(action, device)
        spent += seconds
        if tried and seconds < limit:
            return True
        if tried and spent > _TRIES * enough:
            break
    return False


def in_turns(
    actions: Sequence[Callable[[], object]], seconds: float, device: torch.device | None = None
) -> list[float]:
    """The median of each of some actions, one after the other in each round: a machine that is slow for a moment is
    so for all. One round at least, after one that finds memory and kernels and does not count; as many as fit."""
    end = time.perf_counter() + seconds
    rounds: list[list[float]] = []
    while len(rounds) < 2 or (len(rounds) <= _ROUNDS and time.perf_counter() < end):
        rounds.append([seconds_of(action, device) for action in actions])
    return [statistics.median(taken) for taken in zip(*rounds[1:], strict=True)]


def seconds_of(action: Callable[[], object], device: torch.device | None = None) -> float:
    """Of one call, until the device is done."""
    start = time.perf_counter()
    action()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)  # it is what is measured
    return time.perf_counter() - start
