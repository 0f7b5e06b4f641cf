"""Decides which steps are committed: every k-th step, or as often as a drive budget allows."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

from offload.aio import crc32c
from offload.distributed.process_group import Ranks
from offload.layout.drive_budget import Account, DriveBudget, Written, commit_is_due, ends, excess, opened, spend
from offload.records import fields, number, read
from offload.sizes import PAGE, format_decimal, format_share, format_time
from offload.swapper.store import DriveByteCounter
from offload.swapper.store.folder import overwrite, read_whole

logger = logging.getLogger("offload")

clock = time.time
"""The wall clock: a budget's period goes on while no process trains."""
_STEADY = 3
"""Steps after the first one of a process, whose seconds tell how much the run writes in a day."""
_NEARLY = 0.9
"""Fraction of a budget from which on a run says when it ends."""
_PARTS = 64
"""Parts of a step and its commit that the file counts one after the other, each before it is written."""
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

    The first rank decides for all. It keeps the account in a file of its swap folder. The file counts bytes before they
    are written, a 64th of a step and its commit at a time. So a run that is killed has counted that much too much at
    most, and not too little. The file is not synced: after a power cut, as after other damage, the account begins anew,
    without credit.
    """

    def __init__(
        self,
        every: int,
        *,
        budget: DriveBudget,
        written: Written,
        thins: bool,
        keep_every: int,
        counter: DriveByteCounter,
        ranks: int,
        path: Path | None,
        everyone: Ranks,
    ) -> None:
        """Opens the account, or goes on with that of an earlier process.

        Args:
            every: steps between two commits as in `Commits`; with `thins` only whether there are any.
            written: bytes that a step and a commit write to one drive.
            thins: True if the run has promised no interval, so that the budget decides.
            keep_every: steps that are a multiple of this are committed in any case; 0 for none.
            counter: the bytes that this rank writes to each drive; the account is of the drive that is written most.
            ranks: the ranks that write to the same drives.
            path: file of the account; None without swap files, or on any rank but the first.
        """
        super().__init__(every)
        self._budget, self._written, self._thins, self._keep_every = budget, written, thins, keep_every
        self._counter, self._ranks, self._path, self._everyone = counter, ranks, path, everyone
        self._lock = threading.Lock()
        self._account = _read(path) or opened(clock())
        self._counted = 0.0
        """Bytes of this process in the account."""
        self._began_commit: float | None = None
        """Time of the last decision to commit."""
        self._steps = 0
        self._began: tuple[float, float] | None = None
        """Time and bytes of this process at its first step, after all first states were written."""
        self._warned: float | None = None
        """Beginning of the period of which it was said that it nearly ends."""
        if path is not None:
            counter.reserve_by(self._reserve)  # a drive without room for the account refuses it before the first step

    @property
    def budget_share(self) -> float | None:
        return self._account.spent / self._budget.nbytes

    def due(self, step: int) -> bool:
        here = self._decide(step) if self._everyone.rank == 0 else False
        # The clocks and drives of other ranks differ, and all commit the same steps.
        return here if self._everyone.alone else bool(self._everyone.share(here, "commit by its drive budget")[0])

    def _decide(self, step: int) -> bool:
        commit = self._written.at_commit
        with self._lock:
            # calling thread: the commit before has ended. Until then the file has the time of an earlier one, since a
            # kill in the middle of a commit must not put the next one off by a day.
            if self._began_commit is not None:
                self._account = self._account._replace(committed=self._began_commit)
            run = self._run()
            self._account = spend(self._account, self._budget, clock(), run - self._counted, commit)
            self._counted = run
        due = super().due(step)
        if self._thins and self.every:
            kept = self._keep_every > 0 and step % self._keep_every == 0
            due = kept or commit_is_due(self._account, commit)
        self._steps += 1
        self._say()
        self._began_commit = self._account.at if due else None
        if self._path is not None:
            self._reserve()
        return due

    def _run(self) -> float:
        """Returns the bytes that this process, and the other ranks, have written to the drive written most."""
        return float(self._ranks * max(row.run_bytes for row in self._counter.drives()))

    def _reserve(self) -> float:
        """Writes the account with the bytes so far and the next ones, and returns the count that it then contains."""
        assert self._path is not None
        # any thread that writes to the drives: the count is read under the lock, so no older one replaces a newer one.
        with self._lock:
            reserved = self._run() + max((self._written.each_step + self._written.at_commit) / _PARTS, PAGE)
            ahead, account = reserved - self._counted, self._account
            account = account._replace(credit=account.credit - ahead, spent=account.spent + ahead)
            overwrite(self._path, _packed(account))
        return reserved / self._ranks

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
