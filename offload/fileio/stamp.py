"""Properties of a file that show a change of its content."""

from __future__ import annotations

import os
from typing import NamedTuple


class Stamp(NamedTuple):
    """Properties of a file that show a change of its content."""

    inode: int
    nbytes: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Returns the stamp of the file with this status."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)
