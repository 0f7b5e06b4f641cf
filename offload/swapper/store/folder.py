"""The folder of a rank on one drive: its lock, its small files, notes of a run, and bytes that two files share.

The user names the folder of the drive, which may be a link. Below it, `offload.fileio.inner_files` opens the run's
folder, the rank's folder and the files in it, and follows no link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from offload.aio.unanswered import aloud, sync
from offload.errors import StoreError
from offload.fileio import (
    DirLock,
    LockHeldError,
    holder_of,
    inner_folder,
    inner_opener,
    inner_status,
    lock_folder,
    naming_errors,
    open_inner,
    read_inner,
    real_path,
    sync_folder,
    this_process,
    write_all,
)
from offload.records import fields, read, whole
from offload.sizes import MIB, PAGE

# -- rank folder ---------------------------------------------------------------------------------------


REMOVED = "removed"
"""Name that the commit file gets when the deletion of a store begins: from then on none of its records counts."""

FILES = ("commit", "states", "blob.0", "blob.1", "suspect", "undo", "budget", "manifest.json", REMOVED, "lock")
"""Names of all files that a rank's folder may hold, the lock last. The temporary file of a replacement is `*.tmp`."""

_IN_RANK = {*FILES, *(f"{name.partition('.')[0]}.tmp" for name in FILES)}
"""Files of a rank's folder, and those that replace them."""
_MOST = {"commit": 2 * PAGE, "manifest.json": 64 * MIB, "blob.0": 2**63 - 1, "blob.1": 2**63 - 1}
"""Most bytes that `read_whole` reads of a file. A blob has no such limit: it is read as a whole."""
_MOST_OF_NOTE = MIB

Use = Literal["train", "read", "delete"]
"""Purpose for which a process locks a rank's folder."""

STAGED, REPLACED = "new-", "old-"
"""Prefixes of a rank's folder during a change of the number of ranks: of a new folder, and of a replaced one."""


def folders_aside(run: Path) -> list[Path]:
    """Returns the ranks' folders that are not in their place in a run's folder on one drive, sorted by name.

    A change of the number of ranks has made them. Without its note in the run's folder nothing reads them.
    """
    return sorted(
        folder
        for prefix in (STAGED, REPLACED)
        for folder in run.glob(f"{prefix}rank*")
        if rank_number(folder.name.removeprefix(prefix)) is not None
    )


def rank_number(name: str) -> int | None:
    """Returns the rank whose folder has this name; None for another name."""
    number = name.removeprefix("rank")
    return int(number) if name[:4] == "rank" and number.isascii() and number.isdigit() and len(number) < 10 else None


