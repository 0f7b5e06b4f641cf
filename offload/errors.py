"""Every error that `offload` raises on purpose.

    OffloadError
    ├── ConfigError      the JSON, an option or the model cannot be honoured; nothing was touched
    ├── BudgetError      a memory budget cannot hold what must be in it at one time
    ├── IoError          one read or write failed (path, offset, nbytes, errno)
    ├── StoreError       the swap store: no room, held by another process, torn, of another model
    ├── UsageError       the engine was called in a way that cannot be right
    ├── RankError        another process of the run is gone, or has come to another place of the program
    ├── NumericsError    a gradient norm that is not finite; weights were not touched
    └── EngineFailed     an earlier error on a background thread has stopped this engine

Each message says what was expected, what came, and what to do next.
"""

from __future__ import annotations

import errno
import os

_REASONS = {
    errno.ENODATA: "the file ends before that",
    errno.EBADMSG: "the checksum is not the expected one: the bytes are damaged",
    errno.ELOOP: "it is a symbolic link, which is not followed; give os.path.realpath of it where that is meant",
}
"""What the system's own words leave out."""


class OffloadError(Exception):
    """Base class of all errors of this library."""


class ConfigError(OffloadError, ValueError):
    """A configuration, an option or a model that cannot be honoured."""


class BudgetError(OffloadError, MemoryError):
    """A memory budget too small for what must be held at one time."""


class IoError(OffloadError, OSError):
    """A read or write of a swap file failed.

    `offset` and `nbytes` are those of the request, in bytes, 0 where it is about the whole file; `errno` is the
    system's.
    """

    def __init__(self, path: str, offset: int, nbytes: int, errno: int, operation: str = "access") -> None:
        OSError.__init__(self, errno, os.strerror(errno), path)
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.operation = operation

    def __str__(self) -> str:
        what = f"{self.nbytes} bytes at offset {self.offset} of {self.path}" if self.nbytes else self.path
        return f"cannot {self.operation} {what}: [Errno {self.errno}] {_REASONS.get(self.errno or 0, self.strerror)}"

    def __reduce__(self) -> tuple[type[IoError], tuple[str, int, int, int, str]]:
        return (IoError, (self.path, self.offset, self.nbytes, self.errno or 0, self.operation))


class StoreError(OffloadError):
    """A swap store that cannot be made, opened or trusted."""


class UsageError(OffloadError, RuntimeError):
    """A call that cannot be right at this moment."""


class RankError(OffloadError):
    """Another rank is gone, or does something that cannot go together with what this one does."""


class NumericsError(OffloadError, ArithmeticError):
    """A gradient norm that is inf or NaN; the step was not applied."""


class EngineFailed(OffloadError, RuntimeError):
    """The engine stopped at an earlier error, which is this error's cause."""
