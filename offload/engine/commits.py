"""Decides which steps are committed: every k-th step, or as often as a drive budget allows."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from offload.aio import crc32c
from offload.distributed.process_group import Ranks
from offload.layout.drive_budget import (
    Account,
    DriveBudget,
    Written,
    commit_is_due,
    ends,
    excess,
    opened,
    spend,
)
from offload.records import fields, number, read
from offload.sizes import format_decimal, format_share, format_time
from offload.swapper.store.folder import overwrite, read_whole

logger = logging.getLogger("offload")

clock = time.time
"""The wall clock: a budget's period goes on while no process trains."""
_STEADY = 3
"""Steps after the first one of a process, whose seconds tell how much the run writes in a day."""
_NEARLY = 0.9
"""Fraction of a budget from which on a run says when it ends."""
_SIZE = 512
"""Bytes of the file with the account."""


class Commits:
    """The steps whose number is a multiple of `every`; no step if it is 0."""

    def __init__(self, every: int) -> None:
        self.every = every

    @property
    def budget_share(self) -> float | None:
        """The fraction of the drive budget that its present period has used; None without a budget."""
        return None

    def due(self, step: int) -> bool:
        """Returns True if the step, which has just been decided, is to be committed. Collective."""
        return bool(self.every) and step % self.every == 0


class BudgetedCommits(Commits):
    """Commits of a run whose writes have a budget. Belongs to the thread that runs the model.

    The first rank decides for all. It keeps the account in a file of its swap folder, written before each step with the
    bytes that the step is about to write. So a run that is killed and resumed has counted too much rather than too
    little. The file is not synced: after a power cut, as after other damage, the account begins anew, without credit.
    """

    def __init__(
        self,
        every: int,
        *,
        budget: DriveBudget,
        written: Written,
        thins: bool,
        keep_every: int,
        counts: Callable[[], tuple[float, float]],
        path: Path | None,
        everyone: Ranks,
    ) -> None:
        """Opens the account, or goes on with that of an earlier process.

        Args:
            every: steps between two commits as in `Commits`; with `thins` only whether there are any.
            written: bytes that a step and a commit write to one drive.
            thins: True if the run has promised no interval, so that the budget decides.
            keep_every: steps that are a multiple of this are committed in any case; 0 for none.
            counts: returns the bytes that were written to the most written drive by this process, and in the life of
                the run.
            path: file of the account; None without swap files, or on any rank but the first.
        """
        super().__init__(every)
        self._budget, self._written, self._thins, self._keep_every = budget, written, thins, keep_every
        self._counts, self._path, self._everyone = counts, path, everyone
        earlier, life = _read(path), counts()[1]
        self._account = opened(clock()) if earlier is None else earlier
        self._counted = 0.0
        if earlier is not None:
            # An end without a kill has written more than its last step knew: the last commit. After a kill the run's
            # own count is that of an earlier commit.
            self._counted = -max(0.0, life - earlier.life)
        self._steps = 0
        self._began: tuple[float, float] | None = None
        """Time and bytes of this process at its first step, after all first states were written."""
        self._warned: float | None = None
        """Beginning of the period of which it was said that it nearly ends."""
        self._keep(0.0)  # a drive without room for the account refuses it before the first step

    @property
    def budget_share(self) -> float | None:
        return self._account.spent / self._budget.nbytes

    def due(self, step: int) -> bool:
        here = self._decide(step) if self._everyone.rank == 0 else False
        # The clocks and drives of other ranks differ, and all commit the same steps.
        return here if self._everyone.alone else bool(self._everyone.share(here, "commit by its drive budget")[0])

    def _decide(self, step: int) -> bool:
        commit, run = self._written.at_commit, self._counts()[0]
        self._account = spend(self._account, self._budget, clock(), run - self._counted, commit)
        self._counted = run
        due = super().due(step)
        if self._thins and self.every:
            kept = self._keep_every > 0 and step % self._keep_every == 0
            due = kept or commit_is_due(self._account, commit)
        self._steps += 1
        self._say()
        if due:
            self._account = self._account._replace(committed=self._account.at)
        self._keep(self._written.each_step + (commit if due else 0.0))
        return due

    def _keep(self, ahead: float) -> None:
        """Writes the account as it will be after `ahead` bytes more."""
        if self._path is None:
            return
        kept, life = self._account, self._counts()[1] + ahead
        kept = kept._replace(credit=kept.credit - ahead, spent=kept.spent + ahead, life=life)
        overwrite(self._path, _packed(kept))

    def _say(self) -> None:
        """Warns once if the budget cannot be kept, and once a period if it ends before the period does."""
        account, budget = self._account, self._budget
        if self._began is None:
            self._began = account.at, self._counted
            return
        (began, before), steps = self._began, self._steps - 1
        seconds = (account.at - began) / steps
        rate = (self._counted - before) / max(account.at - began, 1e-9)
        if steps == _STEADY and seconds > 0:
            promised = None if self._thins else self.every * seconds
            over = excess(budget, self._written, seconds, promised)
            if over > 0:
                least = budget.rate + over
                logger.warning(
                    'the "drive_budget" of %s cannot be kept: steps of %.3g s write at least %s a day to each drive%s; '
                    "%s",
                    budget.text,
                    seconds,
                    format_decimal(least * 86400),
                    "" if self._thins else ', with the "durability" that the config promises',
                    self._ending(least, seconds),
                )
        left = account.since + budget.seconds - account.at
        if account.spent >= _NEARLY * budget.nbytes and self._warned != account.since:
            end = ends(account, budget, rate)
            if end is not None and end < _NEARLY * left:
                self._warned = account.since
                logger.warning(
                    '%s of the "drive_budget" of %s are written: %s',
                    format_share(account.spent / budget.nbytes),
                    budget.text,
                    self._ending(rate, seconds),
                )

    def _ending(self, rate: float, step: float) -> str:
        """Returns when the present period's bytes are spent at `rate`, in words. A step takes `step` seconds."""
        account, budget = self._account, self._budget
        end, left = ends(account, budget, rate), format_time(account.since + budget.seconds - account.at)
        if end is None:
            return f"the bytes of this period last until it ends, in {left}"
        # The next step already has no bytes left, or no whole step has.
        if end <= step:
            return f"the bytes of this period are spent, and it ends in {left}: until then the run writes beyond them"
        return f"at this rate the bytes of this period are spent in {format_time(end)}, and it ends in {left}"


# -- file ----------------------------------------------------------------------------------------------
#
# The file of an account: the CRC-32C of a JSON object as eight hexadecimal digits, a space, the object, and spaces.


def _packed(account: Account) -> bytes:
    content = json.dumps(account._asdict()).encode()
    return (b"%08x " % crc32c(content) + content).ljust(_SIZE)


def _read(path: Path | None) -> Account | None:
    """Returns the account in a file; None if there is none, or, after a warning, if the file contains anything else."""
    if path is None:
        return None
    try:
        checksum, _, content = read_whole(path).rstrip(b" ").partition(b" ")
        if checksum != b"%08x" % crc32c(content):
            raise ValueError("its checksum is wrong")
        facts = read(content, fields({name: number() for name in Account._fields}))
        return Account(*(facts[name] for name in Account._fields))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning(
            "%s is no account of a drive budget, as after a power cut (%s): this run's count begins anew", path, error
        )
        return None
