"""Bytes written to each drive, which wear it out: by this process, and by earlier processes of the run.

The counts are the bytes that the process asks the system to write: states, spilled gradients, commits. A drive writes
more than that (it erases larger blocks), a file system slightly more. Checkpoints and exports are not counted.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from offload.errors import StoreError
from offload.records import fields, maybe, number, read, rows, whole
from offload.sizes import format_decimal

logger = logging.getLogger("offload")


class DriveWrites(NamedTuple):
    """Bytes written to one drive by one rank."""

    path: str
    """The user's folder for swap files."""
    run_bytes: int
    """Bytes written by this process."""
    life_bytes: int
    """Bytes written by this process and by earlier processes of the run, up to the commit from which each resumed."""


class Rating(NamedTuple):
    """Rated endurance of a drive, and the fraction at which a run warns."""

    nbytes: float
    """The lowest endurance of all drives (TBW), in bytes."""
    share: float = 0.1
    """Fraction of `nbytes` above which a run warns."""
    ranks: int = 1
    """Number of ranks that write to the same drives, each as much as the others."""

    def used(self, nbytes: float) -> float:
        """Returns the fraction of a drive's endurance that is used if each rank writes `nbytes`."""
        return nbytes * self.ranks / self.nbytes


class Written:
    """Bytes written to each drive, in the order of `paths`.

    Any thread may call `add`, which warns once for each drive if the fraction in `rating` is exceeded.
    """

    def __init__(self, paths: Sequence[str | Path], rating: Rating | None = None) -> None:
        self.rating = rating
        self._paths = [str(path) for path in paths]
        self._lock = threading.Lock()
        self._run = [0] * len(paths)
        self._before = [0] * len(paths)
        self._warned = [False] * len(paths)

    def add(self, drive: int, nbytes: int) -> None:
        """Adds `nbytes` to the count of a drive."""
        with self._lock:
            self._run[drive] += nbytes
            life = self._run[drive] + self._before[drive]
            # `life` is the count of one rank; `used` multiplies by the ranks that write to the same drives.
            exceeded = self.rating is not None and self.rating.used(life) > self.rating.share
            # Decided under the lock, so that one thread warns.
            warns, self._warned[drive] = exceeded and not self._warned[drive], self._warned[drive] or exceeded
        # Not under the lock: a log handler may block, and other threads must be able to add meanwhile.
        if warns and self.rating is not None:
            self._warn(drive, life, self.rating)

    def drives(self) -> tuple[DriveWrites, ...]:
        """Returns the counts of each drive."""
        with self._lock:
            # Under the lock, so that the counts of all drives are of one moment.
            each = zip(self._paths, self._run, self._before, strict=True)
            return tuple(DriveWrites(path, run, run + before) for path, run, before in each)

    def _warn(self, drive: int, life: int, rating: Rating) -> None:
        """Logs a warning that a drive's count, `life` of this rank, has exceeded the fraction in `rating`."""
        logger.warning(
            "%s: this run has written %s to this drive, %.1f %% of its rated %s (drive_tbw); the config asks for a "
            "warning from %g %% on (drive_share)",
            self._paths[drive],
            format_decimal(life * rating.ranks),
            100 * rating.used(life),
            format_decimal(rating.nbytes),
            100 * rating.share,
        )

    # -- in a commit --------------------------------------------------------------------------------

    def pack(self) -> bytes:
        """Returns the counts as JSON, for the blob of a commit."""
        rated = None if self.rating is None else self.rating.nbytes
        facts = {"bytes": [each.life_bytes for each in self.drives()], "rated_bytes": rated}
        return json.dumps(facts).encode()

    def go_on(self, *packed: bytes | None) -> None:
        """Resumes the counts of a commit, or the sums of several; a commit older than these counts has none."""
        before = [0] * len(self._before)
        for each in packed:
            counts = read_written(each)[0]
            # Counts of another number of drives cannot be assigned to the drives of this store.
            if len(counts) == len(before):
                before = [one + other for one, other in zip(before, counts, strict=True)]
        self._before = before


def read_written(packed: bytes | None) -> tuple[list[int], float | None]:
    """Returns the counts that `pack` stored: bytes by drive, and the rated endurance in bytes or None."""
    if packed is None:
        return [], None
    try:
        facts = read(packed, fields({"bytes": rows(whole()), "rated_bytes": maybe(number(1))}))
    except ValueError as error:
        raise StoreError(
            f"the count of written bytes in a commit is damaged: {error}; go back to a checkpoint"
        ) from error
    return list(facts["bytes"]), facts["rated_bytes"]
