"""The errors that `offload` raises on purpose.

    OffloadError
    ├── ConfigError      the JSON, an option or the model is not supported; nothing was changed
    ├── BudgetError      a memory budget cannot hold what must be in memory at one time
    ├── IoError          one operation on a file failed (path, offset, nbytes, errno)
    ├── StoreError       the swap store: no room, locked by another process, damaged, of another model
    ├── UsageError       a call of the engine that is not valid now
    ├── RankError        another process of the run is gone, or executes another collective
    ├── NumericsError    a gradient norm, or logits, that are inf or NaN; weights were not changed
    ├── AuditError       bits have changed in memory, or in a gradient computed again; weights were not changed
    └── EngineFailed     an earlier error on a background thread has stopped this engine

Each message states the expected value, the actual value, and the next thing to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import unicodedata
from collections.abc import Iterator

_REASONS = {
    errno.ENODATA: "the file ends before these bytes",
    errno.EBADMSG: "the checksum is not the expected one: the bytes are damaged",
    errno.ESTALE: (
        "the file has changed since its header was read; leave the files of a model as they are while an engine reads "
        "them, and start again"
    ),
    errno.ELOOP: (
        "the path is a symbolic link, which is not followed; if its target is meant, give os.path.realpath of the link"
    ),
    errno.EPIPE: "the program that reads this output has closed it",
    errno.ENOMEM: "the system has no memory for this request; raise the limit (ulimit -v), or end other programs",
}
"""Reasons that the system's own messages do not give."""
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that move a terminal's cursor, change its colors or the order of its text, or are none."""


def printable(text: str, lines: bool = True) -> str:
    r"""Returns `text` in a form that is safe on a terminal: control characters become \x1b and the like.

    Args:
        lines: True if line breaks and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in _UNPRINTABLE and not (lines and char in "\n\t")
        else char
        for char in text
    )


class OffloadError(Exception):
    """Base class of all errors of this library. Its message is printable, whatever names it quotes."""

    @property
    def page(self) -> str:
        """Returns where the documentation has causes and cures of errors of this class."""
        return f"docs/reference/errors.md#{type(self).__name__.lower()}"

    def __str__(self) -> str:
        """Returns the message without control characters but line breaks and tabs."""
        return printable(super().__str__())


class ConfigError(OffloadError, ValueError):
    """An invalid or unsupported configuration, option or model."""


class BudgetError(OffloadError, MemoryError):
    """A memory budget that is too small for what must be in memory at one time."""


_REFUSED = re.compile(r"you tried to allocate ([0-9]+) bytes|can't start new thread|failed to map segment")
"""How torch, Python and the dynamic linker say, in errors of general classes, that there is no memory."""


def no_memory(error: BaseException, asked: str = "") -> BudgetError | None:
    """Returns an error of the system about host memory as a `BudgetError` with a cure; None for any other error.

    Python raises `MemoryError`, a mapping `OSError`, and torch a `RuntimeError` whose text names the bytes. `asked` is
    the size of the request, if the caller knows it.
    """
    match = _REFUSED.search(str(error))
    if isinstance(error, OffloadError) or not (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError | ImportError) and match)
    ):
        return None
    asked = asked or (f"{match[1]} bytes" if match and match[1] else "a request")
    named = BudgetError(
        f"the system has no host memory for {asked} ({str(error).partition(chr(10))[0][:200] or 'no memory'}): raise "
        "the limit (ulimit -v), end other programs, or give a smaller host_memory, batch or sequence"
    )
    named.__cause__ = error
    return named


@contextlib.contextmanager
def naming_memory(asked: str = "") -> Iterator[None]:
    """Raises a `BudgetError` in place of an error of the system about host memory; see `no_memory`."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if (named := no_memory(error, asked)) is not None:
            raise named from error
        raise


class IoError(OffloadError, OSError):
    """A failed operation on a file: a read, a write, an open, a sync.

    `offset` and `nbytes` are the request's, in bytes; both are 0 if the error concerns the file as such. `errno` is the
    system's. `cure` is what to do, where that is known.
    """

    def __init__(
        self, path: str, offset: int, nbytes: int, errno: int, operation: str = "access", cure: str = ""
    ) -> None:
        OSError.__init__(self, errno, os.strerror(errno), path)
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.operation = operation
        self.cure = cure

    def __str__(self) -> str:
        """Returns the operation, its bytes, the reason and the cure on one line."""
        what = f"{self.nbytes} bytes at offset {self.offset} of {self.path}" if self.nbytes else self.path
        reason = _REASONS.get(self.errno or 0, self.strerror)
        cure = f"; {self.cure}" if self.cure else ""
        return printable(f"cannot {self.operation} {what}: [Errno {self.errno}] {reason}{cure}")

    def __reduce__(self) -> tuple[type[IoError], tuple[str, int, int, int, str, str]]:
        """Returns the constructor's arguments: exceptions that cross processes are pickled."""
        return (IoError, (self.path, self.offset, self.nbytes, self.errno or 0, self.operation, self.cure))


class StoreError(OffloadError):
    """A swap store that cannot be created, opened or trusted.

    `damaged` is True if bytes differ from those written: the command has failed, and its input is not at fault.
    """

    def __init__(self, message: str, damaged: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged


def is_damage(error: BaseException | None) -> bool:
    """Returns True for an error of bytes that are damaged or cannot be read, or if such an error has caused it."""
    while error is not None:
        if isinstance(error, StoreError) and error.damaged:
            return True
        if isinstance(error, IoError) and (
            error.errno in (errno.EBADMSG, errno.ENODATA) or (error.errno == errno.EIO and error.operation == "read")
        ):
            return True
        error = error.__cause__
    return False


class UsageError(OffloadError, RuntimeError):
    """A call that is not valid at this moment."""


class RankError(OffloadError):
    """Another rank is gone, or executes something that does not match this rank's collective."""


class NumericsError(OffloadError, ArithmeticError):
    """A gradient norm is inf or NaN, and the step was not applied; or logits are inf or NaN, without training."""


class AuditError(OffloadError, ArithmeticError):
    """Bits have changed in memory, or differ when a block's gradient is computed again; the step was not applied."""


class EngineFailed(OffloadError, RuntimeError):
    """A call of an engine that an earlier error has stopped; that error is the `__cause__`."""
