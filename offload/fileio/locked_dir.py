"""Locks on folders that one process at a time may change.

The lock is `flock` on a file, so that it ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

_CONTENDED = (errno.EWOULDBLOCK, errno.EACCES)
_PAUSE = 0.01
"""Seconds between two tries. The tries outlast `holder_of`, which holds a shared lock for a moment."""
_NOTE_NBYTES = 1000
_NOTE_START = b"process "
"""First bytes of each note; see `this_process`."""


class LockHeldError(Exception):
    """Error: another process, or another lock of this process, holds the file; `holder` is the text in the file."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class DirLock:
    """The lock on a folder, held from construction until `close` or `remove`.

    Args:
        note: Text that is written into the file after the name of the process, for `holder_of`.
        tries: Number of attempts while another process holds the lock.
        opener: Opens the file, as that of Python's `open`, and receives its mode too.

    Raises:
        LockHeldError: If another process holds the lock.
        OSError: If the file cannot be opened, or contains something else than the note of a lock.
    """

    def __init__(
        self,
        path: Path,
        note: str = "",
        *,
        mode: int = 0o600,
        tries: int = 11,
        opener: Callable[[str, int, int], int] = os.open,
    ) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._note = f"{this_process()}{note}\n".encode()
        """Text of the file; empty if it could not be written."""
        self.refused: OSError | None = None
        """Error of a file system that has no locks, else None. After it the file is open, and keeps no process out."""
        while self._descriptor is None:
            # In a folder that others may write, the name could be a link to a foreign file, symbolic or hard, which
            # would be truncated below.
            self._descriptor = opener(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
            try:
                _check_lock(self._descriptor, path)
            except OSError:
                self.close()
                raise
            try:
                _flock(self._descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _CONTENDED:
                    self.refused = error
                    return
                holder = _read_note(self._descriptor)
                self.close()
                tries -= 1
                if not tries:
                    raise LockHeldError(holder) from None
                time.sleep(_PAUSE)
            else:
                if not self._is_linked():  # the former holder has removed the file: this lock keeps nobody out
                    self.close()
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self._note, 0)
        except OSError:  # the disk is full; the lock is valid without the note
            self._note = b""

    @property
    def held(self) -> bool:
        """True until `close` or `remove`."""
        return self._descriptor is not None

    def check(self) -> None:
        """Raises `LockHeldError` if another process has written its note into the file: it holds the lock too.

        `flock` succeeds on both hosts where a network file system locks on each host alone (local_lock of NFS).
        """
        if self._descriptor is not None and self._note:
            if os.pread(self._descriptor, len(self._note) + 1, 0) != self._note:
                raise LockHeldError(_read_note(self._descriptor))

    def close(self) -> None:
        """Closes the file; idempotent. A forked child calls this too, and its parent then keeps the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Deletes the file and releases the lock; idempotent.

        A forked child must not call this: its parent would lose the lock.
        """
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            # If the path now names another file, another process owns it.
            if self._is_linked():
                os.unlink(self._path)  # while locked: a process that locks it next sees that the file is gone
        with contextlib.suppress(OSError):
            _flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough if a child was forked meanwhile
        self.close()

    def _is_linked(self) -> bool:
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return False


def lock_folder(descriptor: int, tries: int = 11) -> bool:
    """Locks an open folder itself, until the descriptor is closed.

    Returns False if the file system locks no folders.

    Someone could delete a lock file and make a new one, and both would be locked. A folder that contains files cannot
    be deleted.

    Raises:
        LockHeldError: If another process holds the lock.
    """
    for tries_left in reversed(range(tries)):
        try:
            _flock(descriptor, fcntl.LOCK_EX)
            return True
        except OSError as error:
            # NFS locks only files that are open for writing, and never a folder. The lock of the file remains.
            if error.errno not in _CONTENDED:
                break
            if not tries_left:
                raise LockHeldError("another process") from None
        time.sleep(_PAUSE)
    return False


def this_process() -> str:
    """Returns the name that this process writes into the files that it locks."""
    return f"{_NOTE_START.decode()}{os.getpid()} on {socket.gethostname()}"


def holder_of(path: Path, opener: Callable[[str, int, int], int] = os.open) -> str | None:
    """Returns the text that the holder of the lock on `path` has written; None if it is free or unreadable."""
    try:
        # O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
        descriptor = opener(str(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        # A shared lock fails if another process holds the lock, and does not collide with other callers of this
        # function. If granted, it ends when the descriptor is closed.
        _flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        return _read_note(descriptor) if error.errno in _CONTENDED else None
    finally:
        os.close(descriptor)
    return None


def _flock(descriptor: int, operation: int) -> None:
    fcntl.flock(descriptor, operation | fcntl.LOCK_NB)


def _check_lock(descriptor: int, path: Path) -> None:
    """Raises `OSError` for a file that no lock has written."""
    # A process that was killed while it wrote its note, or a power cut, may have left a part of the note, or zeros.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "expected the file of a lock, which is a regular file", str(path))
    start = os.pread(descriptor, len(_NOTE_START), 0).lstrip(b"\0")
    if not _NOTE_START.startswith(start):
        raise OSError(
            errno.EEXIST,
            "expected the file of a lock, empty or with the name of a process; move that file away",
            str(path),
        )


def _read_note(descriptor: int) -> str:
    return os.pread(descriptor, _NOTE_NBYTES, 0).decode(errors="replace").strip() or "another process"
