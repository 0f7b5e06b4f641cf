"""Decides when a run commits whose writes have a budget, as "1TB/day". Pure functions; `engine/commits.py` acts.

    credit  grows by the budget's bytes a second, and falls by each byte that is written
    commit  of states that are in memory alone: once the credit covers its bytes, else `LONGEST` after the last one

The credit begins at 0, so a run never writes more than its budget since its start, except for what it has to: the first
states, states on a drive, commits that were promised, and one commit a day. It never exceeds two commits, so a run that
was stopped for a week does not catch up. A period of the budget, such as a day, counts for messages alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from offload.sizes import parse_budget

LONGEST = 86400.0
"""Most seconds between two commits, whatever the budget."""
_CREDITS = 2
"""Commits that the credit covers at most. A step ends at any time after the credit suffices, so one would lose some."""


class DriveBudget(NamedTuple):
    """Bytes that a run may write to each of its drives in each period of so many seconds."""

    text: str
    """The budget as the user wrote it."""
    nbytes: int
    seconds: float

    @classmethod
    def of(cls, text: str) -> DriveBudget:
        """Returns the budget of a text; raises `ConfigError` for a text that is none."""
        return cls(text, *parse_budget(text))

    @property
    def rate(self) -> float:
        """Returns the bytes a second."""
        return self.nbytes / self.seconds


class Written(NamedTuple):
    """Bytes of a run that are written."""

    each_step: float
    """Bytes of the states that each step writes."""
    at_commit: float
    """Bytes of the states that are in memory alone, and written at commits."""


class Account(NamedTuple):
    """What one drive has been written under a budget. Times are in seconds since the epoch."""

    at: float
    """Time of this account."""
    credit: float
    """Bytes that may be written now; below 0 if too many were."""
    since: float
    """Beginning of the budget's present period."""
    spent: float
    """Bytes written in that period."""
    committed: float
    """Time of the last commit."""


def opened(now: float) -> Account:
    """Returns the account of a run that begins."""
    return Account(now, 0.0, now, 0.0, now)


def spend(account: Account, budget: DriveBudget, now: float, nbytes: float, commit: float) -> Account:
    """Returns the account after `nbytes` more were written. A commit writes `commit` bytes."""
    if (
        now < account.at
    ):  # the clock was set back, perhaps from far ahead: without this no commit would be due for as long
        account = account._replace(at=now, since=min(account.since, now), committed=min(account.committed, now))
    credit = min(account.credit + budget.rate * (now - account.at), _CREDITS * commit)
    periods = math.floor((now - account.since) / budget.seconds)
    return account._replace(
        at=now,
        credit=credit - nbytes,
        since=account.since + periods * budget.seconds,
        spent=(0.0 if periods else account.spent) + nbytes,
    )


def commit_is_due(account: Account, commit: float) -> bool:
    """Returns True if a commit of `commit` bytes is within the budget, or none was made for too long."""
    return not commit or account.credit >= commit or account.at - account.committed >= LONGEST


def excess(budget: DriveBudget, written: Written, step: float, promised: float | None) -> float:
    """Returns the bytes a second that a run writes beyond its budget at the least; 0 if the budget is kept.

    `promised` are the seconds between two commits that the run has promised; None if the budget decides.
    """
    between = promised or LONGEST
    return max(0.0, written.each_step / step + written.at_commit / between - budget.rate)


def ends(account: Account, budget: DriveBudget, rate: float) -> float | None:
    """Returns the seconds until the present period's bytes are spent at `rate` bytes a second; None if they suffice."""
    left, until = budget.nbytes - account.spent, account.since + budget.seconds - account.at
    seconds = max(0.0, left / rate) if rate > 0 else math.inf
    return seconds if seconds < until else None


def steps_between(budget: DriveBudget, written: Written, step: float) -> int:
    """Returns the steps from one commit to the next that the budget allows, with steps of `step` seconds."""
    left = budget.rate - written.each_step / step
    wait = written.at_commit / left if left > 0 else math.inf
    between = min(wait, LONGEST) / step
    return 1 if between <= 1 else max(2, round(between))
