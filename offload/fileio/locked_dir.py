"""A folder that one process at a time may change, by `flock` of a file, so that the lock dies with its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

_CONTENDED = (errno.EWOULDBLOCK, errno.EACCES)
_PAUSE = 0.01
"""Seconds between two tries: whoever asks by `holder_of` has the lock for a moment, which is waited for."""
_NOTE_NBYTES = 1000


class LockHeldError(Exception):
    """The lock is another's, who has written `holder` into the file."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class DirLock:
    """The lock on a folder, held from construction until `close` or `remove`.

    Args:
        path: the file that is locked; it is made where it is missing.
        note: written into the file behind the name of the process, for `holder_of`.
        mode: of the file, where it is made.
        tries: how often the lock is tried while another has it.

    Raises:
        LockHeldError: where another has the lock.
        OSError: where the file cannot be opened.
    """

    def __init__(self, path: Path, note: str = "", *, mode: int = 0o600, tries: int = 11) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.refused: OSError | None = None
        """The error of a file system that has no locks; the file is open, and nobody is kept out."""
        while self._descriptor is None:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
            try:
                _flock(self._descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _CONTENDED:
                    self.refused = error
                    return
                holder = _note_in(self._descriptor)
                self.close()
                tries -= 1
                if not tries:
                    raise LockHeldError(holder) from None
                time.sleep(_PAUSE)
            else:
                if not self._has_its_name():  # who had the lock has removed the file: what is locked keeps nobody out
                    self.close()
        with contextlib.suppress(OSError):  # a disk that is full; the lock holds without the note
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{this_process()}{note}\n".encode(), 0)

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def close(self) -> None:
        """Closes the file; idempotent. A forked child calls it too: its parent keeps the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Deletes the file and gives the lock back; idempotent. Not for a forked child, whose parent would lose it."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            if self._has_its_name():
                os.unlink(self._path)  # while it is locked: the next one sees that it has locked what is gone
        with contextlib.suppress(OSError):
            _flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough where a child was forked meanwhile
        self.close()

    def _has_its_name(self) -> bool:
        """Returns whether the open file is still the one at the path."""
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return False


def this_process() -> str:
    """Returns the name by which this process writes itself into the files that it locks."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def holder_of(path: Path) -> str | None:
    """Returns who has the lock on the file at `path`, as it has written itself down; None where nobody has."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        _flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        return _note_in(descriptor) if error.errno in _CONTENDED else None
    finally:
        os.close(descriptor)
    return None


def _flock(descriptor: int, operation: int) -> None:
    fcntl.flock(descriptor, operation | fcntl.LOCK_NB)


def _note_in(descriptor: int) -> str:
    return os.pread(descriptor, _NOTE_NBYTES, 0).decode(errors="replace").strip() or "another process"