class Lock:
    """Exclusive lock of this process on a rank's folder.

    Locks the file, and the folder itself if the file system supports that: a cleaner of old files may delete the file,
    but does not touch a locked folder. A reader needs no lock file in a folder where this user may not write one.
    Raises `StoreError` with the name of the holder if another process or engine holds the folder, or if the file system
    has no locks; and `FileNotFoundError` if the folder does not exist, because another process may have removed it.
    """

    def __init__(self, folder: Path, use: Use = "train") -> None:
        self._folder: int | None = None
        self._lock: DirLock | None = None
        # Only a reader, and an administrator who deletes a run, may use a folder of another user.
        ours = use == "train" or (use == "delete" and os.geteuid() != 0)
        try:
            with _refusing(folder), inner_folder(folder, 2, ours) as descriptor:
                self._folder = os.dup(descriptor)
                if use == "train":
                    for name in FILES:  # each must be this user's, and a regular file
                        with contextlib.suppress(FileNotFoundError):
                            os.close(open_inner(folder / name, 3, ours=True))
                try:
                    # A reader creates and changes nothing in a folder of another user.
                    if use != "read" or os.fstat(descriptor).st_uid == os.geteuid():
                        self._lock = DirLock(folder / "lock", opener=inner_opener(3, ours=ours))
                except OSError as error:
                    # The folder is mounted read-only, such as a snapshot, and no process can write here. Or it belongs
                    # to another user, whose processes lock the folder too. In both cases a reader needs no lock file.
                    if error.errno == errno.EACCES and use != "read":
                        raise StoreError(
                            f"{folder} is another user's, who alone may change it: its lock cannot be opened "
                            f"({error.strerror}); do this as that user"
                        ) from error
                    if error.errno not in (errno.EROFS, errno.EACCES):
                        raise
            lock_folder(self._folder)
        except LockHeldError as error:
            self.release()
            raise in_use(folder, holder(folder) or error.holder, use) from None
        except BaseException:
            self.release()
            raise
        if self._lock is not None and (refused := self._lock.refused) is not None:
            self.release()
            raise StoreError(
                f"{folder} cannot be locked ({refused.strerror}), so another process could use it too; set nvme_path "
                "to a folder on a local drive"
            )

    @property
    def held(self) -> bool:
        """True until `release`."""
        return self._folder is not None or (self._lock is not None and self._lock.held)

    def check(self, folder: Path) -> None:
        """Raises `StoreError` if another process holds this lock too: the file system's locks keep nobody out."""
        try:
            if self._lock is not None:
                self._lock.check()
        except LockHeldError as error:
            raise StoreError(
                f"{folder} is used by {error.holder} too, since locks of its file system keep no other host out; end "
                "one of them, and set nvme_path to a folder on a local drive"
            ) from None

    def release(self) -> None:
        """Releases the lock; idempotent."""
        if self._folder is not None:
            os.close(self._folder)
        self._folder = None
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_folders(folders: Sequence[Path]) -> list[Lock]:
    """Creates the folders of a rank and locks all of them, in order.

    Raises `StoreError` if a folder is named twice, cannot be created, or is in use.
    """
    if len({real_path(folder.parent.parent) for folder in folders}) < len(folders):
        raise StoreError(f"nvme_path names a folder twice: {', '.join(str(f.parent.parent) for f in folders)}")
    while True:
        make_folders(folders)
        locks: list[Lock] = []
        try:
            for folder in folders:
                locks.append(Lock(folder))
            return locks
        except BaseException as error:
            for lock in locks:
                lock.release()
            # A process that removes its run may have deleted a folder between `make_folders` and the lock: try again.
            if not isinstance(error, FileNotFoundError):
                raise


def in_use(folder: Path, who: str, use: Use) -> StoreError:
    """Returns the error for a folder that `who` holds."""
    end = "call destroy() on that engine of this process" if who == this_process() else "end that process"
    wait = "wait until it has ended: a run is read, and deleted, while no process uses it"
    more = 'give a run beside it a name of its own by "run" in the "offload" block' if use == "train" else wait
    return StoreError(f"{folder} is in use by {who}; {end}, or {more}")


def holder(folder: Path) -> str | None:
    """Returns the holder of the rank's folder, as recorded in its lock file; None if the lock is free or unreadable.

    Tests the lock: acquires a shared lock and releases it at once.
    """
    return holder_of(folder / "lock", inner_opener(3))


@contextlib.contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Turns errors in the body into `StoreError`: the folder is no rank's folder, or something is in a file's place."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot use {error.filename or folder}: {error.strerror}; expected a folder of swap files with regular "
            "files, which no link leads to: remove what is in the way, or choose another run name or another nvme_path"
        ) from error


# -- folders ------------------------------------------------------------------------------------------


def check_owner(run: Path) -> None:
    """Raises `StoreError` if a run's folder exists, and is a link or belongs to another user."""
    with _refusing(run), contextlib.suppress(FileNotFoundError), inner_folder(run, 1, ours=True):
        pass


