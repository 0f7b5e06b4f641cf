"""How much was written to each drive, which is what wears a drive out: of this process, and of its run before that.

What is counted is what we ask the system to write: states, gradients that wait on a drive, commits. A drive writes more
than that (it erases larger blocks), a file system a little more; checkpoints and exports are files of their own.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from offload.sizes import format_decimal

logger = logging.getLogger("offload")


class DriveWrites(NamedTuple):
    """Bytes written to one drive by one rank."""

    path: str
    """The folder for swap files that was given."""
    run_bytes: int
    """By this process."""
    life_bytes: int
    """By it and by those whose run it goes on with, up to the commit that it was resumed from."""


class Rating(NamedTuple):
    """What a drive is sold to bear."""

    nbytes: float
    """The least of the drives', in bytes: its TBW."""
    share: float = 0.1
    """Of that, from which on a run is warned of."""
    ranks: int = 1
    """That write to the same drives, each as much."""

    def used(self, nbytes: float) -> float:
        """The share of a drive's life that is used up where one rank writes so much."""
        return nbytes * self.ranks / self.nbytes


class Written:
    """Bytes by drive, in the order of `paths`. Any thread may add; warns once for each drive, by `rating`."""

    def __init__(self, paths: Sequence[str | Path], rating: Rating | None = None) -> None:
        self.rating = rating
        self._paths = [str(path) for path in paths]
        self._lock = threading.Lock()
        self._run = [0] * len(paths)
        self._before = [0] * len(paths)
        self._warned = [False] * len(paths)

    def add(self, drive: int, nbytes: int) -> None:
        """So much goes to a drive."""
        with self._lock:
            self._run[drive] += nbytes
        self._warn(drive)

    def drives(self) -> tuple[DriveWrites, ...]:
        """What there is of each."""
        with self._lock:
            each = zip(self._paths, self._run, self._before, strict=True)
            return tuple(DriveWrites(path, run, run + before) for path, run, before in each)

    def _warn(self, drive: int) -> None:
        rating, life = self.rating, self._run[drive] + self._before[drive]
        if rating is None or self._warned[drive] or rating.used(life) <= rating.share:
            return
        self._warned[drive] = True
        logger.warning(
            "%s: this run has written %s to it, %.1f %% of the %s that it is rated for (drive_tbw); a warning was "
            "asked for from %g %% on (drive_share)",
            self._paths[drive],
            format_decimal(life * rating.ranks),
            100 * rating.used(life),
            format_decimal(rating.nbytes),
            100 * rating.share,
        )

    # -- in a commit --------------------------------------------------------------------------------

    def pack(self) -> bytes:
        """What a blob holds of it."""
        rated = None if self.rating is None else self.rating.nbytes
        facts = {"bytes": [each.life_bytes for each in self.drives()], "rated_bytes": rated}
        return json.dumps(facts).encode()

    def go_on(self, packed: bytes | None) -> None:
        """Go on from what a commit holds; from nothing where it is older than these counts."""
        before = read_written(packed)[0]
        if len(before) == len(self._before):
            self._before = before


def read_written(packed: bytes | None) -> tuple[list[int], float | None]:
    """What `pack` gave: bytes by drive, and what each is rated for, if that was said."""
    if packed is None:
        return [], None
    facts = json.loads(packed)
    return list(facts["bytes"]), facts["rated_bytes"]