def make_folders(folders: Sequence[Path]) -> None:
    """Creates the folder of a rank on each drive, mode 0700.

    Raises `StoreError` with advice if a folder cannot be created or written to.
    """
    for folder in folders:
        try:
            _make_folder(folder)
        except OSError as error:
            raise StoreError(
                f"cannot make the swap folder {folder}: {error.strerror}; set nvme_path to a folder "
                f"on a local drive that you may write"
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StoreError(f"the swap folder {folder} is not writable; set nvme_path to one that is")


_ATTEMPTS = 100
"""More often than ranks of one machine remove an empty folder."""


def _make_folder(folder: Path) -> None:
    """Creates one rank's folder and its missing parents. `sync_names` makes their names durable.

    Raises `StoreError` if a file or a link is in the way, or a folder is another user's, and `OSError` if a folder
    cannot be created.
    """
    run = folder.parent
    for attempt in itertools.count():
        run.parent.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.suppress(FileExistsError):
                run.mkdir(mode=0o700)
            # Opened relative to the run's folder: a link in the place of that folder would lead elsewhere.
            with inner_folder(run, 1, ours=True) as descriptor, contextlib.suppress(FileExistsError):
                os.mkdir(folder.name, 0o700, dir_fd=descriptor)
            with inner_folder(folder, 2, ours=True):
                return
        except OSError as error:
            for directory in (run, folder):
                try:
                    in_the_way = not stat.S_ISDIR(directory.lstat().st_mode)  # a link to a folder is in the way too
                except OSError:
                    in_the_way = False
                if in_the_way:
                    raise StoreError(
                        f"cannot make the swap folder {folder}: {directory} exists and is not a folder; remove it, or "
                        f"choose another run name or another nvme_path"
                    ) from None
            # Nothing in the way: another rank has just removed the empty folder of an earlier run, so try again. Where
            # no folder can be made, as in /proc, the system says the same each time.
            if not isinstance(error, FileNotFoundError) or attempt == _ATTEMPTS:
                raise


def sync_names(folder: Path) -> None:
    """Makes durable the names of a folder and of all folders above it on its file system, whoever created them.

    A power cut must not lose the folders of a durable commit, and a name is durable once its parent is synced. Another
    rank, or the user, may have created some of the folders a moment ago. Raises `OSError` if a folder above cannot be
    synced.
    """
    here = real_path(folder)
    while not here.is_mount():
        here = here.parent
        # A process cannot sync a folder that it may not read, so this one skips it: most file systems write a name no
        # later than the files below it.
        with contextlib.suppress(PermissionError):
            sync_folder(here)


def begin_removal(folder: Path) -> None:
    """Gives up all commits of a store at once and durably, by another name of the commit file. Repeats may follow.

    `folder` is the rank's folder on the first drive; on another drive, without a commit file, nothing is done. A kill
    or a power cut leaves either all records or none, and needs no room on a full drive.
    """
    with inner_folder(folder, 2) as descriptor, contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.replace("commit", REMOVED, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        sync(descriptor, folder)


def removal_begun(folder: Path) -> bool:
    """Returns True if a deletion has left the files in a rank's folder; False as well if it cannot be read."""
    try:
        return not is_there(folder / "commit") and is_there(folder / REMOVED)
    except OSError:
        return False


def remove_all_but_lock(folder: Path) -> None:
    """Deletes durably a store's files in a rank's folder, which another start may use while its lock is held.

    After `begin_removal` a kill or a power cut leaves no manifest without the mark of the deletion.
    """
    begin_removal(folder)
    with inner_folder(folder, 2) as descriptor:
        temporary = [name for name in os.listdir(descriptor) if name.endswith(".tmp")]
        # The manifest is deleted near the end, since it names the owner of these files.
        for names in ([*temporary, *FILES[:-2]], [REMOVED]):
            for name in names:
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(name, dir_fd=descriptor)
            sync(descriptor, folder)


def remove_files(folder: Path) -> None:
    """Deletes a store's files in a rank's folder, and the folder itself unless other files are in it."""
    remove_all_but_lock(folder)
    # The lock is deleted last: once its name is gone, another process may lock the folder and write new files.
    unlink(folder / "lock")
    with inner_folder(folder.parent, 1) as run, contextlib.suppress(OSError):
        # Fails if other files are in the folder. The folder then stays.
        os.rmdir(folder.name, dir_fd=run)


# -- small files --------------------------------------------------------------------------------------


def _depth(path: Path) -> int:
    """Returns the number of names at the end of a path that lie below the user's folder for swap files."""
    return 3 if path.name in _IN_RANK else 2


def read_whole(path: Path) -> bytes:
    """Returns the bytes of a rank's file or of a note in a run's folder. Of a commit file, reads at most both records.

    Never waits for another process. Raises `OSError` if there is no such file, or if it is a link, no regular file, or
    too large.
    """
    return read_inner(path, _depth(path), _MOST.get(path.name, _MOST_OF_NOTE), whole=path.name != "commit")


def is_there(path: Path) -> bool:
    """Returns True if a rank's or a run's file exists, or anything else is in its place."""
    return inner_status(path, _depth(path)) is not None


def unlink(path: Path) -> None:
    """Deletes a file of a rank, or a note in a run's folder, if it exists. Deletes a link itself, not its target."""
    with contextlib.suppress(FileNotFoundError), inner_folder(path.parent, _depth(path) - 1) as folder:
        os.unlink(path.name, dir_fd=folder)


def cut_short(path: Path, nbytes: int) -> None:
    """Shortens a file to `nbytes`, if it is longer. Raises `IoError`."""
    descriptor = _open_for_writing(path)
    try:
        with naming_errors(path, "cut"):
            if os.fstat(descriptor).st_size > nbytes:
                os.ftruncate(descriptor, nbytes)
    finally:
        os.close(descriptor)


def write_in_place(path: Path, data: bytes | memoryview, offset: int = 0) -> None:
    """Writes `data` durably at byte `offset` of `path`. Creates the file if it does not exist.

    The write is not atomic: readers detect an incomplete write by a checksum. Raises `IoError` if the file cannot be
    opened or written.
    """
    with writing_in_place(path) as write:
        write(data, offset)


@contextlib.contextmanager
def writing_in_place(path: Path) -> Iterator[Callable[[bytes | memoryview, int], None]]:
    """Yields a function that writes bytes at an offset of `path`. All are durable at the end of the block.

    Creates the file if it does not exist. After an exception in the block nothing is synced. Raises `IoError` if the
    file cannot be opened or written.
    """
    new = not is_there(path)
    descriptor = _open_for_writing(path)
    last = (0, 0)

    def write(data: bytes | memoryview, offset: int) -> None:
        nonlocal last
        last = (offset, len(data))
        with naming_errors(path, "write", *last):
            write_all(descriptor, offset, data)

    try:
        yield write
        # Synced by the descriptor that wrote: the system may not report an earlier write error to another descriptor.
        with naming_errors(path, "write", *last):
            sync(descriptor, path)
    finally:
        os.close(descriptor)
    # The name of a new file is durable only once its folder is synced.
    if new:
        sync_folder(path.parent)


def _open_for_writing(path: Path) -> int:
    """Returns the descriptor of a file that is created if it does not exist. Raises `IoError`, also for a link."""
    with naming_errors(path, "open"):
        return open_inner(path, _depth(path), os.O_WRONLY | os.O_CREAT, ours=True)


def overwrite(path: Path, data: bytes) -> None:
    """Writes `data` to the beginning of `path` by one call of the system, and syncs nothing.

    A killed process leaves the old bytes or the new ones, a power cut anything. Creates the file if it does not exist.
    Raises `IoError` if it cannot be opened or written.
    """
    descriptor = _open_for_writing(path)
    try:
        with naming_errors(path, "write", 0, len(data)):
            write_all(descriptor, 0, data)
    finally:
        os.close(descriptor)


def reserve(path: Path, nbytes: int) -> None:
    """Allocates `nbytes` bytes of `path` on the drive, so that a later write does not fail on a full drive.

    Raises `IoError` if the file cannot be opened, or there is not enough room.
    """
    descriptor = _open_for_writing(path)
    try:
        with naming_errors(path, "reserve", 0, nbytes), aloud(lambda: f"reservation of {nbytes} bytes for {path}"):
            os.posix_fallocate(descriptor, 0, nbytes)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve_blobs(folder: Path, nbytes: int) -> None:
    """Reserves `nbytes` and a quarter more for each blob, so that later commits fit even if others fill the drive."""
    paths = [folder / "blob.0", folder / "blob.1"]
    have = [None if (status := inner_status(path, 3)) is None else status.st_size for path in paths]
    for path, size in zip(paths, have, strict=True):
        if size is None or size < nbytes:
            reserve(path, nbytes + nbytes // 4)
    if None in have:
        sync_folder(folder)


def write_durably(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`, atomically and durably."""
    temporary = path.with_suffix(".tmp")
    unlink(temporary)
    write_in_place(temporary, data)
    with inner_folder(path.parent, _depth(path) - 1, ours=True) as folder:
        os.replace(temporary.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        sync(folder, path.parent)


# -- forked children ----------------------------------------------------------------------------------


class Closable(Protocol):
    """Owner of open files that a forked child must not keep."""

    def close_in_child(self) -> None: ...


close_in_children: weakref.WeakSet[Closable] = weakref.WeakSet()
"""Objects whose files are closed in every forked child."""


def _close_in_child() -> None:
    for lock in list(close_in_children):
        with contextlib.suppress(OSError):
            lock.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


# -- shared bytes -------------------------------------------------------------------------------------

# FICLONERANGE of linux/fs.h: _IOW(0x94, 13, struct file_clone_range), see ioctl_ficlonerange(2).
_FICLONERANGE = 0x4020940D


_RANGE = struct.Struct("=qQQQ")  # source descriptor, source offset, bytes, destination offset


def clone_range(source: int, start: int, nbytes: int, destination: int, offset: int) -> bool:
    """Lets `destination` share bytes of `source` without a copy. Returns False if the file systems cannot.

    All numbers are multiples of 4096.
    """
    try:
        fcntl.ioctl(destination, _FICLONERANGE, _RANGE.pack(source, start, nbytes, offset))
    except OSError:
        # The files are on two file systems, or theirs cannot share bytes. The caller copies instead; if the drive
        # fails, the copy fails.
        return False
    return True


def copy_range(source: int, start: int, nbytes: int, destination: int, offset: int, path: Path) -> None:
    """Copies bytes of `source` into the file at `path`, open as `destination`, within the kernel. Raises `IoError`."""
    done = 0
    while done < nbytes:
        with naming_errors(path, "copy", offset + done, nbytes - done):
            count = os.copy_file_range(source, destination, nbytes - done, start + done, offset + done)
            if not count:
                raise OSError(errno.ENODATA, "the file that is copied is cut short")
        done += count


# -- run notes -----------------------------------------------------------------------------------------
#
# Notes next to the swap files: how a run ended, and whether a process found damage in a commit.
#
# The notes of an end are stored in the run's folder on its first drive, for all ranks. The note of damage is stored in
# the rank's folder on that drive.


FINISHED = "finished.json"
"""Name of the note that the run ended. The files next to the note are remainders; no run resumes."""
CLOSED = "closed.json"
"""Name of the note that the run was closed without being kept. It can be resumed, or replaced by a start of its job.

Its contents are the steps, the job, and `saved`: true if the user has the weights of the last step in other files.
"""
RESHARDED = "resharded.json"
"""Name of the note that swap files for another number of ranks are complete, and replace those of the run."""


def read_finished(run: Path) -> dict[str, Any] | None:
    """Returns the note that the run in a folder has ended; None without such a note, or if the file is no such note.

    A run writes the note durably before it deletes a file. An unreadable file is therefore damage or somebody else's
    file, and the swap files next to it may be the whole run.
    """
    try:
        note: dict[str, Any] = read(read_whole(run / FINISHED), fields({"steps": whole()}))
    except (OSError, ValueError):
        return None
    return note


class RunNotes:
    """The notes that one rank reads and writes. The rank's lock must be held."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the rank's folder on the first drive."""
        self.finished, self.closed = folder.parent / FINISHED, folder.parent / CLOSED
        self._suspect = folder / "suspect"

    def forget_end(self) -> None:
        """Deletes the notes of an earlier end durably. Afterwards the swap files count as a run that did not end.

        Raises `StoreError` if a folder has the name of a note.
        """
        notes = [note for note in (self.finished, self.closed) if is_there(note)]
        for note in notes:
            if note.is_dir():
                raise StoreError(f"{note} is a folder, expected a note of the run or nothing: remove or rename it")
        for note in notes:
            unlink(note)
        if notes:
            sync_folder(self.finished.parent)

    @property
    def suspect(self) -> bool:
        """True if an earlier process found damage in the last commit. Then `open` verifies the whole commit."""
        return is_there(self._suspect)

    def mark_suspect(self) -> None:
        """Writes the note of damage, which does not survive every power cut. Any thread may call this method."""
        # The caller reports the damage itself; a note that cannot be written must not hide that error. A verification
        # does not write into a folder of another user either.
        with contextlib.suppress(OSError, StoreError):
            reserve(self._suspect, 1)

    def clear_suspect(self) -> None:
        """Deletes the note of damage, if there is one."""
        unlink(self._suspect)
